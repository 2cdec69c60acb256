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
    """One deserialised engine with ``contexts``, one for each profile, so that no profile is switched in a loop.

    Addresses and shapes are given anew with every ``bind``: a context remembers those of its last step. What is
    captured of a step is good only while its context has what it had then, so that each graph has one of its own. They
    all work in the same memory: one step at a time.
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
        self._config, self._kernels = self._configured(sdk, name)
        self._workspace = max(1, int(self._engine.device_memory_size_v2))
        self._memory = cuda.allocate(self._workspace)
        self.contexts: list[Any] = []
        try:
            self.contexts += [self.context(profile) for profile in range(len(self.limits))]
        except BaseException:
            self.close()
            raise

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

    def context(self, profile: int) -> Any:
        """A new execution context. Raises EngineError if there is none to be had."""
        context = self._engine.create_execution_context(self._config)
        if context is not None:
            context.set_device_memory(self._memory, self._workspace)
        if context is None or not context.set_optimization_profile_async(profile, self._cuda.stream):
            raise self._refused(f"a context for profile {profile}")
        return context

    def bind(self, context: Any, shapes: Shapes, addresses: Mapping[str, int]) -> None:
        """Give every input its shape and every tensor its address. Raises EngineError for one that is refused."""
        for name in self.inputs:
            if not context.set_input_shape(name, shapes[name]):
                raise self._refused(f"{name} of shape {shapes[name]}")
        for name in (*self.inputs, *self.outputs):
            if not context.set_tensor_address(name, addresses[name]):
                raise self._refused(f"the address of {name}")

    def enqueue(self, context: Any) -> None:
        """Queue one step of what is bound."""
        if not context.execute_async_v3(self._cuda.stream):
            raise self._refused("a step")

    def capturable(self, context: Any) -> bool:
        """Whether a step of what is bound may be captured. TensorRT itself does not tell: there it has to be tried."""
        ask = getattr(context, "is_stream_capturable", None)
        return ask is None or bool(ask(self._cuda.stream))

    def close(self) -> None:
        """Release contexts, engine and runtime, in that order, and the memory they worked in."""
        self.contexts.clear()
        self._config = self._kernels = self._engine = self._runtime = None
        self._cuda.free(self._memory)

    def _read_limits(self, profile: int) -> Limits:
        rows, width = self._engine.get_tensor_profile_shape("input_ids", profile)[2]
        wanted = self._engine.get_tensor_profile_shape("logit_index", profile)[2][1]
        return Limits(int(rows), int(width), int(wanted))

    def _configured(self, sdk: Any, name: str) -> tuple[Any, Any]:
        """How contexts are to be made: in memory that is given to them. (Their own would be as much for each.)

        And how TensorRT-RTX is to run the engine: each shape by the kernels made for it, from its first step on. Left
        to itself, it begins with others and changes over when those are compiled, in the background: one shape would
        give two sets of bits, and a CUDA graph might hold what is about to be replaced. The second is where it keeps
        them for all contexts, else each would compile its own."""
        config, kernels = self._engine.create_runtime_config(), None
        config.set_execution_context_allocation_strategy(sdk.ExecutionContextAllocationStrategy.USER_MANAGED)
        if name == "tensorrt-rtx":
            config.dynamic_shapes_kernel_specialization_strategy = sdk.DynamicShapesKernelSpecializationStrategy.EAGER
            kernels = config.create_runtime_cache()
            config.set_runtime_cache(kernels)
        return config, kernels

    def _refused(self, what: str) -> EngineError:
        errors = [text for severity, text in self._log.lines if severity.endswith("ERROR")]
        return EngineError(f"{self._name}: the runtime refuses {what}: {errors[-1] if errors else 'no reason given'}")
