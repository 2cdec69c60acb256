"""Decides what a step is thought to cost: measured on this device, in the loop itself, as a table and not a line."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate, pairwise
from statistics import median_low
from typing import NamedTuple

from .settings import MAX_DRAFT_LENGTH, MAX_GUESS_LENGTH

# The start-up measurement: draft lengths and how often each; all still write text. A batch has its own (for each
# doubling of its rows): what rows cost together cannot be told from one. The first two say roughly what all cost.
_FIRST_ALONE, _FIRST_TOGETHER, _ROUGHLY = ((4, 0, 2, 1, 3, 8), 2), ((1, 0, 3), 1), 2
LONGEST_FIRST = max(_FIRST_ALONE[0])
_RECENT = 7
# Rounds: a length of the start-up measurement that was not used for so long is measured anew, once, for a device is not
# always as fast; the next time after twice as many, up to 16 times.
_STALE, _DOUBLINGS = 256, 4
_BELIEVED = 3  # what a table on disk counts for, in measurements: four newer ones outvote it
_NEIGHBOURS = 6
PARTS = ("target", "plain", "draft", "catch-up", "host")
_CALM = 4  # rounds after a draft model's last until the target's weights are back in the cache; then steps are plain
# Measurements of plain steps before they are known: of two the less would count, and stay where drafting pays.
_PLAIN = 3
_NO_WIDTH = 0  # where plain steps are counted among the widths
_NARROW = MAX_DRAFT_LENGTH + 1  # widths from which the wider ones are told until they were measured twice
_LEAST = 1e-6  # seconds: a difference of measurements is never less
_ONE_STEP = 2  # committed tokens that a draft in use lacks, at most: they go in with its first step
_SHORTEST_CONTEXT = 7  # bits: contexts below 128 tokens are one bucket, and from there every doubling is


def context_bucket(past: int) -> int:
    """Which contexts cost alike: 0 below 128 tokens, then one more with every doubling."""
    return max(0, past.bit_length() - _SHORTEST_CONTEXT)


class Recent:
    """The last few measurements. Their middle counts, because first calls at a new shape are slow. ``faded``: it was
    known once, and is renewed."""

    __slots__ = ("_last", "_middle", "faded")

    def __init__(self) -> None:
        self.faded = False
        self._last: deque[float] = deque(maxlen=_RECENT)
        self._middle: float | None = None

    def __len__(self) -> int:
        return len(self._last)

    def append(self, seconds: float) -> None:
        self._last.append(seconds)
        self._middle = None

    def fade(self) -> None:
        """All was long ago: the next measurement counts for as much as what is known, and the less of the two holds."""
        if self._last:
            self.faded, middle = True, self.middle
            self._last.clear()
            self.append(middle)

    @property
    def middle(self) -> float:
        """The lower median, found when it is asked for."""
        if self._middle is None:
            self._middle = median_low(self._last)
        return self._middle


class Step(NamedTuple):
    """What was paid for: ``part`` is one of ``PARTS``; of all but the target's two ``width`` is always 1."""

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
    """Measured seconds on this device, shared by all requests: a step of the target (and the verdict on its rows of
    logits, of which there are as many) by rows, context and width, one without a draft when no draft model has run for
    a while (its weights and the target's may not fit into a cache together: 20 to 30 % less on the demo pair), one step
    of the draft by rows and context, a token of text that a draft had missed while others drafted, and the host's part
    of a round by rows. Recording is cheap, for every round does it; looking up is not. What is not known of a place in
    the table is taken from the nearest places that were measured, scaled by what both know."""

    def __init__(self, known: Iterable[Cost] = ()) -> None:
        """``known`` stands in for the start-up measurement, of the widths it has, until it is outvoted."""
        self._tables: dict[str, dict[tuple[int, int], dict[int, Recent]]] = {}
        self._samples: Counter[tuple[int, int]] = Counter()
        self._used: dict[tuple[int, int], int] = {}  # in which round, by doublings of rows and by width
        self._renewed: Counter[tuple[int, int]] = Counter()  # how often it was measured anew because it was stale
        self._round = self._calm = 0
        self._recents: dict[tuple[str, int, int, int], Recent] = {}  # of the tables, by step: every round asks
        self._paid: Counter[tuple[str, int, int, int]] = Counter()
        for cost in known:
            recent = self._recent(cost.part, cost.rows, cost.context, cost.width)
            for _ in range(_BELIEVED):
                recent.append(cost.seconds)
            self._samples[cost.rows.bit_length(), cost.width] += _BELIEVED * (cost.part == "target")
            self._samples[cost.rows.bit_length(), _NO_WIDTH] += _BELIEVED * (cost.part == "plain")

    def record_target(
        self, rows: int, width: int, seconds: float, past: int = 0, *, drafts: bool = True, modelled: bool = True
    ) -> None:
        """A step and the verdict on its rows. ``past`` is the mean context of the rows; ``drafts``: it verified some;
        ``modelled``: the draft model ran in this round."""
        self._calm = 0 if modelled else self._calm + 1
        plain, size, bucket = not drafts and self._calm > _CALM, rows.bit_length(), context_bucket(past)
        part, place = ("plain", (size, _NO_WIDTH)) if plain else ("target", (size, width))
        if place in self._used and self._stale(place):
            self._renewed[place] += 1
            self._recent(part, rows, bucket, width).fade()
        self._record(part, rows, bucket, width, seconds)
        self._round += 1
        for used in {place, (size, width)}:
            self._samples[used] += 1
            self._used[used] = self._round

    def disturb(self) -> None:
        """A draft model has run, besides rounds: it took a prompt in."""
        self._calm = 0

    def record_draft(self, rows: int, steps: int, seconds: float, past: int = 0, lag: int = 0) -> None:
        """``steps`` of the draft, the first of which took in ``lag`` committed tokens that a row of it lacked."""
        if not steps:
            return
        bucket = context_bucket(past)
        if lag <= _ONE_STEP:
            self._record("draft", rows, bucket, 1, seconds / steps, steps)
        elif known := self.draft(rows, past):
            late = rows * (lag - _ONE_STEP)  # a step is a rectangle
            self._paid["draft", rows, bucket, 1] += steps
            self._record("catch-up", rows, 0, 1, max(_LEAST, seconds - steps * known) / late, late)

    def record_host(self, rows: int, seconds: float) -> None:
        """What a round took besides its models and the verdict: every round pays it, however much it drafts."""
        self._record("host", rows, 0, 1, seconds)

    @property
    def counts(self) -> Counter[Step]:
        """How often each step was paid."""
        return Counter({Step(*step): times for step, times in self._paid.items()})

    def target(self, rows: int, past: int = 0) -> list[float] | None:
        """Seconds of a step of each width from 0 to 64: between measured widths a straight line, beyond them as much
        more as a token took on average below, and never more than a wider step costs. A width that was measured in a
        bad moment would else be avoided for good; so a wide one counts only when it was measured twice. None while
        nothing was measured."""
        if not (known := self._known("target", rows, context_bucket(past))):
            return None
        size = rows.bit_length()
        known = {width: known[width] for width in known if width <= _NARROW or self._samples[size, width] > 1} or known
        widths = sorted(known)
        least, most = widths[0], widths[-1]
        slope = max(0.0, known[most] - known[least]) / (most - least) if most > least else 0.0
        line = [known[least]] * (least + 1)
        for before, after in pairwise(widths):
            rise = (known[after] - known[before]) / (after - before)
            line += [known[before] + rise * more for more in range(1, after - before)]
            line.append(known[after])
        line += [known[most] + slope * more for more in range(1, MAX_GUESS_LENGTH + 2 - most)]
        return list(accumulate(reversed(line), min))[::-1]

    def plain(self, rows: int, width: int, past: int = 0) -> float | None:
        """Seconds of a step of ``width`` tokens, the least, without drafts, while no draft model runs. Of another
        context or number of rows it is as much less than other steps as here; while it was hardly measured, it is as
        they are. None while nothing was."""
        table, bucket = self._tables.get("plain", {}), context_bucket(past)
        recents = {place: widths[width] for place, widths in table.items() if width in widths}
        places = [place for place, recent in recents.items() if recent.faded or len(recent) >= _PLAIN]
        if not places:
            steps = self.target(rows, past)
            return None if steps is None else steps[width]
        near = min(places, key=lambda place: (abs(place[0] - rows), abs(place[1] - bucket), place))
        seconds = recents[near].middle
        if near == (rows, bucket):
            return seconds
        return seconds * _ratio(self._known("target", rows, bucket), self._known("target", *near))

    def lacks_plain(self, rows: int) -> bool:
        """Whether a plain step was hardly measured with about so many rows, or long ago."""
        place = rows.bit_length(), _NO_WIDTH
        return self._samples[place] < _PLAIN or self._stale(place)

    def draft(self, rows: int, past: int = 0) -> float:
        """Seconds of one step of the draft; 0 while it was never measured."""
        return self._known("draft", rows, context_bucket(past)).get(1, 0.0)

    def catch_up(self, rows: int, lag: int, guess: float = 0.0) -> float:
        """Seconds that a draft step takes longer for ``lag`` committed tokens that the draft lacks: ``guess`` for each
        while that was never measured."""
        return rows * max(0, lag - _ONE_STEP) * self._known("catch-up", rows, 0).get(1, guess)

    def host(self, rows: int) -> float:
        """Seconds of a round outside the models; 0 while it was never measured."""
        return self._known("host", rows, 0).get(1, 0.0)

    def first_length(
        self, limit: int, rows: int = 1, narrowest: int = 1, best: Callable[[], int] | None = None
    ) -> int | None:
        """The next draft length of the start-up measurement that ``limit`` allows; None when it is done, and nothing of
        it is stale: what was measured in a bad moment must not be avoided for good. ``narrowest``: the least width the
        target steps with. ``best`` says which length seems to be, as far as is known: once two are measured, only what
        is near to it is worth measuring (without it, all)."""
        lengths, samples = _FIRST_TOGETHER if rows > 1 else _FIRST_ALONE
        places = {length: (rows.bit_length(), max(length + 1, narrowest)) for length in lengths}
        known = {place for place in places.values() if self._samples[place] >= samples}
        legal = [length for length in lengths if length <= limit]
        lacking = [length for length in legal if places[length] not in known]
        if best is not None and lacking and len(known) >= _ROUGHLY:
            seems = best()
            near = min(legal, key=lambda length: abs(length - seems))
            lacking = [near] if near in lacking else []
        stale = (length for length in legal if self._samples[places[length]] and self._stale(places[length]))
        return lacking[0] if lacking else next(stale, None)

    def _stale(self, place: tuple[int, int]) -> bool:
        return self._round - self._used.get(place, 0) > _STALE << min(self._renewed[place], _DOUBLINGS)

    def price(self, counts: Mapping[Step, int]) -> dict[str, float]:
        """Seconds of so many steps, by part, at what each costs now."""
        total = dict.fromkeys(PARTS, 0.0)
        for (part, rows, bucket, width), count in counts.items():
            total[part] += count * self._known(part, rows, bucket)[width]
        return total

    def measured(self) -> list[Cost]:
        """All that was measured, in order: what ``Costs(known)`` starts from."""
        return [
            Cost(part, rows, bucket, width, recent.middle)
            for part, table in sorted(self._tables.items())
            for (rows, bucket), widths in sorted(table.items())
            for width, recent in sorted(widths.items())
        ]

    def _record(self, part: str, rows: int, bucket: int, width: int, seconds: float, times: int = 1) -> None:
        step = part, rows, bucket, width
        if (recent := self._recents.get(step)) is None:
            recent = self._recents[step] = self._recent(*step)
        recent.append(seconds)
        self._paid[step] += times

    def _recent(self, part: str, rows: int, bucket: int, width: int) -> Recent:
        table = self._tables.setdefault(part, defaultdict(lambda: defaultdict(Recent)))
        return table[rows, bucket][width]

    def _known(self, part: str, rows: int, bucket: int) -> dict[int, float]:
        """Width -> seconds for so many rows on contexts of ``bucket``."""
        table = self._tables.get(part, {})
        places = sorted(table, key=lambda place: (abs(place[0] - rows), abs(place[1] - bucket), place))
        known: dict[int, float] = {}
        for place in places[:_NEIGHBOURS]:
            found = {width: recent.middle for width, recent in table[place].items()}
            scale = _ratio(known, found)
            known = {width: scale * seconds for width, seconds in found.items()} | known
        return known


def _ratio(here: Mapping[int, float], there: Mapping[int, float]) -> float:
    """What steps take here over what they take there, by the widths that both know; 1 where there is none."""
    both = here.keys() & there.keys()
    return sum(here[width] for width in both) / sum(there[width] for width in both) if both else 1.0
