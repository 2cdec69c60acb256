"""How a graph becomes half precision: what carries activations does; angles, masks and logits stay as they were."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from .pieces import Array, Pieces, piece_of
from .rewrite import constant, node, sources

_FLOAT = ir.DataType.FLOAT


def to_half(model: ir.Model, half: ir.DataType = ir.DataType.FLOAT16) -> None:
    """fp32 -> ``half`` (fp16 or bf16) in place: weights, activations, cache. What follows from positions alone (cos and
    sin that are no tables) is computed in fp32 and rounded where it meets the rest; logits are handed out in fp32."""
    inner = {id(n) for n in model.graph if _carries_activations(n)}
    for value in [*model.graph.inputs, *model.graph.initializers.values()]:
        if value.is_graph_input() and value.dtype == _FLOAT:
            value.dtype = half
    for n in [n for n in model.graph if id(n) in inner]:
        _convert_inputs(model, n, inner, half)
        if n.op_type == "Cast" and n.attributes["to"].as_int() == int(_FLOAT):
            n.attributes["to"] = ir.AttrInt64("to", int(half))
        if n.op_type == "ConstantOfShape":
            given = n.attributes.get("value")
            filling = np.zeros(1, np.float32) if given is None else given.as_tensor().numpy()
            if filling.dtype == np.float32:
                n.attributes["value"] = ir.AttrTensor("value", ir.tensor(_rounded(filling, half)))
        for output in n.outputs:
            if output.dtype == _FLOAT:
                output.dtype = half
    logits = model.graph.outputs[0]
    last = logits.producer()
    if last is not None and logits.dtype == half:
        cast = ir.node("Cast", [logits], attributes={"to": int(_FLOAT)})
        model.graph.insert_after(last, cast)
        logits.name, cast.outputs[0].name = f"{logits.name}.half", logits.name
        cast.outputs[0].shape, cast.outputs[0].dtype = logits.shape, _FLOAT
        model.graph.outputs[0] = cast.outputs[0]


def _carries_activations(n: ir.Node) -> bool:
    """Whether a node computes with weights (a tied head's Transpose too) or a cache, not with positions alone; or
    compares what such nodes compute."""
    floats = [v for v in (*n.inputs, *n.outputs) if v is not None and v.dtype in (_FLOAT, None)]
    found = sources(n.outputs)
    return bool(floats) and not (found and found <= {"position_ids", "past_lens", "logit_index"})


def _convert_inputs(model: ir.Model, n: ir.Node, inner: set[int], half: ir.DataType) -> None:
    for index, value in enumerate(n.inputs):
        if value is None or value.dtype != _FLOAT:
            continue
        if value.const_value is not None:
            n.replace_input_with(index, constant(model, f"{value.name}.half", _half_of(value.const_value, half)))
        elif value.producer() is not None and id(value.producer()) not in inner:
            n.replace_input_with(index, node(model, n, "Cast", [value], to=int(half)))


def _half_of(tensor: ir.TensorProtocol, half: ir.DataType) -> Array | Pieces:
    if len(tensor.shape) < 2:
        return _rounded(tensor.numpy(), half)
    return Pieces(
        lambda rows, columns: _rounded(piece_of(tensor, rows, columns), half), half, tensor.shape.numpy(), tensor
    )


def _rounded(array: Array, half: ir.DataType) -> Array:
    """In half precision; numbers beyond its range become its largest."""
    largest = float(ml_dtypes.finfo(half.numpy()).max)  # type: ignore[no-untyped-call]
    return np.clip(array, -largest, largest).astype(half.numpy())
