"""Channels made even before rounding: the model stays what it is, and int8 and int4 come closer to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from support_graphs import Nodes, Shape, entry, graph, reference, tokens

from leadout.bundle import Model, file_entry
from leadout.engines.ort import SlotEngine
from leadout.export.graphs.levels import rows_to_int8
from leadout.export.graphs.linear import linear_of
from leadout.export.graphs.passes import pack, simplify
from leadout.export.graphs.quantize import ROUNDINGS, quantize
from leadout.export.graphs.rewrite import array_of
from leadout.export.graphs.smooth import Rounding, _cost, best_scale, observe, smooth

LOUD = Rounding(None, 1, 1 << 20)  # activations alone matter: scales go as far as they may
FORMS = {"plain": {}, "tied": {"tied": True}, "biases": {"biases": True}, "windows": {"windows": (8, None)}}


def canonical(c: Shape, folder: Path, *, outliers: bool = True) -> Path:
    """``c`` as the exporter packs it, in a file. With ``outliers`` three channels of each norm and of each product of
    gate and up are a hundred times as loud as the rest, and what reads them is as much less: the model is the same."""
    model = graph(c)
    if outliers:
        _make_loud(model, c)
    simplify(model, c.context)
    pack(model)
    folder.mkdir(parents=True, exist_ok=True)
    ir.save(model, folder / "pack.onnx", external_data="pack.data")
    return folder / "pack.onnx"


def _make_loud(model: ir.Model, c: Shape) -> None:
    def times(name: str, axis: int, factor: float) -> None:
        array = array_of(model.graph.initializers[name]).copy()
        np.moveaxis(array, axis, 0)[:3] *= factor
        model.graph.initializers[name].const_value = ir.tensor(array, name=name)

    for i in range(c.layers):
        for norm, readers in ((f"{i}.norm1", "qkv"), (f"{i}.norm2", ("gate", "up"))):
            times(norm, 0, 100)
            for reader in readers:
                times(f"{i}.{reader}", 0, 1 / 100)
        times(f"{i}.up", 1, 100)
        times(f"{i}.down", 0, 1 / 100)
    if not c.tied:
        times("norm", 0, 100)
        times("head", 0, 1 / 100)


def logits(c: Shape, model: ir.Model, folder: Path, row: Any, precision: str = "fp32") -> Any:
    ir.save(model, folder / "model.onnx", external_data="model.data")
    there = Model(folder, entry(c, precision, {"canonical": file_entry(folder / "model.onnx")}))
    engine = SlotEngine(there, variant="canonical")
    found = np.array(engine.forward(row, np.zeros(1, np.int64))[0])
    engine.close()
    return found


def error(found: Any, wanted: Any) -> float:
    return float(np.sqrt(((found - wanted) ** 2).mean() / (wanted**2).mean()))


@pytest.mark.parametrize("form", FORMS)
def test_a_scaled_model_is_the_same_model(form: str, tmp_path: Path) -> None:
    c = Shape(**FORMS[form])
    packed, row = canonical(c, tmp_path), tokens(c, 1, 24)
    model = ir.load(packed)
    assert smooth(model, observe(packed, tokens(c, 2, 16, seed=2)), LOUD) == 3 * c.layers + 1
    assert error(logits(c, model, tmp_path, row), reference(c, row[0])) < 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("precision", "gain"), [("int8", 4.0), ("int4", 1.2)])
def test_a_model_with_outliers_loses_less(precision: str, gain: float, form: str, tmp_path: Path) -> None:
    c = Shape(**FORMS[form])
    packed, row = canonical(c, tmp_path), tokens(c, 1, 24)
    errors = []
    for fitted in (False, True):
        model = ir.load(packed)
        if fitted:
            assert smooth(model, observe(packed, tokens(c, 4, 16, seed=2)), ROUNDINGS[precision])
        quantize(model, precision)
        errors.append(error(logits(c, model, tmp_path, row, precision), reference(c, row[0])))
    assert errors[0] > gain * errors[1], errors


def test_a_tied_table_is_still_stored_once_and_no_scaled_weight_is_left_in_float(tmp_path: Path) -> None:
    c = Shape(tied=True, vocab=4096)
    for precision, kind in (("int8", np.int8), ("int4", np.uint8)):
        packed = canonical(c, tmp_path / precision)
        model = ir.load(packed)
        smooth(model, observe(packed, tokens(c, 2, 16)), LOUD)
        quantize(model, precision)
        tables = [v.const_value for v in model.graph.initializers.values() if v.const_value.size >= c.vocab * 32]
        assert len(tables) == 1 and tables[0].numpy().dtype == kind
        matrices = [v for v in model.graph.initializers.values() if v.dtype == ir.DataType.FLOAT and len(v.shape) == 2]
        assert all(v.const_value.size < 4096 or "scale" in v.name for v in matrices)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_seen_is_what_the_model_computes(form: str, tmp_path: Path) -> None:
    """Of several texts at once, each from its beginning: what the head reads makes the logits of each alone."""
    c, texts = Shape(**FORMS[form]), tokens(Shape(**FORMS[form]), 3, 16, seed=2)
    packed = canonical(c, tmp_path)
    seen, model = observe(packed, texts), ir.load(packed)
    (head,) = (found for n in model.graph if (found := linear_of(n)) is not None and found.shape[0] == c.vocab)
    made = seen[str(head.product.inputs[0].name)] @ head.rows.T
    assert error(made.reshape(3, 16, -1), np.stack([reference(c, text) for text in texts])) < 1e-5


def test_observing_leaves_nothing_behind(tmp_path: Path) -> None:
    packed = canonical(Shape(), tmp_path)
    seen = observe(packed, tokens(Shape(), 3, 8))
    assert {rows.shape for rows in seen.values()} == {(24, 64), (24, 96)}
    assert {path.name for path in tmp_path.iterdir()} == {"pack.onnx", "pack.data"}


@pytest.mark.parametrize("precision", ROUNDINGS)
def test_the_error_expected_is_the_error_found(precision: str) -> None:
    """Of a product whose channels differ: within a fifth, however they are scaled."""
    rounding, rng = ROUNDINGS[precision], np.random.default_rng(0)
    channels = np.exp(rng.normal(size=192))
    seen = rng.normal(size=(200, 192)) * channels
    weights = rng.normal(size=(160, 192))
    energy, share = (weights**2).sum(0), 1 / (seen**2).sum(1)
    for exponent in (0.0, 0.3, 0.6, 1.0):
        scale = channels**exponent
        expected = _cost(seen, [weights], energy, share, scale, rounding) / 12
        rounded = _rounded(seen / scale, rounding.block, rounding.activation_levels)
        product = rounded @ _rounded(weights * scale, rounding.block, rounding.weight_levels).T
        found = float(share @ ((product - seen @ weights.T) ** 2).sum(1))
        assert abs(found / expected - 1) < 0.2, (exponent, found / expected)


def _rounded(rows: Any, block: int | None, levels: int) -> Any:
    count, width = rows.shape
    whole = np.pad(rows, ((0, 0), (0, -width % (block or width))))
    blocks = whole.reshape(count, -1, block or width)
    step = np.abs(blocks).max(2, keepdims=True) / levels
    return (np.rint(blocks / step) * step).reshape(whole.shape)[:, :width]


def test_even_channels_are_left_alone() -> None:
    rng = np.random.default_rng(0)
    for precision in ROUNDINGS:
        assert best_scale(rng.normal(size=(64, 96)), [rng.normal(size=(80, 96))], ROUNDINGS[precision]) is None


def test_silent_channels_and_nothing_seen_are_no_harm() -> None:
    rng = np.random.default_rng(0)
    seen = rng.normal(size=(64, 96)) * np.where(np.arange(96) < 4, 100, 1) * (np.arange(96) < 90)
    scale = best_scale(seen, [rng.normal(size=(80, 96))], LOUD)
    assert scale is not None and np.isfinite(scale).all() and (scale > 0).all()
    assert scale[90:].max() * 4 > scale[4:90].min(), "a channel that was silent may speak"
    assert best_scale(np.zeros((64, 96)), [rng.normal(size=(80, 96))], LOUD) is None


def test_rounding_to_eight_bits_gains_what_was_predicted() -> None:
    rng = np.random.default_rng(0)
    seen, weights = rng.normal(size=(64, 96)), rng.normal(size=(80, 96))
    seen[:, :2] *= 100
    scale = best_scale(seen, [weights], ROUNDINGS["int8"])
    assert scale is not None
    truth, errors = seen @ weights.T, []
    for factor in (np.ones(96), scale):
        (a, step), (w, each) = rows_to_int8(seen / factor), rows_to_int8(weights * factor)
        product = (a.astype(np.int64) @ w.T.astype(np.int64)) * step[:, None] * each
        errors.append(((product - truth) ** 2).mean())
    assert errors[1] < errors[0] / 4


ONE = Shape(layers=0, hidden=32, vocab=48)


def _joined(kind: str) -> ir.Model:
    """A decoder of one product that looks as if it could be scaled, and cannot or only with care."""
    made, rng = Nodes(), np.random.default_rng(0)

    def const(*shape: int) -> str:
        return made.const(rng.normal(size=shape).astype(np.float32) + 1)

    x = made.op("Gather", [const(48, 32), "input_ids"])
    n = made.op("RMSNormalization", [x, const(32)], axis=-1)
    if kind == "squared":
        n = made.op("MatMul", [n, const(32, 32)])
        n = made.op("Mul", [n, n])
    elif kind == "added":
        n = made.op("Add", [n, x])
    elif kind == "bent":
        n = made.op("Sigmoid", [n])
    elif kind == "gemm":
        n = made.op("Reshape", [n, made.const(np.array([-1, 32]))])
        n = made.op("Gemm", [n, const(64, 32), const(64)], transB=1)
        n = made.op("Gemm", [made.op("Relu", [n]), const(64, 32), const(32)])
        n = made.op("Reshape", [n, made.const(np.array([1, -1, 32]))])
    elif kind == "split":
        gate, up = made.halves(made.op("MatMul", [n, const(32, 64)]))
        n = made.op("Mul", [made.op("Tanh", [gate]), up])
    rows = made.op("GatherND", [n, made.op("Unsqueeze", ["logit_index", made.ints(2)])], batch_dims=1)
    logits = made.op("MatMul", [rows, const(32, 48)], "logits" if kind != "read twice" else "raw")
    if kind == "read twice":
        made.op("Add", [logits, made.op("ReduceMax", [rows, made.ints(-1)], keepdims=1)], "logits")
    return made.model(ONE)


@pytest.mark.parametrize(
    ("kind", "count"),
    [("plain", 1), ("squared", 1), ("added", 0), ("bent", 0), ("read twice", 0), ("gemm", 3), ("split", 2)],
)
def test_what_cannot_be_divided_is_left(kind: str, count: int, tmp_path: Path) -> None:
    model = _joined(kind)
    ir.save(model, tmp_path / "pack.onnx", external_data="pack.data")
    row = tokens(ONE, 1, 12)
    seen = observe(tmp_path / "pack.onnx", row)
    before = logits(ONE, ir.load(tmp_path / "pack.onnx"), tmp_path, row)
    model = ir.load(tmp_path / "pack.onnx")
    assert smooth(model, seen, LOUD) == count
    assert error(logits(ONE, model, tmp_path, row), before) < 1e-5
