"""Decides where top-k and the nucleus end (top-p, Holtzman et al. 1904.09751), without sorting the vocabulary."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import buffers

Row = NDArray[np.floating[Any]]

_FEW = 2048  # numbers that are sorted; of more, about as many are looked at first
_MARGIN = 32  # of these, how far from where the edge seems to be it may lie: two to three standard deviations
_GROUP = 64  # numbers of which the largest stands for all at first


def largest(scores: Row, k: int) -> NDArray[np.intp]:
    """The places of the k largest of ``scores`` [V], k from 1 to V, and of those as large as the k-th; in order.

    It is no less than the k-th largest of what is largest in each group of them: few reach that.
    """
    groups = scores.size // _GROUP
    if groups < k:
        return np.flatnonzero(scores >= np.partition(scores, -k)[-k])
    peaks = np.maximum.reduce(scores[: groups * _GROUP].reshape(_GROUP, groups), axis=0)
    places = (scores >= np.partition(peaks, -k)[-k]).nonzero()[0]
    few = scores[places]
    kept: NDArray[np.intp] = places[few >= np.partition(few, -k)[-k]]
    return kept


def nucleus_end(scores: Sequence[float], top_p: float) -> float:
    """The same as ``nucleus_edge``, of few weights e^scores: the least score."""
    ordered = sorted(scores, reverse=True)
    upto = list(accumulate(map(math.exp, ordered)))
    return ordered[bisect_left(upto, top_p * upto[-1])]


def nucleus_edge(weights: Row, top_p: float) -> float:
    """The least weight of the smallest set of the largest ``weights`` [V] whose mass reaches ``top_p`` of all.

    Tokens lighter than (1 - top_p) / V of the mass weigh less than 1 - top_p together: the edge lies among the others.
    """
    mass = float(np.add.reduce(weights))
    if weights.size > _FEW:
        heavy = weights >= (1.0 - top_p) * mass / weights.size
        weights = weights[heavy] if np.count_nonzero(heavy) <= _FEW else weights
    return _edge(weights, mass, top_p * mass)


def _edge(weights: Row, mass: float, wanted: float) -> float:
    """The weight, of these from the largest on, that brings their mass up to ``wanted``. ``mass`` is that of all.

    A sample of them says between which two weights it should be found. Those between them are all that is left to be
    looked at; where it is not there, those above or those below.
    """
    while weights.size > _FEW:
        sample = np.sort(weights[:: weights.size // _FEW])[::-1]
        reached = sample.cumsum(dtype=np.float64)
        place = int(reached.searchsorted(wanted / mass * reached[-1]))
        high, low = sample[max(place - _MARGIN, 0)], sample[min(place + _MARGIN, sample.size - 1)]
        above = weights > high
        weight_above = float(np.add.reduce(np.multiply(weights, above, out=buffers.like(weights))))
        if weight_above >= wanted:
            weights, mass = weights[above], weight_above
            continue
        between = weights[(weights >= low) ^ above]
        weight_between = float(np.add.reduce(between))
        wanted -= weight_above
        if weight_between < wanted and (below := weights[weights < low]).size:
            weights, mass = below, mass - weight_above - weight_between
            wanted -= weight_between
        elif high == low:
            return float(high)
        elif between.size == weights.size:
            break  # they are few numbers, many times each: no sample comes between two of them
        else:
            weights, mass = between, weight_between
    ordered = np.sort(weights)[::-1]
    place = int(ordered.cumsum(dtype=np.float64).searchsorted(wanted))
    return float(ordered[min(place, ordered.size - 1)])
