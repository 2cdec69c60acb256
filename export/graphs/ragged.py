"""Attention of many rows, each with as many tokens as it has: one node a row, and all else over the tokens of all."""

from __future__ import annotations

import onnx_ir as ir

from .gqa import attending, to_gqa
from .rewrite import add_input, dims, graph_inputs, node, sweep

_TOKENS, _CACHES, _LENGTHS, _POSITIONS = range(3), slice(3, 5), slice(5, 7), 9  # inputs of GroupQueryAttention


def to_ragged(model: ir.Model, rows: int) -> int:
    """``to_gqa`` for ``rows`` rows, whose tokens stand one row after the other in ``input_ids`` [1,T], in place.

    All but attention takes a token as it comes. Attention has a node for each row r, with a cache of its own
    (``past_key_values.0.key.r`` [1,heads,M,dim]): it takes the tokens at the places ``row_tokens.r``, and has
    ``row_last.r`` + 1 = ``row_total.r`` slots in use then; what it gives of all rows, one after the other, is put in
    the places where the tokens stand by ``order`` [T]. A token that is the only one of its row is shown to the node
    twice, as in ``gqa_even``, so its bits are those that the graph for one row gives it, whatever stands beside it.
    Returns how many layers changed, 0 where one is left or something else asks how long the rows are.
    """
    layers = attending(model)
    if to_gqa(model) < layers:
        return 0
    nodes = [n for n in model.graph if n.op_type == "GroupQueryAttention"]
    made = [_Row(model, nodes[0], row) for row in range(rows)]
    order = add_input(model, "order", ir.DataType.INT64, ["T"])
    for old in nodes:
        _apart(model, old, made, order)
    sweep(model)
    if graph_inputs(model)["past_lens"].uses():
        return 0
    given = [value for value in model.graph.inputs if not (value.name or "").startswith("past_")]
    own = [value for row in made for value in row.caches]
    model.graph.inputs[:] = [*given, *own]
    return len(nodes)


class _Row:
    """What one row's nodes share."""

    def __init__(self, model: ir.Model, first: ir.Node, row: int) -> None:
        self.row, self._model, self._first = row, model, first
        self.tokens = add_input(model, f"row_tokens.{row}", ir.DataType.INT64, [f"N.{row}"])
        last = add_input(model, f"row_last.{row}", ir.DataType.INT32, [1])
        self.lengths = [last, add_input(model, f"row_total.{row}", ir.DataType.INT32, [])]
        self.caches: list[ir.Value] = []
        self._positions: dict[int, ir.Value] = {}

    def of(self, before: ir.Node, value: ir.Value) -> ir.Value:
        """Of ``value`` [1,T,...] what is the row's."""
        mine: ir.Value = node(self._model, before, "Gather", [value, self.tokens], axis=1)
        return mine

    def positions(self, value: ir.Value) -> ir.Value:
        """The same, once for all layers."""
        if id(value) not in self._positions:
            self._positions[id(value)] = self.of(self._first, value)
        return self._positions[id(value)]

    def cache(self, whole: ir.Value) -> ir.Value:
        """The row's own part of a cache."""
        _, heads, _, width = dims(whole)
        mine = ir.Value(name=f"{whole.name}.{self.row}", type=whole.type)
        mine.shape = ir.Shape([1, heads, f"M.{self.row}", width])
        self.caches.append(mine)
        return mine


def _apart(model: ir.Model, old: ir.Node, rows: list[_Row], order: ir.Value) -> None:
    outputs, attributes = [], {name: attribute.value for name, attribute in old.attributes.items()}
    for row in rows:
        inputs = list(old.inputs)
        for i in _TOKENS:
            inputs[i] = inputs[i] and row.of(old, inputs[i])
        if len(inputs) > _POSITIONS and (positions := inputs[_POSITIONS]) is not None:
            inputs[_POSITIONS] = row.positions(positions)
        inputs[_CACHES], inputs[_LENGTHS] = [row.cache(whole) for whole in inputs[_CACHES]], row.lengths
        output, *kept = node(model, old, old.op_type, inputs, outputs=3, domain=old.domain, **attributes)
        outputs.append(output)
        for mine, whole, past in zip(kept, old.outputs[1:], row.caches[-2:], strict=True):
            mine.name, mine.type, mine.shape = f"{whole.name}.{row.row}", past.type, past.shape
            model.graph.outputs.append(mine)
    for whole in old.outputs[1:]:
        model.graph.outputs.remove(whole)
    together = node(model, old, "Concat", outputs, axis=1)
    result = old.outputs[0]
    result.replace_all_uses_with(node(model, old, "Gather", [together, order], axis=1, like=result))
    model.graph.remove(old, safe=True)
