"""Decides when a draft in the making is long enough: by how sure the draft model is of each token it proposes.

The chance that a token is accepted is counted by classes of q(x), the probability that the draft gave it (of a greedy
draft, its largest). Exact under every rule, because a token that was drawn is always verified: whether another is drawn
after it may depend on all that were. (The coins of rejection, and the thresholds of block verification, at one prefix
ask of what follows only that it is drawn from its q, however far it goes. To drop a token for being unlikely would
leave the unlikely ones out of what was drawn from q, and that does bias.)
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

import numpy as np

from ...engines.base import LogitRow
from ..rules.verify import Outcomes
from .free import Calibration

_EDGES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
# What each class begins with: a middling draft's. A sampled token may be right without being the likeliest.
GREEDY_PRIOR = (0.35, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 0.88, 0.95, 0.98)
SAMPLED_PRIOR = (0.65, 0.7, 0.74, 0.77, 0.78, 0.8, 0.85, 0.9, 0.95, 0.98)
_ROW_DECAY, _ROUND_DECAY = 0.98, 0.95


def chance_of(logits: LogitRow, token: int) -> float | None:
    """The probability of ``token`` by a row of logits [V]. None where they are still on a device: to fetch them costs
    more than it says."""
    if not isinstance(logits, np.ndarray):
        return None
    weights = logits - logits[logits.argmax()]
    np.exp(weights, out=weights)
    return float(weights[token]) / float(np.add.reduce(weights))


def sureness(chance: float) -> int:
    """The class of a probability: 0 (unsure) to 9."""
    return bisect(_EDGES, chance)


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

    def saw(self, place: int, chance: float | None) -> None:
        """Row ``place`` drafted a token of this probability ``chance`` (None: it is not known)."""
        if chance is not None:
            found = sureness(chance)
            self.classes[place].append(found)
            self._survivals[place] *= self._chances[place][found]
        else:
            self._survivals[place] *= self._rates[place]

    def missed(self, place: int, count: int) -> None:
        """The draft of row ``place`` begins with ``count`` tokens whose probabilities are not known."""
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
    """How often tokens of each class were accepted in one row, starting from what all rows showed; and how many watched
    rounds it had, with their tokens and seconds, over about the last 20."""

    def __init__(self, shared: Calibration) -> None:
        self._shared, self._own = shared, Calibration(shared.rates, _ROW_DECAY)
        self.rounds = self.tokens = self.seconds = 0.0

    @property
    def chances(self) -> Sequence[float]:
        return self._own.rates

    def record(self, classes: Sequence[int], outcomes: Outcomes, seconds: float) -> None:
        """A watched round: the classes of its drafted tokens, their outcomes, and the seconds that such a round
        takes."""
        for each, (reached, kept) in zip(classes, outcomes, strict=False):
            self._own.record(each, kept, reached)
            self._shared.record(each, kept, reached)
        self.rounds = _ROUND_DECAY * self.rounds + 1.0
        self.tokens = _ROUND_DECAY * self.tokens + sum(kept for _, kept in outcomes) + 1.0
        self.seconds = _ROUND_DECAY * self.seconds + seconds
