"""Decides how much more to expect of the draft model in rounds where free drafters expect to be right. What is easy for
one is easy for the other, so the draft model's mean over all rounds is too low exactly where the two compete.

Classes come from free drafters' guesses, which are functions of past rounds: a draft length may depend on them under
every rule.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

from ..settings import MAX_DRAFT_LENGTH

_EDGES = (1.2, 1.6, 2.2, 3.2, 5.0)  # tokens that the best guess of a round promises
CLASSES = len(_EDGES) + 1
_POSITIONS = 6  # counted one by one; later ones are like the last
_DECAY = 0.995  # per round of a class: about the last 200 count
_FIRST, _PRIOR_WEIGHT = 0.7, 8.0


def class_of(promised: float) -> int:
    """The class of a round whose best guess promises so many tokens."""
    return bisect(_EDGES, promised)


class Easiness:
    """Acceptance of the draft model's tokens by position and by class of the round, shared by all rows; what a class
    lacks is taken from all rounds."""

    def __init__(self) -> None:
        self._all = _Counts()
        self._classes = [_Counts() for _ in range(CLASSES)]
        self._factors: list[Sequence[float]] = [(1.0,) * (MAX_DRAFT_LENGTH + 1)] * len(self._classes)

    def factors(self, promised: float) -> Sequence[float]:
        """Of drafts of 0 to 16 tokens: the expected tokens of a round whose best guess promises ``promised`` tokens,
        over those of any round."""
        return self._factors[class_of(promised)]

    def record(self, promised: float, tested: int, accepted: int) -> None:
        """A round in which the draft model proposed: what the best guess promised, and the verdict."""
        if not tested:
            return
        which = class_of(promised)
        for counts in (self._all, self._classes[which]):
            counts.record(tested, accepted)
        rates = self._all.rates([_FIRST] * _POSITIONS)
        here = _tokens(self._classes[which].rates(rates))
        self._factors[which] = [mine / mean for mine, mean in zip(here, _tokens(rates), strict=True)]


class _Counts:
    def __init__(self) -> None:
        self._tested, self._accepted = [0.0] * _POSITIONS, [0.0] * _POSITIONS

    def record(self, tested: int, accepted: int) -> None:
        for position in range(_POSITIONS):
            self._tested[position] = _DECAY * self._tested[position] + (position < tested)
            self._accepted[position] = _DECAY * self._accepted[position] + (position < accepted)

    def rates(self, before: Sequence[float]) -> list[float]:
        each = zip(self._tested, self._accepted, before, strict=True)
        return [(accepted + _PRIOR_WEIGHT * rate) / (tested + _PRIOR_WEIGHT) for tested, accepted, rate in each]


def _tokens(rates: Sequence[float]) -> list[float]:
    """1 + the sum of survivals, for drafts of 0 to 16."""
    tokens, survival = [1.0], 1.0
    for position in range(MAX_DRAFT_LENGTH):
        survival *= rates[min(position, _POSITIONS - 1)]
        tokens.append(tokens[-1] + survival)
    return tokens
