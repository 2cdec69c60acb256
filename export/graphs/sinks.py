"""Attention sinks: a logit of each query head's own that takes its share of the softmax and gives no value (as gpt-oss
has them; Xiao et al., 2309.17453, found out what they are for).

The standard operator has no input for them. But it tells its scores, and softmax over those and a sink is softmax over
those alone, times what they leave to the sink: sigmoid(log(sum(exp(scores))) - sink). So in a canonical graph what
``Attention`` gives is multiplied by that; GroupQueryAttention takes sinks as an input.
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from .pieces import Array
from .rewrite import array_of, only_user

SCORES = 3  # which of Attention's outputs
RAW_SCORES = {"qk_matmul_output_mode": 0}  # unmasked: runtimes differ in what the other modes are


@dataclasses.dataclass(frozen=True)
class Sink:
    """What stands behind an ``Attention`` with sinks: ``masked``, the node that hides scores by the mask; ``logits``
    [H], of each head; ``result`` [B,H,S,D], what is attended to then."""

    masked: ir.Node
    logits: Array
    result: ir.Value


def sink_of(attention: ir.Node) -> Sink | None:
    """Its sinks, if it has them."""
    if len(attention.outputs) <= SCORES:
        return None
    masked = only_user(attention.outputs[SCORES], "Where")
    total = masked and only_user(masked.outputs[0], "ReduceLogSumExp")
    less = total and only_user(total.outputs[0], "Sub")
    share = less and only_user(less.outputs[0], "Sigmoid")
    product = share and only_user(share.outputs[0], "Mul")
    if masked is None or less is None or product is None or (logits := array_of(less.inputs[1])) is None:
        return None
    return Sink(masked, logits.ravel(), product.outputs[0])
