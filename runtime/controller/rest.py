"""Decides when a draft model that does not pay is tried again."""

from __future__ import annotations

_FIRST_SHARE, _SHARE_OF_A_NEW_TEXT, _LEAST_SHARE = 1 / 32, 1 / 128, 1 / 512


class Rest:
    """Whether the draft model rests, for all rows of a decoder, because they share its steps. Where drafting does not
    pay it rests, and is tried again once a try costs no more than 1/32 of the time rested since the last try. Each
    failed try halves that share, down to 1/512. (After a rest the draft model must first read all that was written
    meanwhile. Where that alone costs more than the share, the next try comes with the next text.)"""

    def __init__(self) -> None:
        self.resting = self._tried = False
        self._share, self._rested = _FIRST_SHARE, 0.0

    def tick(self, seconds: float) -> None:
        """Another round of rest, which takes that long."""
        self._rested += seconds

    def affords(self, price: float) -> bool:
        """Whether a try that costs ``price`` seconds is due."""
        return self._share * self._rested >= price

    def attempt(self) -> None:
        """It is tried; the next round knows what came of it."""
        self.resting, self._tried, self._rested = False, True, 0.0

    def begin(self) -> None:
        """Drafting does not pay now."""
        if self._tried:
            self._share = max(_LEAST_SHARE, self._share / 2)
        self.resting, self._tried = True, False

    def restart(self) -> None:
        """A new text begins: the draft model does not rest, and if it has to, the first try comes sooner than in a text
        where several tries failed."""
        self.resting = self._tried = False
        self._share = max(self._share, _SHARE_OF_A_NEW_TEXT)

    def end(self) -> None:
        """Drafting pays."""
        self._share, self._tried = _FIRST_SHARE, False
