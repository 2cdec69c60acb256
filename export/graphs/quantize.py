"""In what numbers weights are stored and multiplied: int8 per row and channel, int4 in blocks, or fp16.

A row of the result must depend on that row alone, whatever stands beside it: speculation is lossless only then. That
rules out per-tensor dynamic quantisation; it holds for all forms here (from two rows on, bit for bit; of int4-128 for
rows in pairs).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir

from ...errors import ExportError
from .experts import experts_apart, quantize_experts, routers_of
from .half import to_half
from .levels import BLOCK, WIDE_BLOCK, columns_to_int4, int4_to_rows, int8_scale, rows_to_int4, to_int8
from .linear import Linear, linear_of
from .pieces import Array, Pieces, piece_of, steps
from .rewrite import CONTRIB, array_of, constant, dims, graph_inputs, made_by, node, swap, sweep
from .smooth import Rounding

_FEWEST_COLUMNS = 32  # narrower products cost little
# What each precision does to a product with weights, for those who fit the model to it first.
ROUNDINGS = {
    "int8": Rounding(None, 127, 127),
    "int4": Rounding(BLOCK, 127, 8),
    "int4-128": Rounding(WIDE_BLOCK, 127, 8),
}


def quantize(model: ir.Model, precision: str) -> None:
    """Rewrite a canonical graph in place: ``fp16`` or one of ROUNDINGS. The LM head and the embedding are included;
    a tied table is stored once. What makes features of streams stays as it is, and so does what chooses experts.

    int8: activations to u8 by the largest magnitude of their row, weights to s8 by that of their output channel,
    MatMulInteger, standard operators only. On an x86 without VNNI whoever opens such a graph has to ask onnxruntime for
    exact sums (``engines.saturation``). int4: MatMulNBits in blocks of 32 (int4-128: of 128) with activations in int8
    (accuracy level 4). fp16: weights, activations and cache; logits stay fp32. Experts of a mixture: ``experts``, in
    blocks of 32. Raises ExportError for another name.
    """
    if precision == "fp16":
        experts_apart(model)
        sweep(model)
        to_half(model)
    elif (rounding := ROUNDINGS.get(precision)) is not None:
        _linears_to(model, _int8 if rounding.block is None else partial(_int4, block=rounding.block))
        quantize_experts(model, 8 if rounding.block is None else 4)
        _embeddings_to_int8(model)
    else:
        raise ExportError(f"precision '{precision}' is unknown (one of: fp32, fp16, {', '.join(ROUNDINGS)})")
    sweep(model)


def to_int4_blocks(model: ir.Model) -> list[str]:
    """Weights of products to int4 in blocks of 32 along K, in place, as a standard DequantizeLinear before the MatMul:
    the weight-only form that TensorRT fuses. Embeddings stay. Returns the weights that K keeps from it."""
    return _linears_to(model, _int4_blocks)


def from_int4(model: ir.Model) -> None:
    """An int4 graph back to plain operators in fp32, in place, for runtimes without MatMulNBits: the weights keep the
    values that int4 gave them."""
    experts_apart(model)
    for n in list(model.graph):
        if n.op_type == "MatMulNBits":
            rows = _unpacked(model, n.inputs[1], n.inputs[2], n.attributes["K"].as_int())
            weight = node(model, n, "Transpose", [rows], perm=[1, 0])
            swap(n.outputs[0], node(model, n, "MatMul", [n.inputs[0], weight], like=n.outputs[0]))
        elif (table := _coarse_table(model, n)) is not None:
            found = node(model, n, "Gather", [table, graph_inputs(model)["input_ids"]], axis=0, like=n.outputs[0])
            swap(n.outputs[0], found)
    sweep(model)


def _unpacked(model: ir.Model, packed: ir.Value, scale: ir.Value, width: int) -> ir.Value:
    levels, scales = array_of(packed), array_of(scale)
    assert levels is not None and scales is not None
    return constant(model, f"{packed.name}.rows", int4_to_rows(levels, scales, width))


def _coarse_table(model: ir.Model, n: ir.Node) -> ir.Value | None:
    """The table in fp32, if ``n`` ends an embedding's lookup in int4, or in int8 with a scale a row."""
    if n.op_type == "GatherBlockQuantized" and (flat := made_by(n.inputs[0], "Reshape")) is not None:
        _, blocks, half = dims(flat.inputs[0])
        return _unpacked(model, flat.inputs[0], n.inputs[2], 2 * half * blocks)
    cast = made_by(n.inputs[0], "Cast") if n.op_type == "Mul" else None
    lookup = made_by(cast.inputs[0], "Gather") if cast is not None else None
    scale = made_by(n.inputs[1], "Gather") if lookup is not None else None
    if lookup is None or scale is None:
        return None
    levels, scales = array_of(lookup.inputs[0]), array_of(scale.inputs[0])
    assert levels is not None and scales is not None
    return constant(model, f"{lookup.inputs[0].name}.rows", (levels * scales).astype(np.float32))


