"""What speculation is worth here: the fastest plain decode against the pair, alternating in one process.

Both sides are timed after the prompt is in; ``speedup_with_prompt`` counts the prompt too. The plain side is never
slowed: width 1, exactness off, the fastest graph variant for its number of rows (opened beside the pair's, if exactness
asks for another).
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from ..engines import Engine, Logits, Tokens
from ..engines.base import EachRow, Sight
from ..engines.providers import version_of
from ..engines.wrapped import Wrapped
from .controller.costs import Costs, Step
from .controller.tempo import Tempo
from .decoder import Decoder
from .device import processor
from .divergence import first_divergence
from .pair import Pair
from .samples import Sample, check_sample
from .settings import MAX_GUESS_LENGTH, Settings
from .stats import Stats

TIMED_STEPS = 9


class Timed(Wrapped):
    """An engine that notes when it worked on rounds, as (from, to) in ``spans``. Steps that read a prompt are not
    noted: those wider than any draft, those on an empty cache, and, where the engine takes prompts in narrower steps
    than that, those of several tokens of which only the last one's logits are wanted. (A draft that catches up with
    others' tokens in such a step looks like a prompt, too.) Each call here adds to a small model's step, so there are
    few."""

    def __init__(self, engine: Engine, spans: list[tuple[float, float]]) -> None:
        super().__init__(engine)
        self._spans = spans
        self._most = MAX_GUESS_LENGTH + 1 if engine.spec.max_step > MAX_GUESS_LENGTH + 1 else 2  # with one's logits

    def forward(self, tokens: Tokens, past_lens: Tokens, logit_index: Tokens | None = None) -> Logits:
        start = perf_counter()
        logits = self.engine.forward(tokens, past_lens, logit_index)
        most = MAX_GUESS_LENGTH + 1 if logit_index is None or logit_index.shape[1] > 1 else self._most
        if tokens.shape[1] <= most and past_lens[0]:
            self._spans.append((start, perf_counter()))
        return logits

    def forward_tree(self, tokens: Tokens, past_lens: Tokens, sees: Sight) -> Logits:
        start = perf_counter()
        logits = super().forward_tree(tokens, past_lens, sees)
        self._spans.append((start, perf_counter()))
        return logits

    def forward_ragged(self, pieces: Sequence[Sequence[int]], past_lens: Sequence[int]) -> EachRow:
        start = perf_counter()
        logits = super().forward_ragged(pieces, past_lens)
        self._spans.append((start, perf_counter()))
        return logits

    def _row_logits(self, tokens: Sequence[int], past_len: int, last: bool) -> Logits:
        assert self._row_step is not None
        start = perf_counter()
        logits = self._row_step(tokens, past_len, last)
        if len(tokens) <= MAX_GUESS_LENGTH + 1 and past_len:
            self._spans.append((start, perf_counter()))
        return logits


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of ``spans``, which overlap where a draft model works while the target does."""
    total, end = 0.0, 0.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


@dataclasses.dataclass(slots=True)
class Totals:
    """What one side did: its seconds altogether (``wall``; ``walls``: of each group, without its prompts), on prompts,
    and inside engines during rounds; its counters, and the tokens of each answer."""

    wall: float = 0.0
    prompt: float = 0.0
    engines: float = 0.0
    stats: list[Stats] = dataclasses.field(default_factory=list)
    outputs: list[list[int]] = dataclasses.field(default_factory=list)
    walls: list[float] = dataclasses.field(default_factory=list)

    def count(self, name: str) -> int:
        """A counter of ``Stats``, summed."""
        return int(sum(getattr(stats, name) for stats in self.stats))

    def by_drafter(self) -> dict[str, dict[str, int]]:
        """``Stats.by_drafter``, summed."""
        total: dict[str, Counter[str]] = defaultdict(Counter)
        for stats in self.stats:
            for name, counts in stats.by_drafter.items():
                total[name].update(counts)
        return {name: dict(counts) for name, counts in total.items()}

    @property
    def tokens_per_second(self) -> float:
        return self.count("tokens") / (self.wall - self.prompt)


Group = list[list[int]]


