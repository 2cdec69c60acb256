"""Engines whose steps take the time that a table says, on a clock of their own: for tests and benchmarks.

What a machine measures differs by the minute; what a controller makes of a table does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..errors import UsageError
from .base import Engine
from .wrapped import Wrapped

_SETTLES = 0.8  # of what a draft model's step costs the target's next one is left for the one after it
_A_LOOK = 8e-6  # seconds that pass between two looks at the clock: the host's part, as it is with small models


class Clock:
    """Seconds of which only prices are made. ``told`` puts it in the place of ``perf_counter``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.unsettled = 0.0  # how much of a draft model's weights is where the target's were: 0 to 1

    def __call__(self) -> float:
        self.now += _A_LOOK
        return self.now

    @contextmanager
    def told(self, modules: Iterable[ModuleType]) -> Iterator[None]:
        """While inside, these modules read this clock for their ``perf_counter``."""
        before = {module: vars(module)["perf_counter"] for module in modules}
        try:
            for module in before:
                vars(module)["perf_counter"] = self
            yield
        finally:
            for module, function in before.items():
                vars(module)["perf_counter"] = function


@dataclass(frozen=True, slots=True)
class Prices:
    """Milliseconds on one device: ``steps`` of the target by rows and width, ``plain`` of its step of one row and token
    with exactness off, ``draft`` of a draft step by rows, and ``missed`` of each token beyond two, in each row, that
    such a step takes in. ``beside``: by what part the target's steps are longer that follow one of the draft, the first
    above all, where a cache has no room for both models."""

    steps: Mapping[int, Mapping[int, float]]
    plain: float
    draft: Mapping[int, float]
    missed: float
    beside: float = 0.0

    @classmethod
    def read(cls, path: Path, name: str) -> Prices:
        """The table called ``name`` in a JSON file of such tables. Raises UsageError if there is none."""
        tables: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        if name not in tables:
            raise UsageError(f"no prices of '{name}' in {path} (there are: {', '.join(tables)})")
        table = tables[name]
        steps = {int(rows): _numbered(widths) for rows, widths in table["steps"].items()}
        return cls(steps, table["plain"], _numbered(table["draft"]), table["missed"], table.get("beside", 0.0))

    def target(self, rows: int, width: int) -> float:
        return _between({each: _between(widths, width) for each, widths in self.steps.items()}, rows)

    def bare(self, rows: int, width: int) -> float:
        """The same with exactness off."""
        return self.plain if rows == width == 1 else self.target(rows, width)

    def drafts(self, rows: int, width: int) -> float:
        return _between(self.draft, rows) + self.missed * rows * max(0, width - 2)


class Priced(Wrapped):
    """``engine`` with steps that move ``clock`` on by ``price(rows, width)`` milliseconds. A draft's leave it
    unsettled, a target's are longer by ``beside`` as far as it is."""

    def __init__(
        self, engine: Engine, clock: Clock, price: Callable[[int, int], float], *, beside: float | None = None
    ) -> None:
        """``beside`` None: a draft's engine."""
        super().__init__(engine)
        self._clock, self._price, self._beside = clock, price, beside

    def step(self, rows: int, width: int, past: int) -> AbstractContextManager[object]:
        clock = self._clock
        clock.now += 1e-3 * self._price(rows, width) * (1.0 + (self._beside or 0.0) * clock.unsettled)
        clock.unsettled = 1.0 if self._beside is None else _SETTLES * clock.unsettled
        return nullcontext()


def _numbered(table: Mapping[str, float]) -> dict[int, float]:
    return {int(key): value for key, value in table.items()}


def _between(known: Mapping[int, float], at: int) -> float:
    """Between what is known a line; beyond it, the last line goes on."""
    places = sorted(known)
    if at <= places[-1]:
        return float(np.interp(at, places, [known[place] for place in places]))
    before, last = places[-2:]
    return known[last] + (at - last) * (known[last] - known[before]) / (last - before)
