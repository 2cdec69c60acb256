"""Decides what to expect of drafts: how often they were accepted at each position, and how far that is believed."""

from __future__ import annotations

import math

from ..rules.verify import Outcomes
from ..settings import MAX_DRAFT_LENGTH

_FIRST = 0.7
PRIOR_WEIGHT, _LASTING_WEIGHT = 4.0, 1.0  # rounds that earlier knowledge counts for: at first, and in the end


class Acceptance:
    """How often a draft is accepted at each position, given that the position was reached, over the last rounds.

    A round counts at a position only as far as it reached it (``Verdict.outcomes``): drafts behind the first rejection
    were not tested, so they count as neither accepted nor rejected.
    The rate of each position is shrunk towards that of ``before`` at the time this was made, scaled by how the rates of
    the other positions have changed since. The weight of that prior falls with every round.
    """

    def __init__(self, decay: float, before: Acceptance | None = None) -> None:
        self._decay = decay
        self._rate_before = before.rate() if before else _FIRST
        self._before = before.at_positions() if before else [_FIRST] * MAX_DRAFT_LENGTH
        self._rounds, self._weight = 0, PRIOR_WEIGHT
        self._tested: list[float] = []  # as many positions as were ever tested
        self._accepted: list[float] = []

    def observe(self, outcomes: Outcomes) -> None:
        self._rounds += 1
        self._weight = max(_LASTING_WEIGHT, self._decay * self._weight)
        missing = [0.0] * (len(outcomes) - len(self._tested))
        self._tested += missing
        self._accepted += missing
        for position in range(len(self._tested)):
            reached, kept = outcomes[position] if position < len(outcomes) else (0.0, 0.0)
            self._tested[position] = self._decay * self._tested[position] + reached
            self._accepted[position] = self._decay * self._accepted[position] + kept

    def rate(self) -> float:
        """Over all positions."""
        return (self._weight * self._rate_before + sum(self._accepted)) / (self._weight + sum(self._tested))

    def at_positions(self) -> list[float]:
        """At each of the 16 positions."""
        before, weight = self._rate_before, self._weight
        tests, kept = weight + sum(self._tested), weight * before + sum(self._accepted)
        rates = [min(1.0, kept / tests / before * rate) for rate in self._before]
        for position, (tested, accepted) in enumerate(zip(self._tested, self._accepted, strict=True)):
            others = (kept - accepted) / (tests - tested) / before
            prior = min(1.0, others * self._before[position])
            rates[position] = min(1.0, max(0.0, (weight * prior + accepted) / (weight + tested)))
        return rates

    def expected_tokens(self, hope: float = 0.0) -> list[float]:
        """Expected tokens of a round with drafts of 0, 1, 2, ...: 1 + the sum of survivals (Leviathan et al.
        2211.17192, section 3.1, but with a rate for each position). The list ends where fewer than 2 % of drafts
        survive. ``hope``: take each rate so many standard errors above its estimate."""
        tokens, survival = [1.0], 1.0
        for rate in self.at_positions():
            if hope:
                rate = min(1.0, rate + hope * math.sqrt(rate * (1.0 - rate) / (PRIOR_WEIGHT + self._rounds)))
            if (survival := survival * rate) < 0.02:
                break
            tokens.append(tokens[-1] + survival)
        return tokens
