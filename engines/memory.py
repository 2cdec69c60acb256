"""Where cache buffers live: host arrays on a CPU, device allocations on a GPU; both are bound by address."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .providers import onnxruntime


class Buffer(Protocol):
    """A zero-filled block of memory whose address never changes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    device: str

    @property
    def pointer(self) -> int: ...

    def grown(self, slots: int) -> Buffer:
        """A copy with ``slots`` slots a row (axis 2); the new ones are zero."""
        ...

    def copy_row(self, source: int, destination: int) -> None: ...


class HostBuffer:
    """A numpy array [rows, heads, slots, width]."""

    device = "cpu"

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        self.shape, self.dtype, self.pointer = array.shape, array.dtype, array.ctypes.data

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: np.dtype[Any]) -> HostBuffer:
        return cls(np.zeros(shape, dtype))

    def grown(self, slots: int) -> HostBuffer:
        return HostBuffer(_grown(self.array, slots))

    def copy_row(self, source: int, destination: int) -> None:
        self.array[destination] = self.array[source]


class CudaBuffer:
    """A device allocation of the same shape. Growing and copying go by way of the host: both are rare."""

    device = "cuda"

    def __init__(self, array: NDArray[Any]) -> None:
        self.value = onnxruntime().OrtValue.ortvalue_from_numpy(array, "cuda", 0)
        self.shape, self.dtype, self.pointer = array.shape, array.dtype, self.value.data_ptr()

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: np.dtype[Any]) -> CudaBuffer:
        return cls(np.zeros(shape, dtype))

    def grown(self, slots: int) -> CudaBuffer:
        return CudaBuffer(_grown(self.value.numpy(), slots))

    def copy_row(self, source: int, destination: int) -> None:
        array = self.value.numpy()
        array[destination] = array[source]
        self.value.update_inplace(array)


def _grown(array: NDArray[Any], slots: int) -> NDArray[Any]:
    rows, heads, kept, width = array.shape
    wider = np.zeros((rows, heads, slots, width), array.dtype)
    wider[:, :, :kept] = array
    return wider
