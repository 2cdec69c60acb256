"""How a captured graph is tidied and packed, and stays canonical; the variants come from gqa.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from .gqa import to_gqa, to_gqa_even, to_grouped, to_nonpad
from .pieces import Array, Pieces, piece_of
from .rewrite import array_of, constant, dims, evaluate, graph_inputs, made_by, node, only_user, sources, swap, sweep

__all__ = ["pack", "simplify", "to_gqa", "to_gqa_even", "to_grouped", "to_nonpad"]

_LARGEST_TABLE = 1 << 26  # bytes of one cos or sin table; above, the graph goes on computing them
_PADDING = 128  # rows beyond the context: a last step may be padded past it, and GroupQueryAttention wants them there


def simplify(model: ir.Model, max_context: int | None = None) -> None:
    """Tidy a captured graph in place without changing what it computes.

    Duplicates, identities and metadata go; slices that tile a value become one Split; rows are gathered by GatherND.
    With ``max_context`` (positions 0 .. max_context-1 are all there will be), cos and sin become tables, and
    RotaryEmbedding reads them by ``position_ids``, where that is exact: a row's angle depends on its position alone.
    """
    common.IdentityEliminationPass()(model)
    _drop_same_type_casts(model)
    _drop_same_shape_reshapes(model)
    _gather_rows(model)
    _split_slices(model)
    if max_context is not None:
        _tabulate_rotary(model, max_context + _PADDING)
    common.DeduplicateInitializersPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.ClearMetadataAndDocStringPass()(model)
    sweep(model)


def pack(model: ir.Model) -> int:
    """Join MatMuls that read one value (q, k, v; gate, up) into a MatMul and a Split, biases too. Returns how many."""
    groups: dict[int, list[ir.Node]] = defaultdict(list)
    for n in model.graph:
        if n.op_type == "MatMul" and n.inputs[1].const_value is not None and len(dims(n.inputs[1])) == 2:
            groups[id(n.inputs[0])].append(n)
    packed = [group for group in groups.values() if len(group) > 1 and len({m.inputs[1].dtype for m in group}) == 1]
    for index, group in enumerate(packed):
        _pack_group(model, group, f"packed.{index}")
    sweep(model)
    return len(packed)


def _pack_group(model: ir.Model, group: list[ir.Node], name: str) -> None:
    adds, widths = [_bias_of(m) for m in group], [dims(m.inputs[1])[1] for m in group]
    weight = constant(model, f"{name}.weight", _side_by_side([m.inputs[1].const_value for m in group], sum(widths)))
    sizes = constant(model, f"{name}.sizes", np.array(widths, np.int64))
    product = node(model, group[0], "MatMul", [group[0].inputs[0], weight])
    product.dtype, product.shape = weight.dtype, _with_last(group[0].inputs[0], weight.shape[1])
    if any(adds):
        kind = weight.dtype.numpy()
        vectors = [np.zeros(width, kind) if add is None else add[1] for width, add in zip(widths, adds, strict=True)]
        bias = constant(model, f"{name}.bias", np.concatenate(vectors))
        product = node(model, group[0], "Add", [product, bias], like=product)
    parts = node(model, group[0], "Split", [product, sizes], outputs=len(group), axis=-1)
    for matmul, add, part in zip(group, adds, parts, strict=True):
        last = matmul if add is None else add[0]
        swap(last.outputs[0], part)
        model.graph.remove([matmul] if add is None else [add[0], matmul], safe=True)


def _side_by_side(weights: Sequence[ir.TensorProtocol], width: int) -> Pieces:
    """Matrices [K,N] of one K as one [K,width]."""

    def make(rows: slice, columns: slice) -> Array:
        return np.concatenate([piece_of(weight, rows) for weight in weights], axis=1)[:, columns]

    return Pieces(make, weights[0].dtype, (weights[0].shape[0], width), weights)


def _bias_of(matmul: ir.Node) -> tuple[ir.Node, Array] | None:
    """The Add of a constant vector that follows, and the vector."""
    add = only_user(matmul.outputs[0], "Add")
    if add is None:
        return None
    for value in add.inputs:
        array = array_of(value)
        if array is not None and array.shape == (matmul.inputs[1].shape[1],):
            return add, array
    return None


def _with_last(value: ir.Value, last: int) -> ir.Shape | None:
    return None if value.shape is None else ir.Shape([*list(value.shape)[:-1], last])


def _drop_same_type_casts(model: ir.Model) -> None:
    for n in list(model.graph):
        if n.op_type == "Cast" and n.inputs[0].dtype == ir.DataType(n.attributes["to"].as_int()):
            swap(n.outputs[0], n.inputs[0])


def _drop_same_shape_reshapes(model: ir.Model) -> None:
    for n in list(model.graph):
        shape = dims(n.inputs[0]) if n.op_type == "Reshape" else ()
        if shape and None not in shape and shape == dims(n.outputs[0]):
            swap(n.outputs[0], n.inputs[0])


def _gather_rows(model: ir.Model) -> None:
    """GatherElements(x [B,S,H], index [B,L] spread over H) -> GatherND: L rows are copied, no index per element."""
    for n in list(model.graph):
        expand = made_by(n.inputs[1], "Expand") if n.op_type == "GatherElements" else None
        unsqueeze = made_by(expand.inputs[0], "Unsqueeze") if expand is not None else None
        if unsqueeze is None or len(dims(n.inputs[0])) != 3 or dims(unsqueeze.outputs[0])[-1:] != (1,):
            continue
        if n.attributes["axis"].as_int() != 1 or len(dims(unsqueeze.inputs[0])) != 2:
            continue
        rows = node(model, n, "GatherND", [n.inputs[0], unsqueeze.outputs[0]], batch_dims=1)
        swap(n.outputs[0], rows)
        model.graph.remove(n, safe=True)


def _split_slices(model: ir.Model) -> None:
    """Slices of one value's last axis that tile it, in order -> one Split."""
    groups: dict[int, list[tuple[int, int, ir.Node]]] = defaultdict(list)
    for n in model.graph:
        if n.op_type == "Slice" and (span := _last_axis_span(n)) is not None:
            groups[id(n.inputs[0])].append((*span, n))
    for index, group in enumerate(groups.values()):
        group.sort(key=lambda piece: piece[0])
        width = dims(group[0][2].inputs[0])[-1]
        starts, ends = [s for s, _, _ in group], [e for _, e, _ in group]
        if len(group) < 2 or starts != [0, *ends[:-1]] or ends[-1] != width:
            continue
        slices = [n for _, _, n in group]
        first = next(n for n in model.graph if any(n is s for s in slices))
        sizes = constant(model, f"split.{index}", np.array([e - s for s, e, _ in group], np.int64))
        parts = node(model, first, "Split", [first.inputs[0], sizes], outputs=len(group), axis=-1)
        for old, part in zip(slices, parts, strict=True):
            swap(old.outputs[0], part)
        model.graph.remove(slices, safe=True)


