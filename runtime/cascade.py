"""Decides who drafts: per row and round, whoever promises the most tokens per second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from ..engines.base import Logits
from .family import Family
from .free import Calibrated, Calibration, FreeDrafter, NgramDrafter
from .policy import AutoLength, Pace
from .recycling import RecyclingDrafter, Successors
from .settings import MAX_DRAFT_LENGTH, Settings
from .siblings import SiblingsDrafter
from .suffix import EarlierTexts, OwnText, SuffixPool

_PATIENCE, _NAP = 16, 4  # free drafters that were not chosen for so many rounds are asked every fourth only
_FLOOR = 0.05  # no guess goes on once less than this is expected to be reached: no step verifies that cheaply


class Plan(NamedTuple):
    """Who drafts for a row this round: a free drafter its ``tokens``, or the draft model ``length`` of them.

    ``expected`` tokens of a round with drafts of 0, 1, 2, ... say what cutting the draft would cost; none, that it must
    not be cut.
    """

    by: str = "none"
    tokens: Sequence[int] = ()
    length: int = 0
    expected: Sequence[float] = ()

    @property
    def drafts(self) -> int:
        """How many tokens are going to be drafted."""
        return self.length or len(self.tokens)

    def cut(self, longest: int) -> Plan:
        """The same with at most ``longest`` drafts, if it may be cut."""
        if not self.expected or self.drafts <= longest:
            return self
        return self._replace(tokens=self.tokens[:longest], length=min(self.length, longest))


@dataclass(slots=True)
class Commons:
    """What the free drafters of all rows and requests share: texts, successors, and how good their guesses were."""

    pool: SuffixPool = field(default_factory=SuffixPool)
    successors: Successors = field(default_factory=Successors)
    records: dict[str, Calibration] = field(default_factory=dict)

    def drafters(self, kind: str, family: Family | None = None) -> list[Calibrated]:
        """The free drafters of one row that drafts with ``kind`` (a value of ``Settings.draft``); of equals the first
        is preferred. ``family``: the answers to its prompt, if there are others."""
        made: list[FreeDrafter] = []
        if kind == "ngram":
            made.append(NgramDrafter())
        if kind in ("suffix", "auto"):
            made += [OwnText(), EarlierTexts(self.pool)]
        if kind in ("siblings", "auto") and family is not None:
            made.append(SiblingsDrafter(family))
        if kind in ("recycling", "auto"):
            made.append(RecyclingDrafter(self.successors))
        return [Calibrated(each, self._record(each)) for each in made]

    def _record(self, drafter: FreeDrafter) -> Calibration:
        return self.records.setdefault(type(drafter).__name__, Calibration(drafter.prior))


class Cascade:
    """The choice of one row among free drafters and, perhaps, the draft model.

    Free drafters guess and are scored every round, also while another proposes: the committed text says how many of
    their tokens would have been accepted. Each is worth its expected tokens, 1 + the sum of its survivals, over the
    seconds of the step that verifies them; the draft model is worth what its policy expects. Guesses and choice come
    from past rounds alone, never from what the draft model is about to propose: so every rule stays exact.
    """

    def __init__(
        self,
        settings: Settings,
        commons: Commons,
        pace: Pace,
        model: AutoLength | None,
        family: Family | None = None,
    ) -> None:
        """``model`` estimates the draft model (None: it is not to be asked)."""
        self._kind, self._fixed = settings.draft, None if settings.draft_length == "auto" else settings.draft_length
        self._commons, self._pace, self._model = commons, pace, model
        self._idle = 0  # rounds since a free drafter was chosen
        self._drafters = commons.drafters(settings.draft, family)

    def take(self, tokens: Sequence[int]) -> None:
        """Take the text in: the prompt before the first round, and what each round brought at its end, so that rows
        that draft from each other know as much, whoever guesses first."""
        for each in self._drafters:
            each.drafter.take(tokens)

    def choose(self, tokens: Sequence[int], limit: int, model_limit: int, allotted: int, rows: int) -> Plan:
        """The plan for the round after ``tokens``: at most ``limit`` drafts, ``model_limit`` if they are the draft
        model's, which is ``allotted`` so many, when ``rows`` rows share a step."""
        limit = max(0, min(limit, MAX_DRAFT_LENGTH))
        wanted = self._wanted(limit, rows)
        longest, floor = (limit, _FLOOR) if wanted is None else (min(wanted, limit), 0.0)
        self._idle += 1
        if wanted is None and self._idle > _PATIENCE and self._idle % _NAP:
            longest = 0
        for each in self._drafters:
            each.look(tokens, longest, floor)
        free, speed = self._best_guess(rows, whole=wanted is not None)
        length, promised = self._from_model(min(limit, model_limit), allotted, rows)
        if not length or promised <= speed:
            self._idle = 0 if free.tokens else self._idle
            return free
        forced = self._fixed is not None or promised == math.inf
        return Plan("model", length=length, expected=() if forced or self._model is None else self._model.tokens)

    def observe(self, fed: Sequence[int], new: Sequence[int], logits: Logits) -> None:
        """The round's outcome: the target was ``fed`` [K+1] tokens, gave ``logits`` [>= K+1, V] and wrote ``new``."""
        for each in self._drafters:
            each.score(new)
        if self._kind in ("recycling", "auto"):
            self._commons.successors.record_round(fed, new, logits)

    def finish(self, tokens: Sequence[int]) -> None:
        """The row ended with ``tokens``: later requests may draft from them."""
        if self._kind in ("suffix", "auto"):
            self._commons.pool.add(tokens)

    def _wanted(self, limit: int, rows: int) -> int | None:
        """The one length that matters: a fixed one, or what the start-up measurement asks for (of a row with a model
        only if that is a step without any draft)."""
        if self._fixed is not None:
            return self._fixed
        first = self._pace.first_length(limit, rows)
        return first if self._model is None or first == 0 else None

    def _best_guess(self, rows: int, *, whole: bool) -> tuple[Plan, float]:
        """The guess, cut where it is worth most, and its expected tokens per second (``whole``: no cut, and a guess
        of any worth before none). While nothing is measured, every step takes a second."""
        seconds = self._pace.seconds_without_draft(rows)
        plan, best = Plan(), 0.0 if whole else 1.0 / seconds[0]
        for each in self._drafters:
            expected = list(accumulate(each.guess.survivals, initial=1.0))
            for length, tokens in enumerate(expected[1:], start=1):
                speed = tokens / seconds[length]
                if speed > best and (not whole or length == len(each.guess.tokens)):
                    cuttable = () if whole else expected
                    plan, best = Plan(each.drafter.name, each.guess.tokens[:length], expected=cuttable), speed
        return plan, best

    def _from_model(self, limit: int, allotted: int, rows: int) -> tuple[int, float]:
        """How many tokens the draft model should draft, and the tokens per second that promises: any number of them
        where its policy wants to measure, or to try again after a rest."""
        if self._model is None or limit <= 0:
            return 0, 0.0
        if self._fixed is not None:
            length = min(self._fixed, limit)
            return length, self._model.speed(length, rows)
        promised = self._model.speed(allotted, rows)
        forced = self._pace.first_length(limit, rows) is not None or promised <= self._model.speed(0, rows)
        return allotted, math.inf if forced else promised
