"""Decides how a law is held and what can be asked of it: an array over the vocabulary, or the few tokens that have any
mass, which is what top-k, top-p and min-p usually leave.

To look up one of few tokens, to draw one, and to take another law from theirs takes microseconds, whatever the
vocabulary. Over an array [V] each of these is a pass, and over a short one a call that finds nothing in the cache.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from itertools import accumulate, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import buffers

Probs = NDArray[np.floating[Any]]

_SHORT = 8192  # masses that are added up one by one sooner than in blocks, which takes twice as many calls
_BLOCK = 64
_starts: dict[int, NDArray[np.intp]] = {}


class Few(dict[int, float]):
    """The mass of each token that may have any, by id, the lowest first. Not written to."""

    @classmethod
    def of(cls, ids: Iterable[int], masses: Iterable[float]) -> Few:
        """``masses`` of the tokens ``ids``, in order."""
        return cls(zip(ids, masses, strict=True))

    def item(self, token: int) -> float:
        """The mass of ``token``."""
        return self.get(token, 0.0)

    def sum(self) -> float:
        """The mass of all."""
        return sum(self.values())

    def __truediv__(self, mass: float) -> Few:
        return Few.of(self, [each / mass for each in self.values()])

    def draw_and_sum(self, uniform: float) -> tuple[int, float]:
        """A token, and the mass of all."""
        upto = list(accumulate(self.values()))
        total = upto[-1]
        place = bisect_right(upto, uniform * total)
        return list(self)[place if place < len(upto) else bisect_left(upto, total)], total

    def whole(self, size: int) -> Probs:
        """The same as an array [``size``]."""
        return buffers.spread(np.array(list(self)), np.array(list(self.values())), size, 0.0)


Law = Probs | Few


def whole(law: Law, size: int) -> Probs:
    """``law`` as an array [``size``]."""
    return law.whole(size) if isinstance(law, Few) else law


def mass_of(law: Law) -> float:
    """The mass of all tokens. (The method of an array has more overhead.)"""
    return law.sum() if isinstance(law, Few) else float(np.add.reduce(law))


def masses_of(law: Law, ids: Collection[int]) -> list[float]:
    """Those of the tokens ``ids``."""
    if isinstance(law, Few):
        return list(map(law.get, ids, repeat(0.0)))
    masses: list[float] = law[list(ids)].tolist()
    return masses


def over(law: Law, mass: float) -> Law:
    """``law`` divided by ``mass``; an array is written to."""
    if isinstance(law, Few):
        return law / mass
    law *= 1.0 / mass
    return law


def draw(law: Law, uniform: float) -> int:
    """Inverse CDF: the first token whose cumulative mass exceeds ``uniform`` (in [0, 1)) of the total.

    ``law`` need not be normalised. Tokens of mass 0 are never drawn.
    """
    return draw_and_sum(law, uniform)[0]


def draw_and_sum(law: Law, uniform: float) -> tuple[int, float]:
    """``draw``, and the total."""
    if isinstance(law, Few):
        return law.draw_and_sum(uniform)
    if law.size > _SHORT:
        return _draw_from_blocks(law, uniform)
    sums = np.add.accumulate(law, dtype=np.float64)
    total = sums.item(-1)
    place = int(sums.searchsorted(uniform * total, side="right"))
    return place if place < law.size else int(np.flatnonzero(law)[-1]), total


def _draw_from_blocks(law: Probs, uniform: float) -> tuple[int, float]:
    """The same of a long array: summed one by one, its numbers wait for each other. (A block's sum, of the law's dtype,
    and that of its numbers one by one differ in the last bits, so it is a share of the block that is looked for: what
    lies between the two would be the last token's, however unlikely that is.)"""
    if (starts := _starts.get(law.size)) is None:
        starts = _starts[law.size] = np.arange(0, law.size, _BLOCK)
    upto = np.add.reduceat(law, starts).cumsum(dtype=np.float64)
    total = upto.item(-1)
    wanted = uniform * total
    block = min(int(upto.searchsorted(wanted, side="right")), upto.size - 1)
    first, before = block * _BLOCK, upto.item(block - 1) if block else 0.0
    mass, sums = upto.item(block) - before, law[first : first + _BLOCK].cumsum(dtype=np.float64)
    share = (wanted - before) / mass if mass else 1.0
    place = int(sums.searchsorted(share * sums.item(-1), side="right"))
    return first + place if place < sums.size else int(np.flatnonzero(law[: first + _BLOCK])[-1]), total
