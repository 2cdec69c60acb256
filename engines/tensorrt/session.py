"""A built engine, loaded: what it takes, where its tensors are bound, how it is set going. Nothing here knows of rows
that are rolled back or of logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import EngineError
from . import compat
from .cuda import Cuda

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The largest step one profile takes: rows, tokens a row, and tokens a row whose logits are wanted."""

    rows: int
    width: int
    wanted: int

    def allow(self, rows: int, width: int, wanted: int) -> bool:
        return rows <= self.rows and width <= self.width and wanted <= self.wanted

    def __str__(self) -> str:
        return f"{self.rows} rows x {self.width} tokens, logits of {self.wanted}"


class Session:
    """One deserialised engine with an execution context for each profile, so that no profile is switched in a loop.

    Addresses and shapes are given anew with every ``bind``: a context remembers those of its last step.
    """

    def __init__(self, name: str, path: Path, cuda: Cuda) -> None:
        """``name`` is the SDK's (``compat.SDKS``). Raises EngineError if it refuses the engine."""
        sdk = compat.sdk(name)
        self._name, self._cuda = path.name, cuda
        self._log = compat.logger(name)
        self._runtime = sdk.Runtime(self._log)
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise self._refused("it on this device")
        names = [self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)]
        inputs = {name for name in names if self._engine.get_tensor_mode(name) == sdk.TensorIOMode.INPUT}
        self.inputs = [name for name in names if name in inputs]
        self.outputs = [name for name in names if name not in inputs]
        if host := [name for name in names if self._engine.get_tensor_location(name) != sdk.TensorLocation.DEVICE]:
            raise EngineError(f"{path}: tensor '{host[0]}' wants to live on the host; build the engine again")
        self.limits = [self._read_limits(profile) for profile in range(self._engine.num_optimization_profiles)]
        self._config = self._eager(sdk) if name == "tensorrt-rtx" else None
        self._contexts = [self._open_context(profile) for profile in range(len(self.limits))]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, -1 where it depends on the step."""
        return tuple(self._engine.get_tensor_shape(name))

    def item_bytes(self, name: str) -> int:
        """Bytes of one element."""
        return int(self._engine.get_tensor_dtype(name).itemsize)

    def type_name(self, name: str) -> str:
        """The element type as the SDK names it: FLOAT, HALF, BF16, INT64 ..."""
        return str(self._engine.get_tensor_dtype(name).name)

    def aliases(self) -> dict[str, str]:
        """Every output that shares an input's memory, to that input."""
        pairs = ((name, self._engine.get_aliased_input_tensor(name)) for name in self.outputs)
        return {output: source for output, source in pairs if source}

    def profile(self, rows: int, width: int, wanted: int) -> int:
        """The last profile (they go from prefill to verify) that takes a step. Raises EngineError if none does."""
        fitting = [index for index, limits in enumerate(self.limits) if limits.allow(rows, width, wanted)]
        if not fitting:
            raise EngineError(
                f"{self._name} takes no step of {rows} rows x {width} tokens, logits of {wanted}"
                f" (at most {' or '.join(map(str, self.limits))}); others need another leadout build"
            )
        return fitting[-1]

    def bind(self, profile: int, shapes: Shapes, addresses: Mapping[str, int]) -> None:
        """Give every input its shape and every tensor its address. Raises EngineError for one that is refused."""
        context = self._contexts[profile]
        for name in self.inputs:
            if not context.set_input_shape(name, shapes[name]):
                raise self._refused(f"{name} of shape {shapes[name]} in profile {profile}")
        for name in (*self.inputs, *self.outputs):
            if not context.set_tensor_address(name, addresses[name]):
                raise self._refused(f"the address of {name}")

    def enqueue(self, profile: int) -> None:
        """Queue one step of what is bound."""
        if not self._contexts[profile].execute_async_v3(self._cuda.stream):
            raise self._refused("a step")

    def capturable(self, profile: int) -> bool:
        """Whether a step of what is bound may be captured. TensorRT itself does not tell: there it has to be tried."""
        ask = getattr(self._contexts[profile], "is_stream_capturable", None)
        return ask is None or bool(ask(self._cuda.stream))

    def close(self) -> None:
        """Release contexts, engine and runtime, in that order."""
        self._contexts.clear()
        self._config = self._engine = self._runtime = None

    def _read_limits(self, profile: int) -> Limits:
        rows, width = self._engine.get_tensor_profile_shape("input_ids", profile)[2]
        wanted = self._engine.get_tensor_profile_shape("logit_index", profile)[2][1]
        return Limits(int(rows), int(width), int(wanted))

    def _eager(self, sdk: Any) -> Any:
        """How TensorRT-RTX is to run the engine: each shape by the kernels made for it, from its first step on. Left to
        itself, it begins with others and changes over when those are compiled, in the background: one shape would give
        two sets of bits, and a CUDA graph might hold what is about to be replaced."""
        config = self._engine.create_runtime_config()
        config.dynamic_shapes_kernel_specialization_strategy = sdk.DynamicShapesKernelSpecializationStrategy.EAGER
        return config

    def _open_context(self, profile: int) -> Any:
        given = () if self._config is None else (self._config,)
        context = self._engine.create_execution_context(*given)
        if context is None or not context.set_optimization_profile_async(profile, self._cuda.stream):
            raise self._refused(f"a context for profile {profile}")
        return context

    def _refused(self, what: str) -> EngineError:
        errors = [text for severity, text in self._log.lines if severity.endswith("ERROR")]
        return EngineError(f"{self._name}: the runtime refuses {what}: {errors[-1] if errors else 'no reason given'}")
