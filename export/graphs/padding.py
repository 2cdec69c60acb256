"""How a step of one token gets the kernels of wider ones: attention, and nothing else, sees a second row.

A matrix product over weights gives a row the same bits whatever stands beside it; the products inside attention have
a kernel of their own for one row, which sums in another order. The second row costs little there, 4 to 18 % of a small
model's step: who asks for a law and not for bits can do without it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from .rewrite import add_input, constant, dims, graph_inputs, node


class Padding:
    """Rows that fill a step of one token up to two, made of values that are there: what they hold is never read."""

    def __init__(self, model: ir.Model, *, asked: bool = False) -> None:
        """Adds to ``model`` what all paddings share: ``width`` [1] is S, ``padded`` [1] is max(S, 2), both int64.

        ``asked``: max(S, the new input ``least_width`` int64 [1]) instead, which is 2, or 1 where a step of one token
        may round as it likes.
        """
        first = next(iter(model.graph))
        self._model = model
        self.end = first  # the first node behind them
        self._zero = constant(model, "padding.zero", np.array([0], np.int64))
        if asked:
            least = add_input(model, "least_width", ir.DataType.INT64, [1])
        else:
            least = constant(model, "padding.two", np.array([2], np.int64))
        self.width: ir.Value = node(model, first, "Shape", [graph_inputs(model)["input_ids"]], start=1, end=2)
        self.padded: ir.Value = node(model, first, "Max", [self.width, least])
        self._missing = node(model, first, "Sub", [self.padded, self.width])
        self._rows: dict[tuple[Any, ...], ir.Value] = {}
        self._padded: dict[tuple[int, int], ir.Value] = {}

    def add(self, before: ir.Node, value: ir.Value, axis: int) -> ir.Value:
        """``value`` with as many rows behind its S along ``axis`` as are missing; values of one shape share them."""
        if (done := self._padded.get((id(value), axis))) is not None:
            return done
        known = dims(value)
        shape = (value.dtype, axis, *known) if known else (id(value),)
        if shape not in self._rows:
            inputs = [value, self._zero, self._missing, self._axis(axis)]
            self._rows[shape] = node(self._model, before, "Slice", inputs)
        padded: ir.Value = node(self._model, before, "Concat", [value, self._rows[shape]], axis=axis)
        self._padded[id(value), axis] = padded
        return padded

    def remove(self, before: ir.Node, value: ir.Value, axis: int) -> ir.Value:
        """The first S rows of ``value`` along ``axis``."""
        kept: ir.Value = node(self._model, before, "Slice", [value, self._zero, self.width, self._axis(axis)])
        return kept

    def _axis(self, axis: int) -> ir.Value:
        return constant(self._model, f"padding.axis.{axis}", np.array([axis], np.int64))
