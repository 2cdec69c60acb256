"""Mixtures of experts: pairs in one node a layer, the same bits at every width, in every precision."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support_graphs import op_counts  # noqa: E402
from support_lowered import experts_hold  # noqa: E402
from test_export_architectures import GROUPED, canonical, copied  # noqa: E402
from test_export_drafts import PROMPTS, answers_are_the_target_s  # noqa: E402
from test_mutants import Mutant, must_die  # noqa: E402

import leadout  # noqa: E402
from leadout.bundle import Model  # noqa: E402
from leadout.engines import open_engine  # noqa: E402
from leadout.export import build  # noqa: E402
from leadout.export.build import export_model, export_pair, silent  # noqa: E402
from leadout.export.canonical import Canonical  # noqa: E402
from leadout.export.capture import lowerings  # noqa: E402
from leadout.export.capture.decoder_graph import capture  # noqa: E402
from leadout.export.capture.kept import kept  # noqa: E402
from leadout.export.capture.refusals import context_length  # noqa: E402
from leadout.export.checkpoints.checkpoint import Checkpoint  # noqa: E402
from leadout.export.graphs import experts, quantize  # noqa: E402
from leadout.runtime.check import stepped  # noqa: E402
from leadout.scripts.cli import main  # noqa: E402

pytestmark = pytest.mark.usefixtures("captures_once")

DEEP = {"n_routed_experts": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
DEEP |= {"n_shared_experts": 1}
SINGLE = {"num_hidden_layers": 1}  # captures take time: of several layers Mixtral tells, of dense ones among them GLM
# Configuration class -> its arguments, and in how many of its two layers (of SINGLE: in its one) it has experts.
ARCHITECTURES: dict[str, tuple[dict[str, Any], int]] = {
    "Mixtral": ({"num_local_experts": 4}, 2),
    "Qwen2Moe": (SINGLE | {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}, 1),
    "Qwen3Moe": (SINGLE | {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16}, 1),
    "Olmoe": (SINGLE | {"num_experts": 4}, 1),
    "GraniteMoe": (SINGLE | {"num_local_experts": 4}, 1),
    "Phimoe": (SINGLE | {"num_local_experts": 4}, 1),
    "Glm4Moe": (DEEP | {"head_dim": 16}, 1),
    "Dots1": (DEEP | SINGLE | {"first_k_dense_replace": 0}, 1),
    "AriaText": (SINGLE | {"moe_num_experts": 4, "moe_topk": 2}, 1),
    "GptOss": (SINGLE | {"num_local_experts": 4, "head_dim": 16, "intermediate_size": 32}, 1),
    "Ernie4_5_Moe": (
        SINGLE | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 0},
        1,
    ),
}
# 40 experts: a router of more columns than are left alone for being few.
WIDE = GROUPED | {"num_local_experts": 40, "num_experts_per_tok": 3, "intermediate_size": 32}


def mixture(**settings: Any) -> Any:
    """A random Mixtral, spread so that its experts differ and its logits reach about 2."""
    torch.manual_seed(3)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**WIDE | settings)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(std=0.3 if "gate.weight" in name else 0.12)
    return model


def checkpoint(**settings: Any) -> Checkpoint:
    model = mixture(**settings)
    return Checkpoint("mixtral", model, 256, context_length(model.config), 1, (2,), {})


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Canonical:
    return canonical(checkpoint(), tmp_path_factory.mktemp("mixture") / "target")


@pytest.fixture(params=["fp32", "int8", "int4"])
def written(request: pytest.FixtureRequest, packed: Canonical, tmp_path: Path) -> Model:
    (tmp_path / "target").mkdir()
    return Model(tmp_path / "target", export_model(packed, tmp_path / "target", request.param, silent))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_layer_s_experts_are_one_node(name: str) -> None:
    arguments, layers = ARCHITECTURES[name]
    config = getattr(transformers, f"{name}Config")(**GROUPED | {"num_experts_per_tok": 2} | arguments)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    graph = capture(model, *kept(model))
    counts = op_counts(graph)
    assert counts["MoE"] == layers and "GatherND" not in [n.op_type for n in graph.graph if "experts" in (n.name or "")]
    assert len(experts.unrounded_experts(graph)) == 2 * layers
    assert len(experts.routers_of(graph)) == layers
    assert not any("forward" in vars(module) for module in model.modules()), "everything is put back"


def test_a_step_s_bits_depend_on_no_width(written: Model) -> None:
    row = np.arange(3, 51)[None] * 5 % 256
    for variant in ("gqa_even", "grouped"):
        engine = open_engine(written, variant=variant, exact=True)
        wanted = stepped(engine, row, 48)
        # in int4 without AVX-512 a token alone is another matter
        for width in (engine.spec.widths.narrowest, 2, 3, 7, 24):
            assert np.array_equal(stepped(engine, row, width), wanted), (variant, width)
        engine.close()


def test_other_rows_of_a_batch_change_no_bit(written: Model) -> None:
    engine = open_engine(written, variant="grouped")
    row = np.arange(3, 51)[None] * 5 % 256
    wanted = stepped(engine, row, 16)
    engine.reset(3)
    others = np.concatenate([row, row[:, ::-1], (row + 7) % 256])
    found = [np.array(engine.forward(others[:, at : at + 16], np.full(3, at)))[0] for at in (0, 16, 32)]
    assert np.array_equal(np.concatenate(found), wanted.reshape(48, -1))


def test_precisions_reach_experts_and_spare_what_chooses_them(packed: Canonical) -> None:
    sizes = {}
    for precision, kind in (("int8", np.uint8), ("int4", np.uint8)):
        graph = ir.load(packed.graph)
        quantize.quantize(graph, precision)
        counts = op_counts(graph)
        assert counts["QMoE"] == 2 and "MoE" not in counts and not experts.unrounded_experts(graph)
        stacks = {name: v.const_value.numpy() for name, v in graph.graph.initializers.items() if len(v.shape) == 3}
        levels = {name: stack for name, stack in stacks.items() if ".experts." in name and stack.dtype == kind}
        assert len(levels) == 4 and all(stack.shape[0] == 40 for stack in levels.values())
        sizes[precision] = sum(stack.nbytes for stack in levels.values())
        routers = experts.routers_of(graph)
        assert {n.op_type for n in routers} <= {"MatMul", "Gemm"} and len(routers) == 2
        assert all(n.inputs[1].dtype == ir.DataType.FLOAT for n in routers)
    assert sizes["int8"] == 2 * sizes["int4"] == 2 * 40 * 3 * 32 * 64


def test_in_8_bits_nearer_than_in_4_and_both_near(packed: Canonical, tmp_path: Path) -> None:
    wanted = np.asarray(packed.truth.logits, np.float32)
    errors = []
    for precision in ("fp32", "int8", "int4"):
        folder = tmp_path / precision
        folder.mkdir()
        engine = open_engine(Model(folder, export_model(packed, folder, precision, silent)), variant="canonical")
        engine.reset(len(packed.truth.tokens))
        found = engine.forward(packed.truth.tokens, np.zeros(len(packed.truth.tokens), np.int64))
        errors.append(float(np.sqrt(((np.asarray(found) - wanted) ** 2).mean() / (wanted**2).mean())))
    assert errors[0] < 1e-5 < errors[1] < 0.08 and 2 * errors[1] < errors[2] < 0.7, errors


def test_apart_again_they_say_the_same(packed: Canonical, tmp_path: Path) -> None:
    """For fp16 and TensorRT: of float32, shown twice or not, and of 4 bits with the values those gave."""
    row = np.arange(3, 27)[None] * 5 % 256

    def logits(graph: ir.Model, name: str) -> Any:
        (tmp_path / name).mkdir()
        model = Model(tmp_path / name, export_model(packed, tmp_path / name, "fp32", silent))
        ir.save(graph, model.path("canonical"), external_data="apart.data")
        engine = open_engine(model, variant="canonical")
        return stepped(engine, row, 24)

    plain = logits(ir.load(packed.graph), "plain")
    for name, change in (("once", lambda _: None), ("shown twice", experts.never_alone)):
        graph = ir.load(packed.graph)
        change(graph)
        experts.experts_apart(graph)
        quantize.sweep(graph)
        assert {n.domain for n in graph.graph} == {""} and op_counts(graph)["GatherND"] >= 4
        assert "Concat" not in [n.op_type for n in graph.graph if "experts" in str(n.inputs[0].name)]
        assert np.abs(logits(graph, name) - plain).max() < 1e-5
    coarse = ir.load(packed.graph)
    quantize.quantize(coarse, "int4")
    wanted = logits(coarse, "coarse")
    quantize.from_int4(coarse)
    assert {n.domain for n in coarse.graph} == {""}
    error = logits(coarse, "back") - wanted
    assert np.sqrt((error**2).mean() / (wanted**2).mean()) < 0.08, "activations are in 8 bits on one side"


@pytest.mark.parametrize(
    ("settings", "left", "like"),
    [
        (SINGLE | {"hidden_act": "gelu"}, 2, "model.layers.0.mlp.experts"),
        (SINGLE | {"intermediate_size": 40}, 2, "model.layers.0.mlp.experts"),
    ],
    ids=["gelu", "no blocks"],
)
def test_what_a_precision_cannot_reach_is_said(settings: dict[str, Any], left: int, like: str, tmp_path: Path) -> None:
    told: list[str] = []
    folder = tmp_path / "target"
    captured = canonical(checkpoint(**settings), folder)
    entry = export_model(captured, folder, "int8", told.append)
    said = [line for line in told if "stay in float32" in line]
    assert len(said) == 1 and said[0] == f"target: {entry.note}"
    assert entry.note.startswith(f"{left} weights of experts stay in float32, like {like}")
    row = np.arange(3, 27)[None]
    engine = open_engine(Model(folder, entry), variant="gqa_even")
    assert np.abs(stepped(engine, row, 1) - stepped(engine, row, 24)).max() < 1e-5
    assert export_model(dataclasses.replace(captured), scratch(tmp_path), "fp32", silent).note == ""


def scratch(folder: Path) -> Path:
    (folder / "again").mkdir()
    return folder / "again"


def test_half_precision_runs(packed: Canonical, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    entry = export_model(packed, tmp_path / "target", "fp16", silent)
    assert entry.dtype == "float16" and entry.note == ""
    assert "MoE" not in op_counts(ir.load(tmp_path / "target" / "model.onnx"))


@pytest.fixture(scope="module")
def bundle(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A mixture as the target of the tiny draft, in int8: its answers are those of the tiny target's MLPs, rounded."""
    place = tmp_path_factory.mktemp("bundles")
    arguments = [str(tiny_pair[0]), str(place / "mixture"), "--layers", "2", "--intermediate", "128", "--experts", "6"]
    from leadout.scripts.grow import main as grow

    assert CliRunner().invoke(grow, arguments, catch_exceptions=False).exit_code == 0
    config = json.loads((place / "mixture" / "config.json").read_text(encoding="utf-8"))
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (6, 2)
    yield export_pair(place / "mixture", tiny_pair[1], place / "bundle", precision="int8", draft_precision="fp32")


