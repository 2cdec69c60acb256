"""Decides what a step typically takes, from measurements of which the first are slow and any may be an outlier."""

from __future__ import annotations

from statistics import geometric_mean, median

HARDLY, KNOWN = 2, 4  # measurements
_LAST, _OUTLIER = 32, 2.0


class Typical:
    """What a step takes: the smaller one of the first two measurements, because the first call at a new shape is slow;
    the median of the first three or four; then a running mean (of logarithms) over about the last 32. ``faded``: it was
    known and is being renewed. Then the old value counts as one of the first two measurements, and the smaller holds,
    so that a step measured in a bad moment is not avoided for good; with ``even`` their mean holds."""

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
            self._first = (
                first  # last: an interrupt may come in between, and what counts as measured must take some time
            )
        elif counts and self.seconds > 0.0:
            self._counted += 1
            error = min(max(seconds / self.seconds, 1.0 / _OUTLIER), _OUTLIER)
            self.seconds *= error ** (1.0 / min(KNOWN + self._counted, _LAST))

    def begin(self, seconds: float) -> None:
        """It is thought to be so before it is measured."""
        self.seconds, self._first = seconds, [seconds] * KNOWN

    def fade(self, *, even: bool = False) -> None:
        """The measurements are old: the next one counts as much as all of them together."""
        if self._first:
            self.faded, self._even, self._first, self._counted = True, even, [self.seconds], 0
