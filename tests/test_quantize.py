"""Quantised graphs: close to the model, one table where it is tied, and rows that do not depend on each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from support_graphs import Shape, graph, op_counts, reference, tokens, write

from leadout.engines.ort import SlotEngine
from leadout.engines.saturation import EXACT_SUMS
from leadout.errors import ExportError
from leadout.export.graphs.levels import int4_to_rows, rows_to_int4, rows_to_int8
from leadout.export.graphs.passes import pack, simplify
from leadout.export.graphs.quantize import from_int4, quantize

# Root mean square of the error over that of the logits; random weights, which have no redundancy (real ones lose less).
# ARM64 adds in fp16 what x86 adds in fp32.
ERROR = {"fp16": (0.001, 0.008), "int8": (0.02, 0.07), "int4": (0.2, 0.5), "int4-128": (0.2, 0.6)}


def quantised(c: Shape, precision: str) -> ir.Model:
    model = graph(c)
    simplify(model, c.context)
    pack(model)
    quantize(model, precision)
    return model


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("precision", ERROR)
def test_every_precision_is_near_the_model_in_every_form(precision: str, tied: bool, tmp_path: Path) -> None:
    c = Shape(tied=tied, biases=True)
    row = tokens(c, 1, 24)
    wanted = reference(c, row[0])
    model = write(c, tmp_path, precision)
    for variant in ("canonical", "gqa", "nonpad"):
        engine = SlotEngine(model, variant=variant)
        logits = engine.forward(row, np.zeros(1, np.int64))[0]
        assert logits.dtype == np.float32
        least, most = ERROR[precision]
        assert least < np.sqrt(((logits - wanted) ** 2).mean() / (wanted**2).mean()) < most
        engine.close()


def test_a_tied_table_is_stored_once() -> None:
    for precision, kind in (("int8", np.int8), ("int4", np.uint8), ("int4-128", np.uint8), ("fp16", np.float16)):
        c = Shape(tied=True, vocab=4096, hidden=128)
        model = quantised(c, precision)
        tables = [v.const_value for v in model.graph.initializers.values() if v.const_value.size >= c.vocab * 32]
        assert len(tables) == 1 and tables[0].numpy().dtype == kind


def test_int8_uses_standard_operators_only_and_shares_inputs() -> None:
    model = quantised(Shape(), "int8")
    assert {n.domain for n in model.graph} == {""}
    counts = op_counts(model)
    assert counts["MatMulInteger"] == 2 * 4 + 1
    assert counts["QuantizeLinear"] == counts["MatMulInteger"], "q/k/v are packed: one quantised input for each product"
    assert counts["ConstantOfShape"] == 2, "one zero point for [B, S, 1], one for the rows that want logits"
    assert "MatMul" not in counts


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4", "int4-128"])
def test_no_value_has_a_shape_and_no_type(precision: str) -> None:
    values = [value for n in quantised(Shape(), precision).graph for value in n.outputs]
    assert [v.name for v in values if v.shape is not None and v.dtype is None] == []  # onnx-ir warns of each, aloud


def test_products_that_read_one_value_share_its_quantisation() -> None:
    model = graph(Shape())
    simplify(model)
    quantize(model, "int8")  # not packed: q, k, v read one value, gate and up another
    counts = op_counts(model)
    assert counts["MatMulInteger"] == 2 * 7 + 1 and counts["QuantizeLinear"] == 2 * 4 + 1


def test_rows_of_almost_nothing_stay_that() -> None:
    """The scale of a row is not kept from 0: zeros are 0 over 0 on the way to integers, and zeros again behind it."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((64, 40)).astype(np.float32)
    product = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    x, y = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, "S", width])
        for name, width in (("x", 64), ("y", 40))
    )
    whole = onnx.helper.make_graph([product], "g", [x], [y], [onnx.numpy_helper.from_array(weight, "w")])
    model = ir.from_proto(
        onnx.helper.make_model(whole, ir_version=11, opset_imports=[onnx.helper.make_opsetid("", 24)])
    )
    quantize(model, "int8")
    assert op_counts(model)["MatMulInteger"] == 1
    row = rng.standard_normal(64).astype(np.float32)
    rows = np.stack([0 * row, 1e-42 * row, 1e-30 * row, row, -0.0 * row])[None].astype(np.float32)
    options = ort.SessionOptions()
    options.add_session_config_entry(EXACT_SUMS, "1")
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    found = session.run(["y"], {"x": rows})[0][0]
    assert not found[0].any() and not found[4].any() and np.isfinite(found).all()
    wanted = rows[0] @ weight
    assert np.abs(found[1]).max() < 1e-37
    for place in (2, 3):
        assert np.abs(found[place] - wanted[place]).max() < 0.02 * np.abs(wanted[place]).max()


