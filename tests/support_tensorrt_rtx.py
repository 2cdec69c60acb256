"""TensorRT-RTX where it is not like TensorRT: kernels are compiled while it runs, and a context says whether its steps
can be captured. The rest is as in ``support_tensorrt_host``."""

from __future__ import annotations

import ctypes
import enum
from types import SimpleNamespace

import numpy as np
import pytest
from support_tensorrt_host import SDK, STREAMS, FakeConfig, FakeContext, FakeEngine, FakeRuntime

from leadout.engines.tensorrt import compat


class Specialization(enum.IntEnum):
    LAZY, EAGER, NONE = range(3)


class RTXEngine(FakeEngine):
    """LAZY where nobody asks for anything else. ``fixed``: whether it was built to allocate nothing while it runs."""

    fixed = True

    def create_runtime_config(self) -> RTXConfig:
        return RTXConfig()

    def create_execution_context(self, config: FakeConfig) -> FakeContext:
        assert isinstance(config, RTXConfig) and config.strategy == "user managed" and config.cache is not None
        self.contexts.append(RTXContext(self, config.dynamic_shapes_kernel_specialization_strategy))
        return self.contexts[-1]


class RTXConfig(FakeConfig):
    """``cache``: of compiled kernels; contexts without one compile all of theirs."""

    dynamic_shapes_kernel_specialization_strategy = Specialization.LAZY
    cache: object = None

    def create_runtime_cache(self) -> object:
        return object()

    def set_runtime_cache(self, cache: object) -> bool:
        self.cache = cache
        return True


class RTXContext(FakeContext):
    """If LAZY, a shape's first step is a fallback kernel's, which rounds otherwise than the one that is then compiled.
    ``asked``: how often somebody asked whether it can be captured."""

    def __init__(self, engine: RTXEngine, how: Specialization) -> None:
        super().__init__(engine)
        self.how, self.fixed, self.asked = how, engine.fixed, 0

    def execute_async_v3(self, stream: int) -> bool:
        done = super().execute_async_v3(stream)
        if self.how is Specialization.LAZY and self.runs.count(self.runs[-1]) == 1:
            address, (rows, _, wanted) = self.addresses["logits"], self.runs[-1]
            count = rows * wanted * self.engine.get_tensor_shape("logits")[-1]
            STREAMS[stream].do(lambda: _round_otherwise(address, count))
        return done

    def is_stream_capturable(self, stream: int) -> bool:
        self.asked += 1
        return stream in STREAMS and self.fixed and self.how is not Specialization.LAZY


class RTXRuntime(FakeRuntime):
    kind = RTXEngine


RTX = SimpleNamespace(
    **vars(SDK) | {"Runtime": RTXRuntime, "DynamicShapesKernelSpecializationStrategy": Specialization}
)


def _round_otherwise(address: int, count: int) -> None:
    logits = np.frombuffer((ctypes.c_float * count).from_address(address), np.float32)
    logits[...] = np.nextafter(logits, np.float32(np.inf))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TensorRT-RTX be the fake, too (after ``support_tensorrt_host.install``)."""
    monkeypatch.setattr(compat, "sdk", {"tensorrt": SDK, "tensorrt-rtx": RTX}.__getitem__)
