"""Decides what speculation promises on this device, from costs measured in the loop and the acceptance of the user's
own prompts; and holds the promise against what is then observed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..engines import Engine
from ..engines.base import Widths
from ..errors import UsageError
from .bench import Bench, Group, decode
from .controller.costs import Cost, Costs
from .controller.policy import FixedLength
from .controller.rounds import Round
from .controller.tempo import Tempo
from .decoder import Decoder
from .pair import Pair
from .settings import MAX_DRAFT_LENGTH
from .stats import Stats
from .vocabulary import VocabularyMap

_EACH = 5  # rounds of each draft length, at least
_CONTEXT_TOKENS = 64  # new tokens on each longer context
# Beyond these the measurements are not believed, because other work must have run beside them: how much faster than
# plain decoding the pair may seem without drafts (it is no faster), and how far a promise may be off what was then
# observed.
_MOST_UNDRAFTED, _MOST_OFF = 1.3, 0.3


class EachInTurn(FixedLength):
    """Another length each round, the same for all rows: every one from 0 to ``longest`` equally often and in no order.
    ``rounds`` counts them."""

    def __init__(self, longest: int) -> None:
        super().__init__(0)
        self.longest, self._lengths, self.rounds = longest, _shuffled(longest), 0
        self._last: Round | None = None

    def length(self, this: Round) -> int:
        if this is not self._last:
            self._last, self._fixed, self.rounds = this, next(self._lengths), self.rounds + 1
        return self._fixed


class Sweep(Decoder):
    """Drafts ``EachInTurn``: so that each step is measured as it is in life, after others and with cold caches, and all
    of them in the same minutes."""

    def __init__(
        self,
        target: Engine,
        draft: Engine,
        *,
        exact: bool,
        tempo: Tempo | None = None,
        vocabulary: VocabularyMap | None = None,
    ) -> None:
        self.lengths = EachInTurn(min(MAX_DRAFT_LENGTH, target.spec.max_verify - 1))
        costs = Costs(tempo=tempo)
        super().__init__(target, draft, exact=exact, costs=costs, vocabulary=vocabulary, policy=self.lengths)

    @property
    def rereads(self) -> bool:
        """Whether the draft reads again what was accepted of it."""
        return self._pace.prices.rereads

    @property
    def widths(self) -> Widths:
        """Those that the target stepped with."""
        return self._target.widths


def _shuffled(longest: int) -> Iterator[int]:
    order, rng = list(range(longest + 1)), random.Random(0)
    while True:
        rng.shuffle(order)
        yield from order


@dataclass(frozen=True, slots=True)
class Promise:
    """What drafts of one draft model are worth with ``rows`` rows a step: ``speedup[k]`` over the fastest plain decode
    and ``tokens[k]`` a row and round with drafts of k, ``acceptance`` of tested drafts, ``draft_ms`` a drafted token,
    ``plain_ms`` and ``round_ms[k]`` a round."""

    rows: int
    speedup: list[float]
    tokens: list[float]
    acceptance: float
    draft_ms: float
    plain_ms: float
    round_ms: list[float]

    @property
    def best(self) -> int:
        return self.speedup.index(max(self.speedup))


class Tuner:
    """One measurement of one pair. ``measure`` per number of rows, then ``costs`` to keep."""

    def __init__(
        self, pair: Pair, settings: dict[str, Any], longest_context: int = 1024, plain: Engine | None = None
    ) -> None:
        """``settings`` as for ``Pair.generate``, except who drafts and how much. ``plain``: the engine that decodes
        plainly, by default the pair's target. Steps are measured on the prompts as they are, and on contexts of up to
        ``longest_context`` tokens. Raises UsageError for a bundle without a draft."""
        if pair.draft is None:
            raise UsageError(
                "this bundle has no draft model; nothing to tune (one of another is measured by --draft BUNDLE)"
            )
        self.pair, self.settings = pair, pair.settings(settings | {"draft": "model"})
        self._given, self._longest, self._tempo = settings, longest_context, Tempo()
        plainly = Costs(tempo=self._tempo)
        self._bare, self._plain = plain, Decoder(plain or pair.target, None, exact=False, costs=plainly)
        self._sweep = self._sweep_of(pair.draft)

    def _sweep_of(self, draft: Engine) -> Sweep:
        own = self.pair.vocabulary if draft is self.pair.draft else None  # others have the target's ids
        return Sweep(self.pair.target, draft, exact=self.pair.exact, tempo=self._tempo, vocabulary=own)

    def measure(self, prompts: Group, rows: int, draft: Engine | None = None) -> Promise:
        """Measure with ``rows`` rows a step on ``prompts``; ``draft`` instead of the bundle's own."""
        sweep = self._sweep if draft is None else self._sweep_of(draft)
        settings = replace(self.settings, ignore_eos=True)
        groups = grouped(prompts, rows)
        stats: list[Stats] = []
        for number, group in enumerate(itertools.cycle(groups)):
            decode(self._plain, group, replace(settings, draft="none"), self.pair)
            stats += decode(sweep, group, settings, self.pair)[1]
            if number + 1 >= len(groups) and sweep.lengths.rounds >= _EACH * (MAX_DRAFT_LENGTH + 1):
                break
        sweep.lengths.rounds = 0
        past = sum(map(len, prompts)) // len(prompts) + settings.max_new_tokens // 2
        plain, longest, rereads = self._plain.costs, sweep.lengths.longest, sweep.rereads
        return promise(plain, sweep.costs, stats, rows, past, sweep.widths, rereads=rereads, longest=longest)

    def measure_contexts(self, prompts: Group, rows: int) -> None:
        """Add steps on longer contexts, of the prompts one after the other."""
        longest = min(self._longest, self.pair.target.spec.max_context - _CONTEXT_TOKENS - MAX_DRAFT_LENGTH - 1)
        text = list(itertools.islice(itertools.cycle(itertools.chain.from_iterable(prompts)), max(0, longest)))
        settings = replace(self.settings, ignore_eos=True, max_new_tokens=_CONTEXT_TOKENS)
        length = 128
        while length <= longest:
            group = [text[:length]] * rows
            while self._sweep.lengths.rounds < _EACH * (MAX_DRAFT_LENGTH + 1):
                decode(self._plain, group, replace(settings, draft="none"), self.pair)
                decode(self._sweep, group, settings, self.pair)
            self._sweep.lengths.rounds = 0
            length *= 2

    def costs(self) -> list[Cost]:
        """All that was measured of the bundle's own pair."""
        return kept(self._sweep.costs, self._plain.costs)

    def observe(self, prompts: Group, rows: int, **change: Any) -> dict[str, Any]:
        """What `leadout bench` says of these prompts with ``change`` in the settings."""
        return Bench(self.pair, self._given | change, rows, self._bare).run(prompts)


