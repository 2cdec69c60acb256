"""The only seam to CUDA: a device, one stream of it, memory, copies and graphs. Addresses are plain integers."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import EngineError
from .compat import ASK

Bytes = NDArray[np.uint8]
_NO_MEMORY, _INSUFFICIENT_DRIVER = 2, 35  # cudaErrorMemoryAllocation, -InsufficientDriver: also where there is none


class Cuda:
    """A device and a stream of its own on it. Fills, copies and graphs are queued on the stream in the order of the
    calls; nothing of theirs may be read before ``wait``. Every failure is an EngineError.
    """

    def __init__(self, device: int = 0) -> None:
        """Raises EngineError without cuda-bindings, a driver or a device: before any call that could crash."""
        try:
            self._cuda: Any = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise EngineError(f"cuda-bindings does not load ({error}): pip install cuda-bindings") from None
        failed, devices = self._cuda.cudaGetDeviceCount()
        if int(failed) == _INSUFFICIENT_DRIVER:
            raise self._driver_missing_or_old()
        if int(failed):
            raise EngineError(f"no CUDA device ({self._reason(failed)}): {ASK}")
        if not 0 <= device < devices:
            raise EngineError(f"CUDA device {device} is not one of the {devices} (0 to {devices - 1})")
        self._check(self._cuda.cudaSetDevice(device))
        self._device = device
        self.stream = int(self._check(self._cuda.cudaStreamCreateWithFlags(self._cuda.cudaStreamNonBlocking)))
        self._pinned: dict[int, Bytes] = {}

    @property
    def name(self) -> str:
        """The device's name as the driver tells it."""
        properties = self._check(self._cuda.cudaGetDeviceProperties(self._device))
        return bytes(properties.name).split(b"\0")[0].decode()

    @property
    def driver(self) -> str:
        """The newest CUDA version the driver takes, for instance 13.0."""
        version = int(self._check(self._cuda.cudaDriverGetVersion()))
        return f"{version // 1000}.{version % 1000 // 10}"

    def memory(self) -> tuple[int, int]:
        """Bytes of the device's memory: free now, and in all."""
        free, total = self._check(self._cuda.cudaMemGetInfo())
        return int(free), int(total)

    def allocate(self, size: int) -> int:
        """The address of ``size`` bytes on the device, not cleared."""
        answer = self._cuda.cudaMalloc(size)
        if int(answer[0]) == _NO_MEMORY:
            wanted, free, total = (f"{each / 1e6:.0f} MB" for each in (size, *self.memory()))
            raise EngineError(
                f"CUDA: out of memory: {wanted} wanted, {free} of {total} free (leadout plan says what a bundle takes)"
            )
        return int(self._check(answer))

    def free(self, address: int) -> None:
        self._check(self._cuda.cudaFree(address))

    def pinned(self, size: int) -> Bytes:
        """Host memory [size] that copies reach without a detour and graphs may name; for ``unpin``."""
        address = int(self._check(self._cuda.cudaMallocHost(size)))
        block: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        self._pinned[address] = block
        return block

    def unpin(self, block: Bytes) -> None:
        """Release what ``pinned`` gave; no view of it may be used after."""
        del self._pinned[block.ctypes.data]
        self._check(self._cuda.cudaFreeHost(block.ctypes.data))

    def fill(self, address: int, byte: int, size: int) -> None:
        self._check(self._cuda.cudaMemsetAsync(address, byte, size, self.stream))

    def upload(self, address: int, array: NDArray[Any]) -> None:
        """Host to device. ``array`` is contiguous, and stays as it is until ``wait``."""
        self._copy(address, array.ctypes.data, array.nbytes, "HostToDevice")

    def download(self, array: NDArray[Any], address: int) -> None:
        """Device to host."""
        self._copy(array.ctypes.data, address, array.nbytes, "DeviceToHost")

    def copy(self, destination: int, source: int, size: int) -> None:
        """Device to device."""
        self._copy(destination, source, size, "DeviceToDevice")

    def copy_strided(self, destination: int, pitch: int, source: int, source_pitch: int, size: int, count: int) -> None:
        """Device to device: ``count`` pieces of ``size`` bytes, a pitch apart on either side."""
        way = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        copied = self._cuda.cudaMemcpy2DAsync(destination, pitch, source, source_pitch, size, count, way, self.stream)
        self._check(copied)

    def wait(self) -> None:
        """Return when all that was queued is done. Raises EngineError for whatever failed on the way."""
        self._check(self._cuda.cudaStreamSynchronize(self.stream))

    def capture(self, work: Callable[[], None]) -> Any:
        """What ``work`` queues, as a graph that ``launch`` queues at once; nothing of it runs now."""
        cuda = self._cuda
        mode = cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._check(cuda.cudaStreamBeginCapture(self.stream, mode))
        try:
            work()
        finally:  # also after a failure: else the stream stays in capture mode
            ended = cuda.cudaStreamEndCapture(self.stream)
        graph = self._check(ended)
        try:
            return self._check(cuda.cudaGraphInstantiate(graph, 0))
        finally:
            self._check(cuda.cudaGraphDestroy(graph))

    def launch(self, graph: Any) -> None:
        self._check(self._cuda.cudaGraphLaunch(graph, self.stream))

    def discard(self, graph: Any) -> None:
        """Release a graph that ``capture`` gave."""
        self._check(self._cuda.cudaGraphExecDestroy(graph))

    def close(self) -> None:
        """Release the stream and all pinned memory. Calling it twice is fine."""
        if self.stream:
            self.wait()
            for block in list(self._pinned.values()):
                self.unpin(block)
            self._check(self._cuda.cudaStreamDestroy(self.stream))
            self.stream = 0

    def _driver_missing_or_old(self) -> EngineError:
        if not int(self._check(self._cuda.cudaDriverGetVersion())):
            return EngineError("no CUDA device (no NVIDIA driver is here): run this on the machine with the GPU")
        wanted = int(self._check(self._cuda.cudaRuntimeGetVersion())) // 1000
        known = int(self.driver.split(".")[0])
        return EngineError(
            f"the NVIDIA driver is too old for CUDA {wanted} of cuda-bindings (it takes CUDA {self.driver} at most):"
            f" update it (CUDA 13 needs 580 or later), or, where TensorRT is one for CUDA {known},"
            f" pip install 'cuda-bindings<{known + 1}'"
        )

    def _copy(self, destination: int, source: int, size: int, kind: str) -> None:
        way = getattr(self._cuda.cudaMemcpyKind, f"cudaMemcpy{kind}")
        self._check(self._cuda.cudaMemcpyAsync(destination, source, size, way, self.stream))

    def _check(self, answer: tuple[Any, ...]) -> Any:
        """What a call returned behind its error code: nothing, one value, or a tuple."""
        if int(answer[0]):
            raise EngineError(f"CUDA: {self._reason(answer[0])}")
        return answer[1] if len(answer) == 2 else answer[1:]

    def _reason(self, code: Any) -> str:
        failed, text = self._cuda.cudaGetErrorString(code)
        return f"error {int(code)}" if int(failed) else f"{text.decode()} (error {int(code)})"