def _last_axis_span(n: ir.Node) -> tuple[int, int] | None:
    shape = dims(n.inputs[0])
    starts, ends, axes, steps = ([array_of(v) for v in n.inputs[1:]] + [None, None])[:4]
    if not shape or not isinstance(shape[-1], int) or starts is None or ends is None or axes is None:
        return None
    if axes.tolist() not in ([-1], [len(shape) - 1]) or (steps is not None and steps.tolist() != [1]):
        return None
    start, end, _ = slice(int(starts[0]), int(ends[0])).indices(shape[-1])
    return start, end


def _tabulate_rotary(model: ir.Model, rows: int) -> None:
    tables: dict[str, ir.Value | None] = {}
    positions = graph_inputs(model)["position_ids"]
    for n in [n for n in model.graph if n.op_type == "RotaryEmbedding" and len(n.inputs) == 3]:
        cos, sin = (_table(model, v, rows, tables) for v in n.inputs[1:3])
        if cos is None or sin is None:
            continue
        rotated = ir.Node("", "RotaryEmbedding", [n.inputs[0], cos, sin, positions], n.attributes.values())
        model.graph.insert_before(n, rotated)
        swap(n.outputs[0], rotated.outputs[0])
        model.graph.remove(n, safe=True)


def _table(model: ir.Model, value: ir.Value, rows: int, made: dict[str, ir.Value | None]) -> ir.Value | None:
    """``value`` [B,S,W] for positions 0 .. rows-1 as an initializer [rows, W], or None where it is not a function of
    each position alone (a prefix evaluated by itself tells: longrope's factors follow the longest position)."""
    name = str(value.name)
    if name not in made:
        made[name] = None
        width = dims(value)[-1:]
        if sources([value]) == {"position_ids"} and width and rows * int(width[0]) * 4 <= _LARGEST_TABLE:
            every = np.arange(rows, dtype=np.int64)[None]
            (table,) = evaluate(model, [value], {"position_ids": every})
            parts = [evaluate(model, [value], {"position_ids": p})[0] for p in (every[:, : rows // 2], every[:, :1])]
            if all(np.array_equal(part, table[:, : part.shape[1]]) for part in parts):
                made[name] = constant(model, f"rotary.{len(made)}", table[0])
    return made[name]