_AROUND_FEATURES = ("RMSNormalization", "Concat")  # what stands behind the product that makes them of streams


def _gives_features(n: ir.Node) -> bool:
    """Whether a product makes what a head reads, of streams that no norm has evened out: some of their channels are a
    thousand times the others, of which a row's rounding would leave nothing."""
    made = n.outputs[0]
    users = [use.node for use in made.uses()]
    if len(users) == 1 and users[0].op_type in _AROUND_FEATURES:
        return _gives_features(users[0])
    return bool(made.is_graph_output() and made.name == "features")


def _linears_to(model: ir.Model, rewrite: Callable[[ir.Model, Linear], ir.Value | None]) -> list[str]:
    """Replace products by what ``rewrite`` makes of them; returns the weights of those it made None of."""
    left, routers = [], routers_of(model)
    for n in list(model.graph):
        linear = linear_of(n)
        if linear is None or linear.shape[0] < _FEWEST_COLUMNS or n in routers or _gives_features(n):
            continue
        result = rewrite(model, linear)
        if result is None:
            left.append(str(linear.weight.name))
            continue
        if n.op_type == "Gemm" and len(n.inputs) == 3:
            result = node(model, n, "Add", [result, n.inputs[2]], like=n.outputs[0])
        swap(n.outputs[0], result)
        model.graph.remove(n, safe=True)
    return left


def _int8(model: ir.Model, linear: Linear) -> ir.Value:
    before, name = linear.product, str(linear.weight.name)
    levels, scale = _quantized_input(model, before, before.inputs[0], linear.shape[1])
    channel_scale = int8_scale(_peaks(linear))
    if linear.tied:
        table = constant(model, f"{name}.s8", _int8_table(linear.tensor, channel_scale))
        weight = node(model, before, "Transpose", [table], perm=[1, 0])
    else:
        weight = constant(model, f"{name}.s8", _int8_columns(linear, channel_scale))
    zero = constant(model, "int8.zero", np.array(128, np.uint8))
    product = node(model, before, "MatMulInteger", [levels, weight, zero])
    real = node(model, before, "Cast", [product], to=int(ir.DataType.FLOAT))
    scaled = node(model, before, "Mul", [real, constant(model, f"{name}.scale", channel_scale)])
    result: ir.Value = node(model, before, "Mul", [scaled, scale], like=before.outputs[0])
    return result


def _peaks(linear: Linear) -> Array:
    """The largest magnitude of each output channel [N]."""
    peaks = np.zeros(linear.shape[0], np.float32)
    for at in steps(linear.tensor.shape.numpy()):
        piece = np.abs(piece_of(linear.tensor, at))
        if linear.by_row:
            peaks[at] = piece.max(axis=1)
        else:
            np.maximum(peaks, piece.max(axis=0), out=peaks)
    return peaks


def _int8_table(table: ir.TensorProtocol, scale: Array) -> Pieces:
    """s8 [V,H] with a ``scale`` [V] for each row."""

    def make(rows: slice, columns: slice) -> Array:
        return to_int8(piece_of(table, rows, columns), scale[rows, None])

    return Pieces(make, ir.DataType.INT8, table.shape.numpy(), table)


def _int8_columns(linear: Linear, scale: Array) -> Pieces:
    """s8 [K,N] with a ``scale`` [N] for each column."""

    def make(rows: slice, columns: slice) -> Array:
        return to_int8(linear.part(columns, rows).T, scale[columns])

    return Pieces(make, ir.DataType.INT8, linear.shape[::-1], linear.tensor)


def _quantized_input(model: ir.Model, before: ir.Node, value: ir.Value, width: int) -> tuple[ir.Value, ir.Value]:
    """``value`` [..., width] in u8 around 128, and its scale [..., 1]; all products that read ``value`` share the two.

    A block of QuantizeLinear is a whole row: one pass over the row where Div, Round, Add and Cast would be four. A row
    of zeros has scale 0: whatever its levels become they are integers, and what is made of them is multiplied by 0.
    """
    for user in value.consumers():
        if user.op_type == "QuantizeLinear":
            return user.outputs[0], user.inputs[1]
    last = constant(model, "int8.last_axis", np.array([-1], np.int64))
    peak = node(model, before, "ReduceMax", [node(model, before, "Abs", [value]), last], keepdims=1)
    scale = node(model, before, "Mul", [peak, constant(model, "int8.step", np.array(1 / 127, np.float32))])
    scale.shape, scale.dtype = ir.Shape([*dims(value)[:-1], 1]) if dims(value) else None, ir.DataType.FLOAT
    middle = _middle(model, before, scale)
    levels = node(model, before, "QuantizeLinear", [value, scale, middle], axis=-1, block_size=width)
    return levels, scale


