"""Decides which token has the largest sum of logit and noise from a few of them: from a row's k largest logits without
the row, or, given the row, from the tokens whose logit and noise leave them a chance."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ...engines.base import LogitArray, LogitRow, Tokens, Tops
from ...errors import EngineError, LeadoutError, UsageError
from .noise import gumbel

_SLACK = 1e-6  # more than float32 rounds a bound by, relative to 1 + the sizes of it and of what it is measured from


def tops_of(logits: LogitRow) -> Tops | None:
    """The k largest of a row that is on a device, where they came over with the step."""
    top = getattr(logits, "top", None)  # only such rows have one
    return None if top is None else top()


def winner(ids: Tokens, tops: LogitArray, temperature: float, noise: NDArray[np.float64]) -> int | None:
    """argmax of (logit - largest logit) / temperature + noise over the whole row (the lowest id among equals), or None
    where the head alone does not say.

    ids int64 [k] are the row's k largest logits, ``tops`` float32 [k] these logits, largest first; ``noise`` float64
    [vocab_size]. To the bit what the whole row says: the same operations on the same numbers, and rounding is monotone,
    so that no token outside the head exceeds (the head's last logit) + (the largest noise outside).
    """
    scores = ((tops - tops[0]) / temperature).astype(np.float64)
    outside = noise.copy()
    outside[ids] = -np.inf
    bound = scores[-1] + outside.max()
    scores += noise[ids]
    best = scores.max()
    return int(ids[scores == best].min()) if best > bound else None


def loudest(row: LogitArray, temperature: float, uniforms: NDArray[np.float64], peak: int) -> int:
    """argmax of (logit - largest logit) / temperature + Gumbel noise over the row (the lowest id among equals), to the
    bit what adding all the noise says.

    row float32 [V]; ``uniforms`` float64 [V], of which the noise is made, the largest at ``peak``. The likeliest token
    and that of the largest noise say what the winner must reach. A token that does has a logit that the largest noise
    lifts so high, and noise that lifts the largest logit so high: of 151,936 tokens that is a few hundred, and only
    their noise is worked out. Raises EngineError where the largest logit is not finite.
    """
    first = int(row.argmax())
    top = row.item(first)
    if not math.isfinite(top):
        raise not_finite()
    loudest_noise, score = _gumbel(uniforms.item(peak)), (row.item(peak) - top) / temperature
    reach = max(_gumbel(uniforms.item(first)), score + loudest_noise - _SLACK * abs(score))
    lowest = top + temperature * (reach - loudest_noise)
    quietest = math.exp(-math.exp(-reach)) if reach > -700.0 else 0.0
    candidates = row >= np.float32(lowest - _SLACK * (1.0 + abs(lowest) + abs(top)))
    candidates &= uniforms >= quietest - _SLACK * _SLACK
    ids = candidates.nonzero()[0]
    lifted = (row[ids] - top) / temperature + gumbel(uniforms[ids])
    return int(ids[lifted.argmax()])


def _gumbel(uniform: float) -> float:
    """``gumbel`` of one."""
    return -math.log(-math.log(uniform)) if uniform > 0.0 else -math.inf


def not_finite() -> EngineError:
    """The error for a row whose largest logit is not finite."""
    return EngineError("no finite maximum among the logits: NaN or infinity from the engine")


def nothing_left(logits: LogitRow) -> LeadoutError:
    """The error where no finite logit of a row is left: either the row has none, or the settings struck all out."""
    if not np.isfinite(np.asarray(logits).max()):
        return not_finite()
    return UsageError("logit_bias and min_new_tokens leave no token to be written: at the least one must be possible")
