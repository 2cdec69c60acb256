"""The graphs engines are built from: the model's own answers in every precision, ragged, over a poisoned cache."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from support_graphs import Shape, graph, op_counts, reference, tokens, write
from support_tensorrt import CACHE, Lowered, relative

from leadout.bundle import Bundle
from leadout.engines.ort import SlotEngine
from leadout.engines.providers import open_session
from leadout.engines.tensorrt.buildable import PRECISIONS
from leadout.export.graphs.levels import columns_to_int4
from leadout.export.graphs.passes import pack, simplify
from leadout.export.graphs.quantize import to_int4_blocks
from leadout.export.tensorrt.build import Sizes, write_graph
from leadout.export.tensorrt.graph import fold_scale

C = Shape(vocab=48, biases=True)
SIZES = Sizes(max_draft=5, capacity=64, top=7)
# Bands of the relative error: below, the precision is not what it says; above, the graph is wrong.
ERROR = {"fp32": (0.0, 2e-6), "fp16": (5e-4, 4e-3), "bf16": (5e-3, 4e-2), "int4": (0.1, 0.5)}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_prefill_gives_the_model_s_logits(precision: str, tmp_path: Path) -> None:
    lowered = Lowered(write(C, tmp_path), tmp_path / "lowered", precision, SIZES)
    row = tokens(C, 1, 24)
    found = lowered.step(row, np.zeros(1, np.int64))["logits"][0]
    assert found.dtype == np.float32
    least, most = ERROR[precision]
    assert least <= relative(found, reference(C, row[0])) < most


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_ragged_rows_are_right_whatever_lies_behind_them(precision: str, tied: bool, tmp_path: Path) -> None:
    c = Shape(vocab=48, tied=tied, windows=(None, 6))
    lens, width = np.array([5, 11, 2], np.int64), 6
    rows = tokens(c, 3, 17)
    lowered = Lowered(write(c, tmp_path), tmp_path / "lowered", precision, SIZES, rows=3)
    lowered.step(rows[:, : lens.max()], np.zeros(3, np.int64))
    for buffer in lowered.cache.values():
        for row, length in enumerate(lens):
            buffer[row, :, length:] = 1000
    new = np.stack([rows[row, length : length + width] for row, length in enumerate(lens)])
    found = lowered.step(new, lens)["logits"]
    for row, length in enumerate(lens):
        wanted = reference(c, rows[row, : length + width])[length:]
        assert relative(found[row], wanted) < ERROR[precision][1]


def test_a_bundle_s_golden_rows_hold(tiny_bundle: Path, tmp_path: Path) -> None:
    model = Bundle.read(tiny_bundle).model("target")
    golden = np.load(model.folder / "golden.npz")
    row, ids, wanted = golden["tokens"][:1], golden["ids"][0].astype(np.int64), golden["logits"][0]
    for precision, most in (("fp32", 1e-5), ("fp16", 4e-3), ("int4", 0.3)):
        lowered = Lowered(model, tmp_path / precision, precision, Sizes(max_draft=4, capacity=64))
        found = lowered.step(row, np.zeros(1, np.int64))["logits"][0]
        assert relative(np.take_along_axis(found, ids, -1), wanted) < most


def test_fp32_gives_the_bits_of_the_canonical_graph_but_for_the_scale(tmp_path: Path) -> None:
    c = Shape(head_dim=16, vocab=48)  # 16 ** -0.5 is a power of two: folding it rounds nothing
    model, row = write(c, tmp_path), tokens(c, 1, 9)
    engine = SlotEngine(model, variant="canonical")
    wanted = engine.forward(row, np.zeros(1, np.int64)).copy()
    engine.close()
    found = Lowered(model, tmp_path / "lowered", "fp32", SIZES).step(row, np.zeros(1, np.int64))["logits"]
    assert np.abs(found - wanted).max() < 1e-5


@pytest.mark.parametrize("precision", PRECISIONS)
def test_heads_say_what_numpy_says_of_the_logits(precision: str, tmp_path: Path) -> None:
    lowered = Lowered(write(C, tmp_path), tmp_path / "lowered", precision, SIZES, rows=2)
    row = tokens(C, 2, 8)
    found = lowered.step(row, np.zeros(2, np.int64), np.array([[7, 0, 3], [1, 1, 6]]))
    logits = found["logits"]
    assert logits.shape == (2, 3, C.vocab)
    assert np.array_equal(found["greedy"], logits.argmax(-1)) and found["greedy"].dtype == np.int64
    wide = logits.astype(np.float64)
    assert np.allclose(found["logsumexp"], np.log(np.exp(wide).sum(-1)), atol=1e-5)
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :7]
    assert np.array_equal(found["top_logits"], np.take_along_axis(logits, order, -1))
    assert np.array_equal(np.take_along_axis(logits, found["top_ids"], -1), found["top_logits"])


def test_heads_at_the_edges_of_arithmetic(tmp_path: Path) -> None:
    """Equal logits: the lowest id. Large ones: no overflow. NaN: it shows."""
    path, _, _ = write_graph(write(C, tmp_path), tmp_path, "fp32", SIZES)
    whole = ir.load(path)
    heads = ir.convenience.extract(whole.graph, ["logits"], ["greedy", "logsumexp"])
    ir.save(ir.external_data.load_to_model(ir.Model(heads, ir_version=whole.ir_version)), tmp_path / "heads.onnx")
    rows = np.zeros((1, 3, C.vocab), np.float32)
    rows[0, 0, [9, 4, 30]], rows[0, 1, :], rows[0, 2, 5] = 1.0, 200.0, np.nan
    session = open_session(tmp_path / "heads.onnx", provider="cpu", threads=1)
    greedy, total = session.run(None, {"logits": rows})
    assert greedy[0, :2].tolist() == [4, 0]
    assert np.isclose(total[0, 1], 200 + np.log(C.vocab)) and np.isnan(total[0, 2])


def test_without_a_top_head_the_others_stay(tmp_path: Path) -> None:
    _, made, _ = write_graph(write(C, tmp_path), tmp_path, "fp16", Sizes(capacity=64, top=0))
    names = [v.name for v in made.graph.outputs if not v.name.startswith("present")]
    assert names == ["logits", "greedy", "logsumexp"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_file_is_plain_onnx_of_fixed_capacity_in_one_precision(precision: str, tmp_path: Path) -> None:
    path, made, _ = write_graph(write(C, tmp_path), tmp_path, precision, SIZES)
    onnx.checker.check_model(str(path))
    assert {n.domain for n in made.graph} == {""}
    caches = [v for v in (*made.graph.inputs, *made.graph.outputs) if "key" in v.name or "value" in v.name]
    assert len(caches) == 4 * C.layers
    assert all(v.shape[2] == 64 and v.dtype == ir.DataType.from_numpy(np.dtype(CACHE[precision])) for v in caches)
    assert "slots" not in {str(d) for n in made.graph for v in n.outputs for d in v.shape or ()}
    scales = [n.attributes["scale"].as_float() for n in made.graph if n.op_type == "Attention"]
    assert scales == [1.0] * C.layers


def test_attention_without_a_scale_gets_its_default_folded() -> None:
    model = graph(Shape())
    for n in model.graph:
        if n.op_type == "Attention":
            del n.attributes["scale"]
    assert fold_scale(model) == 2
    factor = next(v for name, v in model.graph.initializers.items() if name.startswith("attention.scale"))
    assert factor.const_value.numpy() == 0.25


def test_int4_blocks_along_k_have_positive_scales_and_reach_both_extremes() -> None:
    weight = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
    weight[:32, 0], weight[32:, 1] = 0.0, -np.abs(weight[32:, 1])
    levels, scale = columns_to_int4(weight)
    assert levels.shape == (64, 5) and levels.dtype == ml_dtypes.int4 and scale.shape == (2, 5)
    assert (scale > 0).all()
    whole = levels.astype(np.float32).reshape(2, 32, 5)
    assert np.abs(whole * scale[:, None] - weight.reshape(2, 32, 5)).max() <= scale.max() / 2 + 1e-6
    assert whole.min() == -8 and whole.max() == 7 and not whole[0, :, 0].any()


def test_int4_takes_every_product_but_those_its_blocks_do_not_divide() -> None:
    model = graph(Shape(ffn=80))
    simplify(model)
    pack(model)
    left = to_int4_blocks(model)
    assert left == ["0.down", "1.down"]
    assert op_counts(model)["DequantizeLinear"] == 2 * 3 + 1


def test_a_bundle_in_fp16_is_built_from_its_own_halves(tmp_path: Path) -> None:
    model, row = write(C, tmp_path, "fp16"), tokens(C, 1, 24)
    lowered = Lowered(model, tmp_path / "lowered", "fp16", SIZES)
    found = lowered.step(row, np.zeros(1, np.int64))["logits"][0]
    least, most = ERROR["fp16"]
    assert least < relative(found, reference(C, row[0])) < most
