"""Decides what becomes of the rows' plans where rows share a step: whose draft is cut, who goes without the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..settings import MAX_GUESS_LENGTH
from .gain import BY_DRAFTS, BY_GUESSES, cap, worth
from .prices import Prices
from .rounds import Round


class Plan(NamedTuple):
    """Who drafts for a row in this round: the free drafter ``guesser``, whose guess is ``tokens``; or the draft model,
    ``length`` tokens. With neither, nobody does.

    ``expected``: the tokens that the round is expected to bring with drafts of 0, 1, 2, ..., which says what it costs
    to cut the draft. A plan that is ``whole`` must not be cut. ``instead``: what the row does where the plans of the
    other rows make this one a bad choice."""

    guesser: str = "none"
    tokens: Sequence[int] = ()
    length: int = 0
    expected: Sequence[float] = (1.0,)
    whole: bool = False
    instead: Plan | None = None

    @property
    def by(self) -> str:
        """The name of who drafts."""
        return "model" if self.length else self.guesser if self.tokens else "none"

    @property
    def drafts(self) -> int:
        """How many tokens are going to be drafted."""
        return self.length or len(self.tokens)

    @property
    def promises(self) -> float:
        """Tokens of the round."""
        return self.expected[min(self.drafts, len(self.expected) - 1)]

    def cut(self, longest: int) -> Plan:
        """The same with at most ``longest`` drafts, if it may be cut."""
        if self.whole or self.drafts <= longest:
            return self
        return self._replace(tokens=self.tokens[:longest], length=min(self.length, longest))

    def without_model(self) -> Plan:
        """What the row does where the draft model is not asked, if it need not be."""
        return (self.instead or NOBODY) if self.length and not self.whole else self

    def beside_model(self) -> Plan:
        """What the row does where the draft model is asked anyway, for others: who must draft so many does."""
        return self.instead if not self.whole and self.instead and self.instead.promises > self.promises else self


NOBODY = Plan()


def together(plans: Sequence[Plan], this: Round, prices: Prices) -> Sequence[Plan]:
    """The best plans for rows that share a step, which is as wide for all as the longest draft needs (unless rows are
    ragged, see ``Prices.drafted``), and waits for the draft model if any row asks it. Of the plans with the draft model
    and those without it, the ones that promise more; no row's draft is longer than pays for all rows together."""
    if not any(plan.drafts for plan in plans):
        return plans
    speed, with_model = _cut([plan.beside_model() for plan in plans], prices)
    this.otherwise, without = _cut([plan.without_model() for plan in plans], prices)
    promised = [plan.promises for plan in without]
    alone = beside(this.otherwise, worth(promised, BY_GUESSES), prices.missed(this.rows, max(promised)))
    return with_model if speed >= alone else without


def beside(speed: float, tokens: float, missed: float) -> float:
    """Tokens a second of a round without the draft model, if the seconds are counted, too, that the model will take to
    read what it ``missed`` in it. ``speed``: the tokens a second of the round by itself, ``tokens``: what it writes."""
    return tokens / (tokens / speed + missed) if speed else 0.0


def _cut(plans: Sequence[Plan], prices: Prices) -> tuple[float, list[Plan]]:
    """The plans, cut to the length that is best for all, and what they are worth then, in tokens a second."""
    modelled = any(plan.length for plan in plans)
    wanted = [((1.0,), 0) if plan.whole else (plan.expected, plan.drafts) for plan in plans]
    limits = [MAX_GUESS_LENGTH if plan.whole else 0 for plan in plans]  # what may not be cut stays as long as it is
    drafts, lengths = [plan.drafts for plan in plans], [plan.length for plan in plans]

    def seconds(longest: int) -> float:
        cuts = [max(longest, limit) for limit in limits]
        by_model = max(map(min, lengths, cuts)) if modelled else None
        return prices.together([*map(min, drafts, cuts)], by_model)

    speed, longest = cap(wanted, seconds, BY_DRAFTS if modelled else BY_GUESSES)
    return speed, [plan.cut(longest) for plan in plans]
