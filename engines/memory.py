"""Cache buffers: how many slots they have, and where they live (host arrays on a CPU, device allocations on a GPU; both
are bound by address)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..bundle import ModelEntry
from ..errors import EngineError
from .base import ONE_ROW, RAGGED
from .tensorrt.cuda import Cuda

_DTYPES: dict[str, np.dtype[Any]] = {"tensor(float)": np.dtype(np.float32), "tensor(float16)": np.dtype(np.float16)}
NAMED = 3  # parts of a name: past_key_values.0.key is that of all rows, or of one (past_key_values.0.key.3)
_DRAFTED, _GUESSED = 17, 64
_FINE_BUCKET, _COARSE_BUCKET, _GPU_BUCKET, _COARSE_FROM = 128, 512, 2048, 2048


def steady(variant: str, provider: str) -> bool:
    """Whether the time of a step depends on the tokens a row holds and not on its capacity. It does so in graphs for
    one row, and in attention on a GPU (where CUDA graphs also are valid only while the cache stays in its place)."""
    return variant in ONE_ROW or provider != "cpu"


def bucket(slots: int, *, coarse: bool, gpu: bool = False) -> int:
    """``slots``, rounded up to a bucket. Each growth rebinds every shape, so buckets are large (``coarse``). Where the
    time of attention depends on the capacity they are small while the cache is small. On a ``gpu``, where each growth
    records all steps anew, they are larger from the second bucket on."""
    step = _COARSE_BUCKET if coarse or slots > _COARSE_FROM else _FINE_BUCKET
    step = _GPU_BUCKET if gpu and slots > _COARSE_BUCKET else step
    return max(step, -(-slots // step) * step)


def buffer_slots(capacity: int, variant: str) -> int:
    """The slots of the buffers: some write one slot more, which no length counts, in steps of one token."""
    return capacity + (variant in ("gqa_even", *RAGGED))


def logit_rows(wanted: int, batch: int) -> int:
    """Rows of logits to make room for on a GPU: at least a draft for each text, or one long guess. When the room has to
    grow it moves, and all recorded steps are lost."""
    return max(wanted, _DRAFTED * batch, _GUESSED)


def cache_dtype(onnx_type: str) -> np.dtype[Any]:
    """That of a cache a graph declares so. Raises EngineError for one that is not supported."""
    if onnx_type not in _DTYPES:
        raise EngineError(f"a cache of {onnx_type} is not supported (one of: {', '.join(_DTYPES)})")
    return _DTYPES[onnx_type]


class Buffer(Protocol):
    """A zero-filled block of memory [rows, heads, slots, width] whose address never changes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def pointer(self) -> int: ...

    def grown(self, slots: int) -> Buffer:
        """A copy with ``slots`` slots a row (axis 2), the new ones zero, in place of this one, which is gone."""
        ...

    def copy_row(self, source: int, destination: int) -> None: ...

    def compact(self, row: int, start: int, kept: Sequence[int]) -> None:
        """Move slot start + kept[i] of ``row`` to start + i; ``kept`` ascends."""
        ...

    def close(self) -> None:
        """Release it."""
        ...


class HostBuffer:
    """A numpy array."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array, self.shape, self.dtype, self.pointer = array, array.shape, array.dtype, array.ctypes.data

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostBuffer:
        """Of an array of its own. Raises EngineError where there is no memory for one."""
        try:
            return cls(np.zeros(shape, dtype))
        except MemoryError:
            size = math.prod(shape) * dtype.itemsize / 2**20
            raise EngineError(
                f"no memory for {shape[0]} rows of cache, of which a part takes {size:.0f} MB"
                " (what all takes says: leadout plan BUNDLE)"
            ) from None

    def grown(self, slots: int) -> HostBuffer:
        rows, heads, kept, width = self.shape
        wider = HostBuffer.zeros((rows, heads, slots, width), self.dtype)
        wider.array[:, :, :kept] = self.array
        return wider

    def copy_row(self, source: int, destination: int) -> None:
        self.array[destination] = self.array[source]

    def compact(self, row: int, start: int, kept: Sequence[int]) -> None:
        self.array[row, :, start : start + len(kept)] = self.array[row][:, [start + slot for slot in kept]]

    def close(self) -> None:
        pass  # numpy frees it with the last reference


class CudaBuffer:
    """An allocation on the device; nothing of it ever crosses to the host."""

    device = "cuda"

    def __init__(self, cuda: Cuda, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._cuda, self.shape, self.dtype = cuda, shape, dtype
        size = math.prod(shape) * dtype.itemsize
        self.pointer = cuda.allocate(size)
        cuda.fill(self.pointer, 0, size)
        cuda.wait()

    def grown(self, slots: int) -> CudaBuffer:
        rows, heads, kept, width = self.shape
        wider = CudaBuffer(self._cuda, (rows, heads, slots, width), self.dtype)
        slot = width * self.dtype.itemsize
        self._cuda.copy_strided(wider.pointer, slots * slot, self.pointer, kept * slot, kept * slot, rows * heads)
        self._cuda.wait()
        self.close()
        return wider

    def compact(self, row: int, start: int, kept: Sequence[int]) -> None:
        _, heads, slots, width = self.shape
        slot = width * self.dtype.itemsize
        first = self.pointer + (row * heads * slots + start) * slot
        for place, old in enumerate(kept):  # ascending, so that nothing is overwritten before it has moved
            self._cuda.copy_strided(first + place * slot, slots * slot, first + old * slot, slots * slot, slot, heads)
        self._cuda.wait()

    def copy_row(self, source: int, destination: int) -> None:
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        self._cuda.copy(self.pointer + destination * size, self.pointer + source * size, size)
        self._cuda.wait()

    def close(self) -> None:
        self._cuda.free(self.pointer)


def on_host(buffer: Buffer) -> NDArray[Any]:
    """The array of a buffer that the host holds."""
    assert isinstance(buffer, HostBuffer)
    return buffer.array


def fresh_cache(
    entry: ModelEntry, session: Any, shape: tuple[int, int], zeros: Callable[[tuple[int, ...], np.dtype[Any]], Buffer]
) -> Iterator[Buffer]:
    """Buffers of ``shape`` (rows, slots) as ``session`` declares them, made by ``zeros``: a key's and a value's for
    each layer; last, if there are any, the host's for features, as wide as a cache of one head. One by one, so that
    those there are can be let go of where memory is too short for all."""
    rows, slots = shape
    values = (*session.get_inputs(), *session.get_outputs())
    types = {".".join(value.name.split(".")[:NAMED]): value.type for value in values}
    for i, layer in enumerate(entry.cache):
        for kind, dim in (("key", layer.key_dim), ("value", layer.value_dim)):
            yield zeros((rows, layer.heads, slots, dim), cache_dtype(types[f"past_key_values.{i}.{kind}"]))
    if entry.features is not None:
        yield HostBuffer.zeros((rows, 1, slots, entry.features), cache_dtype(types["features"]))