def kept(pair: Costs, plain: Costs) -> list[Cost]:
    """What is worth keeping of a sweep's costs and of those of plain decoding beside it: what a plain step takes only
    the latter says. All of one table, or what is measured later would be compared with another hour's."""
    return pair.entries() + [cost for cost in plain.entries() if cost.part == "plain"]


def promise(
    plain: Costs,
    pair: Costs,
    stats: Sequence[Stats],
    rows: int,
    past: int,
    widths: Widths,
    *,
    rereads: bool = False,
    longest: int = MAX_DRAFT_LENGTH,
) -> Promise:
    """Predict from costs and from the tests of ``stats``: tokens a round, 1 + the sum of survivals (2211.17192,
    section 3.1), over its seconds, each length against a plain round, as slow as the device was for
    both. Untested positions take the last tested rate. ``rereads``: what is accepted of a draft is read again with the
    next; ``longest``: the longest draft that the target verifies."""
    steps, alone = pair.target(rows, past), plain.plain(rows, 1, past)
    assert steps is not None and alone is not None, "measured before"
    drafts, host = pair.drafts(rows, past), pair.host(rows)
    rates, tokens, survival = acceptance(stats), [1.0], 1.0
    for rate in rates[:longest]:
        tokens.append(tokens[-1] + (survival := survival * rate))
    seconds = [host + steps[widths.holding(k + 1)] + drafts[k] for k in range(longest + 1)]
    if rereads:
        each = pair.catch_up(rows, 1)
        seconds = [took + each * (written - 1.0) for took, written in zip(seconds, tokens, strict=True)]
    seconds = [pair.slowness(rows) * took for took in seconds]
    plain_seconds = plain.slowness(rows) * (plain.host(rows) + alone)
    tested = sum(row.tested for row in stats)
    return Promise(
        rows=rows,
        speedup=[gain * plain_seconds / took for gain, took in zip(tokens, seconds, strict=True)],
        tokens=tokens,
        acceptance=sum(row.accepted for row in stats) / tested if tested else 0.0,
        draft_ms=1e3 * pair.draft(rows, past),
        plain_ms=1e3 * plain_seconds,
        round_ms=[1e3 * took for took in seconds],
    )


