"""Where one row of somebody else's model keeps its keys and values, and what rolling back costs there."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..bundle import CacheShape
from ..errors import EngineError
from .foreign_graph import Port, Signature

Array = NDArray[Any]


class RowCache(Protocol):
    """One row's keys and values; ``held`` slots of it are filled."""

    held: int

    def bind(self, io: Any, past: int, new: int) -> None:
        """Bind ``past`` slots as input and ``past + new`` as output. Slots from ``past`` on are forgotten."""
        ...

    def commit(self, length: int) -> None:
        """The step bound last has run: ``length`` slots are filled now."""
        ...

    def reserve(self, slots: int) -> None:
        """Make room for ``slots``; keep what is held."""
        ...

    def copy_from(self, other: RowCache) -> None:
        """Become a copy of another row of the same model."""
        ...


class ConcatCache:
    """Two buffers a tensor: the graph reads [1, H, past, D] from one and writes [1, H, past + S, D] to the other.

    The graph copies its cache in every step as it is; rolling back copies the kept prefix once more, into the buffer
    that is free anyway. Rejected slots are not left as masked holes: a graph with a sliding window counts slots, and
    one without position_ids takes positions from the number of slots, so both would see wrong distances.
    """

    def __init__(self, signature: Signature, shapes: tuple[CacheShape, ...], slots: int) -> None:
        self._signature, self._widths = signature, _widths(shapes)
        self.held = 0
        self._full, self._free = self._allocate(slots), self._allocate(slots)

    def bind(self, io: Any, past: int, new: int) -> None:
        _check_past(past, self.held)
        if past < self.held:
            self._crop(past)
        for i, port in enumerate(self._signature.past):
            bind_input(io, port, self._view(self._full, i, past))
            bind_output(io, self._signature.present[i], self._view(self._free, i, past + new))

    def commit(self, length: int) -> None:
        self._full, self._free, self.held = self._free, self._full, length

    def reserve(self, slots: int) -> None:
        full = self._allocate(slots)
        for i in range(len(full)):
            self._view(full, i, self.held)[:] = self._view(self._full, i, self.held)
        self._full, self._free = full, self._allocate(slots)

    def copy_from(self, other: RowCache) -> None:
        assert isinstance(other, ConcatCache)
        self.held = other.held
        for i in range(len(self._full)):
            self._view(self._full, i, self.held)[:] = other._view(other._full, i, self.held)

    def _crop(self, past: int) -> None:
        for i in range(len(self._full)):
            self._view(self._free, i, past)[:] = self._view(self._full, i, self.held)[:, :, :past]
        self.commit(past)

    def _allocate(self, slots: int) -> list[Array]:
        ports = zip(self._signature.past, self._widths, strict=True)
        # one element at least: an empty past still needs an address
        return [np.empty(max(1, heads * slots * width), port.dtype) for port, (heads, width) in ports]

    def _view(self, buffers: list[Array], tensor: int, length: int) -> Array:
        heads, width = self._widths[tensor]
        return buffers[tensor][: heads * length * width].reshape(1, heads, length, width)


class SharedCache:
    """One buffer a tensor, [1, H, M, D], bound as past and as present: GroupQueryAttention writes in place.

    Rolling back is saying a smaller length, through the width of the attention mask.
    """

    def __init__(self, signature: Signature, shapes: tuple[CacheShape, ...], slots: int) -> None:
        self._signature, self._widths = signature, _widths(shapes)
        self.held = 0
        self._buffers = self._allocate(slots)

    def bind(self, io: Any, past: int, new: int) -> None:
        _check_past(past, self.held)
        for port, present, buffer in zip(self._signature.past, self._signature.present, self._buffers, strict=True):
            bind_input(io, port, buffer)
            bind_output(io, present, buffer)

    def commit(self, length: int) -> None:
        self.held = max(self.held, length)  # what lies beyond is still there, as in any fixed buffer

    def reserve(self, slots: int) -> None:
        grown = self._allocate(slots)
        for new, old in zip(grown, self._buffers, strict=True):
            new[:, :, : self.held] = old[:, :, : self.held]
        self._buffers = grown

    def copy_from(self, other: RowCache) -> None:
        assert isinstance(other, SharedCache)
        self.held = other.held
        for new, old in zip(self._buffers, other._buffers, strict=True):
            new[:, :, : self.held] = old[:, :, : self.held]

    def _allocate(self, slots: int) -> list[Array]:
        ports = zip(self._signature.past, self._widths, strict=True)
        return [np.zeros((1, heads, slots, width), port.dtype) for port, (heads, width) in ports]


def bind_input(io: Any, port: Port, array: Array) -> None:
    """Bind a contiguous array by address; the caller keeps it alive until the run is over."""
    io.bind_input(port.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def bind_output(io: Any, port: Port, array: Array) -> None:
    """Let the graph write its output straight into a contiguous array."""
    io.bind_output(port.name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def _widths(shapes: tuple[CacheShape, ...]) -> list[tuple[int, int]]:
    return [(s.heads, width) for s in shapes for width in (s.key_dim, s.value_dim)]


def _check_past(past: int, held: int) -> None:
    if not 0 <= past <= held:
        raise EngineError(f"past_lens says {past} slots, but the row holds {held}")
