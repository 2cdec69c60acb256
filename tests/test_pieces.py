"""Weights made piece by piece are the weights made at once, whoever makes them and whatever is asked for."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from support_graphs import Shape, graph
from test_mutants import Mutant, must_die

from leadout.export.graphs import half, passes, pieces, quantize, smooth
from leadout.export.graphs.levels import rows_to_int4, rows_to_int8
from leadout.export.graphs.passes import pack, simplify
from leadout.export.graphs.pieces import Pieces, steps
from leadout.export.graphs.quantize import quantize as to_precision
from leadout.export.graphs.rewrite import constant
from leadout.export.graphs.smooth import Rounding, observe
from leadout.export.graphs.smooth import smooth as make_even

FORMS = {"plain": {}, "tied": {"tied": True}, "wide": {"hidden": 48, "ffn": 80}}


def in_memory(form: str) -> ir.Model:
    model = graph(Shape(**FORMS[form]))  # type: ignore[arg-type]
    simplify(model, 320)
    pack(model)
    return model


def made(model: ir.Model) -> dict[str, Pieces]:
    return {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if isinstance(value.const_value, Pieces)
    }


def sums_up(tensor: Pieces) -> None:
    """All parts of a tensor are those of its whole, and a file of it is its bytes."""
    whole, file = tensor.numpy(), io.BytesIO()
    assert whole.shape == tuple(tensor.shape.numpy()) and whole.dtype == tensor.dtype.numpy()
    tensor.tofile(file)
    assert file.getvalue() == np.ascontiguousarray(whole).tobytes()
    some, few = slice(1, whole.shape[0] - 2), slice(2, max(3, whole.shape[1] - 1))
    assert np.array_equal(tensor.make(some, few), whole[some, few])


def levels_are_those_of_rows(model: ir.Model, before: dict[str, Any], precision: str) -> None:
    """What ``levels`` makes of whole matrices."""
    for name, tensor in made(model).items():
        if precision == "fp16":
            expected = before[name.removesuffix(".half")].astype(np.float16)
            assert np.array_equal(tensor.numpy(), expected)
            continue
        weights = before[name.rsplit(".", 1)[0]]
        by_row = name.startswith("embed") or name.endswith(".u4")
        rows = weights if name.startswith("embed") else weights.T
        found, scale = (rows_to_int4 if name.endswith(".u4") else rows_to_int8)(rows)
        assert np.array_equal(tensor.numpy(), found if by_row else found.T)
        kind = "row_scale" if f"{name.rsplit('.', 1)[0]}.row_scale" in model.graph.initializers else "scale"
        scales = model.graph.initializers[f"{name.rsplit('.', 1)[0]}.{kind}"].const_value.numpy()
        assert np.array_equal(scales.reshape(scale.shape), scale)


def all_of_it(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(pieces, "PIECE", 1 << 10)
    for form in FORMS:
        packed, apart = in_memory(form), graph(Shape(**FORMS[form])).graph.initializers  # type: ignore[arg-type]
        for name, parts in (("packed.0", ("0.q", "0.k", "0.v")), ("packed.1", ("0.gate", "0.up"))):
            expected = np.hstack([apart[part].const_value.numpy() for part in parts])
            assert np.array_equal(made(packed)[f"{name}.weight"].numpy(), expected)
        for tensor in made(packed).values():
            sums_up(tensor)
        for precision in ("int8", "int4", "fp16"):
            model = in_memory(form)
            before = {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}
            to_precision(model, precision)
            assert len(made(model)) >= 9
            for tensor in made(model).values():
                sums_up(tensor)
            levels_are_those_of_rows(model, before, precision)
        ir.save(packed, folder / "pack.onnx", external_data="pack.data")
        seen = observe(folder / "pack.onnx", np.arange(12).reshape(2, 6))
        model = ir.load(folder / "pack.onnx")
        loud = {value: rows * np.where(np.arange(rows.shape[1]) % 7, 1, 50) for value, rows in seen.items()}
        assert make_even(model, loud, Rounding(None, 1, 1 << 20)) and made(model)
        for tensor in made(model).values():
            sums_up(tensor)


def test_they_sum_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_it(monkeypatch, tmp_path)


def test_a_piece_is_as_large_as_it_may_be_and_at_least_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 64)
    assert steps((5, 8)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert steps((2, 8), 1) == [slice(0, 2)]
    assert steps((3, 100)) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert steps((0, 8)) == []


def test_one_name_and_one_source_are_one_constant() -> None:
    model = ir.Model(ir.Graph([], [], nodes=[]), ir_version=10)
    zeros, source = np.zeros((2, 2), np.float32), object()

    def of(source: object) -> Pieces:
        return Pieces(lambda rows, columns: zeros[rows, columns], ir.DataType.FLOAT, (2, 2), source)

    first = constant(model, "a", of(source))
    assert constant(model, "a", of(source)) is first and first.const_value.name == "a"
    assert constant(model, "a", of(object())).name == "a_"
    assert constant(model, "a", zeros).name == "a__"
    assert constant(model, "a__", zeros).name == "a__"


MUTANTS = [
    Mutant("the last piece is left out", pieces, "steps", "0, shape[0], height", "0, shape[0] - height, height"),
    Mutant("peaks of the last piece", quantize, "_peaks", "np.maximum(peaks,", "np.minimum(peaks + 9,"),
    Mutant("scales of the first rows", quantize, "_int8_table", "scale[rows, None]", "scale[: len(scale[rows]), None]"),
    Mutant("int4 of all columns", quantize, "_int4_rows", "[:, blocks]", ""),
    Mutant("matrices change places", passes, "_side_by_side", "weight in weights", "weight in weights[::-1]"),
    Mutant("factors of the first rows", smooth, "_times", "factors[rows", "factors[: len(factors[rows])"),
    Mutant("halves of all columns", half, "_half_of", "piece_of(tensor, rows, columns)", "piece_of(tensor, rows)"),
    Mutant("levels are cut off", quantize, "to_int8", "np.rint(weights / scale)", "(weights / scale)"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.bug for mutant in MUTANTS])
def test_mutant_is_killed(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    must_die(mutant, [lambda patch: all_of_it(patch, tmp_path)], monkeypatch)
