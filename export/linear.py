"""Which nodes are a linear layer: a product of activations with constant weights."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from .rewrite import Array, array_of, made_by


@dataclasses.dataclass(frozen=True)
class Linear:
    """A product with a constant. ``rows`` [N,K] holds the weights by output channel, ``by_row``: so does ``weight``,
    and ``transposed``, if not None, makes of it what the product reads. ``tied``: an embedding is looked up in it."""

    product: ir.Node
    weight: ir.Value
    rows: Array
    by_row: bool
    transposed: ir.Node | None
    tied: bool


def linear_of(n: ir.Node) -> Linear | None:
    """What a node is, if it is a MatMul or Gemm whose weights are a matrix in float32 and that does nothing else but
    add a bias."""
    if n.op_type not in ("MatMul", "Gemm"):
        return None
    transposed = made_by(n.inputs[1], "Transpose")
    weight = n.inputs[1] if transposed is None else transposed.inputs[0]
    array = array_of(weight)
    if array is None or array.ndim != 2 or array.dtype != np.float32:
        return None
    plain = {"alpha": 1.0, "beta": 1.0, "transA": 0}
    if any(n.attributes[name].value != value for name, value in plain.items() if name in n.attributes):
        return None
    by_row = (transposed is not None) != ("transB" in n.attributes and n.attributes["transB"].as_int() == 1)
    tied = any(user.op_type == "Gather" for user in weight.consumers())
    return Linear(n, weight, array if by_row else array.T, by_row, transposed, tied)
