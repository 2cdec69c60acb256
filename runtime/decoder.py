"""Decides nothing but the order of things: propose, forward, verify, extend, yield."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Items
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from time import perf_counter

import numpy as np

from ..engines.base import Engine, Logits
from ..errors import ContextError, UsageError
from . import lossy, trees, verify
from .ahead import AheadDrafter, drafts_ahead
from .cascade import Cascade, Commons, Plan
from .confidence import Watch
from .costs import Costs
from .drafters import Draft, Drafter
from .foreign_draft import model_drafter
from .noise import Noise, Purpose
from .policy import AutoLength, FixedLength, Pace, Policy, cap
from .prefill import prefill
from .sampling import Chain, Probs, Sampler, draw
from .sequence import FinishReason, Row, Sequence, StopMatcher
from .settings import LOSSY, MODEL_DRAFTS, DraftAhead, Rule, Settings
from .siblings import Sample, samples
from .stats import Clock, Stats
from .steps import Stepper
from .tree_drafter import TreeDrafter
from .vocabulary import VocabularyMap

NO_TREES = "only bundles of leadout export on provider cpu or cuda have (one from before they could: export it again)"


@dataclass(frozen=True, slots=True)
class Event:
    """What one round committed to one request: (token, proposed by the draft?) in order.

    The last event of a request carries its ``finish_reason`` and ``stats``. The end token is among the tokens.
    ``rule`` and ``seed`` are those in force (a seed was drawn if none was given).
    """

    index: int
    tokens: list[tuple[int, bool]]
    rule: Rule
    seed: int
    finish_reason: FinishReason | None = None
    stats: Stats | None = None


class Decoder:
    """Generates with a target and, if there is one, a draft. One decode at a time: a new one ends the one before.

    ``exact``: the target takes no step narrower than all of its widths round alike, so that every draft length's
    numbers are the same bits.
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
    ) -> None:
        """``costs``: what is known of this device already; ``vocabulary``: what the draft's ids mean to the target, if
        they are not the same ids; ``draft_ahead``: the draft model works while the target does, ``ahead`` (None where
        nobody does)."""
        self._engines = {"target": target} | ({} if draft is None else {"draft": draft})
        self._target = Stepper(target, "target", narrowest=target.spec.narrowest if exact else 1)
        self.costs, self._commons = Costs() if costs is None else costs, Commons()
        self._model: Drafter | None = None
        self._trees: Drafter | None = None
        self.ahead: AheadDrafter | None = None
        if draft is not None:
            vocabulary = vocabulary or VocabularyMap.shared(draft.spec.vocab_size, target.spec.vocab_size)
            model = model_drafter(Stepper(draft, "draft"), vocabulary)
            self.ahead = drafts_ahead(model, self.costs, draft_ahead)
            self._model = self.ahead or model
            if vocabulary.tokenizers is None:
                self._trees = TreeDrafter(Stepper(draft, "draft"), vocabulary)
        self._pace = Pace(self.costs, self._target.narrowest)
        self._drafting: Drafter | None = None  # the model, if a row of this decode may ask it
        self._epoch = 0

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
        given = samples([prompt for prompt, _ in requests]) if siblings is None else siblings
        rows = [
            self._admit(index, prompt, settings, sample, eos_token_ids, stop_matcher_factory)
            for index, ((prompt, settings), sample) in enumerate(zip(requests, given, strict=True))
        ]
        if len({row.settings.branches for row in rows}) > 1:
            raise UsageError("branches must be the same for all requests of a batch: their steps are one")
        return self._run(rows)

    def forget(self) -> None:
        """Drop what the free drafters remember of earlier requests: texts, successors and counts."""
        self._commons = Commons()

    def _run(self, rows: list[Row]) -> Iterator[Event]:
        clock = self._start(rows)
        while rows:
            drafts = self._propose(rows, clock)
            logits = self._forward(rows, drafts, clock)
            verdicts = self._verify(rows, drafts, logits, clock)
            events = [self._extend(*each) for each in zip(range(len(rows)), rows, drafts, verdicts, strict=True)]
            rows = self._retire(rows, clock)
            yield from events
            clock.resume()

    def _admit(
        self,
        index: int,
        prompt: list[int],
        settings: Settings,
        sample: Sample,
        eos: Collection[int],
        matchers: Callable[[int], StopMatcher | None] | None,
    ) -> Row:
        spec = self._target.engine.spec
        self._check(prompt, settings)
        ends = frozenset(settings.stop_token_ids) | (frozenset() if settings.ignore_eos else frozenset(eos))
        seed = sample.seed if settings.seed is None else settings.seed
        chain = Chain(settings, spec.vocab_size, prompt, ends)
        stop = matchers(index) if matchers is not None else None
        policy = self._policy(settings)
        return Row(
            index=index,
            settings=settings,
            sequence=Sequence(list(prompt), len(prompt), settings.max_new_tokens, spec.max_context, ends, stop),
            sampler=Sampler(settings.acceptance_rule, chain, Noise(seed, sample.number)),
            policy=policy,
            cascade=self._cascade(settings, policy, sample),
        )

    def _check(self, prompt: list[int], settings: Settings) -> None:
        spec = self._target.engine.spec
        if not prompt:
            raise UsageError("a prompt must have at least one token, not 0")
        if min(prompt) < 0 or max(prompt) >= spec.vocab_size:
            raise UsageError(
                f"prompt token ids must be from 0 to {spec.vocab_size - 1}, not {min(prompt)}..{max(prompt)}"
            )
        if len(prompt) >= spec.max_context:
            raise ContextError(f"the prompt has {len(prompt)} tokens; this target takes at most {spec.max_context - 1}")
        if settings.draft != "none" and settings.draft_length != "auto" and settings.draft_length >= spec.max_verify:
            raise UsageError(f"draft_length {settings.draft_length}: this target verifies 0 to {spec.max_verify - 1}")
        if settings.draft == "model" and self._model is None:
            raise UsageError("draft 'model' needs a draft model, and there is none (use: draft auto or none)")
        if settings.branches:
            self._check_trees(settings)

    def _check_trees(self, settings: Settings) -> None:
        spec, nodes = self._target.engine.spec, sum(accumulate(settings.branches, mul))
        if self._model is not None and self._trees is None:
            raise UsageError("branches: a draft with another tokenizer proposes no trees (without branches it does)")
        for name, engine in self._engines.items():
            if not engine.spec.trees:
                raise UsageError(f"branches: the {name} has no graph for trees: {NO_TREES}")
        if nodes >= spec.max_verify:
            raise UsageError(f"branches: {nodes} nodes; this target verifies 1 to {spec.max_verify - 1}")

    def _policy(self, settings: Settings) -> Policy:
        if settings.draft not in MODEL_DRAFTS or self._model is None:
            return FixedLength(0)
        if settings.branches:
            return FixedLength(len(settings.branches))
        if settings.draft == "model" and settings.draft_length != "auto":
            return FixedLength(settings.draft_length)
        return AutoLength(self._pace)

    def _cascade(self, settings: Settings, policy: Policy, sample: Sample) -> Cascade | None:
        if settings.draft in ("model", "none"):
            return None
        model = policy if isinstance(policy, AutoLength) else None
        return Cascade(settings, self._commons, self._pace, model, sample.family)

    def _start(self, rows: list[Row]) -> Clock:
        self._epoch += 1
        self._pace.start()
        clock = Clock(self._epoch)
        if rows:
            self._target.engine.reset(len(rows))
            prefill(self._target, [row.sequence.tokens[:-1] for row in rows])
            for row in rows:
                if row.cascade is not None:
                    row.cascade.take(row.sequence.tokens)
            self._drafting = self._model if any(row.settings.draft in MODEL_DRAFTS for row in rows) else None
            if rows[0].settings.branches:
                self._drafting = self._trees
            if self._drafting is not None:
                self._drafting.reset(len(rows))
                self._drafting.prefill(rows)
            clock.lap("prefill")
        return clock

    def _propose(self, rows: list[Row], clock: Clock) -> list[Draft]:
        if clock.epoch != self._epoch:
            raise UsageError("this decode was ended by a later one of the same decoder; start it again")
        plans = self._plan(rows)
        clock.lap("host")
        drafts = [Draft(list(plan.tokens), by=plan.by) for plan in plans]
        lengths = [plan.length for plan in plans]
        if self._drafting is not None and any(lengths):
            lengths, watch = self._watched(rows, lengths)
            started = perf_counter()
            proposed = self._drafting.propose(rows, lengths, watch)
            if self._drafting is self._model:
                took = perf_counter() - started
                self.costs.record_draft(len(rows), self._drafting.steps, took, mean_context(rows))
            drafts = [new if n else old for n, new, old in zip(lengths, proposed, drafts, strict=True)]
        clock.lap("draft")
        return drafts

    def _watched(self, rows: list[Row], lengths: list[int]) -> tuple[list[int], Watch | None]:
        """Where every draft of the round may be cut anywhere, how far each may go, and what says when to stop."""
        watched = self._drafting is not None and self._drafting.watches
        if not watched or not all(lengths) or any(row.sampler.rule != "greedy" for row in rows):
            return lengths, None
        watch = self._pace.watch([row.policy for row in rows], self._limits(rows)[1])
        return (lengths, None) if watch is None else (list(watch.limits), watch)

    def _limits(self, rows: list[Row]) -> tuple[list[int], list[int]]:
        """The longest draft of each row, and if it is the draft model's."""
        widest = self._target.engine.spec.max_verify - 1
        limits = [min(row.sequence.room - 1, widest) for row in rows]
        rooms = [self._drafting.room(row) if self._drafting else 0 for row in rows]
        return limits, [min(each) for each in zip(limits, rooms, strict=True)]

    def _plan(self, rows: list[Row]) -> list[Plan]:
        self._pace.tick(mean_context(rows))
        limits, of_model = self._limits(rows)
        lengths = self._pace.lengths([row.policy for row in rows], of_model, len(rows))
        plans = [
            Plan("model", length=length)
            if row.cascade is None
            else row.cascade.choose(row.sequence.tokens, limit, most, length, len(rows))
            for row, limit, most, length in zip(rows, limits, of_model, lengths, strict=True)
        ]
        return plans if len(rows) == 1 else self._cut(plans)

    def _cut(self, plans: list[Plan]) -> list[Plan]:
        """No row's long draft makes the others' step wider than all together gain by it."""
        wanted = [(plan.expected, plan.drafts) if plan.expected else ((1.0,), 0) for plan in plans]
        fixed = max((plan.drafts for plan in plans if not plan.expected), default=0)
        modelled = any(plan.length for plan in plans)
        seconds = (self._pace.seconds if modelled else self._pace.seconds_without_draft)(len(plans))
        longest = cap(wanted, seconds, fixed)
        return [plan.cut(longest) for plan in plans]

    def _forward(self, rows: list[Row], drafts: list[Draft], clock: Clock) -> Logits:
        pieces = [[row.sequence.tokens[-1], *draft.tokens] for row, draft in zip(rows, drafts, strict=True)]
        past = [row.sequence.cached for row in rows]
        width = max(self._target.narrowest, *map(len, pieces))
        if any(draft.parents for draft in drafts):
            sees = np.stack([trees.ancestry(draft.parents or [], width) for draft in drafts])
            logits = self._target.tree_logits(pieces, past, sees)
            clock.lap("target")
            return logits
        with nullcontext() if self.ahead is None else self.ahead.meanwhile(rows, drafts):
            logits = self._target.all_logits(pieces, past)
        self.costs.record_target(len(rows), width, clock.lap("target"), mean_context(rows))
        return logits

    def _verify(self, rows: list[Row], drafts: list[Draft], logits: Logits, clock: Clock) -> list[verify.Verdict]:
        verdicts = [judge(*each) for each in zip(rows, drafts, logits, strict=True)]
        for row, draft, scores, verdict in zip(rows, drafts, logits, verdicts, strict=True):
            if row.cascade is not None:
                fed = [row.sequence.tokens[-1], *draft.tokens]
                row.cascade.observe(fed, [*draft.tokens[: verdict.accepted], verdict.token], scores)
        clock.lap("verify")
        return verdicts

    def _extend(self, place: int, row: Row, draft: Draft, verdict: verify.Verdict) -> Event:
        new = [*draft.kept(verdict), verdict.token]
        self._target.compact(place, row.sequence.cached + 1, verdict.path)
        kept, row.finish_reason = row.sequence.extend(new)
        row.sampler.chain.extend(new[:kept])
        if draft.by == "model":
            row.policy.observe(verdict.tested, verdict.accepted, draft.classes)
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
            shift=sum(verdict.distances[:kept]),
        )
        tokens = [(token, i < verdict.accepted) for i, token in enumerate(new[:kept])]
        stats = row.stats if row.finish_reason else None
        return Event(row.index, tokens, row.sampler.rule, row.sampler.noise.seed, row.finish_reason, stats)

    def _retire(self, rows: list[Row], clock: Clock) -> list[Row]:
        """Fill the places of finished rows with the last live ones, in every cache; charge the round's time."""
        live = list(rows)
        for place in reversed(range(len(rows))):
            if rows[place].finish_reason is not None:
                last = live.pop()
                if place < len(live):
                    self._target.engine.copy_row(len(live), place)
                    if self._drafting is not None:
                        self._drafting.move(len(live), place)
                    live[place] = last
        self.costs.record_host(len(rows), clock.charge([row.stats for row in rows]))
        return live


