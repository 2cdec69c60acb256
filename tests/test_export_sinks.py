"""Attention sinks and what comes with them in gpt-oss: gates with a slope, an offset and limits, biases of experts,
half tables of angles, and weights that are published in 4 bits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from support_graphs import op_counts
from support_lowered import experts_hold, rotations_hold
from test_export_architectures import canonical, tiny
from test_mutants import Mutant, must_die

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from leadout.bundle import Model  # noqa: E402
from leadout.engines import open_engine  # noqa: E402
from leadout.errors import ExportError  # noqa: E402
from leadout.export.build import export_model, silent  # noqa: E402
from leadout.export.canonical import Canonical  # noqa: E402
from leadout.export.capture import decoder_graph, lowerings  # noqa: E402
from leadout.export.capture.decoder_graph import slot_attention  # noqa: E402
from leadout.export.checkpoints.checkpoint import load  # noqa: E402
from leadout.export.graphs import experts, gqa, sinks, tree  # noqa: E402
from leadout.export.graphs.quantize import sweep  # noqa: E402
from leadout.export.graphs.variants import VARIANTS  # noqa: E402
from leadout.export.parity import check_graph  # noqa: E402
from leadout.export.tensorrt.graph import lower  # noqa: E402
from leadout.runtime.check import stepped  # noqa: E402

pytestmark = pytest.mark.usefixtures("captures_once")

SINKING = ("gqa", "gqa_even", "grouped", "tree", "tree_gqa")
ROW = np.arange(3, 51)[None] * 5 % 256


def model(**changes: Any) -> Any:
    """A gpt-oss whose gates go beyond their limits."""
    return tiny("gpt_oss", swiglu_limit=0.4, **changes)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Canonical:
    return canonical(model(), tmp_path_factory.mktemp("sinks") / "target")


def variants_are_right(packed: Canonical, folder: Path) -> None:
    for name in SINKING:
        graph = ir.load(packed.graph)
        assert VARIANTS[name](graph) == 2, name
        ir.save(graph, folder / f"{name}.onnx", external_data=f"{name}.data")
        assert check_graph(packed.entry, packed.truth, folder / f"{name}.onnx", name, silent, variant=name) <= 1e-4, (
            name
        )
        counts = op_counts(graph)
        assert counts.get("GroupQueryAttention", 0) == (0 if name in ("grouped", "tree") else 2), name
        assert counts.get("ReduceLogSumExp", 0) == (2 if name in ("grouped", "tree") else 0), name
        for n in graph.graph:
            if n.op_type == "GroupQueryAttention":
                assert n.attributes["do_rotary"].as_int() == 1, "half tables are angles like others"


def test_every_variant_has_them(packed: Canonical, tmp_path: Path) -> None:
    variants_are_right(packed, tmp_path)
    graph = ir.load(packed.graph)
    found = [sinks.sink_of(n) for n in graph.graph if n.op_type == "Attention"]
    assert len(found) == 2 and all(sink is not None and sink.logits.shape == (4,) for sink in found)
    assert gqa.to_nonpad(graph) == 0, "these look at the mask"


def trees_are_right(packed: Canonical, folder: Path) -> None:
    """Two branches behind a text: what each variant makes of them, and of the first one alone."""
    (folder / "trees").mkdir()
    written = Model(folder / "trees", export_model(packed, folder / "trees", "fp32", silent))
    sees = np.tril(np.ones((1, 5, 5), bool))
    sees[0, 3:, 1:3] = False  # tokens 3 and 4 go on from the first, as 1 and 2 do
    found = []
    for variant in ("tree", "tree_gqa"):
        engine = open_engine(written, variant=variant)
        stepped(engine, ROW[:, :20], 20)
        found.append(np.array(engine.forward_tree(ROW[:, 20:25], np.array([20]), sees)))
    one = open_engine(written, variant="gqa")
    stepped(one, ROW[:, :20], 20)
    branch = np.array(one.forward(ROW[:, [20, 23, 24]], np.array([20])))
    assert np.abs(found[0] - found[1]).max() < 1e-4 and np.abs(found[0][:, [0, 3, 4]] - branch).max() < 1e-4


def test_branches_see_no_other(packed: Canonical, tmp_path: Path) -> None:
    trees_are_right(packed, tmp_path)


VARIANT_MUTANTS = [
    Mutant("no sink", gqa, "fuse_attention", "if layer.sink is not None:", "if False:"),
    Mutant("a sink at a wrong place", gqa, "fuse_attention", "(11 - len(inputs))", "(10 - len(inputs))"),
    Mutant("all heads have the first's", gqa, "sink_of", "logits.ravel()", "logits.ravel()[:1].repeat(4)"),
    Mutant(
        "scores of other heads", gqa, "_group", "np.array([0, heads, -1], np.int64)", "np.array([0, -1, heads], int)"
    ),
    Mutant("scores by another mask", tree, "to_tree", "if layer.sink is not None:", "if False:"),
    Mutant("lengths for masks", gqa, "to_nonpad", " and layer.sink is None", ""),
]


@pytest.mark.parametrize("mutant", VARIANT_MUTANTS, ids=[mutant.bug for mutant in VARIANT_MUTANTS])
def test_mutant_is_killed(mutant: Mutant, packed: Canonical, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(patch: pytest.MonkeyPatch) -> None:
        patch.setitem(VARIANTS, "tree", tree.to_tree)
        try:
            variants_are_right(packed, tmp_path)
            assert gqa.to_nonpad(ir.load(packed.graph)) == 0
            trees_are_right(packed, tmp_path)
        except (ValueError, RuntimeError) as error:  # a graph that cannot be
            raise AssertionError(error) from error

    must_die(mutant, [check], monkeypatch)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_a_step_s_bits_depend_on_no_width(precision: str, packed: Canonical, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    written = Model(tmp_path / "target", export_model(packed, tmp_path / "target", precision, silent))
    assert not written.entry.note, "no weight is left in float32"
    for variant in ("gqa_even", "grouped"):
        engine = open_engine(written, variant=variant, exact=True)
        wanted = stepped(engine, ROW, 48)
        for width in (engine.spec.widths.narrowest, 3, 24):  # in int4 without AVX-512 a token alone is another matter
            assert np.array_equal(stepped(engine, ROW, width), wanted), (variant, width)
        engine.close()


def test_rounded_and_apart_again_they_say_the_same(packed: Canonical, tmp_path: Path) -> None:
    """Biases and limits survive int8, int4 and the way back to plain operators."""

    def logits(name: str, *changes: Any) -> Any:
        (tmp_path / name).mkdir()
        model = Model(tmp_path / name, export_model(packed, tmp_path / name, "fp32", silent))
        graph = ir.load(packed.graph)
        for change in changes:
            change(graph)
        ir.save(graph, model.path("canonical"), external_data="changed.data")
        return stepped(open_engine(model, variant="canonical"), ROW, 24)

    plain = logits("plain")
    assert np.abs(logits("apart", experts.experts_apart, sweep) - plain).max() < 1e-4
    for bits, error in ((8, 0.08), (4, 0.7)):
        rounded = logits(f"bits{bits}", lambda graph, bits=bits: experts.quantize_experts(graph, bits))
        off = np.sqrt(((rounded - plain) ** 2).mean() / (plain**2).mean())
        assert 0.0 < off < error, (bits, off)
    back = logits("back", lambda graph: experts.quantize_experts(graph, 4), experts.experts_apart, sweep)
    assert np.sqrt(((back - rounded) ** 2).mean() / (plain**2).mean()) < 0.05, "activations are in 8 bits on one side"


def capture_is_right(folder: Path) -> None:
    """Of one layer: a capture is what takes time here."""
    graph = ir.load(canonical(model(num_hidden_layers=1), folder / "target").graph)
    assert op_counts(graph)["MoE"] == 1 and op_counts(graph)["RotaryEmbedding"] == 2


def nodes_are_right(patch: pytest.MonkeyPatch) -> None:
    """What a capture is made of, without one."""
    of = model(num_hidden_layers=1).model
    experts_hold(of, patch)
    rotations_hold(of, patch)


def test_the_capture_of_healthy_code_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes_are_right(monkeypatch)
    capture_is_right(tmp_path)


CAPTURE_MUTANTS = [
    Mutant("no limits", lowerings, "gate_of", ', "swiglu_limit": float(limit)', ""),
    Mutant("no offset", lowerings, "gate_of", '"activation_beta": 1.0', '"activation_beta": 0.0'),
    Mutant("no biases", lowerings, "by_pairs", "if experts.has_bias", "if False"),
    Mutant("weights lie as in others", decoder_graph, "arrange", "turned=turned and is_weight", "turned=False"),
    Mutant("gates stand apart", decoder_graph, "arrange", "apart=apart and at < 2", "apart=at < 2"),
    Mutant("tables are whole", lowerings, "half_split", "if whole else 2 * cos", "if True else cos"),
]


@pytest.mark.parametrize("mutant", CAPTURE_MUTANTS, ids=[mutant.bug for mutant in CAPTURE_MUTANTS])
def test_mutant_of_the_capture_is_killed(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    must_die(mutant, [nodes_are_right, lambda _: capture_is_right(tmp_path)], monkeypatch)


def test_what_the_operator_cannot_express_is_refused_by_name() -> None:
    module, x = torch.nn.Identity(), torch.zeros(1, 2, 3, 4)
    for how, what in (({"position_bias": x}, "a position bias"), ({"s_aux": x, "softcap": 5.0}, "sinks beside capped")):
        with pytest.raises(ExportError, match=f"Identity uses {what}"):
            slot_attention(module, x, x, x, x, **how)


def test_tensorrt_refuses_them_by_name(packed: Canonical) -> None:
    with pytest.raises(ExportError, match="attention sinks, which TensorRT"):
        lower(ir.load(packed.graph), "fp16", 64, 0)


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4 = torch.cat([FP4, -FP4])


def as_published(folder: Path) -> Iterator[tuple[str, Any]]:
    """A checkpoint's experts become blocks of 32 numbers of 4 bits and a power of two (mxfp4); what they say then."""
    from safetensors.torch import load_file, save_file

    written = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            written[name] = weight
            continue
        rows = weight.float().transpose(1, 2)
        blocks = rows.reshape(*rows.shape[:2], -1, 32)
        power = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
        index = ((blocks / 2 ** power[..., None])[..., None] - FP4).abs().argmin(-1)
        written[f"{name}_blocks"] = (index[..., ::2] | index[..., 1::2] << 4).to(torch.uint8)
        written[f"{name}_scales"] = (power + 127).to(torch.uint8)
        yield name, (FP4[index] * 2 ** power[..., None]).reshape(rows.shape).transpose(1, 2)
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def test_weights_are_read_as_they_are_published(tmp_path: Path) -> None:
    tiny("gpt_oss").model.save_pretrained(tmp_path)
    said = dict(as_published(tmp_path))
    found = dict(load(tmp_path).model.named_parameters())
    assert len(said) == 4 and all(torch.equal(found[name], rows) for name, rows in said.items())