class Bench:
    """One measurement of one pair: ``run`` gives the report that `leadout bench --json` prints."""

    def __init__(
        self, pair: Pair, settings: Mapping[str, Any], batch_size: int = 1, plain: Engine | None = None
    ) -> None:
        """``settings`` as for ``Pair.generate``, but UsageError for draft ``siblings``: each prompt is asked once.
        ``plain``: what decodes plainly, if not the pair's own target."""
        self.pair, self.batch_size = pair, batch_size
        self.settings = pair.settings(settings)
        check_sample(self.settings, Sample(), 1)
        self.plain_settings = dataclasses.replace(self.settings, draft="none", branches=())
        self._spans: list[tuple[float, float]] = []
        self.target = Timed(pair.target, self._spans)
        self.draft = None if pair.draft is None else Timed(pair.draft, self._spans)
        tempo = Tempo()
        alone = Timed(plain or pair.target, self._spans)  # what watching takes, both sides pay
        self.plain = Decoder(alone, None, exact=False, costs=Costs(tempo=tempo), grammars=pair.grammars)
        shared: dict[str, Any] = {"exact": pair.exact, "vocabulary": pair.vocabulary, "draft_ahead": pair.draft_ahead}
        shared["grammars"] = pair.grammars
        self.speculative = Decoder(self.target, self.draft, costs=Costs(pair.known, tempo), **shared)
        # has not seen the batch's answers
        self.single = Decoder(self.target, self.draft, costs=Costs(pair.known, tempo), **shared)
        self._warm: dict[str, dict[Step, float]] = {}  # what each side had paid before anything was timed

    def run(self, prompts: Group, progress: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
        """Measure every group of ``batch_size`` prompts, alternating which side goes first."""
        sides = {"plain": self.time_plain, "speculative": self.time_speculative}
        if self.batch_size > 1:
            sides["alone"] = self._alone
        totals = {name: Totals() for name in sides}
        groups = [prompts[i : i + self.batch_size] for i in range(0, len(prompts), self.batch_size)]
        for side in sides.values():
            side(groups[0], Totals())
        for decoder in (self.plain, self.speculative, self.single):
            decoder.forget()  # no drafter may know an answer from the run that warmed up, and no cache a prompt
        self._warm = {"plain": self.plain.costs.weights, "speculative": self.speculative.costs.weights}
        for number, group in enumerate(groups):
            for name in sorted(sides, reverse=number % 2 == 1):
                sides[name](group, totals[name])
            progress(f"{min((number + 1) * self.batch_size, len(prompts))} of {len(prompts)} prompts")
        return self._report(prompts, groups, totals)

    def time_plain(self, group: Group, totals: Totals) -> None:
        """Add one group, decoded by the target alone at its fastest."""
        self._time(self.plain, group, self.plain_settings, totals)

    def time_speculative(self, group: Group, totals: Totals) -> None:
        """Add one group, decoded by the pair."""
        self._time(self.speculative, group, self.settings, totals)

    def _alone(self, group: Group, totals: Totals) -> None:
        for prompt in group:
            self._time(self.single, [prompt], self.settings, totals)

    def _time(self, decoder: Decoder, group: Group, settings: Settings, totals: Totals) -> None:
        self._spans.clear()
        start = perf_counter()
        outputs, stats = decode(decoder, group, settings, self.pair)
        wall = perf_counter() - start
        totals.wall += wall
        totals.walls.append(wall - sum(row.seconds["prefill"] for row in stats))
        totals.engines += covered(self._spans)
        totals.prompt += sum(row.seconds["prefill"] for row in stats)
        totals.stats += stats
        totals.outputs += outputs

    def _report(self, prompts: Group, groups: list[Group], totals: dict[str, Totals]) -> dict[str, Any]:
        plain, speculative = totals["plain"], totals["speculative"]
        tested, rounds = speculative.count("tested"), speculative.count("rounds")
        rows = len(groups[0])  # fewer than was asked for where there are fewer prompts
        report: dict[str, Any] = {
            "plain": {"tokens_per_second": plain.tokens_per_second},
            "speculative": {"tokens_per_second": speculative.tokens_per_second},
            "speedup": speculative.tokens_per_second / plain.tokens_per_second,
            "speedup_median": median(a / b for a, b in zip(plain.walls, speculative.walls, strict=True)),
            "speedup_with_prompt": (speculative.count("tokens") / speculative.wall)
            / (plain.count("tokens") / plain.wall),
            "acceptance_rate": speculative.count("accepted") / tested if tested else 0.0,
            "tokens_per_round": speculative.count("tokens") / rounds,
            "distance": sum(row.shift for row in speculative.stats) / speculative.count("tokens"),
            "host_share": 1.0 - speculative.engines / (speculative.wall - speculative.prompt),
            "seconds": {
                name: sum(row.seconds[name] for row in speculative.stats) for name in speculative.stats[0].seconds
            },
            "by_drafter": speculative.by_drafter(),
            "draft_ahead": None if (ahead := self.speculative.ahead) is None else ahead.counts(),
            "prompts": len(prompts),
            "tokens": speculative.count("tokens"),
            "batch_size": rows,
        }
        report |= self._prediction(totals, rows)
        if "alone" in totals:
            alone = totals["alone"].tokens_per_second
            report["alone"] = {"tokens_per_second": alone}
            report["batch_gain"] = speculative.tokens_per_second / alone
        return report | self._identity(prompts, groups, totals) | surroundings()

    def _identity(self, prompts: Group, groups: list[Group], totals: dict[str, Totals]) -> dict[str, Any]:
        """Whether the answers are those of the target alone, exact; and where the plain side, whose steps are one token
        wide, differs from these: by a near-tie or a fault."""
        if self.settings.acceptance_rule not in ("greedy", "coupled") or self.settings.branches:
            return {"identical_outputs": None, "plain_divergences": None}
        reference: list[list[int]] = []
        for group in groups:
            self.speculative.forget()
            reference += decode(self.speculative, group, self.plain_settings, self.pair)[0]
        divergences = []
        if self.settings.acceptance_rule == "greedy":
            pairs = zip(prompts, reference, totals["plain"].outputs, strict=True)
            found = (first_divergence(self.pair, *answers, self.plain_settings) for answers in pairs)
            divergences = [dataclasses.asdict(divergence) for divergence in found if divergence is not None]
        return {
            "identical_outputs": totals["speculative"].outputs == reference,
            "plain_divergences": divergences,
        }

    def _prediction(self, totals: dict[str, Totals], rows: int) -> dict[str, Any]:
        """What the cost tables, from which every draft length is chosen, say that the measured rounds took: the speedup
        that follows from them, and the share of each side's time that they do not explain (outliers, the caller)."""
        if self.settings.branches:  # the tables are of chains
            return {"predicted_speedup": None, "unaccounted": {}, "cost_ms": self._costs(rows)}
        predicted, unaccounted = {}, {}
        for name, decoder in (("plain", self.plain), ("speculative", self.speculative)):
            side, before = totals[name], self._warm[name]
            paid = {step: weight - before.get(step, 0.0) for step, weight in decoder.costs.weights.items()}
            seconds = sum(decoder.costs.price(paid).values())
            predicted[name] = side.count("tokens") / seconds
            unaccounted[name] = 1.0 - seconds / (side.wall - side.prompt)
        return {
            "predicted_speedup": predicted["speculative"] / predicted["plain"],
            "unaccounted": unaccounted,
            "cost_ms": self._costs(rows),
        }

    def _costs(self, rows: int) -> dict[str, Any]:
        """Milliseconds that each part of a round typically takes with so many rows, measured in the loop."""
        costs, plain = self.speculative.costs, self.plain.costs
        widths = sorted({step.width for step in costs.counts if step.part == "target"})
        target = {1: 1e3 * (plain.plain(rows, 1) or 0.0)}
        target |= {width: 1e3 * seconds for width, seconds in enumerate(costs.target(rows) or ()) if width in widths}
        return {
            "target": target,
            "draft": 1e3 * costs.draft(rows),
            "host": 1e3 * costs.host(rows),
            "plain_host": 1e3 * plain.host(rows),
        }


def decode(decoder: Decoder, group: Group, settings: Settings, pair: Pair) -> tuple[Group, list[Stats]]:
    """The new tokens and the counters of every prompt of a group."""
    outputs: Group = [[] for _ in group]
    stats: dict[int, Stats] = {}
    eos = pair.bundle.manifest.models["target"].eos_token_ids
    for event in decoder.decode([(prompt, settings) for prompt in group], eos_token_ids=eos):
        outputs[event.index] += [token for token, _ in event.tokens]
        if event.stats is not None:
            stats[event.index] = event.stats
    return outputs, [stats[index] for index in range(len(group))]


def step_ms(engine: Engine, rows: int, width: int, past: Tokens) -> float:
    """Milliseconds of one step of ``width`` tokens a row on top of ``past`` (the median of a few)."""
    engine.reset(rows)
    past = np.minimum(past, engine.spec.max_context - width)
    engine.reserve(int(past.max()) + width)
    tokens = np.zeros((rows, width), np.int64)
    seconds = []
    for _ in range(TIMED_STEPS):
        start = perf_counter()
        engine.forward(tokens, past)
        seconds.append(perf_counter() - start)
    return 1e3 * median(seconds)


def surroundings() -> dict[str, Any]:
    """The hardware and the versions a measurement belongs to."""
    names = ("leadout", "onnxruntime", "onnxruntime-gpu", "numpy", "tokenizers")
    versions = {"python": platform.python_version()}
    versions |= {name: version for name in names if (version := version_of(name)) is not None}
    return {
        "hardware": {"processor": processor(), "cores": os.cpu_count(), "system": platform.system()},
        "versions": versions,
    }
