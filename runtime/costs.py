"""Decides what a step is thought to cost: measured on this device, in the loop itself, as a table and not a line."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from statistics import median_low
from typing import TypeVar

import numpy as np

from .settings import MAX_DRAFT_LENGTH

Known = TypeVar("Known")

_FIRST_LENGTHS = (4, 8, 2, 1, 3)  # the start-up measurement: each twice, and each still writes text
_SAMPLES = 2
_RECENT = 7
_WIDTHS = np.arange(MAX_DRAFT_LENGTH + 2)


class Recent(deque[float]):
    """The last few measurements. Their middle counts, because first calls at a new shape are slow."""

    def __init__(self) -> None:
        super().__init__(maxlen=_RECENT)


class Costs:
    """Measured seconds on this device, shared by all requests: a step of the target by rows and width, one step of
    the draft by rows, and the host's part of a round by rows. Recording is cheap, for every round does it; looking up
    is not. What is not known for a number of rows is taken from the nearest number that was measured."""

    def __init__(self) -> None:
        self._target: dict[int, dict[int, Recent]] = defaultdict(lambda: defaultdict(Recent))
        self._draft: dict[int, Recent] = defaultdict(Recent)
        self._host: dict[int, Recent] = defaultdict(Recent)
        self._samples: Counter[int] = Counter()

    def record_target(self, rows: int, width: int, seconds: float) -> None:
        self._target[rows][width].append(seconds)
        self._samples[width] += 1

    def record_draft(self, rows: int, steps: int, seconds: float) -> None:
        if steps:
            self._draft[rows].append(seconds / steps)

    def record_host(self, rows: int, seconds: float) -> None:
        """What a round took besides its models: every round pays it, however much it drafts."""
        self._host[rows].append(seconds)

    def target(self, rows: int) -> list[float] | None:
        """Seconds of a step of each width from 0 to 17: between measured widths a straight line, beyond them the
        nearest, and never more than a wider step costs (a width that was last measured in a bad moment would else
        be avoided for good). None while nothing was measured."""
        if not self._target:
            return None
        known = {width: median_low(recent) for width, recent in sorted(_nearest(self._target, rows).items())}
        line = np.interp(_WIDTHS, list(known), list(known.values()))
        monotone: list[float] = np.minimum.accumulate(line[::-1])[::-1].tolist()
        return monotone

    def draft(self, rows: int) -> float:
        """Seconds of one step of the draft; 0 while it was never measured."""
        return median_low(_nearest(self._draft, rows)) if self._draft else 0.0

    def host(self, rows: int) -> float:
        """Seconds of a round outside the models; 0 while it was never measured."""
        return median_low(_nearest(self._host, rows)) if self._host else 0.0

    def first_length(self, limit: int) -> int | None:
        """The next draft length of the start-up measurement that ``limit`` allows; None when it is done."""
        return next((k for k in _FIRST_LENGTHS if k <= limit and self._samples[k + 1] < _SAMPLES), None)


def _nearest(table: Mapping[int, Known], rows: int) -> Known:
    """What is known for ``rows``, or for the nearest number of rows."""
    return table[rows] if rows in table else table[min(table, key=lambda r: (abs(r - rows), r))]
