"""Decides nothing but the order of things: propose, forward, verify, extend, yield."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Items
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter

from ..engines.base import Engine, Logits
from ..errors import ContextError, UsageError
from . import verify
from .ahead import AheadDrafter
from .cascade import Cascade, Commons, Plan
from .costs import Costs
from .drafters import Draft, Drafter, ModelDrafter
from .noise import Noise, Purpose
from .policy import AutoLength, FixedLength, Pace, Policy, cap
from .sampling import Chain, Probs, Sampler, draw
from .sequence import FinishReason, Row, Sequence, StopMatcher
from .settings import MODEL_DRAFTS, DraftAhead, Rule, Settings
from .stats import Clock, Stats
from .steps import Stepper


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
    ``draft_ahead``: the draft works while the target does ("auto": while that is seen to pay); ``ahead`` is who does.
    Between rounds, for every row: the target's cache holds all committed tokens but the last.
    """

    def __init__(
        self, target: Engine, draft: Engine | None, *, exact: bool = True, draft_ahead: DraftAhead = False
    ) -> None:
        self._target = Stepper(target, "target", narrowest=target.spec.narrowest if exact else 1)
        self.costs, self._commons = Costs(), Commons()
        self._model: Drafter | None = None
        self.ahead: AheadDrafter | None = None
        if draft is not None:
            self._model = model = ModelDrafter(Stepper(draft, "draft"), target.spec.vocab_size)
            if draft_ahead:
                self._model = self.ahead = AheadDrafter(model, self.costs, measured=draft_ahead == "auto")
        self._pace = Pace(self.costs, self._target.narrowest)
        self._drafting: Drafter | None = None  # the model, if a row of this decode may ask it
        self._epoch = 0

    def decode(
        self,
        requests: Items[tuple[list[int], Settings]],
        *,
        eos_token_ids: Collection[int] = (),
        stop_matcher_factory: Callable[[int], StopMatcher | None] | None = None,
    ) -> Iterator[Event]:
        """Decode all requests (prompt ids, settings) as one batch, one Event per request and round.

        ``stop_matcher_factory(index)`` gives request ``index`` its matcher: called each round with the new token ids,
        it answers how many of them to keep, or None to go on. Raises UsageError, ContextError before anything runs;
        EngineError from any round, after which the decoder can be used again.
        """
        rows = [
            self._admit(index, prompt, settings, eos_token_ids, stop_matcher_factory)
            for index, (prompt, settings) in enumerate(requests)
        ]
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
        eos: Collection[int],
        matchers: Callable[[int], StopMatcher | None] | None,
    ) -> Row:
        spec = self._target.engine.spec
        self._check(prompt, settings)
        ends = frozenset(settings.stop_token_ids) | (frozenset() if settings.ignore_eos else frozenset(eos))
        seed = secrets.randbits(63) if settings.seed is None else settings.seed
        chain = Chain(settings, spec.vocab_size, prompt, ends)
        stop = matchers(index) if matchers is not None else None
        policy = self._policy(settings)
        return Row(
            index=index,
            settings=settings,
            sequence=Sequence(list(prompt), len(prompt), settings.max_new_tokens, spec.max_context, ends, stop),
            sampler=Sampler(settings.acceptance_rule, chain, Noise(seed)),
            policy=policy,
            cascade=self._cascade(settings, policy),
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

    def _policy(self, settings: Settings) -> Policy:
        if settings.draft not in MODEL_DRAFTS or self._model is None:
            return FixedLength(0)
        if settings.draft == "model" and settings.draft_length != "auto":
            return FixedLength(settings.draft_length)
        return AutoLength(self._pace)

    def _cascade(self, settings: Settings, policy: Policy) -> Cascade | None:
        if settings.draft in ("model", "none"):
            return None
        model = policy if isinstance(policy, AutoLength) else None
        return Cascade(settings, self._commons, self._pace, model)

    def _start(self, rows: list[Row]) -> Clock:
        self._epoch += 1
        self._pace.start()
        clock = Clock(self._epoch)
        if rows:
            self._target.engine.reset(len(rows))
            prompts = [row.sequence.tokens[:-1] for row in rows]
            if any(prompts):
                self._target.last_logits(prompts, [0] * len(rows))
            for row in rows:
                if row.cascade is not None:
                    row.cascade.take(row.sequence.tokens)
            self._drafting = self._model if any(row.settings.draft in MODEL_DRAFTS for row in rows) else None
            if self._drafting is not None:
                self._drafting.reset(len(rows))
                self._drafting.prefill(rows)
            clock.lap("prefill")
        return clock

    def _propose(self, rows: list[Row], clock: Clock) -> list[Draft]:
        if clock.epoch != self._epoch:
            raise UsageError("this decode was ended by a later one of the same decoder; start it again")
        plans = self._plan(rows)
        drafts = [Draft(list(plan.tokens), by=plan.by) for plan in plans]
        lengths = [plan.length for plan in plans]
        if self._drafting is not None and any(lengths):
            started = perf_counter()
            proposed = self._drafting.propose(rows, lengths)
            self.costs.record_draft(len(rows), self._drafting.steps, perf_counter() - started)
            drafts = [new if n else old for n, new, old in zip(lengths, proposed, drafts, strict=True)]
        clock.lap("draft")
        return drafts

    def _plan(self, rows: list[Row]) -> list[Plan]:
        self._pace.tick()
        widest = self._target.engine.spec.max_verify - 1
        limits = [min(row.sequence.room - 1, widest) for row in rows]
        rooms = [self._drafting.room(row) if self._drafting else 0 for row in rows]
        of_model = [min(each) for each in zip(limits, rooms, strict=True)]
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
        with nullcontext() if self.ahead is None else self.ahead.meanwhile(rows, drafts):
            logits = self._target.all_logits(pieces, [row.sequence.cached for row in rows])
        width = max(self._target.narrowest, *map(len, pieces))
        self.costs.record_target(len(rows), width, clock.lap("target"))
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
        new = [*draft.tokens[: verdict.accepted], verdict.token]
        kept, row.finish_reason = row.sequence.extend(new)
        row.sampler.chain.extend(new[:kept])
        if draft.by == "model":
            row.policy.observe(verdict.tested, verdict.accepted)
            if draft.tokens and self._drafting is not None:
                self._drafting.observe(place, verdict.accepted)
        if row.finish_reason is not None and row.cascade is not None:
            row.cascade.finish(row.sequence.tokens)
        row.stats.record(
            drafted=len(draft.tokens),
            tested=verdict.tested,
            accepted=min(verdict.accepted, kept),
            tokens=kept,
            by=draft.by if draft.tokens else "none",
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


def judge(row: Row, draft: Draft, logits: Logits) -> verify.Verdict:
    """Apply the row's rule. ``logits`` [>= K+1, V]: row i is the target's after the prefix and x_1..x_i."""
    x, sampler, start = draft.tokens, row.sampler, row.sequence.length
    if sampler.rule in ("greedy", "coupled"):
        return verify.match(x, lambda i: sampler.choose(logits[i], x[:i], start + i))
    coins = sampler.noise.uniforms(start, Purpose.ACCEPT, len(x))
    final = sampler.noise.uniforms(start, Purpose.FINAL, 1)[0]

    def p(i: int) -> Probs:
        return sampler.chain.distribution(logits[i], x[:i])

    def pick(law: Probs) -> int:
        return draw(law, final)

    if sampler.rule == "block" and draft.q is not None:
        return verify.block(x, draft.q, p, coins, pick)
    return verify.rejection(x, draft.q, p, coins, pick)
