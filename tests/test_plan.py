"""What memory a bundle will take: the numbers an engine really allocates, from the manifest alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support_graphs import Shape, write

from leadout.bundle import CacheShape, Model, ModelEntry, Recurrence, file_entry
from leadout.engines.ort import SlotEngine
from leadout.engines.plan import Load, fitting, plan
from leadout.errors import EngineError, ExportError, UsageError
from leadout.export.tensorrt.build import Sizes, check_buildable, write_graph
from leadout.scripts.cli import main

C = Shape()


def load(**changes: object) -> Load:
    return dataclasses.replace(Load(provider="cpu", batch=3, draft_length=4, context=200), **changes)


def entry(folder: Path, precision: str = "fp32") -> ModelEntry:
    model = write(C, folder, precision)
    files = {name: file_entry(folder / name) for name in ("model.onnx.data",)}
    golden = dataclasses.replace(files["model.onnx.data"], file="golden.npz", bytes=10**9)
    return dataclasses.replace(model.entry, parameters=100_000, files=files | {"golden.npz": golden})


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_cache_and_logits_are_what_the_engine_allocates(precision: str, tmp_path: Path) -> None:
    model = write(C, tmp_path, precision)
    engine = SlotEngine(model)
    engine.reset(3)
    engine.reserve(200 + 4)
    logits = engine.forward(np.zeros((3, 5), np.int64), np.zeros(3, np.int64))
    found = plan(entry(tmp_path, precision), load())
    counted = [buffer.array[:, :, 1:] for buffer in engine._cache]  # one slot more is written, which no length counts
    assert found.cache == sum(each.nbytes for each in counted)
    assert found.logits == logits.nbytes
    engine.close()


def test_an_engine_s_cache_has_the_slots_asked_for(tmp_path: Path) -> None:
    model = write(C, tmp_path)
    _, graph, _ = write_graph(model, tmp_path, "bf16", Sizes(capacity=230))
    caches = [v for v in graph.graph.inputs if v.name.startswith("past_key_values.")]
    slots = sum(int(np.prod([int(d) for d in v.shape[1:]])) * v.dtype.itemsize for v in caches)
    found = plan(entry(tmp_path), load(provider="tensorrt", precision="bf16", capacity=230))
    assert found.cache == 3 * slots
    assert plan(entry(tmp_path), load(provider="tensorrt")).cache == 3 * slots * 204 // 230


def test_weights_are_the_blob_as_often_as_sessions_pack_it(tmp_path: Path) -> None:
    """A graph for one row, one for many, and a small target has one more for rows whose bits nobody compares."""
    model = entry(tmp_path)
    blob = (tmp_path / "model.onnx.data").stat().st_size
    large, draft = dataclasses.replace(model, parameters=1 << 26), dataclasses.replace(model, directory="draft")
    for exact, planned in ((True, model), (False, draft)):
        engine = SlotEngine(write(C, tmp_path), exact=exact)
        for rows in (1, 3):
            engine.reset(rows)
            engine.even = False
            assert plan(planned, load(batch=rows)).weights == len(engine._sessions.kept) * blob
        engine.close()
    assert [plan(large, load(batch=rows)).weights for rows in (1, 3)] == [blob, 2 * blob]
    assert plan(model, load(provider="cuda")).weights == blob
    coarse = dataclasses.replace(large, precision="int4")
    sums = (1 << 26) // 8  # a float for each block of 32 weights, which onnxruntime packs beside them
    assert [plan(coarse, load(batch=rows)).weights for rows in (1, 3)] == [blob + sums, 2 * (blob + sums)]
    assert plan(coarse, load(provider="cuda")).weights == blob


def test_a_cpu_holds_and_computes_float16_in_float32(tmp_path: Path) -> None:
    half, whole = entry(tmp_path, "fp16"), dataclasses.replace(entry(tmp_path), parameters=1 << 26)
    half, blob = dataclasses.replace(half, parameters=1 << 26), half.files["model.onnx.data"].bytes
    assert [plan(half, load(batch=rows)).weights for rows in (1, 3)] == [2 * blob, 4 * blob]
    assert plan(half, load(provider="cuda")).weights == blob
    one = load(batch=1)
    assert plan(half, one).steps == plan(whole, one).steps > plan(half, load(batch=1, provider="cuda")).steps
    assert 2 * plan(half, load()).cache == plan(whole, load()).cache, "this is as it is stored"


def test_the_weights_of_an_import_may_be_in_its_graph(tmp_path: Path) -> None:
    model, graph = entry(tmp_path), dataclasses.replace(file_entry(tmp_path / "model.onnx"), bytes=5000)
    imported = dataclasses.replace(model, dialect="genai", variants={"canonical": graph}, files={})
    assert plan(imported, load()).weights == 5000
    both = dataclasses.replace(imported, files=model.files)
    assert plan(both, load()).weights == 5000 + model.files["model.onnx.data"].bytes


def test_the_steps_of_more_rows_are_narrower(tmp_path: Path) -> None:
    """From four rows on a step of a prompt holds as many tokens, and one that verifies as many more as there are. A
    prompt that is read alone needs half of that, until there are many short ones, which are not."""
    model = dataclasses.replace(entry(tmp_path), max_context=1024)
    alone = [plan(model, load(batch=rows, context=900)).steps for rows in (2, 16, 17, 33, 64)]
    assert alone[0] == alone[1] < alone[2] < alone[3]
    model = dataclasses.replace(model, variants={name: model.variants[name] for name in ("canonical", "grouped")})
    assert alone[4] == plan(model, load(batch=64, context=900)).steps == 2 * alone[0]
    steps = [plan(model, load(batch=rows, context=900)).steps for rows in (1, 2, 4, 16)]
    assert steps[1] == steps[2] == steps[3] > steps[0]
    verifying = [plan(model, load(batch=64, context=836 - more, draft_length=31 + more)).steps for more in (0, 33)]
    assert verifying[1] / verifying[0] == pytest.approx(65 / 32)


def test_an_engine_s_weights_follow_its_precision(tmp_path: Path) -> None:
    layers = (CacheShape(4, 64, 64),) * 22
    tiny = write(C, tmp_path).entry
    model = dataclasses.replace(tiny, vocab_size=32000, max_context=2048, parameters=1_100_000_000, cache=layers)
    sizes = {
        precision: plan(model, load(provider="tensorrt", precision=precision)).weights
        for precision in ("fp32", "fp16", "int4")
    }
    assert sizes["fp32"] == pytest.approx(4.4e9, rel=0.01) and sizes["fp16"] == pytest.approx(2.2e9, rel=0.01)
    assert 0.55e9 < sizes["int4"] < 0.9e9


def test_more_of_anything_takes_more(tmp_path: Path) -> None:
    model = entry(tmp_path)
    base = plan(model, load()).total
    for changes in ({"batch": 4}, {"context": 300}, {"draft_length": 12}):
        assert plan(model, load(**changes)).total > base
    assert plan(dataclasses.replace(model, dialect="concat"), load()).cache == 2 * plan(model, load()).cache


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch must be from 1 to 4096, not 0"),
        ({"batch": 10**399}, "batch must be from 1 to 4096, not 1000"),
        ({"draft_length": -1}, "draft-length must be from 0 to 64, not -1"),
        ({"draft_length": 1000}, "draft-length must be from 0 to 64, not 1000"),
        ({"context": 0}, "context must be at least 1, not 0"),
        ({"provider": "tpu"}, "provider 'tpu' is unknown"),
        ({"precision": "fp8"}, "precision 'fp8' is unknown"),
        ({"precision": ""}, "precision '' is unknown"),
        *(
            (
                {"provider": provider, "precision": "int4"},
                f"precision is an engine's; provider '{provider}' runs a bundle in that of its export",
            )
            for provider in ("cpu", "cuda")
        ),
        ({"capacity": 300}, "capacity is an engine's; with provider 'cpu' a cache grows as it is needed"),
        (
            {"provider": "tensorrt", "capacity": 203},
            r"capacity must be at least 204 slots \(context 200 and a draft of 4\), not 203",
        ),
        (
            {"provider": "tensorrt", "context": 1, "capacity": 9},
            r"capacity must be at least 10 slots \(two steps of 5\), not 9",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(**changes)


def test_a_context_beyond_the_model_s_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="context 321 exceeds the model's 320"):
        plan(entry(tmp_path), load(context=321))


def test_an_engine_that_cannot_be_built_is_not_planned(tmp_path: Path) -> None:
    model, built = write(C, tmp_path), load(provider="tensorrt")
    for change, reason in (
        ({"precision": "int8"}, "target is in int8, which only ONNX Runtime reads"),
        ({"dialect": "genai"}, "target was imported"),
        ({"precision": "fp16"}, "target is in fp16 and can be built in fp16 only"),
    ):
        changed = dataclasses.replace(model, entry=dataclasses.replace(entry(tmp_path), **change))
        refusals = []
        for ask in (
            lambda entry=changed.entry: plan(entry, dataclasses.replace(built, precision="int4")),
            lambda changed=changed: check_buildable(changed, "int4"),
        ):
            with pytest.raises(ExportError, match=reason) as error:
                ask()
            refusals.append(str(error.value))
        assert refusals[0] == refusals[1]
        assert plan(changed.entry, load()).total


def test_what_a_provider_does_not_run_is_not_planned(tmp_path: Path) -> None:
    """In the words of who refuses it when it is loaded."""
    model, keeps = entry(tmp_path), Recurrence(slots=128, context=4, trails=(8,))
    for change, kind, reason in (
        ({"dialect": "genai"}, EngineError, "target: a genai model runs on provider cpu, not cuda"),
        ({"dialect": "concat"}, EngineError, "target: a concat model runs on provider cpu, not cuda"),
        ({"recurrence": keeps}, UsageError, "target has recurrent layers, which run with provider cpu, not 'cuda'"),
    ):
        changed = dataclasses.replace(model, **change)
        with pytest.raises(kind, match=reason):
            plan(changed, load(provider="cuda"))
        assert plan(changed, load()).total


def test_no_more_slots_are_planned_than_are_built(tmp_path: Path) -> None:
    model = Model(tmp_path, entry(tmp_path))
    most = C.context + 4
    Sizes(max_draft=4, capacity=most).check([model])
    assert plan(model.entry, load(provider="tensorrt", capacity=most)).cache
    for refuse in (
        lambda: Sizes(max_draft=4, capacity=most + 1).check([model]),
        lambda: plan(model.entry, load(provider="tensorrt", capacity=most + 1)),
    ):
        with pytest.raises(UsageError, match=f"{most} slots"):
            refuse()
    short = dataclasses.replace(model.entry, max_context=100)
    assert fitting(load(provider="tensorrt", capacity=most), short).capacity == 104
    assert plan(short, fitting(load(provider="tensorrt", capacity=most), short)).cache


def test_the_command_needs_no_more_than_the_manifest(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "leadout.json").write_bytes((tiny_bundle / "leadout.json").read_bytes())
    done = CliRunner().invoke(main, ["plan", str(tmp_path), "--batch", "2", "--json"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["models"]) == {"target", "draft"} and found["context"] == 256
    assert found["total"] == sum(model["total"] for model in found["models"].values())
    assert found["precision"] == "fp32"
    for model in found["models"].values():
        assert model["precision"] == "fp32"
        assert model["total"] == model["weights"] + model["cache"] + model["logits"] + model["steps"]
    built = ["plan", str(tmp_path), "--provider", "tensorrt", "--json"]
    assert json.loads(CliRunner().invoke(main, built).stdout)["models"]["draft"]["precision"] == "fp16"
    table = CliRunner().invoke(main, ["plan", str(tmp_path), "--provider", "tensorrt", "--precision", "int4"])
    assert "MB on tensorrt in int4: batch 1, drafts of 8, context 256" in table.stdout
    assert CliRunner().invoke(main, ["plan", str(tmp_path / "nothing")]).exit_code == 3
    for option in (("--precision", "fp16"), ("--capacity", "300")):
        refused = CliRunner().invoke(main, ["plan", str(tmp_path), *option])
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert f"leadout: {option[0][2:]} is an engine's;" in refused.stderr and refused.stderr.count("\n") == 1
