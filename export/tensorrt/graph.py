"""What the canonical graph becomes before TensorRT reads it: a fixed capacity, one precision, heads beside the logits.

Each pass is a few lines, and the result is plain ONNX: the very file that is built also runs on ONNX Runtime.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ...errors import ExportError
from ..graphs.half import to_half
from ..graphs.quantize import from_int4, to_int4_blocks
from ..graphs.rewrite import constant, dims, graph_inputs, node, sweep
from ..graphs.sinks import sink_of


def lower(model: ir.Model, precision: str, capacity: int, top: int) -> list[str]:
    """Rewrite a canonical graph in place for an engine of ``capacity`` slots a row. int4 is weights only, with fp16
    activations and cache. ``top`` as in ``add_heads``. Returns what is worth knowing about it, a line each. Raises
    ExportError for what TensorRT's attention cannot express."""
    if any(sink_of(n) is not None for n in model.graph if n.op_type == "Attention"):
        raise ExportError("the model has attention sinks, which TensorRT's attention does not take; ONNX Runtime does")
    notes = []
    from_int4(model)
    fold_scale(model)
    if precision == "int4":
        notes += [f"{name} stays fp16: its K is no multiple of 32" for name in to_int4_blocks(model)]
    if precision != "fp32" and not _is_half(model):
        to_half(model, ir.DataType.BFLOAT16 if precision == "bf16" else ir.DataType.FLOAT16)
    add_heads(model, top)
    fix_capacity(model, capacity)
    sweep(model)
    return notes


def fold_scale(model: ir.Model) -> int:
    """Attention's scale -> a product with Q, in place. TensorRT would multiply K by its root too: the whole cache, in
    every step. Returns how many."""
    found = [n for n in model.graph if n.op_type == "Attention"]
    for n in found:
        query, attribute = n.inputs[0], n.attributes.get("scale")
        scale = attribute.as_float() if attribute is not None else int(query.shape[-1]) ** -0.5
        factor = constant(model, "attention.scale", np.array(scale, query.dtype.numpy()))
        n.replace_input_with(0, node(model, n, "Mul", [query, factor], like=query))
        n.attributes["scale"] = ir.AttrFloat32("scale", 1.0)
    return len(found)


def fix_capacity(model: ir.Model, capacity: int) -> None:
    """The free dimension of the caches' slots -> ``capacity``, wherever a shape names it."""
    slots = dims(graph_inputs(model)["past_key_values.0.key"])[2]
    for value in [*model.graph.inputs, *(output for n in model.graph for output in n.outputs)]:
        if slots in dims(value):
            value.shape = ir.Shape([capacity if d == slots else d for d in dims(value)])


def add_heads(model: ir.Model, top: int) -> None:
    """Outputs beside ``logits`` [B,L,V], so that little has to leave the device:

    greedy [B,L] int64, the lowest id among the largest; logsumexp [B,L] float32, NaN if a logit is; top_ids
    int64 and top_logits float32 [B,L,top], largest first, unless ``top`` is 0. (None with the drafted tokens' own
    probabilities: rounded otherwise than those of a row on the host, they would bias the rule that used both.)
    """
    logits = model.graph.outputs[0]
    vocabulary = int(logits.shape[-1])
    shape = dims(graph_inputs(model)["logit_index"])
    last = constant(model, "heads.last_axis", np.array([-1], np.int64))
    ids, none = np.arange(vocabulary, dtype=np.int64), np.array(vocabulary, np.int64)

    def op(kind: str, inputs: list[ir.Value], count: int = 1, **attributes: Any) -> Any:
        new = ir.node(kind, inputs, attributes=attributes, num_outputs=count)
        model.graph.append(new)
        return new.outputs[0] if count == 1 else new.outputs

    def output(value: ir.Value, name: str, dtype: ir.DataType, *more: int) -> None:
        value.name, value.dtype, value.shape = name, dtype, ir.Shape([*shape, *more])
        model.graph.outputs.append(value)

    peak = op("ReduceMax", [logits, last], keepdims=1)
    # ArgMax and TopK leave it to the runtime which of equal logits they name.
    candidates = [op("Equal", [logits, peak]), constant(model, "heads.ids", ids), constant(model, "heads.none", none)]
    output(op("ReduceMin", [op("Where", candidates), last], keepdims=0), "greedy", ir.DataType.INT64)
    total = op("ReduceSum", [op("Exp", [op("Sub", [logits, peak])]), last], keepdims=1)
    sum_ = op("Squeeze", [op("Add", [op("Log", [total]), peak]), last])
    output(sum_, "logsumexp", ir.DataType.FLOAT)
    if top:
        k = constant(model, "heads.top", np.array([min(top, vocabulary)], np.int64))
        largest, which = op("TopK", [logits, k], count=2, axis=-1)
        output(which, "top_ids", ir.DataType.INT64, min(top, vocabulary))
        output(largest, "top_logits", ir.DataType.FLOAT, min(top, vocabulary))


def _is_half(model: ir.Model) -> bool:
    return bool(graph_inputs(model)["past_key_values.0.key"].dtype == ir.DataType.FLOAT16)
