"""Decides what free drafters have in common: they guess from text that is already there, at no model's cost, and each
guess says how strong the evidence behind it is, so that its chance can be counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

Candidate = tuple[int, int]  # a guessed token and the class of the evidence for it

_PRIOR_WEIGHT = 8.0  # guesses' worth of belief in the prior
_DECAY, _ROW_DECAY = 0.998, 0.98  # per guess of a class: about the last 1000 count, and the last 100 of a row
_LASTING_DISCOUNT, _ROW_DISCOUNT, _PROMISES = 0.995, 0.95, 8.0  # per round; promised hits' worth of belief


class FreeDrafter(Protocol):
    """Continues one row's text. ``prior`` is the chance, before anything is counted, that a guess with evidence of
    each class is right when all before it were."""

    @property
    def name(self) -> str: ...

    @property
    def prior(self) -> tuple[float, ...]: ...

    def take(self, tokens: Sequence[int]) -> None:
        """The row's text is now ``tokens``, which begins with what it was before."""
        ...

    def candidates(self) -> Iterator[Candidate]:
        """What comes next, token by token, for as long as anything is known. Changes nothing."""
        ...


class Calibration:
    """How often guesses of each class of evidence were right: a Beta mean, shrunk to the prior. ``decay`` is what an
    older guess counts for when the next one of its class comes."""

    def __init__(self, prior: Sequence[float], decay: float = _DECAY) -> None:
        self._prior, self._decay = tuple(prior), decay
        self._right, self._tested = [0.0] * len(prior), [0.0] * len(prior)
        self.rates = list(prior)

    def record(self, evidence: int, right: float, reached: float = 1.0) -> None:
        """Count one guess that was ``reached``; both are 0 to 1, what is expected of them where that is known."""
        self._right[evidence] = self._decay * self._right[evidence] + right
        self._tested[evidence] = self._decay * self._tested[evidence] + reached
        right_ones = self._right[evidence] + _PRIOR_WEIGHT * self._prior[evidence]
        self.rates[evidence] = right_ones / (self._tested[evidence] + _PRIOR_WEIGHT)


class Discount:
    """How far a drafter's promises hold where its guess was the best one: hits at positions that were reached, over the
    hits that were promised there. The best of several estimates is too high on average (the winner's curse), the more
    so the less there is to guess. Shrunk towards ``before``; older rounds count less."""

    def __init__(self, before: Discount | None = None) -> None:
        self._decay = _LASTING_DISCOUNT if before is None else _ROW_DISCOUNT
        self._before = 1.0 if before is None else before.factor
        self._hits = self._promised = 0.0

    @property
    def factor(self) -> float:
        """Hits for each that was promised: see ``corrected``."""
        return (_PROMISES * self._before + self._hits) / (_PROMISES + self._promised)

    def record(self, promised: Sequence[float], hits: int) -> None:
        """A round: the chance promised for each token that was reached, and how many were right; none where another's
        guess was the best."""
        self._hits = self._decay * self._hits + hits
        self._promised = self._decay * self._promised + sum(promised)


def corrected(chance: float, factor: float) -> float:
    """A promised ``chance``, corrected where ``factor`` times as many hits come true as were promised. Above 1 the
    misses become fewer by that factor, for no chance exceeds 1."""
    return chance * factor if factor < 1.0 else 1.0 - (1.0 - chance) / factor


@dataclass(slots=True)
class Guess:
    """A free drafter's continuation. ``survivals[i]`` is the estimated chance that the first i + 1 tokens are all
    accepted: their sum is the expected number of accepted tokens (2411.04975, section 4)."""

    tokens: list[int] = field(default_factory=list)
    evidence: list[int] = field(default_factory=list)
    survivals: list[float] = field(default_factory=list)


class Record:
    """What the rounds of all rows have shown of one free drafter: how often its guesses were right, and how far its
    promises held."""

    def __init__(self, prior: Sequence[float]) -> None:
        self.calibration, self.discount = Calibration(prior), Discount()


class Calibrated:
    """A free drafter of one row with its record, kept on every round whether it proposes or not: text that was
    committed says what would have been accepted. ``shared`` is the record of all rows, from which a row's starts."""

    def __init__(self, drafter: FreeDrafter, shared: Record) -> None:
        self.drafter = drafter
        self.guess = Guess()
        self._shared, self._own = shared.calibration, Calibration(shared.calibration.rates, _ROW_DECAY)
        self._discount = Discount(shared.discount)
        self._discounts = self._discount, shared.discount

    @property
    def factor(self) -> float:
        """How far its promises hold: see ``corrected``."""
        return self._discount.factor

    def look(self, tokens: Sequence[int], longest: int, floor: float) -> Guess:
        """Take the text in and guess up to ``longest`` tokens, none after the survival is below ``floor``."""
        self.drafter.take(tokens)
        guess, survival, rates = Guess(), 1.0, self._own.rates
        for token, evidence in islice(self.drafter.candidates(), longest):
            survival *= rates[evidence]
            guess.tokens.append(token)
            guess.evidence.append(evidence)
            guess.survivals.append(survival)
            if survival < floor:
                break
        self.guess = guess
        return guess

    def score(self, committed: Sequence[int]) -> int:
        """Count the last guess against what was ``committed`` after it, up to the first miss; how many were right.

        Guesses beyond the committed tokens are not counted: nobody knows.
        """
        right = 0
        for guessed, evidence, token in zip(self.guess.tokens, self.guess.evidence, committed, strict=False):
            self._own.record(evidence, guessed == token)
            self._shared.record(evidence, guessed == token)
            if guessed != token:
                break
            right += 1
        return right

    def settle(self, proposed: int, committed: Sequence[int]) -> None:
        """Count how far the promises of the last guess held, if it was the best of the round, verified or not: of its
        first ``proposed`` tokens, up to the first that differs from what was ``committed``. ``proposed`` is 0 where
        another drafter's guess was the best."""
        promised, hits, before = list[float](), 0, 1.0
        guess = self.guess.tokens[:proposed]
        for guessed, survival, token in zip(guess, self.guess.survivals, committed, strict=False):
            promised.append(survival / before)
            if guessed != token:
                break
            hits, before = hits + 1, survival
        for each in self._discounts:
            each.record(promised, hits)
