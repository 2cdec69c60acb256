"""Decides what a step typically takes, from measurements of which the first are slow and any may be an outlier."""

from __future__ import annotations

from statistics import geometric_mean, median

HARDLY, KNOWN = 2, 4  # measurements
_LAST, _OUTLIER = 32, 2.0


class Typical:
    """What a step takes. Of the first two measurements the less, because first calls at a new shape are slow; the
    median of the first four; then each moves it a little, as their mean (of logarithms) would, the last 32 above all.
    ``faded``: it was known once, and is renewed. Then what is known counts for one of the first two, and the less of
    them holds, so that nothing is avoided for good that was measured in a bad moment; or, ``even``, their mean."""

    __slots__ = ("_counted", "_even", "_first", "faded", "seconds")

    def __init__(self) -> None:
        self.faded, self.seconds, self._even = False, 0.0, False
        self._first: list[float] = []
        self._counted = 0

    def __len__(self) -> int:
        """How often it was measured, up to the four times after which it is known."""
        return len(self._first)

    @property
    def times(self) -> int:
        """How many measurements say what it takes."""
        return max(1, min(len(self._first) + self._counted, _LAST))

    def append(self, seconds: float, *, counts: bool = True) -> None:
        """``counts``: it says more than those before. (Of the first few each does.)"""
        if len(self._first) < KNOWN:
            first = [*self._first, seconds]
            if len(first) > HARDLY:
                self.seconds = median(first)
            else:
                self.seconds = geometric_mean(first) if self._even else min(first)
            self._first = first  # last, for an interrupt may come in between: what was counted takes some time
        elif counts and self.seconds > 0.0:
            self._counted += 1
            error = min(max(seconds / self.seconds, 1.0 / _OUTLIER), _OUTLIER)
            self.seconds *= error ** (1.0 / min(KNOWN + self._counted, _LAST))

    def begin(self, seconds: float) -> None:
        """It is thought to be so before it is measured."""
        self.seconds, self._first = seconds, [seconds] * KNOWN

    def fade(self, *, even: bool = False) -> None:
        """All was long ago: the next measurement counts for as much as what is known."""
        if self._first:
            self.faded, self._even, self._first, self._counted = True, even, [self.seconds], 0
