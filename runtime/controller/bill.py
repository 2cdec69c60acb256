"""Decides whether a draft model saves more time than it takes, from what its rounds brought and not what they
promised."""

from __future__ import annotations

import math

_DECAY = 0.98  # per round in which it drafted: about the last 50 count
_SURE = 1.5  # standard errors
_FEW = 4  # rounds that say nothing yet: three misses in a row are no verdict
TRIAL = _FEW + 1  # rounds after which one that only loses is known to


class Bill:
    """The seconds that the draft model saved: what the tokens of its rounds would have taken without it, less what
    these rounds took, including the time it spent on prompts and on text that it had missed. This shows costs that the
    choice of a single round leaves out: a draft model that is asked now and then must read all that others wrote, and
    rounds that were chosen for a high promise keep less of it than others.

    A bill that loses stops the draft model, and then nothing could show that the bill was wrong (its prices may have
    been measured in a bad moment). So each new try begins a new bill (``clear``)."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """What was seen counts no more."""
        self._saved = self._squares = self._rounds = 0.0

    def charge(self, seconds: float) -> None:
        """Subtract ``seconds`` that the model took outside rounds. They are certain, so they do not add to the
        scatter."""
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
        """Whether the model costs more than it saves, beyond chance. The fewer rounds there were, the less is known of
        how much they scatter, and the wider the margin is."""
        chance = math.sqrt(self._squares * (1.0 + _FEW / max(1.0, self._rounds)))
        return not self.is_new and self._saved < -_SURE * chance
