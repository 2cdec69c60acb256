"""Decides what a step is thought to cost: measured on this device, in the loop itself, as a table and not a line."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from .settings import MAX_DRAFT_LENGTH

Known = TypeVar("Known")

_FIRST_LENGTHS = (4, 8, 2, 1, 3)  # the start-up measurement: each twice, and each still writes text
_SAMPLES = 2
_NOTICED = 0.02  # a change smaller than this leaves the table as it is
_WIDTHS = np.arange(MAX_DRAFT_LENGTH + 2)
_DRAFT, _HOST = 0, -1  # stand for a step of the draft and for the host's part among the widths


class Costs:
    """Measured seconds on this device, shared by all requests: a step of the target by rows and width, one step of
    the draft by rows, and the host's part of a round by rows. The middle of the last few, because first calls at a new
    shape are slow. What is not known for a number of rows is taken from the nearest number that was measured."""

    def __init__(self) -> None:
        self._recent: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=7))
        self._middles: dict[int, dict[int, float]] = defaultdict(dict)
        self._tables: dict[int, list[float]] = {}
        self._draft: dict[int, float] = {}
        self._host: dict[int, float] = {}
        self._samples: Counter[int] = Counter()

    def record_target(self, rows: int, width: int, seconds: float) -> None:
        middle = self._middle(rows, width, seconds)
        if abs(middle - self._middles[rows].get(width, 0.0)) > _NOTICED * middle:
            self._middles[rows][width] = middle
            self._tables.clear()
        self._samples[width] += 1

    def record_draft(self, rows: int, steps: int, seconds: float) -> None:
        if steps:
            self._draft[rows] = self._middle(rows, _DRAFT, seconds / steps)

    def record_host(self, rows: int, seconds: float) -> None:
        """What a round took besides its models: every round pays it, however much it drafts."""
        self._host[rows] = self._middle(rows, _HOST, seconds)

    def target(self, rows: int) -> list[float] | None:
        """Seconds of a step of each width from 0 to 17: between measured widths a straight line, beyond them the
        nearest, and never more than a wider step costs (a width that was last measured in a bad moment would else
        be avoided for good). None while nothing was measured."""
        if not self._middles:
            return None
        if (table := self._tables.get(rows)) is None:
            known = _nearest(self._middles, rows)
            widths = sorted(known)
            line = np.interp(_WIDTHS, widths, [known[width] for width in widths])
            table = self._tables[rows] = np.minimum.accumulate(line[::-1])[::-1].tolist()
        return table

    def draft(self, rows: int) -> float:
        """Seconds of one step of the draft; 0 while it was never measured."""
        return _nearest(self._draft, rows) if self._draft else 0.0

    def host(self, rows: int) -> float:
        """Seconds of a round outside the models; 0 while it was never measured."""
        return _nearest(self._host, rows) if self._host else 0.0

    def first_length(self, limit: int) -> int | None:
        """The next draft length of the start-up measurement that ``limit`` allows; None when it is done."""
        return next((k for k in _FIRST_LENGTHS if k <= limit and self._samples[k + 1] < _SAMPLES), None)

    def _middle(self, rows: int, width: int, seconds: float) -> float:
        recent = self._recent[rows, width]
        recent.append(seconds)
        return sorted(recent)[(len(recent) - 1) // 2]


def _nearest(table: Mapping[int, Known], rows: int) -> Known:
    """What is known for ``rows``, or for the nearest number of rows."""
    return table[rows] if rows in table else table[min(table, key=lambda r: (abs(r - rows), r))]
