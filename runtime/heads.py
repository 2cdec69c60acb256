"""Decides what can be told from a row's k largest logits without the row: with the noise known, most choices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..engines.base import LogitArray, Tokens


def winner(ids: Tokens, tops: LogitArray, temperature: float, noise: NDArray[np.float64]) -> int | None:
    """argmax of (logit - largest logit) / temperature + noise over the whole row (the lowest id among equals), or None
    where the head alone does not say.

    ids int64 [k] are the row's k largest logits, ``tops`` float32 [k] these logits, largest first; ``noise`` float64
    [vocab_size]. To the bit what the whole row says: the same operations on the same numbers, and rounding is monotone,
    so that no token outside the head exceeds (the head's last logit) + (the largest noise outside).
    """
    scores = (tops.astype(np.float64) - float(tops[0])) / temperature
    outside = noise.copy()
    outside[ids] = -np.inf
    bound = scores[-1] + outside.max()
    scores += noise[ids]
    best = scores.max()
    return int(ids[scores == best].min()) if best > bound else None