def _middle(model: ir.Model, before: ir.Node, scale: ir.Value) -> ir.Value:
    """128 in the shape of ``scale``: QuantizeLinear wants a zero point a block. Made once for each shape."""
    for n in model.graph:
        if n is before:
            break
        if n.op_type == "ConstantOfShape" and n.outputs[0].dtype == ir.DataType.UINT8 and _same(n.outputs[0], scale):
            return n.outputs[0]
    shape = node(model, before, "Shape", [scale])
    middle: ir.Value = node(model, before, "ConstantOfShape", [shape], value=ir.tensor(np.array([128], np.uint8)))
    middle.shape, middle.dtype = scale.shape, ir.DataType.UINT8
    return middle


def _same(a: ir.Value, b: ir.Value) -> bool:
    return None not in dims(a) and dims(a) == dims(b) != ()


def _int4(model: ir.Model, linear: Linear, block: int) -> ir.Value:
    before, name = linear.product, str(linear.weight.name)
    count, width = linear.shape
    scale = np.concatenate([rows_to_int4(linear.part(at), block)[1] for at in steps((count, width))])
    table, scales = constant(model, f"{name}.u4", _int4_rows(linear, block)), constant(model, f"{name}.scale", scale)
    sizes = {"N": count, "K": width, "bits": 4, "block_size": block, "accuracy_level": 4}
    inputs = [before.inputs[0], table, scales]
    result: ir.Value = node(model, before, "MatMulNBits", inputs, domain=CONTRIB, like=before.outputs[0], **sizes)
    if linear.tied and width % block == 0:
        for lookup in [u for u in linear.weight.consumers() if u.op_type == "Gather"]:
            _lookup_int4(model, lookup, table, scales, block)
    return result


def _int4_rows(linear: Linear, block: int) -> Pieces:
    """u8 [N, K/block, block/2], as ``rows_to_int4`` makes them."""

    def make(rows: slice, blocks: slice) -> Array:
        return rows_to_int4(linear.part(rows), block)[0][:, blocks]

    count, width = linear.shape
    return Pieces(make, ir.DataType.UINT8, (count, -(-width // block), block // 2), linear.tensor)


def _int4_blocks(model: ir.Model, linear: Linear) -> ir.Value | None:
    before, name = linear.product, str(linear.weight.name)
    if linear.shape[1] % BLOCK:
        return None
    levels, scale = columns_to_int4(linear.rows.T)
    packed, scales = constant(model, f"{name}.s4", levels), constant(model, f"{name}.scale", scale)
    weight = node(model, before, "DequantizeLinear", [packed, scales], axis=0, block_size=BLOCK)
    weight.shape, weight.dtype = packed.shape, scales.dtype
    result: ir.Value = node(model, before, "MatMul", [before.inputs[0], weight], like=before.outputs[0])
    return result


def _lookup_int4(model: ir.Model, lookup: ir.Node, table: ir.Value, scales: ir.Value, block: int) -> None:
    shape = constant(model, f"{table.name}.rows", np.array([dims(table)[0], -1], np.int64))
    flat = node(model, lookup, "Reshape", [table, shape])
    inputs = [flat, lookup.inputs[1], scales]
    layout = {"gather_axis": 0, "quantize_axis": 1, "block_size": block, "bits": 4}
    found = node(model, lookup, "GatherBlockQuantized", inputs, domain=CONTRIB, like=lookup.outputs[0], **layout)
    swap(lookup.outputs[0], found)
    model.graph.remove(lookup, safe=True)


def _embeddings_to_int8(model: ir.Model) -> None:
    """Tables looked up by token: s8 rows, each with its scale; a tied int8 head has made the same table already."""
    for lookup in [n for n in model.graph if n.op_type == "Gather" and n.inputs[1].name == "input_ids"]:
        table = lookup.inputs[0].const_value
        if table is None or len(table.shape) != 2 or table.dtype != ir.DataType.FLOAT:
            continue
        scale = int8_scale(np.concatenate([np.abs(piece_of(table, at)).max(1) for at in steps(table.shape.numpy())]))
        name, rows = lookup.inputs[0].name, _int8_table(table, scale)
        levels = node(model, lookup, "Gather", [constant(model, f"{name}.s8", rows), lookup.inputs[1]], axis=0)
        scales = constant(model, f"{name}.row_scale", scale[:, None])
        scales = node(model, lookup, "Gather", [scales, lookup.inputs[1]], axis=0)
        real = node(model, lookup, "Cast", [levels], to=int(ir.DataType.FLOAT))
        swap(lookup.outputs[0], node(model, lookup, "Mul", [real, scales], like=lookup.outputs[0]))
        model.graph.remove(lookup, safe=True)
