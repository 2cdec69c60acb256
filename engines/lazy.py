"""Logits that stay on a device: the greedy ids come over with every step, a whole row only when a rule asks for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError
from .base import LogitArray, Tokens

Places = NDArray[np.intp]


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceStep:
    """What one step left behind, for R = B x L positions.

    ``fetch(first, count)`` brings rows [count, vocab_size] of logits over; ``greedy`` int64 [R] are the lowest ids
    among each row's largest; ``peaks`` float32 [R] their logits, not finite where a row holds anything that is not.
    ``current`` tells whether the engine has taken no step since.
    """

    fetch: Callable[[int, int], LogitArray]
    greedy: Tokens
    peaks: LogitArray
    vocab_size: int
    current: Callable[[], bool]

    def rows(self, first: int, count: int) -> LogitArray:
        """Raises EngineError if another step has overwritten them."""
        if not self.current():
            raise EngineError("the logits of an earlier step are gone: take what is needed before the next step")
        return self.fetch(first, count)


class LazyRow:
    """A LogitRow on a device: its greedy token and that token's logit are here, anything else brings the row over."""

    __slots__ = ("_place", "_row", "_step")

    def __init__(self, step: DeviceStep, place: int) -> None:
        self._step, self._place = step, place
        self._row: LogitArray | None = None

    @property
    def size(self) -> int:
        return self._step.vocab_size

    def argmax(self) -> int:
        return int(self._step.greedy[self._place])

    def __getitem__(self, key: Any) -> Any:
        """A logit, or a slice as an array; all of the row in order is the row itself."""
        if isinstance(key, slice):
            return self if key.indices(self.size) == (0, self.size, 1) else self._all()[key]
        return self._step.peaks[self._place] if key == self._step.greedy[self._place] else self._all()[key]

    def astype(self, dtype: Any) -> NDArray[Any]:
        """A copy of the whole row."""
        return self._all().astype(dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        row = self._all()
        return row.astype(dtype) if copy or (dtype is not None and row.dtype != dtype) else row

    def _all(self) -> LogitArray:
        if self._row is None:
            self._row = self._step.rows(self._place, 1)[0]
        return self._row


class LazyLogits:
    """Logits on a device. Indexed like an array of its leading axes; np.asarray brings all rows over."""

    __slots__ = ("_places", "_step")

    def __init__(self, step: DeviceStep, places: Places) -> None:
        """``places``: which of the step's rows, in the shape of the leading axes."""
        self._step, self._places = step, places

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self._places.shape, self._step.vocab_size)

    def argmax(self, axis: int) -> Tokens:
        """The greedy ids, shaped as the leading axes. ``axis`` is the last one; there is no other over rows."""
        if axis not in (-1, self._places.ndim):
            raise EngineError(f"logits on a device know their largest along the last axis only, not along {axis}")
        greedy: Tokens = self._step.greedy[self._places]
        return greedy

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[LazyLogits | LazyRow]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> LazyLogits | LazyRow:
        places = self._places[key]
        return LazyLogits(self._step, places) if isinstance(places, np.ndarray) else LazyRow(self._step, int(places))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        first, last = int(self._places.min()), int(self._places.max())
        rows = self._step.rows(first, last + 1 - first)[self._places - first]
        return rows if dtype is None else rows.astype(dtype)
