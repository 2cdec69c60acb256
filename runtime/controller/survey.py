"""Decides when something is measured: at the start, when it is long ago, and when a choice hangs on it."""

from __future__ import annotations

from collections.abc import Callable

from .coverage import LONGEST_FIRST
from .ledger import Ledger
from .prices import Prices


class Survey:
    """Which lengths are to be measured next, whatever they promise; their rounds are entered at once. ``unclear``:
    whether drafting pays depends on what a plain step takes, within the error of its measurements."""

    def __init__(self, prices: Prices, ledger: Ledger) -> None:
        self._prices, self._ledger = prices, ledger
        self.unclear = False
        self._first: dict[tuple[int, int], int | None] = {}
        self._plain: dict[tuple[int, int], bool] = {}

    def tick(self, *, fresh: bool) -> None:
        """A round begins. An answer that something is to be measured holds for one round, the answer that nothing is
        holds until prices are ``fresh``."""
        if self._first and (fresh or any(length is not None for length in self._first.values())):
            self._first.clear()
        if fresh or any(self._plain.values()):
            self._plain.clear()

    def first_length(self, limit: int, rows: int, best: Callable[[], int]) -> int | None:
        """The draft length to measure next, None if there is none. It is 0 where a plain step must be measured to say
        whether drafting pays. ``best`` as for ``Coverage.first_length``."""
        place = min(limit, LONGEST_FIRST), rows
        if self._doubts(rows):
            first: int | None = 0
        elif place in self._first:
            first = self._first[place]
        else:
            first = self._first[place] = self._prices.costs.coverage.first_length(*place, self._prices.widths, best)
        self._ledger.due |= first is not None
        return first

    def wants_plain(self, limit: int, rows: int) -> bool:
        """Whether a step without any draft is to be measured next, whoever might draft."""
        place = min(limit, LONGEST_FIRST), rows
        if place not in self._plain:
            self._plain[place] = self._prices.costs.coverage.first_length(*place, self._prices.widths) == 0
        wants = self._plain[place] or self._doubts(rows)
        self._ledger.due |= wants
        return wants

    def _doubts(self, rows: int) -> bool:
        """Whether what a plain step takes decides whether to draft, and was not measured just now."""
        return self.unclear and self._prices.costs.coverage.lacks_plain(rows)
