"""Where two answers to one prompt part, and whether rounding explains it: a near-tie with its margin, or a fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..engines import Engine
from .steps import Stepper

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


def last_logits(engine: Engine, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits after ``token_ids`` [vocab_size], on an empty cache."""
    engine.reset(1)
    return np.array(Stepper(engine, "target", narrowest=2).last_logits([token_ids], [0])[0])
