"""Decides what a step is thought to cost: measured on this device, in the loop itself, as a table and not a line."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

from ..settings import MAX_DRAFT_LENGTH, MAX_GUESS_LENGTH
from .coverage import PLAIN, PLAIN_KNOWN, Coverage
from .tempo import Tempo
from .typical import HARDLY, KNOWN, Typical

_BELIEVED = KNOWN  # what a table on disk counts for, in measurements, where it is asked what is still to be measured
_NEIGHBOURS = 6
PARTS = ("target", "plain", "draft", "catch-up", "host", "quiet")
_CALM = 8  # rounds without a draft model after which the target's weights are back in the cache: steps are plain then
_STRETCH = 4  # plain steps after such a wait that are compared with the steps before it
_NARROW = MAX_DRAFT_LENGTH + 1  # wider steps are extrapolated from steps up to this width until measured twice
_LEAST = 1e-6  # seconds: the least that a difference of two measurements is taken for
_TICK = 1e-9  # seconds: the least that a measurement is taken for, however coarse the clock
_BAD_MOMENT = 2.0  # times what a wider step takes: what was hardly measured does not count beyond that
_FEW = 2  # with so few tokens read late, the draft scatters by more than reading them takes: they are no measurement
# Relative costs of steps of 0 to 64 tokens while none is known: on CPUs each further token adds 0.05 to 0.2.
UNKNOWN = [1.0 + 0.1 * max(0, width - 1) for width in range(MAX_GUESS_LENGTH + 2)]
_SHORTEST_CONTEXT = 7  # bits: contexts below 128 tokens are one bucket, and from there every doubling is


def context_bucket(past: int) -> int:
    """Which contexts cost alike: 0 below 128 tokens, then one more with every doubling."""
    return max(0, past.bit_length() - _SHORTEST_CONTEXT)


class Step(NamedTuple):
    """Something that took time: ``part`` is one of ``PARTS``. ``width`` is the width of a step of the target, for part
    "draft" the number of steps in a round, and 1 for all other parts."""

    part: str
    rows: int
    bucket: int
    width: int


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """A measured step as a table on disk has it. ``context`` is a bucket (``context_bucket``)."""

    part: str
    rows: int
    context: int
    width: int
    seconds: float


class Costs:
    """Measured seconds on this device, shared by all requests.

    Kept are (``PARTS``): a step of the target with the verdict on its logits, by rows, context and width; a plain step,
    without a draft and some rounds after a draft model last ran (both models' weights may not fit into a cache
    together: 20 to 30 % less on the demo pair); a draft, by rows, context and length; the reading of a token that a
    draft model had missed while others drafted; and the host's part of a round, by rows, on average ("host") and where
    nobody was asked to draft ("quiet"). All of it is corrected to a device of constant speed (``Tempo``). Recording is
    cheap, for every round does it; looking up is not. A place of the table without measurements takes those of the
    nearest measured places, scaled by the widths that both know."""

    def __init__(self, known: Iterable[Cost] = (), tempo: Tempo | None = None) -> None:
        """``known`` stands in for the start-up measurement of the widths it has. What is measured here counts alone,
        and tells how far the rest of ``known`` is off. Tables of one ``tempo`` can be compared."""
        self._tables: dict[str, dict[tuple[int, int], dict[int, Typical]]] = {}
        self.coverage = Coverage()
        self._calm = self._stretch = 0  # rounds without a draft model; plain steps among them
        self.knows_plain = False  # plain steps were measured, of whatever rows
        self._modelled = False  # a draft model has run
        self._compared: Counter[int] = Counter()  # how often plain steps came after others, by doublings of rows
        self._typicals: dict[tuple[str, int, int, int], Typical] = {}  # of the tables, by step: every round asks
        self._paid: Counter[tuple[str, int, int, int]] = Counter()
        self._weights: defaultdict[tuple[str, int, int, int], float] = defaultdict(float)
        self._tempo = tempo or Tempo()
        self._last: tuple[str, int, int, int] | None = None
        self._said: dict[str, dict[tuple[int, int], dict[int, float]]] = {}  # by part, place and width, by ``known``
        for cost in known:
            self._said.setdefault(cost.part, {}).setdefault((cost.rows, cost.context), {})[cost.width] = cost.seconds
            self.knows_plain |= cost.part == "plain"
            if cost.part in ("target", "plain"):
                self.coverage.believe(cost.rows, PLAIN if cost.part == "plain" else cost.width, _BELIEVED)

    def record_target(
        self,
        rows: int,
        width: int,
        seconds: float,
        past: int = 0,
        *,
        drafts: bool = True,
        modelled: bool = True,
        asked: bool = False,
    ) -> None:
        """A step of the target, with the verdict on its rows, took ``seconds``. ``past``: the mean context of the rows;
        ``drafts``: the step verified drafts; ``modelled``: the draft model ran in this round; ``asked``: free drafters
        were asked, which makes the step longer (they take up the cache)."""
        self._calm, self._stretch = (0, 0) if modelled else (self._calm + 1, self._stretch)
        plain, bucket = not drafts and not asked and self._calm > _CALM, context_bucket(past)
        self._stretch += plain
        beside = plain and self._stretch <= _STRETCH and self._modelled
        part = "plain" if plain else "target"
        if self.coverage.renews(rows, PLAIN if plain else width):
            self._typical(part, rows, bucket, width).fade(even=plain)  # one too short would end all drafting
        self._modelled |= modelled
        # Weights are on their way back into a cache, or tempo is to be that of the steps these are compared with.
        telling = modelled or not self._modelled or (plain and not beside)
        self._compared[rows.bit_length()] += plain and self._stretch == 1
        self._record(part, rows, bucket, width, seconds, telling=telling, counts=telling or drafts or beside)
        self.coverage.record(rows, *((PLAIN, width) if plain else (width,)))
        if plain and self._stretch >= _STRETCH:
            self.coverage.compare(rows)
        self.knows_plain |= plain and self.coverage.times(rows, PLAIN) >= PLAIN_KNOWN

    def disturb(self) -> None:
        """The draft model has run outside a round: it read a prompt."""
        self._calm = 0

    def record_draft(self, rows: int, steps: int, seconds: float, past: int = 0, late: int = 0) -> None:
        """A draft of ``steps`` steps took ``seconds``; the first also read ``late`` tokens more than is usual."""
        if not steps:
            return
        bucket, tokens = context_bucket(past), rows * late  # a step is a rectangle
        if late <= _FEW:
            apart = self.catch_up(rows, late) * self._tempo.slowness if late else 0.0
            self._record("draft", rows, bucket, steps, max(_LEAST, seconds - apart), telling=True)
            if apart:
                self._pay(("catch-up", rows, 0, 1), tokens)
        elif known := self.drafts(rows, past)[steps]:
            self._pay(("draft", rows, bucket, steps), 1)
            self._record("catch-up", rows, 0, 1, max(_LEAST, seconds - known * self._tempo.slowness) / tokens, tokens)

    def record_host(self, rows: int, seconds: float, *, quiet: bool = False) -> None:
        """What a round took besides its models and the verdict: every round pays it, however much it drafts. ``quiet``:
        nobody drafted, nor was asked to."""
        self._record("host", rows, 0, 1, seconds)
        if quiet:
            self._typical("quiet", rows, 0, 1).append(self.usual(max(_TICK, seconds)))

    @property
    def counts(self) -> Counter[Step]:
        """How often each step was paid."""
        return Counter({Step(*step): times for step, times in self._paid.items()})

    @property
    def weights(self) -> dict[Step, float]:
        """The same, but each as often as the device was slow then: price them to know what was paid."""
        return {Step(*step): weight for step, weight in self._weights.items()}

    def slowness(self, rows: int) -> float:
        """How slow the device was, on average, in rounds of ``rows`` rows: what they took, over what the tables say. It
        may differ between batch sizes in the same minutes: models that displace each other from the cache look like a
        slow device, too."""
        paid, slow = (
            sum(self.price({step: times for step, times in each.items() if step.rows == rows}).values())
            for each in (self.counts, self.weights)
        )
        return slow / paid if paid else 1.0

    def usual(self, seconds: float) -> float:
        """``seconds``, measured just now, as they would be if the device were as fast as usual: the unit of all that is
        said here. 0 where the clock was put back meanwhile."""
        return max(0.0, seconds) / self._tempo.slowness

    def target(self, rows: int, past: int = 0) -> list[float] | None:
        """Seconds of a step of each width from 0 to 64. Between measured widths it is a straight line; beyond them each
        token adds what one added on average below. No step may cost more than a wider one: where measurements say so,
        all widths concerned get their mean. A width that was hardly measured does not count if it seems to cost
        more than twice what a wider one does, nor one beyond 17 that was measured once: what was measured in a bad
        moment must not be avoided for good, nor the widths beside it. From a single measured width the others follow by
        ``UNKNOWN``. None while nothing was measured."""
        bucket = context_bucket(past)
        if not (known := self._known("target", rows, bucket)):
            return None
        often = (width for width in known if width <= _NARROW or self.coverage.times(rows, width) > 1)
        known = {width: known[width] for width in often} or known
        if len(known) == 1:
            ((width, seconds),) = known.items()
            return [seconds / UNKNOWN[width] * each for each in UNKNOWN]
        times = self._times("target", rows, bucket, known)
        return _line(_rising(_credible(known, times), times), MAX_GUESS_LENGTH + 1)

    def plain(self, rows: int, width: int, past: int = 0) -> float | None:
        """Seconds of a plain step of ``width`` tokens (the least width there is), while no draft model runs. Where it
        was measured with other rows or contexts only, it is scaled as other steps are; where it was hardly measured at
        all, it is taken for any step of that width. None while nothing was measured."""
        bucket, seconds = context_bucket(past), dict[tuple[int, int], float]()
        for place, said in self._said.get("plain", {}).items():
            if width in said:
                seconds[place] = said[width] * self._off("target", *place)
        for place, widths in self._tables.get("plain", {}).items():
            if width in widths and (widths[width].faded or len(widths[width]) >= PLAIN_KNOWN):
                seconds[place] = widths[width].seconds
        if not seconds:
            steps = self.target(rows, past)
            return None if steps is None else steps[width]
        near = min(seconds, key=_distance(rows, bucket))
        if near == (rows, bucket):
            return seconds[near]
        return seconds[near] * _ratio(self._known("target", rows, bucket), self._known("target", *near))

    def doubt(self, rows: int) -> float:
        """The standard error of what a plain step takes compared with other steps, as a share of it. They were compared
        only as often as plain steps followed others."""
        return self._tempo.scatter / math.sqrt(max(1, self._compared[rows.bit_length()]))

    def drafts(self, rows: int, past: int = 0) -> list[float]:
        """Seconds of a draft of 0 to 63 steps in a row. The first step is longer: it often reads two tokens, and finds
        little in the cache. 0 while no draft was measured."""
        return self._drafts(rows, context_bucket(past))

    def _drafts(self, rows: int, bucket: int) -> list[float]:
        if not (known := self._known("draft", rows, bucket)):
            return [0.0] * (MAX_GUESS_LENGTH + 1)
        times = self._times("draft", rows, bucket, known)
        return _line({0: 0.0} | _rising(_credible(known, times), times), MAX_GUESS_LENGTH)

    def draft(self, rows: int, past: int = 0) -> float:
        """Seconds of one step of the draft, on average over the longest draft that was measured; 0 while none was."""
        steps = max(self._known("draft", rows, context_bucket(past)), default=1)
        return self.drafts(rows, past)[steps] / steps

    def catch_up(self, rows: int, late: int, guess: float = 0.0) -> float:
        """Seconds by which a draft is longer that has to read ``late`` tokens more than is usual; ``guess`` seconds for
        each while that was never measured."""
        return rows * late * self._known("catch-up", rows, 0).get(1, guess)

    def host(self, rows: int) -> float:
        """Seconds of a round outside the models, on average; 0 while it was never measured."""
        return self._known("host", rows, 0).get(1, 0.0)

    def quiet(self, rows: int) -> float:
        """The same of a round in which nobody drafts, nor is asked to."""
        return self._known("quiet", rows, 0).get(1, self.host(rows))

    def price(self, weights: Mapping[Step, float]) -> dict[str, float]:
        """Seconds of so many steps, by part, at what each is known to cost now."""
        total = dict.fromkeys(PARTS, 0.0)
        for (part, rows, bucket, width), weight in weights.items():
            seconds = self._drafts(rows, bucket) if part == "draft" else self._known(part, rows, bucket)
            total[part] += weight * seconds[width]
        return total

    def entries(self) -> list[Cost]:
        """All that is known, in order, on this device as slow as it was on average: what ``Costs(known)`` starts
        from."""
        return [
            Cost(part, rows, bucket, width, seconds * self._tempo.mean)
            for part in sorted(self._tables | self._said)
            for rows, bucket in sorted(self._places(part))
            for width, seconds in sorted(self._seconds(part, rows, bucket).items())
        ]

    def _record(
        self,
        part: str,
        rows: int,
        bucket: int,
        width: int,
        seconds: float,
        times: int = 1,
        *,
        telling: bool = False,
        counts: bool = True,
    ) -> None:
        """``telling``: the measurement tells how slow the device is now. Then it tells what such a step takes only
        where the step before was of another kind, for the tempo has already followed steps of the same kind.
        ``counts``: it tells what such a step takes."""
        step, seconds = (part, rows, bucket, width), max(_TICK, seconds)
        if (typical := self._typicals.get(step)) is None:
            typical = self._typicals[step] = self._begun(*step)
        if telling:
            if len(typical) >= KNOWN:
                self._tempo.record(seconds, typical.seconds)
            counts, self._last = step != self._last, step
        if counts or telling or len(typical) < HARDLY:
            typical.append(seconds / self._tempo.slowness, counts=counts)
        self._pay(step, times)

    def _pay(self, step: tuple[str, int, int, int], times: int) -> None:
        self._paid[step] += times
        self._weights[step] += times * self._tempo.slowness

    def _typical(self, part: str, rows: int, bucket: int, width: int) -> Typical:
        table = self._tables.setdefault(part, defaultdict(lambda: defaultdict(Typical)))
        return table[rows, bucket][width]

    def _times(self, part: str, rows: int, bucket: int, widths: Iterable[int]) -> dict[int, int]:
        """How many measurements just there say what these take; 1 where none does."""
        here = self._tables.get(part, {}).get((rows, bucket), {})
        return {width: here[width].times if width in here else 1 for width in widths}

    def _places(self, part: str) -> set[tuple[int, int]]:
        """Rows and bucket of what is known."""
        return {*self._tables.get(part, {}), *self._said.get(part, {})}

    def _widths(self, part: str, place: tuple[int, int]) -> set[int]:
        """What something may be known of there."""
        return {*self._tables.get(part, {}).get(place, ()), *self._said.get(part, {}).get(place, ())}

    def _measured(self, part: str, rows: int, bucket: int) -> dict[int, float]:
        """What was measured just there, by width."""
        widths = self._tables.get(part, {}).get((rows, bucket), {})
        return {width: typical.seconds for width, typical in widths.items() if typical}

    def _seconds(self, part: str, rows: int, bucket: int) -> dict[int, float]:
        """What is known just there, by width: as it was measured, or as a table on disk says, as far as that is off."""
        said, measured = self._said.get(part, {}).get((rows, bucket)), self._measured(part, rows, bucket)
        if said is None or measured.keys() >= said.keys():
            return measured
        off = self._off(part, rows, bucket)
        return {width: off * seconds for width, seconds in said.items()} | measured

    def _off(self, part: str, rows: int, bucket: int) -> float:
        """How many times as long as a table on disk says such steps take, by those that were measured nearest to there;
        1 while none was."""
        said, near = self._said.get(part, {}), _distance(rows, bucket)
        for place in sorted(said.keys() & self._tables.get(part, {}).keys(), key=near):
            if (measured := self._measured(part, *place)).keys() & said[place].keys():
                return _ratio(measured, said[place])
        return 1.0

    def _begun(self, part: str, rows: int, bucket: int, width: int) -> Typical:
        """The (new) entry of a step. It begins with what such a step takes on the nearest context where it is known:
        the difference is less than a few measurements err, and later measurements correct it."""
        typical, table = self._typical(part, rows, bucket, width), self._tables[part]
        places = [place for place, widths in table.items() if place[0] == rows and len(widths.get(width, ())) >= KNOWN]
        if places and not typical:
            near = min(places, key=_distance(rows, bucket))
            typical.begin(
                table[near][width].seconds * _ratio(self._seconds(part, rows, bucket), self._seconds(part, *near))
            )
        return typical

    def _known(self, part: str, rows: int, bucket: int) -> dict[int, float]:
        """Width -> seconds for so many rows on contexts of ``bucket``."""
        known: dict[int, float] = {}
        for place in sorted(self._places(part), key=_distance(rows, bucket))[:_NEIGHBOURS]:
            if known and known.keys() >= self._widths(part, place):
                continue  # most places know no more than the first
            found = self._seconds(part, *place)
            scale = _ratio(known, found)
            known = {width: scale * seconds for width, seconds in found.items()} | known
        return known


def _distance(rows: int, bucket: int) -> Callable[[tuple[int, int]], tuple[int, int, tuple[int, int]]]:
    """Sorts places (rows, bucket) by how far they are from this one."""
    return lambda place: (abs(place[0] - rows), abs(place[1] - bucket), place)


def _credible(seconds: Mapping[int, float], times: Mapping[int, int]) -> dict[int, float]:
    """``seconds`` by width without those of a bad moment: hardly measured, and more than twice those of a wider one.
    (One stall of fifty times a step would be most of the mean that all widths around it get.)"""
    kept, least = dict[int, float](), math.inf
    for width in sorted(seconds, reverse=True):
        if times[width] > HARDLY or seconds[width] <= _BAD_MOMENT * least:
            kept[width] = seconds[width]
        least = min(least, seconds[width])
    return kept


def _rising(seconds: Mapping[int, float], weights: Mapping[int, float]) -> dict[int, float]:
    """The nearest to ``seconds`` by width that never falls: neighbours that do get their mean (pool adjacent
    violators)."""
    pools: list[tuple[float, float, list[int]]] = []  # mean, weight, widths
    for width in sorted(seconds):
        mean, weight, widths = seconds[width], weights[width], [width]
        while pools and pools[-1][0] > mean:
            other, more, narrower = pools.pop()
            mean, weight, widths = (mean * weight + other * more) / (weight + more), weight + more, narrower + widths
        pools.append((mean, weight, widths))
    return {width: mean for mean, _, widths in pools for width in widths}


def _line(known: Mapping[int, float], longest: int) -> list[float]:
    """The values of 0 to ``longest``: below the least that is known the same, between two a straight line, beyond the
    last as much more as one more took on average, between those that were measured."""
    places = sorted(known)
    line = [known[places[0]]] * (places[0] + 1)
    for before, after in pairwise(places):
        rise = (known[after] - known[before]) / (after - before)
        line += [known[before] + rise * more for more in range(1, after - before)]
        line.append(known[after])
    first, last = places[1 if places[0] == 0 and len(places) > 2 else 0], places[-1]
    slope = max(0.0, known[last] - known[first]) / (last - first) if last > first else 0.0
    return line + [known[last] + slope * more for more in range(1, longest + 1 - last)]


def _ratio(here: Mapping[int, float], there: Mapping[int, float]) -> float:
    """What steps take here over what they take there, by the widths that both know; 1 where there is none."""
    both = here.keys() & there.keys()
    return sum(here[width] for width in both) / sum(there[width] for width in both) if both else 1.0
