"""Where two answers to one prompt part, and whether rounding explains it: a near-tie with its margin, or a fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..engines import Engine, Logits

if TYPE_CHECKING:
    from .pair import Pair

# Logits of two graph forms of one model differ by this much at most (measured; quantised activations may round
# to the neighbouring step). A greedy choice can only flip where its lead is smaller than twice that.
NEAR_TIE = {"fp32": 2e-3, "fp16": 5e-2, "int8": 2e-1, "int4": 2e-1}


@dataclasses.dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference: its position among the new tokens, the margin between the two choices (in logits of the
    target, width >= 2), and whether that is a near-tie."""

    position: int
    margin: float
    near_tie: bool


def first_divergence(pair: Pair, prompt: Sequence[int], ours: Sequence[int], other: Sequence[int]) -> Divergence | None:
    """Compare two greedy answers; None if they are the same. Uses the target's cache."""
    shortest = min(len(ours), len(other))
    position = next((i for i in range(shortest) if ours[i] != other[i]), shortest)
    if position == len(ours) == len(other):
        return None
    if position == shortest:
        return Divergence(position, float("inf"), near_tie=False)
    logits = last_logits(pair.target, [*prompt, *ours[:position]])
    margin = abs(float(logits[ours[position]]) - float(logits[other[position]]))
    tolerance = NEAR_TIE[pair.bundle.manifest.models["target"].precision]
    return Divergence(position, margin, near_tie=margin <= tolerance)


def last_logits(engine: Engine, token_ids: Sequence[int]) -> Logits:
    """Logits after ``token_ids`` [vocab_size], from one call on an empty cache."""
    engine.reset(1)
    engine.reserve(max(len(token_ids), 2))
    tokens = np.array([token_ids], np.int64)
    logits = engine.forward(tokens, np.zeros(1, np.int64), np.array([[len(token_ids) - 1]], np.int64))
    last: Logits = logits[0, 0].copy()
    return last