def mean_context(rows: list[Row]) -> int:
    """Tokens of a row before its step, on average."""
    return sum(row.sequence.cached for row in rows) // len(rows)


def judge(row: Row, draft: Draft, logits: Logits) -> verify.Verdict:
    """Apply the row's rule. ``logits`` [>= K+1, V]: row i is the target's after the prefix and x_1..x_i."""
    if draft.parents is not None:
        return judge_tree(row, draft, draft.parents, logits)
    x, sampler, start = draft.tokens, row.sampler, row.sequence.length
    if sampler.rule in ("greedy", "coupled"):
        return verify.match(x, lambda i: sampler.choose(logits[i], x[:i], start + i))
    if sampler.rule in LOSSY:
        return judge_lossy(row, draft, logits)
    coins = sampler.noise.uniforms(start, Purpose.ACCEPT, len(x))
    final = sampler.noise.uniforms(start, Purpose.FINAL, 1)[0]

    def p(i: int) -> Probs:
        return sampler.chain.distribution(logits[i], x[:i])

    def pick(law: Probs) -> int:
        return draw(law, final)

    if sampler.rule == "block" and draft.q is not None:
        return verify.block(x, draft.q, p, coins, pick)
    return verify.rejection(x, draft.q, p, coins, pick)


def judge_tree(row: Row, draft: Draft, parents: list[int], logits: Logits) -> verify.Verdict:
    """The same for a tree; ``logits`` [> nodes, V]: row n + 1 is the target's after node n."""
    x, sampler, start, q = draft.tokens, row.sampler, row.sequence.length, draft.q

    def before(node: int) -> list[int]:
        return [x[n] for n in trees.path(parents, node)]

    def choose(node: int) -> int:
        drafted = before(node)
        return sampler.choose(logits[node + 1], drafted, start + len(drafted))

    if q is None:
        return trees.descend(parents, x, choose)
    coins = sampler.noise.uniforms(start, Purpose.ACCEPT, len(x))
    final = sampler.noise.uniforms(start, Purpose.FINAL, 1)[0]
    return trees.recursive_rejection(
        parents,
        x,
        lambda node: q[node + 1],
        lambda node: sampler.chain.distribution(logits[node + 1], before(node)),
        coins,
        lambda law: draw(law, final),
    )


def judge_lossy(row: Row, draft: Draft, logits: Logits) -> verify.Verdict:
    """The same for the lossy rules."""
    x, sampler, start, settings = draft.tokens, row.sampler, row.sequence.length, row.settings
    leniency = lossy.LENIENCY if settings.leniency is None else settings.leniency
    if settings.temperature == 0:

        def weights(i: int) -> Probs:
            return sampler.chain.weights(logits[i], x[:i])

        return lossy.lenient_greedy(x, weights, lambda i: sampler.choose(logits[i], x[:i], start + i), leniency)
    coins = sampler.noise.uniforms(start, Purpose.ACCEPT, len(x))
    final = sampler.noise.uniforms(start, Purpose.FINAL, 1)[0]
    mass = lossy.lenient(leniency)
    if sampler.rule == "typical":
        epsilon = lossy.EPSILON if settings.typical_epsilon is None else settings.typical_epsilon
        mass = lossy.typical(epsilon, lossy.DELTA if settings.typical_delta is None else settings.typical_delta)
    return lossy.relaxed(
        x, draft.q, lambda i: sampler.chain.distribution(logits[i], x[:i]), mass, coins, lambda law: draw(law, final)
    )
