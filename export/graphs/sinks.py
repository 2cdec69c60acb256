"""Attention sinks: a logit of each query head's own, which takes a share of the softmax and gives no value (gpt-oss has
them; what they are for was found out by Xiao et al., 2309.17453).

The standard operator has no input for them, but it can give its scores. A softmax over scores and a sink is the softmax
over the scores alone, times the share that the sink leaves to them: sigmoid(log(sum(exp(scores))) - sink). So in a
canonical graph the output of ``Attention`` is multiplied by that share. GroupQueryAttention takes sinks as an input.
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
