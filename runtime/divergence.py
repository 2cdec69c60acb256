"""Where two answers to one prompt part, and whether rounding explains it: a near-tie with its margin, or a fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..engines import Engine
from ..errors import UsageError
from .noise import Noise
from .sampling import Chain, Sampler
from .settings import Settings
from .steps import Stepper

if TYPE_CHECKING:
    from .pair import Pair

# Logits of two graph forms of one model differ by this much at most (measured; quantised activations may round
# to the neighbouring step). A greedy choice can only flip where its lead is smaller than twice that.
NEAR_TIE = {"fp32": 2e-3, "fp16": 5e-2, "bf16": 2e-1, "int8": 2e-1, "int4": 2e-1}


@dataclasses.dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference: its position among the new tokens, the margin between the two choices (in what the rule
    takes the largest of, from the target: logits, or for ``coupled`` scores with their noise), and
    whether that is a near-tie."""

    position: int
    margin: float
    near_tie: bool


def first_divergence(
    pair: Pair, prompt: Sequence[int], ours: Sequence[int], other: Sequence[int], settings: Settings | None = None
) -> Divergence | None:
    """Compare two answers by ``settings`` (greedy by default; or coupled, with its seed); None if they are the same.
    Uses the target's cache."""
    shortest = min(len(ours), len(other))
    position = next((i for i in range(shortest) if ours[i] != other[i]), shortest)
    if position == len(ours) == len(other):
        return None
    if position == shortest:
        return Divergence(position, float("inf"), near_tie=False)
    text = [*prompt, *ours[:position]]
    scores: NDArray[np.floating] = last_logits(pair.target, text)
    tolerance = NEAR_TIE[pair.target.spec.precision]
    if settings is not None and settings.acceptance_rule == "coupled":
        scores = _noisy(scores, settings, prompt, ours[:position])
        tolerance /= settings.temperature
    margin = abs(float(scores[ours[position]]) - float(scores[other[position]]))
    return Divergence(position, margin, near_tie=margin <= tolerance)


def _noisy(
    logits: NDArray[np.float32], settings: Settings, prompt: Sequence[int], written: Sequence[int]
) -> NDArray[np.float64]:
    """The scores that rule ``coupled`` chooses by after ``written``."""
    if settings.seed is None:
        raise UsageError("answers by rule 'coupled' can only be compared with the seed they were drawn with")
    chain = Chain(settings, logits.size, prompt, ())
    chain.extend(written)
    return Sampler("coupled", chain, Noise(settings.seed)).noisy(logits, (), len(prompt) + len(written))


def last_logits(engine: Engine, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits after ``token_ids`` [vocab_size], on an empty cache."""
    engine.reset(1)
    return np.array(Stepper(engine, "target", narrowest=engine.spec.narrowest).last_logits([token_ids], [0])[0])
