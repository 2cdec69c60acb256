"""Decides how slow the device is at the moment. Other work on the machine makes all steps slower by the same factor,
two and more, within seconds; without that factor, steps that were measured at different times can be compared."""

from __future__ import annotations

import math

_GAIN = 0.5  # the share of a surprise (as a logarithm) that is put down to the device at once
_MOST = 0.5  # the largest surprise that counts, as a logarithm: one outlier says little
_MANY = 50
_FIRST_SCATTER, _BELIEVED = 0.1, 5  # of a shared machine; as many steps' worth


class Tempo:
    """``slowness``: the time of a step over what it usually takes, 1 at first. It follows the last few steps. ``mean``
    is its average over all of them, ``scatter`` how far one step is off what the last ones said (the standard deviation
    of its logarithm, the last 50 above all)."""

    def __init__(self) -> None:
        self.slowness = self.mean = 1.0
        self._steps, self._variance = 0, _FIRST_SCATTER**2

    @property
    def scatter(self) -> float:
        return math.sqrt(self._variance)

    def record(self, seconds: float, usual: float) -> None:
        """A step took so long that usually takes ``usual`` seconds."""
        if seconds <= 0.0 or usual <= 0.0:
            return
        surprise = math.log(seconds / (usual * self.slowness))
        surprise = max(-_MOST, min(_MOST, surprise))
        self.slowness *= math.exp(_GAIN * surprise)
        self._steps += 1
        self._variance += (surprise * surprise - self._variance) / min(self._steps + _BELIEVED, _MANY)
        self.mean += (self.slowness - self.mean) / self._steps
