"""The two SDKs that share one Python interface: TensorRT and TensorRT-RTX, imported when first asked for."""

from __future__ import annotations

import ctypes
import functools
import importlib
from typing import Any

from ...errors import EngineError, one_line

SDKS = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}  # provider name -> module
OLDEST = {"tensorrt": "10.16", "tensorrt-rtx": "1.7"}  # earlier ones read no TensorScatter, or were never tried
ASK = "does nvidia-smi see a GPU that CUDA_VISIBLE_DEVICES does not hide?"
_DRIVER = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_STRONGLY_TYPED_BY_DEFAULT = 11  # the first TensorRT that knows nothing else


def sdk(name: str) -> Any:
    """The module of an SDK. Raises EngineError with the line that installs it if it is not there, or too old."""
    try:
        module = importlib.import_module(SDKS[name])
    except ImportError as error:
        raise EngineError(f"{name} does not load ({error}): pip install 'leadout[{name}]'") from None
    if _numbers(module.__version__) < _numbers(OLDEST[name]):
        raise EngineError(f"{name} {module.__version__} is too old, {OLDEST[name]} or later is needed")
    return module


def _numbers(text: str) -> tuple[int, ...]:
    """The leading two numbers of a version."""
    return tuple(int(part) for part in text.split(".")[:2])


def version(name: str) -> str:
    """The version of an SDK, as engines record it."""
    return str(sdk(name).__version__)


def network_flags(name: str) -> int:
    """The creation flags of a strongly typed network: the graph alone decides in which numbers a layer computes."""
    trt = sdk(name)
    if name == "tensorrt-rtx" or _numbers(version(name))[0] >= _STRONGLY_TYPED_BY_DEFAULT:
        return 0
    return 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


@functools.cache
def logger(name: str) -> Any:
    """The logger of an SDK. An SDK keeps the first it is given and ignores all later ones, so there is one a process:
    pass it to every Builder, OnnxParser and Runtime. ``lines`` collects (severity, text), from WARNING up."""
    trt = sdk(name)

    class Collector(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[tuple[str, str]] = []

        def log(self, severity: Any, text: str) -> None:
            if severity <= trt.ILogger.WARNING:
                self.lines.append((severity.name, one_line(text)))

    return Collector()


def compute_capability(device: int = 0) -> str:
    """Major and minor without a dot ("86", "120") of a CUDA device, asked of the driver alone.

    Without a driver the SDKs crash where they should say so: ask this first. Raises EngineError without a driver or
    such a device.
    """
    try:
        cuda = ctypes.CDLL(_DRIVER)
    except OSError:
        raise EngineError(
            f"no NVIDIA driver here ({_DRIVER} is missing): run this on the machine with the GPU"
        ) from None
    count = ctypes.c_int()
    if (code := cuda.cuInit(0)) or (code := cuda.cuDeviceGetCount(ctypes.byref(count))) or count.value <= device:
        reason = f"driver error {code}" if code else f"the driver sees {count.value}"
        raise EngineError(f"no CUDA device {device} ({reason}): {ASK}")
    parts = [ctypes.c_int(), ctypes.c_int()]
    for part, attribute in zip(parts, (_MAJOR, _MINOR), strict=True):
        if code := cuda.cuDeviceGetAttribute(ctypes.byref(part), attribute, device):
            raise EngineError(f"CUDA device {device} does not tell its compute capability (driver error {code})")
    return "".join(str(part.value) for part in parts)
