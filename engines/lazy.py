"""Logits that stay on a device: the greedy ids come over with every step, a whole row only when a rule asks for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError
from .base import LogitArray, Tokens, Tops
from .tensorrt.cuda import Cuda

Places = NDArray[np.intp]


class LogitStore:
    """The device memory that logits are written to: a step's take the place of those of the step before.

    ``bytes_fetched`` counts what came over to the host.
    """

    def __init__(self, cuda: Cuda, vocab_size: int) -> None:
        self._cuda, self.vocab_size = cuda, vocab_size
        self.address = self._bytes = self.bytes_fetched = 0
        self.serial = 0

    def reserve(self, rows: int) -> bool:
        """Make room for ``rows`` rows of float32. Returns whether ``address`` has changed. Raises EngineError where
        there is no memory for more; then ``address`` stays, for prepared steps refer to it."""
        size = 4 * rows * self.vocab_size
        if size <= self._bytes:
            return False
        larger = self._cuda.allocate(size)
        self.close()
        self.address, self._bytes = larger, size
        return True

    def fetch(self, first: int, count: int) -> LogitArray:
        """Rows [count, vocab_size], in an array of their own."""
        found = np.empty((count, self.vocab_size), np.float32)
        self._cuda.download(found, self.address + 4 * self.vocab_size * first)
        self._cuda.wait()
        self.bytes_fetched += found.nbytes
        return found

    def logits(
        self,
        rows: int,
        wanted: int,
        greedy: Tokens | None = None,
        peaks: LogitArray | None = None,
        tops: Tops | None = None,
    ) -> LazyLogits:
        """The logits of the step just taken, [rows, wanted, vocab_size]; ``greedy``, ``peaks``, ``tops`` as in
        DeviceStep."""
        self.serial += 1
        step = DeviceStep(self, self.serial, greedy, peaks, tops)
        return LazyLogits(step, np.arange(rows * wanted).reshape(rows, wanted))

    def close(self) -> None:
        """Release the memory."""
        if self.address:
            self._cuda.free(self.address)
        self.address = self._bytes = 0


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceStep:
    """One step's logits in ``store``, for R = rows x wanted positions, as long as no other step has followed.

    ``greedy`` int64 [R] are the lowest ids among each row's largest, and ``peaks`` float32 [R] their logits, not
    finite where a row holds anything that is not; ``tops`` int64 and float32 [R, k] are each row's k largest, largest
    first. None where the graph has no such heads.
    """

    store: LogitStore
    serial: int
    greedy: Tokens | None
    peaks: LogitArray | None
    tops: Tops | None = None

    @property
    def vocab_size(self) -> int:
        return self.store.vocab_size

    def rows(self, first: int, count: int) -> LogitArray:
        """Raises EngineError if another step has overwritten them."""
        if self.serial != self.store.serial:
            raise EngineError("the logits of an earlier step are gone: take what is needed before the next step")
        return self.store.fetch(first, count)


class LazyRow:
    """A LogitRow on a device. Its greedy token and that token's logit may be on the host already; to ask for anything
    else fetches the row."""

    __slots__ = ("_place", "_row", "_step")

    def __init__(self, step: DeviceStep, place: int) -> None:
        self._step, self._place = step, place
        self._row: LogitArray | None = None

    @property
    def size(self) -> int:
        return self._step.vocab_size

    def argmax(self) -> int:
        greedy = self._step.greedy
        return int(self._all().argmax() if greedy is None else greedy[self._place])

    def __getitem__(self, key: Any) -> Any:
        """A logit, or a slice as an array; all of the row in order is the row itself."""
        if isinstance(key, slice):
            return self if key.indices(self.size) == (0, self.size, 1) else self._all()[key]
        greedy, peaks = self._step.greedy, self._step.peaks
        if greedy is not None and peaks is not None and key == greedy[self._place]:
            return peaks[self._place]
        return self._all()[key]

    def top(self) -> Tops | None:
        """The ids and logits [k] of the k largest, largest first, if they are here and the row is finite."""
        step, place = self._step, self._place
        if step.tops is None or step.peaks is None or not np.isfinite(step.peaks[place]):
            return None
        return step.tops[0][place], step.tops[1][place]

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
        greedy = self._step.greedy
        found: Tokens = np.asarray(self).argmax(-1) if greedy is None else greedy[self._places]
        return found

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