def test_a_mixture_s_answers_are_its_own_whoever_drafts(bundle: Path) -> None:
    assert answers_are_the_target_s(bundle) > 0.2, "the draft is the tiny target's, whose MLPs these experts are"
    with leadout.load(bundle) as pair:
        for draft in ("auto", "suffix", "recycling"):
            asked: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
            drafted, plain = (pair.generate(PROMPTS[0], draft=name, **asked) for name in (draft, "none"))
            assert drafted.lossless and drafted.token_ids == plain.token_ids


@pytest.mark.slow
def test_check_finds_nothing(bundle: Path) -> None:
    found = CliRunner().invoke(main, ["check", str(bundle)], catch_exceptions=False)
    assert found.exit_code == 0 and "FAIL" not in found.output, found.output


def pairs_are_right(patch: pytest.MonkeyPatch) -> None:
    experts_hold(mixture(**SINGLE), patch)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Canonical:
    return canonical(checkpoint(**SINGLE), tmp_path_factory.mktemp("single") / "target")


def export_is_right(folder: Path, precision: str, captured: Canonical | None = None) -> None:
    """What export itself checks, and that widths agree, and that routers are spared: of one layer. ``captured``: it has
    been, by healthy code."""
    place = folder / "target"
    packed = canonical(checkpoint(**SINGLE), place) if captured is None else copied(captured, folder / "scratch")
    place.mkdir(parents=True, exist_ok=True)
    entry = export_model(packed, place, precision, silent)
    assert not entry.note
    engine = open_engine(Model(place, entry), variant="gqa_even")
    row = np.arange(3, 51)[None] * 5 % 256
    assert np.array_equal(stepped(engine, row, 1), stepped(engine, row, 48))
    if precision != "fp32":
        graph = ir.load(place / "model.onnx")
        assert all(n.inputs[1].dtype == ir.DataType.FLOAT for n in experts.routers_of(graph))
        assert len(experts.routers_of(graph)) == 1


