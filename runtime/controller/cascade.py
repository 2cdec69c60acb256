"""Decides who drafts: per row and round, whoever promises the most tokens per second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from ...engines.base import Logits
from ..drafters.edits import EditedCopy
from ..drafters.family import Family
from ..drafters.forced import ForcedDrafter
from ..drafters.free import Calibrated, FreeDrafter, Record, corrected
from ..drafters.ngram import NgramDrafter
from ..drafters.recycling import RecyclingDrafter, Successors
from ..drafters.runs import OwnRuns
from ..drafters.siblings import SiblingsDrafter
from ..drafters.suffix import WINDOW, EarlierTexts, OwnText, SuffixPool
from ..grammar import Grammar
from ..settings import MAX_DRAFT_LENGTH, MAX_GUESS_LENGTH, Settings
from .easiness import Easiness
from .gain import BY_GUESSES, pays, worth
from .joint import NOBODY, Plan, beside
from .kinds import GREEDY, Kind
from .policy import AutoLength, Pace
from .prices import at
from .rounds import Round
from .unaided import Unaided, replayed
from .vigil import Habit, Vigil

# The lengths that a guess may be cut to. Beyond 16 tokens only those whose step is a multiple of 8 wide: each width has
# to be prepared by the engine, recorded on a GPU, and measured.
_LENGTHS = frozenset((*range(MAX_DRAFT_LENGTH + 1), *range(23, MAX_GUESS_LENGTH + 1, 8)))
_REPEATERS = OwnText, EarlierTexts, EditedCopy  # they have no guess where a text ends as none before
_FLOOR = 0.05  # a guess ends once its chance to be accepted so far is below this: no step is that cheap


@dataclass(slots=True)
class Experience:
    """What rounds have shown of the free drafters: how often their guesses were right, whether asking them pays, and
    how good the draft model was compared with them."""

    records: dict[str, Record] = field(default_factory=dict)
    habit: Habit = field(default_factory=Habit)
    easiness: Easiness = field(default_factory=Easiness)
    unaided: Unaided | None = None

    def calibrated(self, drafter: FreeDrafter) -> Calibrated:
        """``drafter`` of one row, with what is known of its like."""
        return Calibrated(drafter, self.records.setdefault(type(drafter).__name__, Record(drafter.prior)))


@dataclass(slots=True)
class Commons:
    """What the free drafters of all rows and requests share: texts, successors, and the experience of each kind of
    text."""

    pool: SuffixPool = field(default_factory=SuffixPool)
    successors: Successors = field(default_factory=Successors)
    _experiences: dict[Kind, Experience] = field(default_factory=dict)

    def experience(self, kind: Kind) -> Experience:
        """The experience with rows of this kind. Where texts repeat themselves, the draft model must be better than
        free drafters alone would be (``Unaided``)."""
        if kind not in self._experiences:
            self._experiences[kind] = Experience(unaided=Unaided() if kind.repeats else None)
        return self._experiences[kind]

    def drafters(
        self, kind: str, family: Family | None = None, *, model: bool = False, grammar: Grammar | None = None
    ) -> list[FreeDrafter]:
        """The free drafters of one row that drafts with ``kind`` (a value of ``Settings.draft``); of equals the first
        is preferred. ``family``: the answers to its prompt, if there are others. ``model``: on a miss a draft model
        may be asked, beside which recycled tokens bring nothing (docs/notes.md). ``grammar``: what binds the row."""
        made: list[FreeDrafter] = []
        if kind == "auto" and grammar is not None:
            made.append(ForcedDrafter(grammar))
        if kind == "ngram":
            made.append(NgramDrafter())
        if kind in ("suffix", "auto"):
            copy = EditedCopy()
            made += [OwnText(copy=copy), EarlierTexts(self.pool), copy]
        if kind in ("siblings", "auto") and family is not None:
            made.append(SiblingsDrafter(family))
        if kind == "recycling" or (kind == "auto" and not model):
            made.append(RecyclingDrafter(self.successors))
        return made


class Best(NamedTuple):
    """The best guess of a round: the ``plan`` that verifies it, cut to its best length (``NOBODY`` where no guess
    pays); the ``speed`` in tokens a second that this promises; the tokens ``promised`` by the best uncut guess; and
    ``by`` whom the chosen guess is."""

    plan: Plan = NOBODY
    speed: float = 0.0
    promised: float = 1.0
    by: Calibrated | None = None


_NO_GUESS = Best()


@dataclass(slots=True)
class Choice:
    """One row's part in a round. ``asked``: its free drafters guess and are scored; ``settles``: the round counts for
    whether asking them pays. ``otherwise``: the tokens a second that the draft model promised, 0 where it is not to be
    asked. ``spent``: the seconds that asking took; ``saved``: the seconds that a verified guess saved, None where none
    was verified."""

    this: Round
    asked: bool = False
    settles: bool = False
    best: Best = _NO_GUESS
    plan: Plan = NOBODY
    otherwise: float = 0.0
    spent: float = 0.0
    saved: float | None = None


class Cascade:
    """The choice of one row among free drafters and, perhaps, the draft model.

    Free drafters guess and are scored every round, also while another proposes, unless that does not pay (``Vigil``):
    the committed text says how many of their tokens would have been accepted. Each is worth its expected tokens, 1 +
    the sum of its survivals, over the seconds of the step that verifies them; the draft model is worth what its policy
    expects where free drafters promise as much (``Easiness``), and alone it drafts the length that is best there.
    Guesses and choice come from past rounds alone, never from what the draft model is about to propose: so every rule
    stays exact.
    """

    def __init__(
        self,
        settings: Settings,
        commons: Commons,
        pace: Pace,
        model: AutoLength | None,
        family: Family | None = None,
        kind: Kind = GREEDY,
        grammar: Grammar | None = None,
    ) -> None:
        """``model`` estimates the draft model (None: it is not to be asked); ``grammar`` binds the row before its first
        token."""
        self._kind, self._fixed = settings.draft, None if settings.draft_length == "auto" else settings.draft_length
        self._commons, self._pace, self._model = commons, pace, model
        self._experience = experience = commons.experience(kind)
        drafters = commons.drafters(settings.draft, family, model=model is not None, grammar=grammar)
        self._drafters = [experience.calibrated(each) for each in drafters]
        self._recycles = any(isinstance(each, RecyclingDrafter) for each in drafters)
        self._eager = [each.drafter for each in self._drafters if each.drafter.name == "siblings"]
        self._runs = OwnRuns(WINDOW) if all(isinstance(each, _REPEATERS) for each in drafters) else None
        self._vigil = Vigil(experience.habit)
        self._known = 0  # tokens of the text that all free drafters know
        self._choice = Choice(Round())

    def begin(self, prompt: Sequence[int]) -> None:
        """The text begins with ``prompt``. Drafters that sleep are told of it only when they wake. The price of asking
        does not include that, so they sleep on until it is little compared with the time spent writing."""
        if self._vigil.awake:
            self._catch_up(prompt)
            return
        self._tell_eager(prompt)
        self._vigil.put_off(len(prompt) * self._experience.habit.reading / self._pace.prices.without_model(1)[0])
        self._glance(prompt)

    def take(self, tokens: Sequence[int]) -> None:
        """Take in the text at the end of a round. Siblings are always told now, so that rows that draft from each other
        know equally much whichever guesses first; other drafters that sleep are told when they wake."""
        choice = self._choice
        if not choice.asked:
            self._tell_eager(tokens)
            self._glance(tokens)
            return
        started = perf_counter()
        if choice.settles and choice.plan.by == "model" and (unaided := self._experience.unaided) is not None:
            self._replay(tokens, unaided)
        self._tell_all(tokens)
        if choice.settles:
            spent = self._pace.prices.costs.usual(choice.spent + (perf_counter() - started))
            self._vigil.settle(choice.saved or 0.0, spent, chosen=choice.saved is not None)

    def _glance(self, tokens: Sequence[int]) -> None:
        """Let free drafters that are about to wake sleep on where the end of the text is new to all of them."""
        if not self._vigil.is_due or self._runs is None:
            return
        if not (self._runs.repeat(tokens) or self._commons.pool.runs.end(tokens)):
            self._vigil.sleep_on()

    def _tell_all(self, tokens: Sequence[int]) -> None:
        for each in self._drafters:
            each.drafter.take(tokens)
        self._known = len(tokens)

    def _tell_eager(self, tokens: Sequence[int]) -> None:
        for drafter in self._eager:
            drafter.take(tokens)

    def _replay(self, tokens: Sequence[int], unaided: Unaided) -> None:
        """Replay what the draft model's round wrote, to find how long free drafters alone would have taken for it."""
        promised, instead, begin = self._choice.best.promised, self._choice.plan.instead, self._known
        if self._choice.this.rows > 1 or not (new := tokens[begin:]) or not unaided.wants(promised):
            return
        first = instead.tokens if instead is not None else ()
        seconds = self._pace.prices.without_model(1)

        def guess_after(written: int) -> Sequence[int]:
            text = tokens[: begin + written]
            for each in self._drafters:
                each.look(text, MAX_GUESS_LENGTH, _FLOOR)
            return self._best_guess(1, whole=False).plan.tokens

        unaided.record(promised, len(new), replayed(new, first, guess_after, seconds))

    @property
    def dozes(self) -> bool:
        """Whether, if the draft model rests, nobody drafts in the next round: the free drafters sleep, too."""
        return self._model is not None and self._fixed is None and self._vigil.sleeps_on

    def doze(self, this: Round) -> Plan:
        """The plan for a round in which nobody drafts."""
        self._vigil.tick()
        self._choice = Choice(this)
        return NOBODY

    def choose(self, this: Round, tokens: Sequence[int], limit: int, model_limit: int, allotted: int) -> Plan:
        """The plan for ``this`` round, after the text ``tokens``: at most ``limit`` drafted tokens, or ``model_limit``
        if the draft model drafts them. ``allotted``: how many the draft model was given by its policy."""
        if self.dozes and not allotted:
            return self.doze(this)
        self._vigil.tick()
        limit = max(0, min(limit, MAX_GUESS_LENGTH))
        wanted = self._wanted(limit, this.rows)
        settles = self._vigil.awake and wanted is None
        self._choice = choice = Choice(this, settles or bool(wanted), settles)
        length, promised = self._from_model(this, min(limit, model_limit), allotted)
        speed = 0.0
        if choice.asked:
            self._catch_up(tokens)
            started = perf_counter()
            longest, floor = (limit, _FLOOR) if wanted is None else (min(wanted, limit), 0.0)
            for each in self._drafters:
                each.look(tokens, longest, floor)
            choice.best = best = self._best_guess(this.rows, whole=wanted is not None)
            speed = best.speed
            if length and self._waits(this, length, best.promised):
                length = 0
            if length and promised != math.inf and self._fixed is None:
                length, promised = self._where_it_is_as_easy(this, best.promised, length, min(limit, model_limit))
            if length and settles and this.rows == 1 and (unaided := self._experience.unaided) is not None:
                speed = unaided.speed(best.promised, speed)
            choice.spent = perf_counter() - started
            this.otherwise = speed
        choice.plan = guess = choice.best.plan
        if length:
            assert self._model is not None
            choice.otherwise, forced = promised, self._fixed is not None or promised == math.inf
            plan, missed = Plan(length=length, expected=self._model.tokens, whole=forced), self._pace.prices.missed
            better = not guess.tokens or promised > beside(speed, guess.promises, missed(this.rows, guess.promises))
            choice.plan = plan._replace(instead=guess) if better else guess._replace(instead=plan)
        return choice.plan

    def settle_on(self, plan: Plan) -> None:
        """Put ``plan`` in place of the row's own: what was agreed with the other rows of the batch."""
        self._choice.plan = plan

    def observe(self, fed: Sequence[int], new: Sequence[int], logits: Logits, drafts: Sequence[int] = ()) -> None:
        """Learn from the round: the target was ``fed`` [K+1] tokens, gave ``logits`` [>= K+1, V], and ``new`` was
        committed. ``drafts``: the draft lengths of all rows that shared the step (by default of this row alone)."""
        choice = self._choice
        if not choice.asked:
            return
        started = perf_counter()
        for each in self._drafters:
            each.score(new)
            each.settle(len(choice.best.plan.tokens) if each is choice.best.by else 0, new)
        if choice.plan.by == "model":
            self._experience.easiness.record(choice.best.promised, min(len(new), len(fed) - 1), len(new) - 1)
        if self._recycles:
            self._commons.successors.record_round(fed, new, logits)
        if choice.settles:
            choice.spent += perf_counter() - started
            if choice.plan.tokens and len(fed) > 1:
                choice.saved = self._savings(drafts or [len(fed) - 1], len(new), len(fed) - 1)

    def _savings(self, drafts: Sequence[int], tokens: int, own: int = 0) -> float:
        """Seconds that this row's guess saved: the row's share of the time that its tokens would have taken otherwise,
        less its share of what the wider step took longer, and of the reading that the draft model, if it would have
        been asked, still has to do. Counts steps alone, for the host's time is what asking costs."""
        prices, rows, promised = self._pace.prices, len(drafts), self._choice.otherwise
        steps = prices.steps(rows)
        plain, longer = steps[0], at(steps, prices.drafted(drafts)) - steps[0]
        if prices.ragged:  # each row makes the step longer by what it drafted itself
            longer *= own / max(1, sum(drafts))
        else:
            longer /= rows - drafts.count(0)
        otherwise = min(1.0, 1.0 / (plain * promised)) if promised else 1.0
        gained = worth([tokens * otherwise, *[1.0] * (rows - 1)], BY_GUESSES) - rows
        missed = prices.missed(rows, tokens) / rows if promised else 0.0
        return gained * plain / rows - longer - missed

    def _catch_up(self, tokens: Sequence[int]) -> None:
        """Tell the free drafters of the text that was written while they slept."""
        if self._known == len(tokens):
            return
        started, late = perf_counter(), len(tokens) - self._known
        if self._recycles and self._known:
            self._commons.successors.record_text(tokens[self._known - 1 :])
        self._tell_all(tokens)
        self._experience.habit.read(late, self._pace.prices.costs.usual(perf_counter() - started))

    @property
    def asks(self) -> bool:
        """Whether free drafters were asked in this round."""
        return self._choice.asked

    def finish(self, tokens: Sequence[int]) -> None:
        """The row ended with ``tokens``: later requests may draft from them."""
        if self._kind in ("suffix", "auto"):
            self._commons.pool.add(tokens)

    def _wanted(self, limit: int, rows: int) -> int | None:
        """The draft length that is prescribed: the request's fixed one, or 0 where a plain step is to be measured; else
        None. (Other steps need not be prescribed: they are measured when they pay.)"""
        if self._fixed is not None:
            return self._fixed
        return 0 if self._pace.survey.wants_plain(limit, rows) else None

    def _best_guess(self, rows: int, *, whole: bool) -> Best:
        """``whole``: guesses are not cut, and any guess is better than none."""
        seconds = self._pace.prices.without_model(rows)
        plan, plain, promised, by = NOBODY, seconds[0], 1.0, None
        best = 0.0 if whole else 1.0 / plain
        for each in self._drafters:
            guess, factor, expected, reached, before, wins = each.guess, each.factor, [1.0], 1.0, 1.0, 0
            for length, survival in enumerate(guess.survivals, start=1):
                reached *= corrected(survival / before, factor)
                before = survival
                expected.append(expected[-1] + reached)
                if length not in _LENGTHS:
                    continue
                speed = expected[-1] / seconds[length]
                if speed <= best or not (whole or pays(speed * plain, seconds[length] / plain)):
                    continue
                if not whole or length == len(guess.tokens):
                    wins, best = length, speed
            promised = max(promised, expected[-1])
            if wins:
                plan, by = Plan(each.drafter.name, guess.tokens[:wins], expected=expected, whole=whole), each
        return Best(plan, best, promised, by)

    def _from_model(self, this: Round, limit: int, allotted: int) -> tuple[int, float]:
        """How many tokens the draft model should draft, and the tokens a second that this promises: infinity where its
        policy wants to measure, or to try again after a rest, so that nothing beats it."""
        if self._model is None or limit <= 0 or not (allotted or self._fixed):
            return 0, 0.0
        if self._fixed is not None:
            length = min(self._fixed, limit)
            return length, self._model.speed(length, this.rows)
        return allotted, math.inf if this.explores else self._model.speed(allotted, this.rows)

    def _waits(self, this: Round, length: int, promised: float) -> bool:
        """Whether a draft of the model that is only made to be measured can wait, because the best guess promises more
        tokens than it. What is measured serves all texts, so a text that repeats itself should not pay for it. (In a
        batch nothing waits: each row would wait for the others.)"""
        assert self._model is not None
        measures = this.why == "measured" and self._fixed is None and this.rows == 1
        return measures and promised > self._model.tokens[min(length, self._model.reach)]

    def _where_it_is_as_easy(self, this: Round, promised: float, allotted: int, limit: int) -> tuple[int, float]:
        """``_from_model``, corrected for rounds in which the best guess promises ``promised`` tokens (``Easiness``). In
        a batch only the speed is corrected, for one length serves all rows."""
        assert self._model is not None
        factors, prices = self._experience.easiness.factors(promised), self._pace.prices
        if this.rows > 1:
            return allotted, factors[allotted] * self._model.speed(allotted, this.rows)
        tokens = [mean * factor for mean, factor in zip(self._model.tokens[: limit + 1], factors, strict=False)]
        rounds = zip(tokens, prices.with_model(1), strict=False)
        speeds = [mean / (took + prices.again(1, mean)) for mean, took in rounds]
        best = max(range(1, len(speeds)), key=speeds.__getitem__, default=0)
        return best, speeds[best]
