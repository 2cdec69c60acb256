"""Decides which draft lengths are measured whatever they promise: those whose steps were measured too seldom, or too
long ago. (``Costs`` keeps what they took.)"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ...engines.base import ANY, Widths

# The start-up measurement: draft lengths in order, and how often each is measured; these rounds write text like others.
# Batches have a measurement of their own for each doubling of rows, for their costs do not follow from those of one
# row. The first two lengths already tell roughly what all cost (_ROUGHLY), so they are far apart; and each is measured
# twice, for the first round finds nothing in a cache: where batches began with one round of 1 and one of 0, the slope
# between them ended all drafting of the grown pair's first three batches.
_FIRST_ALONE, _FIRST_TOGETHER, _ROUGHLY = ((4, 0, 2, 1, 3, 8), 2), ((3, 0, 1), 2), 2
LONGEST_FIRST = max(_FIRST_ALONE[0])
# A length of the start-up measurement that was not used for _STALE rounds is measured once more, for the speed of a
# device changes; the next time after twice as many rounds, up to 16 times as many.
_STALE, _DOUBLINGS = 256, 4
_OFTEN = 128  # rounds after which plain steps are compared with others anew, while a choice depends on that
# Measurements after which plain steps count as known. (Of only two the less counts, and would stay if drafting pays.)
PLAIN_KNOWN = 3
PLAIN = 0  # where plain steps are counted among the widths


class Coverage:
    """How often the target's steps were measured, and in which round last: by doublings of rows and by width, those
    without a draft while no draft model runs as ``PLAIN``, too."""

    def __init__(self) -> None:
        self._times: Counter[tuple[int, int]] = Counter()
        self._last: dict[tuple[int, int], int] = {}
        self._renewed: Counter[tuple[int, int]] = Counter()  # how often it was measured anew because it was stale
        self._compared: dict[int, int] = {}  # by doublings of rows, the round in which plain steps were compared last
        self._round = 0

    def believe(self, rows: int, width: int, times: int) -> None:
        """A table on disk stands for so many measurements."""
        self._times[rows.bit_length(), width] += times

    def renews(self, rows: int, width: int) -> bool:
        """Whether the measurement that is being made replaces one that is stale."""
        place = rows.bit_length(), width
        if stale := place in self._last and self._stale(place):
            self._renewed[place] += 1
        return stale

    def record(self, rows: int, *widths: int) -> None:
        """A round's step was measured, which counts among these widths."""
        self._round += 1
        size = rows.bit_length()
        for width in widths:
            self._times[size, width] += 1
            self._last[size, width] = self._round

    def compare(self, rows: int) -> None:
        """As many plain steps were measured beside others as say how they compare."""
        self._compared[rows.bit_length()] = self._round

    def times(self, rows: int, width: int) -> int:
        """How often such a step was measured."""
        return self._times[rows.bit_length(), width]

    def lacks_plain(self, rows: int) -> bool:
        """Whether plain steps were hardly measured with about so many rows, or were not compared with others lately."""
        long_ago = self._round - self._compared.get(rows.bit_length(), 0) > _OFTEN
        return long_ago or self.times(rows, PLAIN) < PLAIN_KNOWN

    def first_length(
        self, limit: int, rows: int = 1, widths: Widths = ANY, best: Callable[[], int] | None = None
    ) -> int | None:
        """The next draft length of the start-up measurement that ``limit`` allows; None when it is done, and nothing of
        it is stale: what was measured in a bad moment must not be avoided for good. ``widths``: those that the
        target steps with. ``best`` says which length seems to be, as far as is known: once two are measured, only what
        is near to it is worth measuring (without it, all)."""
        lengths, times = _FIRST_TOGETHER if rows > 1 else _FIRST_ALONE
        places = {length: (rows.bit_length(), widths.holding(length + 1)) for length in lengths}
        known = {place for place in places.values() if self._times[place] >= times}
        legal = [length for length in lengths if length <= limit]
        lacking = [length for length in legal if places[length] not in known]
        if best is not None and lacking and len(known) >= _ROUGHLY:
            seems = best()
            near = min(legal, key=lambda length: abs(length - seems))
            lacking = [near] if near in lacking else []
        stale = (length for length in legal if self._times[places[length]] and self._stale(places[length]))
        return lacking[0] if lacking else next(stale, None)

    def _stale(self, place: tuple[int, int]) -> bool:
        return self._round - self._last.get(place, 0) > _STALE << min(self._renewed[place], _DOUBLINGS)
