"""The TensorRT engine over strict fakes of CUDA and of the SDK: bindings, aliasing, profiles, graphs, refusals; and the
same tokens as ONNX Runtime's engine, alone, ragged and with a draft."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_graphs import Shape, tokens, write
from support_runtime import collect
from support_tensorrt_host import FakeContext, HostCuda, Plan, build, install, no_gpu, write_manifest

from leadout.bundle import Model
from leadout.engines.base import RecordingEngine
from leadout.engines.lazy import LazyRow
from leadout.engines.ort import SlotEngine
from leadout.engines.tensorrt import compat, selftest
from leadout.engines.tensorrt.cuda import Cuda
from leadout.engines.tensorrt.engine import TensorRTEngine
from leadout.errors import BundleError, EngineError, UsageError
from leadout.runtime.decoder import Decoder
from leadout.runtime.rules.sampling import Chain
from leadout.runtime.settings import Settings
from leadout.runtime.steps import Stepper

C = Shape(windows=(None, 8))
PLAN = Plan()
START = np.zeros(1, np.int64)
NO_GPU = no_gpu()  # asked before the fakes say otherwise


def at(*lengths: int) -> np.ndarray:
    return np.array(lengths, np.int64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    written = write(C, tmp_path_factory.mktemp("bundle") / "target")
    build(written)
    return written


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def opened(model: Model) -> TensorRTEngine:
    return TensorRTEngine(model, provider="tensorrt")


@pytest.fixture
def engine(model: Model) -> Iterator[TensorRTEngine]:
    made = opened(model)
    yield made
    made.close()
    assert not made.cuda.blocks and not made.cuda.pins, "memory is left behind"  # type: ignore[attr-defined]


def runs(engine: TensorRTEngine) -> list[list[tuple[int, ...]]]:
    return [context.runs for context in engine.session._engine.contexts]


def test_what_an_engine_says_of_itself(engine: TensorRTEngine) -> None:
    assert (engine.batch, engine.capacity) == (1, PLAN.capacity)
    spec = engine.spec
    assert (spec.vocab_size, spec.max_step, spec.max_verify) == (C.vocab, PLAN.prefill, PLAN.verify)
    assert spec.max_context + spec.max_verify - 1 == PLAN.capacity, "padding finds slots"


def test_the_same_logits_as_onnx_runtime_in_the_same_situations(engine: TensorRTEngine, model: Model) -> None:
    other = SlotEngine(model, variant="canonical")
    rows, lengths, width = tokens(C, 3, 40), at(17, 3, 9), 4
    new = np.stack([row[n : n + width] for row, n in zip(rows, lengths, strict=True)])
    for one in (engine, other):
        one.reset(3)
        one.forward(rows[:, :17], at(0, 0, 0), np.array([[16], [2], [8]]))
        one.forward(np.flip(new), lengths)  # rejected drafts
    found, expected = engine.forward(new, lengths), other.forward(new, lengths)
    assert found.shape == expected.shape
    assert np.abs(np.asarray(found) - expected).max() < 2e-5
    assert np.array_equal(found.argmax(-1), expected.argmax(-1))


def test_two_profiles_take_the_steps_they_were_made_for(engine: TensorRTEngine) -> None:
    row, engine.graphs = tokens(C, 1, PLAN.prefill), False
    engine.forward(row, START, np.array([[PLAN.prefill - 1]]))
    engine.forward(row[:, : PLAN.verify], at(PLAN.prefill))
    engine.forward(row[:, : PLAN.verify + 1], at(PLAN.prefill), np.array([[PLAN.verify]]))
    assert runs(engine) == [[(1, 24, 1), (1, 7, 1)], [(1, 6, 6)]]


def test_steps_outside_all_profiles_are_refused_by_name(engine: TensorRTEngine) -> None:
    legal = r"tensorrt-86-fp32.engine takes no step .*\(at most 3 rows x 24 tokens, logits of 6 or 3 rows x 6 tokens"
    with pytest.raises(EngineError, match=legal):
        engine.forward(tokens(C, 1, 25), START, np.array([[24]]))
    with pytest.raises(EngineError, match="1 rows x 7 tokens, logits of 7"):
        engine.forward(tokens(C, 1, 7), START)
    with pytest.raises(EngineError, match=r"4 rows asked of .* \(1 to 3\).*leadout build .* --max-batch 4 "):
        engine.reset(4)
    with pytest.raises(EngineError, match="2 rows given, the engine has 1"):
        engine.forward(tokens(C, 2, 2), at(0, 0))


def test_the_capacity_is_what_it_is(engine: TensorRTEngine) -> None:
    engine.reserve(PLAN.capacity)
    with pytest.raises(
        EngineError, match=r"65 slots a row asked of .*, which has 64; .*leadout build .* --capacity 65"
    ):
        engine.reserve(65)
    engine.forward(tokens(C, 1, 4), at(60))
    with pytest.raises(EngineError, match="slot 65 exceeds the 64 slots"):
        engine.forward(tokens(C, 1, 4), at(61))


def test_graphs_are_captured_on_the_first_visit_of_a_shape_and_change_nothing(model: Model) -> None:
    graphs, plain = opened(model), opened(model)
    cuda = graphs.cuda
    assert isinstance(cuda, HostCuda) and isinstance(plain.cuda, HostCuda)
    plain.cuda.captures = False
    row = tokens(C, 1, 40)
    for step, width in enumerate((3, 3, 3, 2, 3, 2, 2, 3)):
        past = at(4 * step)
        ours, theirs = (one.forward(row[:, step : step + width], past) for one in (graphs, plain))
        assert np.array_equal(np.asarray(ours), np.asarray(theirs))
        assert np.array_equal(ours.argmax(-1), theirs.argmax(-1))
    assert cuda.launched == 8
    assert runs(graphs) == [[], [], [(1, 3, 3)] * 2, [(1, 2, 2)] * 2], "a context a graph; one step sets it up"
    assert graphs.graph_error == "" and "capturing" in plain.graph_error
    for one in (graphs, plain):
        one.close()


def test_what_becomes_a_graph_is_no_part_of_what_a_step_takes(engine: TensorRTEngine) -> None:
    row = tokens(C, 1, 3)
    assert isinstance(engine, RecordingEngine) and engine.recording == 0.0
    engine.forward(row, START)
    seconds = engine.recording
    assert seconds is not None and seconds > 0.0
    engine.forward(row, START)
    assert engine.recording == seconds
    engine.graphs = False
    assert engine.recording is None


def test_steps_are_as_wide_as_few_graphs_and_no_wider_than_the_target_verifies(engine: TensorRTEngine) -> None:
    engine.reset(3)
    stepper, widths = Stepper(engine, "target"), list(range(1, PLAN.verify + 1))
    one = [np.asarray(stepper.all_logits([[5] * width], [0])[0, width - 1]) for width in widths]
    three = [np.asarray(stepper.all_logits([[5] * width] * 3, [0] * 3)[2, width - 1]) for width in widths]
    assert np.allclose(one, three, atol=2e-5)
    assert {key[:2] for key in engine._steps} == {(rows, width) for rows in (1, 3) for width in (1, 2, 3, 5, 6)}


def test_a_graph_s_key_is_rows_width_and_wanted(engine: TensorRTEngine) -> None:
    engine.reset(2)
    rows = tokens(C, 2, 3)
    for _ in range(4):
        engine.forward(rows, at(0, 0))
        engine.forward(rows[:1], at(0))
        engine.forward(rows, at(0, 0), np.array([[2], [1]]))
    keyed = {key: step.graph is not None for key, step in engine._steps.items()}
    assert keyed == {(2, 3, 3): True, (1, 3, 3): True, (2, 3, 1): True}
    graph = engine._steps[2, 3, 3].graph
    engine.reset(2)
    assert engine._steps[2, 3, 3].graph is graph, "addresses did not move"
    engine.reset(3)
    assert not engine._steps, "they did"


def test_only_ids_and_a_few_numbers_cross_until_a_row_is_asked_for(engine: TensorRTEngine) -> None:
    cuda = engine.cuda
    assert isinstance(cuda, HostCuda)
    row = tokens(C, 1, 5)
    engine.forward(row, START)
    before = dict(cuda.moved)
    logits = engine.forward(row, START)
    greedy = logits.argmax(-1)
    best = logits[0][2]
    assert best.argmax() == greedy[0, 2] and np.isfinite(best[best.argmax()])
    assert cuda.moved["down"] - before["down"] < 2048 and cuda.moved["up"] - before["up"] < 2048
    before = dict(cuda.moved)
    whole = best.astype(np.float64)
    assert cuda.moved["down"] - before["down"] == 4 * C.vocab
    assert whole.argmax() == greedy[0, 2] and whole.max() == best[best.argmax()]
    assert best[:] is best or best[: C.vocab] is best
    assert np.array_equal(np.asarray(best), np.asarray(logits)[0, 2])
    assert cuda.moved["down"] - before["down"] == 4 * C.vocab * 6, "a row once, the five once"


def test_logits_of_an_earlier_step_say_so(engine: TensorRTEngine) -> None:
    logits = engine.forward(tokens(C, 1, 3), START)
    kept = logits[0][1]
    whole = np.asarray(kept).copy()
    engine.forward(tokens(C, 1, 3, seed=5), at(3))
    assert np.array_equal(np.asarray(kept), whole), "what was brought over stays"
    with pytest.raises(EngineError, match="earlier step are gone"):
        np.asarray(logits[0][0])


def test_a_row_with_not_a_number_is_an_error_and_not_a_token(engine: TensorRTEngine) -> None:
    engine.fill_cache(0xFF)  # as if memory had not been cleared
    row = engine.forward(tokens(C, 1, 4), START)[0][3]
    with pytest.raises(EngineError, match="no finite maximum"):
        Chain(Settings(), C.vocab, [1], []).best(row)


def test_the_rest_of_the_cache_is_left_alone(engine: TensorRTEngine) -> None:
    engine.reset(2)
    engine.forward(tokens(C, 2, 6), at(0, 0))
    before = caches(engine, 2)
    engine.forward(tokens(C, 1, 2, seed=4), at(5))
    for old, new in zip(before, caches(engine, 2), strict=True):
        changed = (old != new).any(axis=(1, 3))
        assert np.flatnonzero(changed[0]).tolist() == [5, 6] and not changed[1].any()


def test_copy_row_stays_on_the_device(engine: TensorRTEngine) -> None:
    engine.reset(3)
    engine.forward(tokens(C, 3, 6), at(0, 0, 0))
    cuda = engine.cuda
    assert isinstance(cuda, HostCuda)
    moved = dict(cuda.moved)
    before = caches(engine, 3)
    engine.copy_row(2, 0)
    for old, new in zip(before, caches(engine, 3), strict=True):
        assert np.array_equal(new, old[[2, 1, 2]])
    assert cuda.moved == moved
    with pytest.raises(EngineError, match="row 3 is not one of the engine's 3"):
        engine.copy_row(0, 3)


def test_reset_clears_what_memory_held(engine: TensorRTEngine) -> None:
    assert not any(cache.any() for cache in caches(engine, 1)), "fresh memory was all NaN"
    engine.forward(tokens(C, 1, 6), START)
    engine.reset(1)
    assert not any(cache.any() for cache in caches(engine, 1))


def caches(engine: TensorRTEngine, rows: int) -> list[np.ndarray]:
    shape = (rows, C.kv_heads, PLAN.capacity, C.head_dim)
    size = 4 * int(np.prod(shape))
    blocks = [(ctypes.c_uint8 * size).from_address(address) for address in engine._caches.values()]
    return [np.frombuffer(block, np.float32).reshape(shape).copy() for block in blocks]


def test_many_shapes_are_forgotten_and_come_back(engine: TensorRTEngine) -> None:
    engine.reset(3)
    row = tokens(C, 3, PLAN.prefill)
    first = np.asarray(engine.forward(row[:1, :2], START)).copy()
    for rows in (1, 2, 3):
        for width in range(1, PLAN.prefill + 1):
            index = np.full((rows, 1), width - 1)
            engine.forward(row[:rows, :width], np.zeros(rows, np.int64), index)
    assert len(engine._steps) <= 64
    assert np.array_equal(np.asarray(engine.forward(row[:1, :2], START)), first)


def test_a_closed_engine_says_so_and_frees_everything(model: Model) -> None:
    engine = opened(model)
    cuda = engine.cuda
    assert isinstance(cuda, HostCuda)
    engine.forward(tokens(C, 1, 2), START)
    engine.close()
    engine.close()
    assert not cuda.blocks and not cuda.pins and cuda.stream == 0
    with pytest.raises(EngineError, match="closed"):
        engine.reset(1)
    with pytest.raises(EngineError):
        engine.forward(tokens(C, 1, 2), START)


# What an engine is held to before it runs


def copied(model: Model, folder: Path, plan: Plan = PLAN) -> Model:
    """A bundle's model of its own, whose engine may be spoilt."""
    for path in model.folder.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    fresh = dataclasses.replace(model, folder=folder)
    build(fresh, plan)
    return fresh


