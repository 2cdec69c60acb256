"""Decides when a draft in the making is long enough: by how sure the draft model is of each token it proposes.

The chance that a token is accepted is counted by classes of the draft's top probability. Used under ``greedy`` alone,
where the target's own choice is what is kept and any cut of a draft is exact. Where the target's law is sampled from, a
cut may depend on q but never on the token drawn from it, and sureness of q says too little to pay (+1 % in simulation).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

import numpy as np

from ..engines.base import LogitRow
from .free import Calibration

_EDGES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
PRIOR = (0.35, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 0.88, 0.95, 0.98)  # of each class; shrunk to the demo pair's
_ROW_DECAY, _ROUND_DECAY = 0.98, 0.95


def sureness(logits: LogitRow, token: int) -> int | None:
    """The class of the top probability of a row of logits [V] whose largest is at ``token``: 0 (unsure) to 9. None
    where the logits are still on a device: to fetch them costs more than it says."""
    if not isinstance(logits, np.ndarray):
        return None
    weights = logits - logits[token]
    np.exp(weights, out=weights)
    return bisect(_EDGES, 1.0 / float(np.add.reduce(weights)))


class Watch:
    """One round's drafts in the making, of rows that share its steps: whether another token pays.

    It does while the expected tokens it adds, over all rows, are worth more than its time: survival so far x powers of
    the row's acceptance > price x (seconds of the longer round - seconds of this one), price in tokens a second. A
    rectangle has one width, so that one answer serves all rows.
    """

    def __init__(
        self,
        chances: Sequence[Sequence[float]],
        rates: Sequence[float],
        limits: Sequence[int],
        seconds: Sequence[float],
        price: float,
    ) -> None:
        """Of each row ``chances`` of a token of each class, the mean acceptance ``rates`` and the longest draft;
        ``seconds`` of a round with drafts of 0, 1, 2, ..."""
        self._chances, self._rates, self._seconds, self._price = chances, rates, seconds, price
        self.limits = limits
        self._survivals = [1.0] * len(rates)
        self.classes: list[list[int]] = [[] for _ in rates]

    def saw(self, place: int, logits: LogitRow, token: int) -> None:
        """Row ``place`` drafted ``token`` from ``logits`` [V]."""
        if (found := sureness(logits, token)) is not None:
            self.classes[place].append(found)
            self._survivals[place] *= self._chances[place][found]
        else:
            self._survivals[place] *= self._rates[place]

    def missed(self, place: int, count: int) -> None:
        """Row ``place`` has ``count`` tokens already, whose logits nobody watched."""
        self._survivals[place] *= self._rates[place] ** count

    def more(self, length: int) -> bool:
        """Whether drafts of ``length`` should grow (no row's beyond its limit), be it by one or, where a step's time
        has stairs, by several."""
        gain, survivals = 0.0, list(self._survivals)
        for longer in range(length + 1, len(self._seconds)):
            for place, rate in enumerate(self._rates):
                survivals[place] *= rate if longer <= self.limits[place] else 0.0
            gain += sum(survivals)
            if gain > self._price * (self._seconds[longer] - self._seconds[length]):
                return True
            if not any(survivals):
                break
        return False


class Sureness:
    """What is known of one row's classes, beginning with what all rows showed; and its watched rounds: how many, their
    tokens and their seconds, the last 20 above all."""

    def __init__(self, shared: Calibration) -> None:
        self._shared, self._own = shared, Calibration(shared.rates, _ROW_DECAY)
        self.rounds = self.tokens = self.seconds = 0.0

    @property
    def chances(self) -> Sequence[float]:
        return self._own.rates

    def record(self, classes: Sequence[int], tested: int, accepted: int, seconds: float) -> None:
        """A watched round: its drafts' classes, how many were tested, how many accepted, what such a round takes."""
        for position, each in enumerate(classes[:tested]):
            self._own.record(each, position < accepted)
            self._shared.record(each, position < accepted)
        self.rounds = _ROUND_DECAY * self.rounds + 1.0
        self.tokens = _ROUND_DECAY * self.tokens + accepted + 1.0
        self.seconds = _ROUND_DECAY * self.seconds + seconds
