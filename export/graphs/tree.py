"""Which mask attention gets where the new tokens of a step are a tree: all slots before it, and a token's ancestors.

The graph gains an input ``tree_mask`` bool [B, S, T], T >= S, as ``TreeEngine.forward_tree`` has it: which of the last
T slots token i attends to. Slots are no positions any more, so a causal mask by position would show siblings; windows
go on by position.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir

from .gqa import Layer, fusable, fuse_attention, fuse_skip_norm, layers_of, lengths_of
from .rewrite import add_input, constant, dims, graph_inputs, node, sweep


def to_tree(model: ir.Model) -> int:
    """Attention's masks -> ``tree_mask``, in place, for any number of rows. Returns how many layers changed: 0, and the
    graph as it was, where one has another mask than causal or windowed."""
    layers = _all_layers(model)
    if layers:
        masks = _Masks(model)
        for layer in layers:
            layer.attention.replace_input_with(3, masks.of(layer.window))
            if layer.sink is not None:
                layer.sink.masked.replace_input_with(0, masks.of(layer.window))
        fuse_skip_norm(model)
        sweep(model)
    return len(layers)


def to_tree_gqa(model: ir.Model) -> int:
    """The same for ONE row: TensorScatter x2 + Attention -> GroupQueryAttention with the mask as ``attention_bias``.

    Without windows, a chain in this graph has the bits of ``to_gqa``'s steps from width 2. Returns 0 where ``to_gqa``
    would leave a layer as it is.
    """
    layers = _all_layers(model)
    if not all(map(fusable, layers)):
        return 0
    if layers:
        masks = _Masks(model)
        biases = {layer.window: masks.bias(layer.window) for layer in layers}
        last, total = lengths_of(model)
        lengths = last, masks.never_a_prompt(total)
        for layer in layers:
            unmasked = dataclasses.replace(layer, window=None)
            fuse_attention(model, unmasked, lengths, bias=biases[layer.window])
        fuse_skip_norm(model)
        sweep(model)
    return len(layers)


def _all_layers(model: ir.Model) -> list[Layer]:
    """Every attention layer, or none if one of them is not understood."""
    layers = layers_of(model)
    return layers if len(layers) == sum(n.op_type == "Attention" for n in model.graph) else []


class _Masks:
    """The masks of a graph, one for each width of window, made at its beginning."""

    def __init__(self, model: ir.Model) -> None:
        self._model, self._first = model, next(iter(model.graph))
        inputs = graph_inputs(model)
        self._positions, self._past = inputs["position_ids"], inputs["past_lens"]
        cache = inputs["past_key_values.0.key"]
        self._dtype = cache.dtype
        self._tree = add_input(model, "tree_mask", ir.DataType.BOOL, [*dims(inputs["input_ids"]), "T"])
        self._width = self._node("Shape", inputs["input_ids"], start=1, end=2)
        seen = self._node("Shape", self._tree, start=2, end=3)
        self._start = self._node("Sub", self._past, self._node("Sub", seen, self._width))  # [B]: of the T slots
        slots = self._node("Squeeze", self._node("Shape", cache, start=2, end=3))
        self._slot = self._node("Range", self._ints("zero", 0), slots, self._ints("one", 1))
        self._made: dict[int | None, ir.Value] = {}

    def of(self, window: int | None) -> ir.Value:
        """bool [B, 1, S, M]: the slots before the T, then the T themselves, then none; of ``window`` positions each."""
        if window not in self._made:
            before = self._node("Less", self._slot, self._lifted(self._start, 1, 2, 3))
            tree = self._tree
            if window is None:
                one = self._ints("one.row", [1])
                before = self._node("Expand", before, self._node("Concat", one, one, self._width, one, axis=0))
            else:
                edge = self._node("Sub", self._positions, self._ints(f"window.{window}", window))
                near = self._node("Greater", self._slot, self._lifted(edge, 1, 3))
                before = self._node("And", before, near)
                tree = self._node("And", tree, self._node("Greater", self._positions_seen(), self._lifted(edge, 2)))
            self._made[window] = self._node("TensorScatter", before, self._lifted(tree, 1), self._start, axis=3)
        return self._made[window]

    def bias(self, window: int | None) -> ir.Value:
        """The same as numbers, 0 or -infinity, [B, 1, S, slots in use, and as ``never_a_prompt`` says]."""
        used = self._node("Max", self._node("Add", self._past, self._width), self._one_more())
        mask = self._node("Slice", self.of(window), self._ints("from", [0]), used, self._ints("axis.3", [3]))
        kind = self._dtype.numpy() if self._dtype is not None else np.float32
        shown, hidden = (constant(self._model, f"tree.{x}", np.array(x, kind)) for x in (0.0, -np.inf))
        return self._node("Where", mask, shown, hidden)

    def never_a_prompt(self, total: ir.Value) -> ir.Value:
        """``total`` (int32, a scalar: the slots in use), and a slot more where these are the step's own: what begins a
        text GroupQueryAttention takes for a prompt, whose tokens stand at the positions of their slots."""
        more = self._node("Cast", self._node("Squeeze", self._one_more()), to=int(ir.DataType.INT32))
        return self._node("Max", total, more)

    def _one_more(self) -> ir.Value:
        """int64 [1]: a slot more than the step has tokens."""
        return self._node("Add", self._width, self._ints("one.row", [1]))

    def _positions_seen(self) -> ir.Value:
        """int64 [B, S, T]: an ancestor's position is the first of the T's and how many ancestors it has among them."""
        numbers = self._node("Cast", self._tree, to=int(ir.DataType.INT64))
        ranks = self._node("Sub", self._node("CumSum", numbers, self._ints("last", 2)), self._ints("one", 1))
        return self._node("Add", ranks, self._lifted(self._start, 1, 2))

    def _lifted(self, value: ir.Value, *axes: int) -> ir.Value:
        return self._node("Unsqueeze", value, self._ints(f"axes.{'.'.join(map(str, axes))}", list(axes)))

    def _ints(self, name: str, value: Any) -> ir.Value:
        return constant(self._model, f"tree.{name}", np.array(value, np.int64))

    def _node(self, op: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        made: ir.Value = node(self._model, self._first, op, inputs, **attributes)
        return made