def respell(path: Path, **changes: object) -> None:
    manifest = path.with_suffix(".json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"version": "9.9"}, "built with tensorrt 9.9, here is 1.2.3; .*leadout build .* --sdk tensorrt"),
        ({"graph_sha256": "00"}, "built from another graph than .*leadout build"),
        ({"engine_sha256": "00"}, "does not match its SHA-256"),
        ({"engine_bytes": 1}, "does not match its SHA-256"),
        ({"capacity": 63}, "another capacity than its manifest says; .*leadout build"),
        ({"aliases": {}}, "does not write its cache in place"),
        ({"speed": 1}, "unknown option 'speed'"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused(
    model: Model, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    fresh = copied(model, tmp_path)
    respell(tmp_path / "tensorrt-86-fp32.engine", **changes)
    with pytest.raises((EngineError, BundleError), match=message):
        opened(fresh)


def test_no_engine_for_this_device_names_the_command(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "compute_capability", lambda: "120")
    with pytest.raises(EngineError, match=r"no tensorrt engine for compute capability 120 .*: leadout build .* --sdk"):
        opened(model)


def test_an_engine_without_the_heads_is_refused(model: Model, tmp_path: Path) -> None:
    fresh = copied(model, tmp_path, dataclasses.replace(PLAN, heads=("logsumexp",)))
    with pytest.raises(EngineError, match=r"lacks the output 'greedy'; .*leadout build"):
        opened(fresh)


def test_an_engine_that_wants_what_nobody_feeds_is_refused(model: Model, tmp_path: Path) -> None:
    fresh = copied(model, tmp_path, dataclasses.replace(PLAN, heads=(*PLAN.heads, "drafted_logits")))
    with pytest.raises(EngineError, match=r"wants the input 'drafted_ids', which nothing feeds; .*leadout build"):
        opened(fresh)


def test_what_the_sdk_says_is_in_the_error(model: Model, tmp_path: Path) -> None:
    fresh = copied(model, tmp_path)
    path = tmp_path / "tensorrt-86-fp32.engine"
    aliases = json.loads(path.with_suffix(".json").read_text())["aliases"]
    path.write_bytes(b"plan")
    write_manifest(fresh, path, PLAN, aliases)
    with pytest.raises(
        EngineError, match=r"the runtime refuses it on this device: the engine plan file is not compatible$"
    ):
        opened(fresh)


# The self-test


def test_the_self_test_passes_once_and_is_remembered(model: Model, tmp_path: Path) -> None:
    fresh = copied(model, tmp_path)
    engine = opened(fresh)
    selftest.require(engine, fresh)
    record = tmp_path / "tensorrt-86-fp32.selftest"
    assert json.loads(record.read_text()) == {
        "device": "Host",
        "driver": "13.0",
        "engine_sha256": engine.manifest.engine_sha256,
        "passed": True,
        "detail": "as it should be",
    }
    taken = sum(map(len, runs(engine)))
    selftest.require(engine, fresh)
    assert sum(map(len, runs(engine))) == taken, "no step more"


@pytest.mark.parametrize("changed", [{"device": "Other"}, {"driver": "1.0"}, {"engine_sha256": "00"}, {"speed": 1}])
def test_an_answer_for_another_device_is_not_believed(model: Model, tmp_path: Path, changed: dict[str, object]) -> None:
    fresh = copied(model, tmp_path)
    engine = opened(fresh)
    known = {"device": "Host", "driver": "13.0", "engine_sha256": engine.manifest.engine_sha256}
    record = tmp_path / "tensorrt-86-fp32.selftest"
    record.write_text(json.dumps(known | {"passed": False, "detail": "bad"}))
    with pytest.raises(EngineError, match=f"is refused on Host: bad .*to repeat it delete {record}"):
        selftest.require(engine, fresh)
    record.write_text(json.dumps(known | {"passed": False, "detail": "bad"} | changed))
    selftest.require(engine, fresh)
    assert json.loads(record.read_text())["passed"] is True


def test_an_engine_that_reads_behind_a_row_s_length_is_refused(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask is taken from the positions: with all of them at the end, every slot is attended to."""
    fresh = copied(model, tmp_path)
    engine = opened(fresh)
    run = FakeContext._run

    def blind(context, cuda, addresses, shapes):  # type: ignore[no-untyped-def]
        rows, width = shapes["position_ids"]
        block = (ctypes.c_int64 * (rows * width)).from_address(addresses["position_ids"])
        np.frombuffer(block, np.int64)[...] += PLAN.capacity // 2
        run(context, cuda, addresses, shapes)

    monkeypatch.setattr(FakeContext, "_run", blind)
    with pytest.raises(EngineError, match="step of 1 tokens reads slots behind its row's length"):
        selftest.require(engine, fresh)
    assert json.loads((tmp_path / "tensorrt-86-fp32.selftest").read_text())["passed"] is False


def test_an_engine_that_ignores_its_past_is_refused(model: Model, tmp_path: Path) -> None:
    fresh = copied(model, tmp_path)
    engine = opened(fresh)
    forward = engine.forward

    def forgetful(ids: np.ndarray, past: np.ndarray, index: np.ndarray | None = None) -> object:
        return forward(ids, past if ids.shape[1] == 6 else np.zeros_like(past), index)

    engine.forward = forgetful  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineError, match=r"step of 1 tokens gives logits .* away from those of a step of 6"):
        selftest.require(engine, fresh)


def test_golden_logits_are_asked_for(model: Model, tmp_path: Path) -> None:
    from leadout.engines.golden import Golden

    engine = opened(copied(model, tmp_path))
    ids = tokens(C, 1, 24)
    logits = np.asarray(SlotEngine(model).forward(ids, START))
    best = np.argsort(-logits, -1)[..., :5]
    golden = Golden(ids, at(24), best.astype(np.int32), np.take_along_axis(logits, best, -1))
    assert selftest.fault(engine, golden, "fp32") == ""
    wrong = dataclasses.replace(golden, logits=golden.logits + 1.0)
    assert "from the golden ones (fp32 explains" in selftest.fault(engine, wrong, "fp32")


def test_weights_that_the_bundle_has_rounded_are_no_fault_of_the_engine(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft is exported in int4 beside a target in fp32, and is built in fp16 with it."""
    from leadout.engines.golden import Golden

    fresh, ids = copied(model, tmp_path), tokens(C, 1, 24)
    logits = np.asarray(SlotEngine(model).forward(ids, START))
    best = np.argsort(-logits, -1)[..., :5]
    apart = 0.3 * np.abs(logits).max()
    rounded = Golden(ids, at(24), best.astype(np.int32), np.take_along_axis(logits, best, -1) + apart)
    monkeypatch.setattr(selftest.Golden, "of", lambda model: rounded)
    stored = dataclasses.replace(fresh, entry=dataclasses.replace(fresh.entry, precision="int4"))
    selftest.require(opened(fresh), stored)
    (tmp_path / "tensorrt-86-fp32.selftest").unlink()
    with pytest.raises(EngineError, match=r"from the golden ones \(fp32 explains"):
        selftest.require(opened(fresh), fresh)


# The loop


def decode(target, draft, requests):  # type: ignore[no-untyped-def]
    events = Decoder(target, draft).decode(requests)
    texts, last = collect(events, len(requests))
    return texts, [last[i].finish_reason for i in range(len(requests))]


SAMPLING = [{}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.9, "seed": 7, "rule": "rejection", "top_p": 0.9}]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("draft", ["none", "ngram", "model"])
def test_the_loop_writes_what_it_writes_on_onnx_runtime(
    model: Model, tmp_path: Path, sampling: dict[str, object], draft: str
) -> None:
    fresh = copied(model, tmp_path)
    settings = Settings(draft=draft, draft_length=3, max_new_tokens=20, **sampling)  # type: ignore[arg-type]
    prompts = [tokens(C, 1, n, seed=n)[0].tolist() for n in (3, 30, 9)]
    requests = [(prompt, settings) for prompt in prompts]
    ours = decode(opened(model), opened(fresh), requests)
    other = SlotEngine(model, variant="canonical"), SlotEngine(fresh, variant="canonical")
    assert ours == decode(*other, requests)
    assert {len(text) for text in ours[0]} == {20}


def test_greedy_with_a_draft_moves_no_row_of_logits(model: Model, tmp_path: Path) -> None:
    target, draft = opened(model), opened(copied(model, tmp_path))
    decode(target, draft, [([1, 2, 3], Settings(draft_length=4, max_new_tokens=30))])
    for engine in (target, draft):
        assert isinstance(engine.cuda, HostCuda)
        assert engine.cuda.launched > 3
        assert engine.cuda.sizes and 4 * C.vocab not in engine.cuda.sizes


LAWS = [
    {"temperature": 0.2},
    {"top_k": 2},
    {"top_k": 3, "rule": "rejection"},
    {"top_k": 3, "top_p": 0.6, "rule": "block"},
]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_a_seeded_text_is_told_from_heads_and_moves_few_rows(
    law: dict[str, Any], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(**{"draft_length": 3, "max_new_tokens": 40, "temperature": 1.0, "seed": 4} | law)
    texts, fetched = [], []
    for heads in (True, False):
        if not heads:
            monkeypatch.setattr(LazyRow, "top", lambda row: None)
        target = opened(model)
        texts.append(decode(target, SlotEngine(model, variant="nonpad"), [([1, 2, 3], settings)]))
        fetched.append(target._logits.bytes_fetched)
        target.close()
    assert texts[0] == texts[1]
    if "top_k" in law:
        assert fetched[0] == 0 < fetched[1]
    else:
        assert fetched[0] < 0.8 * fetched[1], "a head of four, and a model that is unsure"


def test_a_text_ends_at_the_capacity_and_a_ragged_batch_finds_its_slots(model: Model, tmp_path: Path) -> None:
    prompts = [tokens(C, 1, n, seed=n)[0].tolist() for n in (52, 2, 40)]
    requests = [(prompt, Settings(draft_length=5, max_new_tokens=60)) for prompt in prompts]
    texts, reasons = decode(opened(model), opened(copied(model, tmp_path)), requests)
    limit = PLAN.capacity - PLAN.verify + 1
    assert reasons[0] == reasons[2] == "context"
    assert [len(p) + len(t) for p, t in zip(prompts, texts, strict=True)] == [limit, limit, limit]


def test_drafts_are_no_longer_than_the_target_can_verify(model: Model) -> None:
    widest: list[int] = []
    target = opened(model)
    forward = target.forward
    target.forward = lambda ids, *rest: (widest.append(ids.shape[1]), forward(ids, *rest))[1]  # type: ignore
    decode(target, None, [([5, 6, 7] * 6, Settings(draft="ngram", max_new_tokens=24))])
    assert max(widest[1:]) <= PLAN.verify
    with pytest.raises(UsageError, match="draft_length 6: this target verifies 0 to 5"):
        decode(target, None, [([5, 6], Settings(draft="ngram", draft_length=6))])


def test_a_prompt_longer_than_a_step_goes_in_pieces(model: Model) -> None:
    engine = opened(model)
    engine.graphs = False
    prompt = tokens(C, 1, 55)[0].tolist()
    last = Stepper(engine, "target").last_logits([prompt], [0])
    whole = SlotEngine(model, variant="canonical").forward(np.array([prompt]), START)[0, -1]
    assert np.abs(np.asarray(last[0]) - whole).max() < 2e-5
    assert [[run[1] for run in each] for each in runs(engine)] == [[24, 7, 24], []]


# The seam itself


@pytest.mark.skipif(not NO_GPU, reason="there is a device")
def test_no_device_is_one_plain_error() -> None:
    pytest.importorskip("cuda.bindings")
    with pytest.raises(EngineError, match=r"^no CUDA device \("):
        Cuda()


def test_the_seam_turns_every_code_into_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    fine = runtime.cudaError_t.cudaSuccess
    monkeypatch.setattr(runtime, "cudaGetDeviceCount", lambda: (fine, 1))
    with pytest.raises(EngineError, match=r"CUDA device 1 is not one of the 1 \(0 to 0\)"):
        Cuda(1)
    with pytest.raises(EngineError, match=r"^CUDA: .+ \(error 35\)$"):
        Cuda()


def test_without_the_bindings_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(EngineError, match=r"cuda-bindings does not load .*pip install cuda-bindings$"):
        Cuda()


def test_the_names_the_engine_relies_on_are_in_the_sdk() -> None:
    """Of what the fakes stand for: the SDK that can be installed without a GPU has it all."""
    sdk = pytest.importorskip("tensorrt_rtx")
    used = {
        sdk.ICudaEngine: (
            "num_io_tensors num_optimization_profiles get_tensor_name get_tensor_mode get_tensor_location "
            "get_tensor_dtype get_tensor_shape get_tensor_profile_shape get_aliased_input_tensor "
            "create_execution_context create_runtime_config device_memory_size_v2"
        ),
        sdk.IExecutionContext: (
            "set_optimization_profile_async set_input_shape set_tensor_address set_device_memory execute_async_v3 "
            "is_stream_capturable"
        ),
        sdk.IRuntimeConfig: (
            "set_execution_context_allocation_strategy dynamic_shapes_kernel_specialization_strategy "
            "create_runtime_cache set_runtime_cache"
        ),
        sdk.ExecutionContextAllocationStrategy: "USER_MANAGED",
        sdk.DynamicShapesKernelSpecializationStrategy: "LAZY EAGER NONE",
        sdk.BuilderFlag: "REQUIRE_USER_ALLOCATION",
        sdk.Runtime: "deserialize_cuda_engine",
        sdk.TensorIOMode: "INPUT OUTPUT",
        sdk.TensorLocation: "DEVICE HOST",
        sdk.ILogger.Severity: "ERROR INTERNAL_ERROR",
        sdk.DataType: "FLOAT HALF BF16 INT64",
    }
    assert not [
        f"{kind.__name__}.{name}" for kind, names in used.items() for name in names.split() if not hasattr(kind, name)
    ]
    assert (sdk.DataType.BF16.itemsize, sdk.DataType.INT64.itemsize, sdk.DataType.FLOAT.name) == (2, 8, "FLOAT")