@pytest.mark.parametrize(("precision", "block"), [("int4", 32), ("int4-128", 128)])
def test_int4_quantises_the_head(precision: str, block: int) -> None:
    model = quantised(Shape(tied=True, hidden=128), precision)
    counts = op_counts(model)
    assert counts["MatMulNBits"] == 2 * 4 + 1 and "MatMul" not in counts
    coarse = [n for n in model.graph if n.op_type in ("MatMulNBits", "GatherBlockQuantized")]
    assert len(coarse) == 2 * 4 + 2 and {n.attributes["block_size"].as_int() for n in coarse} == {block}


def test_narrow_products_stay() -> None:
    model = quantised(Shape(vocab=16), "int8")
    assert op_counts(model)["MatMul"] == 1


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(ExportError, match="'int3' is unknown \\(one of: fp32, fp16, int8, int4, int4-128\\)"):
        quantize(graph(Shape()), "int3")


def test_int8_rows() -> None:
    rows = np.array([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0]], np.float32)
    levels, scale = rows_to_int8(rows)
    assert levels.tolist()[0] == [64, -127, 32] and not levels[1].any()
    assert np.abs(levels * scale[:, None] - rows).max() <= scale.max() / 2


@pytest.mark.parametrize(("block", "blocks"), [(32, 3), (128, 1)])
def test_int4_blocks_hold_sixteen_levels_around_eight(block: int, blocks: int) -> None:
    rows = np.random.default_rng(0).normal(size=(3, 70)).astype(np.float32)
    packed, scale = rows_to_int4(rows, block)
    assert packed.shape == (3, blocks, block // 2) and scale.shape == (3, blocks)
    levels = np.stack([packed & 15, packed >> 4], -1).reshape(3, blocks, block).astype(np.int32) - 8
    back = (levels * scale[..., None]).reshape(3, blocks * block)
    assert np.abs(back[:, :70] - rows).max() <= np.abs(scale).max() + 1e-6
    assert not back[:, 70:].any() and np.allclose(int4_to_rows(packed, scale, 70), back[:, :70])
    assert levels.min() == -8


@pytest.mark.parametrize("precision", ["int4", "int4-128"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_int4_goes_back_to_plain_operators_with_the_weights_it_left(tied: bool, precision: str, tmp_path: Path) -> None:
    c = Shape(tied=tied, biases=True, hidden=128 if tied else 64)
    row, start = tokens(c, 1, 24), np.zeros(1, np.int64)
    coarse = write(c, tmp_path, precision)
    engine = SlotEngine(coarse, variant="canonical")
    wanted = engine.forward(row, start)[0].copy()
    engine.close()
    model = ir.load(coarse.path("canonical"))
    from_int4(model)
    assert {n.domain for n in model.graph} == {""}
    assert not [v.name for v in model.graph.initializers.values() if v.dtype in (ir.DataType.INT8, ir.DataType.UINT8)]
    ir.save(model, tmp_path / "model.onnx", external_data="plain.data")
    plain = SlotEngine(coarse, variant="canonical")
    error = np.sqrt(((plain.forward(row, start)[0] - wanted) ** 2).mean() / (wanted**2).mean())
    assert error < 0.05, "the products' inputs are in int8 on the int4 side, nothing else differs"
