"""Decides which tokens are the nucleus (top-p, Holtzman et al. 1904.09751), without sorting the vocabulary."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import buffers

_FEW = 2048  # numbers that are sorted sooner than binned
_BINS, _PER_NAT = 4096, 128.0


def nucleus_edge(scores: NDArray[np.float64], weights: NDArray[np.float64], top_p: float) -> float:
    """The least weight of the smallest set of the largest weights whose mass reaches ``top_p`` of all.

    ``scores`` are log weights, float64 [V], the largest 0. Tokens lighter than (1 - top_p) / V of the mass weigh less
    than 1 - top_p together, so the edge lies among the others. Where these are few they are sorted; else a histogram
    of their scores says in which of its bins the edge lies, and that one is.
    """
    total = float(weights.sum())
    wanted, least = top_p * total, (1.0 - top_p) * total / weights.size
    heavy = weights >= least
    if int(np.count_nonzero(heavy)) <= _FEW:
        return _edge(weights[heavy], 0.0, wanted)
    bins = buffers.empty(scores.size)
    np.multiply(scores, -_PER_NAT, out=bins)
    np.minimum(bins, _BINS - 1, out=bins)
    places = buffers.empty(scores.size).view(np.int64)
    np.copyto(places, bins, casting="unsafe")
    masses = np.bincount(places, weights, _BINS).cumsum()
    place = int(masses.searchsorted(wanted))
    if place >= _BINS - 1:  # where all that is lighter shares a bin
        return _edge(weights[heavy], 0.0, wanted)
    return _edge(weights[places == place], float(masses[place - 1]) if place else 0.0, wanted)


def _edge(weights: NDArray[np.float64], above: float, wanted: float) -> float:
    """The weight, of these from the largest on, that brings the mass ``above`` them up to ``wanted``."""
    ordered = np.sort(weights)[::-1]
    reached = int((ordered.cumsum() + above).searchsorted(wanted))
    return float(ordered[min(reached, ordered.size - 1)])
