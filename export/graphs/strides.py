"""Attention of several tokens in each of many rows that rounds as that of one does: one node for each token in turn."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .gqa import attending, to_gqa
from .rewrite import constant, node, swap, sweep

_TOKENS, _CACHES, _LENGTHS, _POSITIONS = slice(0, 3), slice(3, 5), slice(5, 7), 9  # inputs of GroupQueryAttention


def to_strides(model: ir.Model, width: int) -> int:
    """``to_gqa`` for steps of just ``width`` tokens in each of any number of ragged rows, in place.

    GroupQueryAttention takes one token in each of many rows, or many tokens in one. So each layer gets ``width`` nodes
    of one token, of which each finds in the cache what the one before has put there: ``past`` of the first is the
    input, ``present`` of the last the output, and each other's is one, too (``present.0.key.1`` and so on), for it must
    be bound to the same address. So a token's bits are those of a step that brings it alone. Returns how many layers
    changed, 0 where one is left.
    """
    layers = attending(model)
    if to_gqa(model) < layers:
        return 0
    nodes = [n for n in model.graph if n.op_type == "GroupQueryAttention"]
    lengths = _lengths(model, nodes[0], width)
    for old in nodes:
        _in_turn(model, old, lengths)
    sweep(model)
    return len(nodes)


def _lengths(model: ir.Model, first: ir.Node, width: int) -> list[tuple[ir.Value, ...]]:
    """The two lengths (``lengths_of``) that each token finds: those of the last, less the tokens behind it."""
    behind = [constant(model, f"strides.{n}", np.array(n, np.int32)) for n in reversed(range(width))]
    return [tuple(node(model, first, "Sub", [length, n]) for length in first.inputs[_LENGTHS]) for n in behind]


def _in_turn(model: ir.Model, old: ir.Node, lengths: list[tuple[ir.Value, ...]]) -> None:
    width, given = len(lengths), list(old.inputs)
    apart = {i: _apart(model, old, given[i], width) for i in (*range(3), _POSITIONS) if i < len(given) and given[i]}
    cache, outputs = given[_CACHES], []
    for n, found in enumerate(lengths):
        inputs = [apart[i][n] if i in apart else value for i, value in enumerate(given)]
        inputs[_CACHES], inputs[_LENGTHS] = cache, list(found)
        attributes = {name: attribute.value for name, attribute in old.attributes.items()}
        output, *cache = node(model, old, old.op_type, inputs, outputs=3, domain=old.domain, **attributes)
        outputs.append(output)
        if n < width - 1:
            for kept, last in zip(cache, old.outputs[1:], strict=True):
                kept.name, kept.shape, kept.type = f"{last.name}.{n + 1}", last.shape, last.type
                model.graph.outputs.append(kept)
    together = node(model, old, "Concat", outputs, axis=1)
    for last, new in zip(old.outputs, (together, *cache), strict=True):
        swap(last, new)
    model.graph.remove(old, safe=True)


def _apart(model: ir.Model, before: ir.Node, value: ir.Value, width: int) -> tuple[ir.Value, ...]:
    """``value`` [B,S,...], a token at a time."""
    found: tuple[ir.Value, ...] = node(model, before, "Split", [value], outputs=width, axis=1, num_outputs=width)
    return found