def acceptance(stats: Sequence[Stats]) -> list[float]:
    """Of each of 16 positions, how many drafts were accepted of those that were reached there."""
    rates: list[float] = []
    for position in range(MAX_DRAFT_LENGTH):
        tested = sum(row.tested_per_position[position] for row in stats if len(row.tested_per_position) > position)
        accepted = sum(row.accepted_per_position[position] for row in stats if len(row.tested_per_position) > position)
        rates.append(accepted / tested if tested else (rates[-1] if rates else 0.0))
    return rates


def grouped(prompts: Group, rows: int) -> list[Group]:
    """Groups of exactly ``rows`` prompts; the last is filled up from the first."""
    endless = itertools.chain(prompts, itertools.cycle(prompts))
    return [list(itertools.islice(endless, rows)) for _ in range(-(-len(prompts) // rows))]


def tune(
    pair: Pair,
    prompts: Group,
    settings: dict[str, Any],
    batch_sizes: Sequence[int],
    candidates: dict[str, Engine],
    *,
    plain: Engine | None = None,
    longest_context: int = 1024,
    progress: Callable[[str], None] = lambda line: None,
    draft_of: str | None = None,
) -> tuple[dict[str, Any], list[Cost]]:
    """The report that `leadout tune --json` prints, and the costs to keep. ``draft_of``: the bundle that
    the pair's draft is from, if not its own."""
    tuner = Tuner(pair, settings, longest_context, plain)
    report: dict[str, Any] = {"batch_sizes": {}, "drafts": {}, "prompts": len(prompts)}
    for rows in batch_sizes:
        progress(f"{rows} at once: each draft length in turn")
        found = tuner.measure(prompts, rows)
        progress(f"{rows} at once: longer contexts")
        tuner.measure_contexts(prompts, rows)
        progress(f"{rows} at once: drafts of {found.best}, observed")
        report["batch_sizes"][rows] = _as_report(found) | held(found, tuner, prompts)
        drafts = {draft_of or "the bundle's own": found}
        for name, engine in candidates.items():
            progress(f"{rows} at once: the draft of {name}")
            drafts[name] = tuner.measure(prompts, rows, engine)
        report["drafts"][rows] = {name: _as_report(each) for name, each in drafts.items()}
    return report | {"contexts": sorted({cost.context for cost in tuner.costs()})}, tuner.costs()


def held(found: Promise, tuner: Tuner, prompts: Group) -> dict[str, Any]:
    """The promise of the best length against the same length observed, and what ``auto`` makes of it. ``tokens_rest``
    and ``time_rest`` are the shares by which tokens a round and speed per round were off."""
    k = found.best
    change = {"draft": "model", "draft_length": k} if k else {"draft": "none"}
    seen = tuner.observe(prompts, found.rows, **change)
    off = seen["speedup"] / found.speedup[k] - 1.0
    tokens = seen["tokens_per_round"] / found.tokens[k] - 1.0
    return {
        "observed": seen["speedup"],
        "off": off,
        "tokens_rest": tokens,
        "time_rest": (1.0 + off) / (1.0 + tokens) - 1.0,
        "unaccounted": seen["unaccounted"],
        "auto": tuner.observe(prompts, found.rows, draft="auto", draft_length="auto")["speedup"],
    }


def doubt(report: dict[str, Any]) -> str:
    """Why the costs of ``report`` are not to be believed; empty where they may be."""
    for rows, each in report["batch_sizes"].items():
        if each["predicted"][0] > _MOST_UNDRAFTED:
            return (
                f"{rows} at once: without drafts the pair seemed {each['predicted'][0]:.2f} times as fast as plain"
                " decoding, which is the same"
            )
        if abs(each["off"]) > _MOST_OFF:
            return f"{rows} at once: what was observed is {each['off']:+.0%} off what was measured before"
    return ""


def _as_report(found: Promise) -> dict[str, Any]:
    return {
        "predicted": found.speedup,
        "tokens": found.tokens,
        "round_ms": found.round_ms,
        "plain_ms": found.plain_ms,
        "best_length": found.best,
        "acceptance_rate": found.acceptance,
        "draft_ms": found.draft_ms,
    }
