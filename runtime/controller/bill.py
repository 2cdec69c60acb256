"""Decides whether a draft model earns what it takes: round by round it may promise to, and not keep it."""

from __future__ import annotations

import math

_DECAY = 0.98  # per round in which it drafted: about the last 50 count
_SURE = 1.5  # standard errors
_FEW = 4  # rounds that say nothing yet: three misses in a row are no verdict
TRIAL = _FEW + 1  # rounds after which one that only loses is known to


class Bill:
    """What the rounds in which the draft model proposed saved, in seconds, all told: over what their tokens would have
    taken without it, less what they took, prompts and the text that it had missed included. What a single choice leaves
    out shows here: a draft that is asked here and there reads all that others wrote, and the rounds that promised most
    kept least.

    Where it loses nobody drafts, so nothing could ever show that it was wrong: by prices, perhaps, that were taken in a
    bad moment. A try therefore begins a new one (``clear``)."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """What was seen counts no more."""
        self._saved = self._squares = self._rounds = 0.0

    def charge(self, seconds: float) -> None:
        """What it took besides rounds, for those in which it proposed since the last charge: no chance is in that."""
        self._saved -= seconds

    def record(self, saved: float) -> None:
        """A round in which it proposed."""
        self._saved = _DECAY * self._saved + saved
        self._squares = _DECAY * self._squares + saved * saved
        self._rounds = _DECAY * self._rounds + 1.0

    @property
    def is_new(self) -> bool:
        """Whether there are too few rounds on it for a verdict."""
        return self._rounds < _FEW

    @property
    def loses(self) -> bool:
        """Whether it costs more than it brings, beyond chance: how much a round scatters is known the less, the fewer
        there were."""
        chance = math.sqrt(self._squares * (1.0 + _FEW / max(1.0, self._rounds)))
        return not self.is_new and self._saved < -_SURE * chance
