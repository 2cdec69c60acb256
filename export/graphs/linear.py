"""Which nodes are a linear layer: a product of activations with constant weights."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from .pieces import ALL, Array, piece_of
from .rewrite import made_by


@dataclasses.dataclass(frozen=True)
class Linear:
    """A product of K by N with a constant, ``weight``. It holds them by output channel, [N,K], if ``by_row``, else
    [K,N]; ``transposed``, if not None, makes of it what the product reads. ``tied``: an embedding is looked up in
    it."""

    product: ir.Node
    weight: ir.Value
    by_row: bool
    transposed: ir.Node | None
    tied: bool

    @property
    def tensor(self) -> ir.TensorProtocol:
        assert self.weight.const_value is not None
        return self.weight.const_value

    @property
    def shape(self) -> tuple[int, int]:
        """N, K."""
        height, width = self.tensor.shape.numpy()
        return (height, width) if self.by_row else (width, height)

    @property
    def rows(self) -> Array:
        """All weights, by output channel: [N,K]."""
        return self.part(ALL)

    def part(self, channels: slice, columns: slice = ALL) -> Array:
        """Those of some output channels, and of these the columns, along K."""
        if self.by_row:
            return piece_of(self.tensor, channels, columns)
        return piece_of(self.tensor, columns, channels).T


def linear_of(n: ir.Node) -> Linear | None:
    """What a node is, if it is a MatMul or Gemm whose weights are a matrix in float32 and that does nothing else but
    add a bias."""
    if n.op_type not in ("MatMul", "Gemm"):
        return None
    transposed = made_by(n.inputs[1], "Transpose")
    weight = n.inputs[1] if transposed is None else transposed.inputs[0]
    tensor = None if weight is None else weight.const_value
    if tensor is None or len(tensor.shape) != 2 or tensor.dtype != ir.DataType.FLOAT:
        return None
    plain = {"alpha": 1.0, "beta": 1.0, "transA": 0}
    if any(n.attributes[name].value != value for name, value in plain.items() if name in n.attributes):
        return None
    by_row = (transposed is not None) != ("transB" in n.attributes and n.attributes["transB"].as_int() == 1)
    tied = any(user.op_type == "Gather" for user in weight.consumers())
    return Linear(n, weight, by_row, transposed, tied)