MUTANTS = [
    ("fp32", Mutant("gates stay in front", experts, "_arranged", "if apart:", "if False:")),
    ("fp32", Mutant("all take the first expert chosen", lowerings, "by_pairs", "top_k_index.", "(0 * top_k_index).")),
    ("fp32", Mutant("experts count alike", lowerings, "by_pairs", "made * top_k_weights.reshape(-1, 1)", "made / k")),
    ("fp32", Mutant("experts have single pairs", build, "never_alone", "_mixtures(model)", "[]")),
    ("int8", Mutant("routers are rounded", quantize, "routers_of", "return found", "return set()")),
    (
        "int8",
        Mutant(
            "experts are not rounded", quantize, "quantize_experts", "dims(n.inputs[at])[2] % BLOCK for", "True for"
        ),
    ),
    (
        "int8",
        Mutant(
            "scales are those of rows", experts, "_levels", "scale.reshape", "np.full_like(scale, scale.max()).reshape"
        ),
    ),
    ("int8", Mutant("zero is not in the middle", experts, "blocks_to_int8", "np.uint8(128)", "np.uint8(0)")),
]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_healthy_code_passes(
    precision: str, single: Canonical, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs_are_right(monkeypatch)
    export_is_right(tmp_path / "captured", precision, single)
    export_is_right(tmp_path, precision)


@pytest.mark.parametrize(("precision", "mutant"), MUTANTS, ids=[mutant.bug for _, mutant in MUTANTS])
def test_mutant_is_killed(
    precision: str, mutant: Mutant, single: Canonical, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the pairs alone, by what becomes of a capture that healthy code made, by an export from its beginning."""

    def what_follows(_: pytest.MonkeyPatch) -> None:
        export_is_right(tmp_path / "captured", precision, single)

    must_die(mutant, [pairs_are_right, what_follows, lambda _: export_is_right(tmp_path, precision)], monkeypatch)
