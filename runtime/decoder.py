"""The decoding loop: propose, forward, verify, extend, yield. What each of these does is decided elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from threading import RLock
from time import perf_counter

import numpy as np

from ..engines.base import EachRow, Engine
from ..errors import UsageError
from . import judging
from .admission import Admission, check_request
from .ahead import AheadDrafter, drafts_ahead
from .controller.costs import Costs
from .controller.joint import NOBODY, Plan, together
from .controller.policy import AutoLength, Pace, Policy
from .controller.rounds import Round
from .drafters.base import Draft, Drafter
from .drafters.choice import drafter_for
from .drafters.confidence import Watch
from .drafters.tree_drafter import TreeDrafter
from .grammars import Grammars
from .prefill import prefill
from .rules import trees, verify
from .samples import Sample, samples
from .sequence import FinishReason, Row, StopMatcher
from .settings import MODEL_DRAFTS, DraftAhead, Rule, Settings
from .stats import Stats, Stopwatch
from .steps import Stepper
from .turns import Turns
from .vocabulary import VocabularyMap


@dataclass(slots=True)
class Event:
    """The tokens that one round committed to request ``index``, each with whether a draft proposed it.

    The last event of a request has its ``finish_reason`` and ``stats``; the end token is among its tokens. ``rule`` and
    ``seed`` are those in force (a seed was drawn if none was given).
    """

    index: int
    tokens: list[tuple[int, bool]]
    rule: Rule
    seed: int
    finish_reason: FinishReason | None = None
    stats: Stats | None = None


class Decoder:
    """Generates with a target and, if there is one, a draft. One decode at a time: a new one ends the one before.

    ``exact``: all steps of the target are at least as wide as it takes for them to round alike, so that its numbers are
    the same bits whatever the draft's length. (Where all rows draw from a law there are no bits to compare, and an
    engine that is faster otherwise rounds otherwise.)
    Between rounds, for every row: the target's cache holds all committed tokens but the last.
    """

    def __init__(
        self,
        target: Engine,
        draft: Engine | None,
        *,
        exact: bool = True,
        costs: Costs | None = None,
        vocabulary: VocabularyMap | None = None,
        draft_ahead: DraftAhead = False,
        policy: Policy | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """``costs``: what is already known of this device; ``vocabulary``: what the draft's ids mean to the target, if
        theirs differ; ``draft_ahead``: let the draft model work while the target does (attribute ``ahead``, None where
        it does not); ``policy``: used for all requests in place of what their settings say; ``grammars``: compiles for
        the target's tokenizer, None where no request may ask for a grammar."""
        self._engines = {"target": target} | ({} if draft is None else {"draft": draft})
        self._target = Stepper(target, "target", exact=exact)
        self.costs = Costs() if costs is None else costs
        self._model: Drafter | None = None
        self._trees: Drafter | None = None
        self.ahead: AheadDrafter | None = None
        if draft is not None:
            vocabulary = vocabulary or VocabularyMap.shared(draft.spec.vocab_size, target.spec.vocab_size)
            model = drafter_for(Stepper(draft, "draft"), vocabulary, target)
            self.ahead = drafts_ahead(model, self.costs, draft_ahead)
            self._model = self.ahead or model
            if vocabulary.tokenizers is None and not draft.spec.reads_features:
                self._trees = TreeDrafter(Stepper(draft, "draft"), vocabulary)
        self._pace = Pace(self.costs, self._target.widths)
        self._pace.prices.rereads = self._model is not None and self._model.rereads
        self._admission = Admission(
            target.spec, self._pace, model=self._model is not None, policy=policy, grammars=grammars
        )
        self._drafting: Drafter | None = None  # the model, if a row of this decode may ask it
        self._plain = True  # nobody drafts in this decode
        self._once = 0.0  # seconds of the target's last step that later ones of its shape do not take
        self._epoch = 0
        self.turns = Turns()
        self.turns.follow(self)

    def check(self, prompt: list[int], settings: Settings) -> None:
        """Raise UsageError or ContextError, naming the legal range, for what the models cannot take."""
        check_request(prompt, settings, self._engines, trees=self._trees is not None)

    def decode(
        self,
        requests: Items[tuple[list[int], Settings]],
        *,
        eos_token_ids: Collection[int] = (),
        stop_matcher_factory: Callable[[int], StopMatcher | None] | None = None,
        siblings: Items[Sample] | None = None,
    ) -> Iterator[Event]:
        """Decode all requests (prompt ids, settings) as one batch, one Event per request and round.

        ``stop_matcher_factory(index)`` gives request ``index`` its matcher: called each round with the new token ids,
        it answers how many of them to keep, or None to go on. ``siblings`` says of each request which answer to its
        prompt it is (by default the first, and equal prompts of the batch are a family). Raises UsageError,
        ContextError before anything runs; EngineError from any round, after which the decoder can be used again.
        """
        for prompt, settings in requests:
            self.check(prompt, settings)
            self._admission.grammar(settings, eos_token_ids)
        if len({settings.branches for _, settings in requests}) > 1:
            raise UsageError("branches must be the same for all requests of a batch: their steps are one")
        given = samples([prompt for prompt, _ in requests]) if siblings is None else siblings

        def admitted() -> list[Row]:
            return [
                self._admission.row(index, prompt, settings, sample, eos_token_ids, stop_matcher_factory)
                for index, ((prompt, settings), sample) in enumerate(zip(requests, given, strict=True))
            ]

        return self._run(admitted)

    @property
    def branches(self) -> bool:
        """Whether a request may ask for them: the draft can propose trees, and both models have graphs for them."""
        return self._trees is not None and all(engine.spec.trees for engine in self._engines.values())

    @property
    def turn(self) -> RLock:
        """Whose round it is, of the threads that share this. See ``Turns.turn``."""
        return self.turns.turn

    def forget(self) -> None:
        """Drop what is remembered of earlier requests: by free drafters their texts, successors and counts, by the
        models' caches the last one's text."""
        with self.turn:
            self._admission.forget()
            self._begin_anew()

    def _begin_anew(self) -> None:
        """The next text does not go on from what the models' caches hold."""
        self._target.forget()
        for drafter in filter(None, (self._model, self._trees)):
            drafter.forget()

    def _run(self, admitted: Callable[[], list[Row]]) -> Iterator[Event]:
        """``admitted`` makes the rows, not before the first event is asked for: they use what all earlier rows
        showed."""
        with self.turn, self.turns.round:
            if self.turns.over:
                self.turns.leave()
            rows = admitted()
            clock = self._start(rows)
        while rows:
            with self.turn, self.turns.round:
                if self.turns.over:
                    self.turns.leave()
                this = self._begin(rows, clock)
                drafts = self._propose(this, rows, clock)
                logits = self._forward(rows, drafts, clock)
                verdicts = self._verify(this, rows, drafts, logits, clock)
                events = self._commit(this, rows, drafts, verdicts)
                rows = self._retire(rows, drafts, clock)
            self.turns.catch_up()
            yield from events

    def _start(self, rows: list[Row]) -> Stopwatch:
        self._epoch += 1
        self._pace.start()
        clock = Stopwatch(self._epoch)
        if self.ahead is not None:
            self.ahead.rest()
        if not rows:
            return clock
        if any(row.settings.seed is not None and not row.sampler.deterministic for row in rows):
            self._begin_anew()  # a held cache came from other steps: its last bits are not those of a fresh one
        self._prefill(rows)
        self._pace.prices.begin(self._target.widths, ragged=self._target.ragged)
        for row in rows:
            if row.cascade is not None:
                row.cascade.begin(row.sequence.tokens)
        self._drafting = self._model if any(row.settings.draft in MODEL_DRAFTS for row in rows) else None
        if rows[0].settings.branches:
            self._drafting = self._trees
        self._plain = self._drafting is None and all(row.cascade is None for row in rows)
        if self._drafting is not None:
            policies = [row.policy for row in rows]
            self._drafting.reset(rows, self._pace.reach(policies, max(row.sequence.room for row in rows)))
            tokens = self._drafting.unread(rows)
            if not self._pace.abstains(policies, tokens):
                self._pace.read(policies, tokens, self._prefill_draft(rows))
        clock.lap("prefill")
        return clock

    def _prefill(self, rows: list[Row]) -> None:
        """The target reads the prompts; of a single prompt, what its cache does not hold already."""
        prompts, even = [row.sequence.tokens[:-1] for row in rows], any(row.sampler.deterministic for row in rows)
        if len(rows) == 1:
            rows[0].stats.held = self._target.resume(prompts[0], even=even)
        else:
            self._target.reset(len(rows), even=even)
        prefill(self._target, prompts, rows[0].stats.held)

    def _prefill_draft(self, rows: list[Row]) -> float:
        """The draft model reads the prompts. Returns the seconds, without those for recording steps."""
        assert self._drafting is not None
        started = self._time("draft")
        self._drafting.prefill(rows)
        self.costs.disturb()
        return self._time("draft") - started

    def _begin(self, rows: list[Row], clock: Stopwatch) -> Round:
        clock.resume()
        if clock.epoch != self._epoch:
            raise UsageError(
                "this answer was ended by a later one of the same pair; take one to its end before the next (of several"
                " threads the one that holds the pair's turn has it to itself)"
            )
        past = sum(row.sequence.cached for row in rows) // len(rows)
        return self._pace.tick(len(rows), past)

    def _propose(self, this: Round, rows: list[Row], clock: Stopwatch) -> list[Draft]:
        plans = self._plan(this, rows)
        clock.lap("host")
        drafts = [Draft(list(plan.tokens), by=plan.by) for plan in plans]
        lengths = [plan.length for plan in plans]
        if self._drafting is not None and any(lengths):
            lengths, watch = self._watched(this, rows, lengths)
            started = self._time("draft")
            proposed = self._drafting.propose(rows, lengths, watch)
            if (model := self._drafting) is self._model:
                took, past = self._time("draft") - started, self._pace.prices.past
                self._pace.ledger.note(self.costs.record_draft, len(rows), model.steps, took, past, model.late)
            drafts = [new if n else old for n, new, old in zip(lengths, proposed, drafts, strict=True)]
        clock.lap("draft")
        return drafts

    def _watched(self, this: Round, rows: list[Row], lengths: list[int]) -> tuple[list[int], Watch | None]:
        """How far each row may draft, and, where every row drafts with the model, the Watch that says when to stop."""
        watched = self._drafting is not None and self._drafting.watches
        fixed = any(row.settings.draft_length != "auto" for row in rows)
        if not watched or fixed or not all(lengths):
            return lengths, None
        at_once = self._drafting is not None and self._drafting.at_once
        watch = self._pace.watch(this, [row.policy for row in rows], at_once=at_once)
        return (lengths, None) if watch is None else (list(watch.limits), watch)

    def _limits(self, rows: list[Row]) -> tuple[list[int], list[int]]:
        """The longest draft of each row, and if it is the draft model's."""
        widest = self._target.engine.spec.max_verify - 1
        limits = [min(row.sequence.room - 1, widest) for row in rows]
        rooms = [self._drafting.room(row) if self._drafting else 0 for row in rows]
        return limits, [min(each) for each in zip(limits, rooms, strict=True)]

    def _plan(self, this: Round, rows: list[Row]) -> Items[Plan]:
        if self._plain:
            return [NOBODY] * len(rows)
        if self._pace.idle and all(map(dozes, rows)):
            return [NOBODY if row.cascade is None else row.cascade.doze(this) for row in rows]
        limits, of_model = self._limits(rows)
        policies, drafting = [row.policy for row in rows], self._drafting
        lengths = self._pace.lengths(this, policies, of_model, lambda: drafting.behind(rows) if drafting else 0)
        plans = [
            Plan(length=length, whole=True)
            if row.cascade is None
            else row.cascade.choose(this, row.sequence.tokens, limit, most, length)
            for row, limit, most, length in zip(rows, limits, of_model, lengths, strict=True)
        ]
        if len(rows) == 1:
            return plans
        best = together(plans, this, self._pace.prices)
        for row, plan in zip(rows, best, strict=True):
            if row.cascade is not None:
                row.cascade.settle_on(plan)
        return best

    def _forward(self, rows: list[Row], drafts: list[Draft], clock: Stopwatch) -> EachRow:
        pieces = [[row.sequence.tokens[-1], *draft.tokens] for row, draft in zip(rows, drafts, strict=True)]
        past = [row.sequence.cached for row in rows]
        before = self._recording("target")
        self._target.commit(past)
        if self._branch(drafts):
            width = max(map(len, pieces))
            sees = np.stack([trees.ancestry(draft.parents or [], width) for draft in drafts])
            logits: EachRow = self._target.tree_logits(pieces, past, sees)
        elif self.ahead is None:
            logits = self._target.all_logits(pieces, past)
        else:
            with self.ahead.meanwhile(rows, drafts):
                logits = self._target.all_logits(pieces, past)
        self._once = self._recording("target") - before
        clock.lap("target")
        return logits

    def _verify(
        self, this: Round, rows: list[Row], drafts: list[Draft], logits: EachRow, clock: Stopwatch
    ) -> list[verify.Verdict]:
        verdicts = [judging.judge(*each) for each in zip(rows, drafts, logits, strict=True)]
        lengths = [len(draft.tokens) for draft in drafts]
        for place, (row, draft, verdict) in enumerate(zip(rows, drafts, verdicts, strict=True)):
            if row.cascade is not None:
                fed = [row.sequence.tokens[-1], *draft.tokens]
                row.cascade.observe(fed, [*draft.tokens[: verdict.accepted], verdict.token], logits[place], lengths)
        clock.lap("verify")
        if not self._branch(drafts):
            width, took = self._pace.prices.step_width(lengths), clock.spent("target", "verify") - self._once
            drafted = any(lengths)
            modelled = drafted and any(draft.tokens and draft.by == "model" for draft in drafts)
            step = len(rows), width, took, self._pace.prices.past
            how = {"drafts": drafted, "modelled": modelled, "asked": any(map(asks, rows))}
            self._pace.ledger.note(self.costs.record_target, *step, **how)
            if modelled and self._drafting is not None:
                tokens, model = [verdict.accepted + 1 for verdict in verdicts], self._drafting
                policies = [row.policy for row in rows]
                self._pace.settle(this, policies, tokens, max(lengths), model.late, model.steps)
        return verdicts

    def _time(self, role: str) -> float:
        """Seconds of a clock that stands still while the engine of ``role`` records steps."""
        return perf_counter() - self._recording(role)

    def _recording(self, role: str) -> float:
        """Seconds that the engine of ``role`` has spent on recording so far (see RecordingEngine)."""
        return getattr(self._engines[role], "recording", None) or 0.0

    def _branch(self, drafts: list[Draft]) -> bool:
        return self._drafting is not None and self._drafting is self._trees and any(draft.parents for draft in drafts)

    def _commit(self, this: Round, rows: list[Row], drafts: list[Draft], verdicts: list[verify.Verdict]) -> list[Event]:
        return [self._extend(this, *each) for each in zip(range(this.rows), rows, drafts, verdicts, strict=True)]

    def _extend(self, this: Round, place: int, row: Row, draft: Draft, verdict: verify.Verdict) -> Event:
        new = [*draft.kept(verdict), verdict.token]
        if verdict.path:
            self._target.compact(place, row.sequence.cached + 1, verdict.path)
        kept, row.finish_reason = row.sequence.extend(new)
        row.sampler.chain.extend(new[:kept])
        if draft.by == "model":
            self._pace.ledger.note(row.policy.observe, verdict.outcomes, draft.classes, this.rows)
            if draft.tokens and self._drafting is not None:
                self._drafting.observe(place, verdict.accepted, verdict.path)
        if row.cascade is not None:
            row.cascade.take(row.sequence.tokens)
            if row.finish_reason is not None:
                row.cascade.finish(row.sequence.tokens)
        row.stats.record(
            drafted=draft.drafted,
            depth=draft.depth,
            tested=verdict.tested,
            accepted=min(verdict.accepted, kept),
            tokens=kept,
            by=draft.by if draft.tokens else "none",
            shift=sum(verdict.distances[:kept]) if verdict.distances else 0.0,
        )
        tokens = [(token, i < verdict.accepted) for i, token in enumerate(new[:kept])]
        stats = row.stats if row.finish_reason else None
        return Event(row.index, tokens, row.sampler.rule, row.sampler.noise.seed, row.finish_reason, stats)

    def _retire(self, rows: list[Row], drafts: list[Draft], clock: Stopwatch) -> list[Row]:
        """Fill the places of finished rows with the last live ones, in every cache; charge the round's time."""
        live = list(rows)
        for place in reversed(range(len(rows))):
            if rows[place].finish_reason is not None:
                last = live.pop()
                if place < len(live):
                    self._target.copy_row(len(live), place)
                    if self._drafting is not None:
                        self._drafting.move(len(live), place)
                    live[place] = last
        quiet = not any(map(asks, rows)) and not any(draft.tokens for draft in drafts)
        host = clock.charge([row.stats for row in rows])
        self._pace.ledger.note(self.costs.record_host, len(rows), host, quiet=quiet)
        if len(live) < len(rows):
            self._pace.enter()
        return live


def asks(row: Row) -> bool:
    """Whether the row's free drafters were asked in this round."""
    return row.cascade is not None and row.cascade.asks


def dozes(row: Row) -> bool:
    """Whether nobody drafts for the row while the draft model rests."""
    return isinstance(row.policy, AutoLength) if row.cascade is None else row.cascade.dozes
