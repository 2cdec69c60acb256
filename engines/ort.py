"""How a graph with a fixed buffer of slots takes a step on ONNX Runtime: which variant, which bindings, which cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bundle import Model
from ..errors import EngineError, UsageError
from .base import EVEN, ONE_ROW, LogitArray, Logits, ModelSpec, Tokens
from .graphs import RECORDING
from .lazy import LogitStore
from .memory import Buffer, CudaBuffer, HostBuffer
from .providers import first_line, onnxruntime, open_session
from .tensorrt.cuda import Cuda

_DTYPES: dict[str, np.dtype[Any]] = {"tensor(float)": np.dtype(np.float32), "tensor(float16)": np.dtype(np.float16)}
_KEPT_STEPS = 32
_FINE_BUCKET, _COARSE_BUCKET, _COARSE_FROM = 128, 512, 2048


_WIDEST_GRAPH, _RUNS_TO_RECORD, _MOST_GRAPHS = 32, 3, 256
_NO_GRAPH = "-1"


def bucket(slots: int, variant: str) -> int:
    """``slots`` rounded up. Growing rebinds every shape, so buckets are large; but where attention costs by capacity
    (all variants that take many rows) they are small while the cache is."""
    step = _FINE_BUCKET if variant not in ONE_ROW and slots <= _COARSE_FROM else _COARSE_BUCKET
    return max(step, -(-slots // step) * step)


@dataclasses.dataclass(slots=True)
class _Step:
    """One shape of call: a binding made once, and the arrays it reads and writes (``logits`` None: on the device).

    A step that may become a CUDA graph has ``options`` that name it, reads device memory that ``uploads`` fill from the
    arrays, and counts its ``runs``.
    """

    binding: Any
    tokens: Tokens
    positions: Tokens
    past_lens: Tokens
    past_column: Tokens
    logit_index: Tokens
    offsets: Tokens
    logits: LogitArray | None
    uploads: list[tuple[int, Tokens]] = dataclasses.field(default_factory=list)
    options: Any = None
    runs: int = 0


class SlotEngine:
    """The Engine for dialect ``slots``: ``present`` is bound to the address of ``past``, so nothing is copied.

    ``variant`` "auto" takes, of those the bundle has, for one row on a CPU ``gqa`` (``gqa_even`` if ``exact``), for
    many ``grouped``, on other providers ``nonpad``, and else the nearest; any other name pins that graph. Two variants
    differ in the last bits of their logits, one variant never differs from itself (any batch, any capacity, widths
    from ``spec.narrowest``).
    TensorRT's providers take ``canonical`` alone: they misread the others in silence.

    On cuda, steps of a shape that comes again run as CUDA graphs (all but prompts) unless ``graphs`` is set to False;
    ``graph_error`` says why they cannot, and is empty while they can.
    """

    def __init__(
        self, model: Model, *, provider: str = "cpu", threads: int = 1, variant: str = "auto", exact: bool = False
    ) -> None:
        self._model, self._provider, self._threads, self._pinned = model, provider, threads, variant
        self._exact = exact
        if provider not in ("cpu", "cuda") and variant not in ("auto", "canonical"):
            raise UsageError(f"variant '{variant}': provider '{provider}' takes canonical alone")
        if variant != "auto":
            model.path(variant)
        entry = model.entry
        even = provider == "cpu" and {self._choose(1), self._pinned if variant in ONE_ROW else self._choose(2)} <= {
            *EVEN
        }
        narrowest = 1 if even else 2
        self._spec = ModelSpec(entry.vocab_size, entry.max_context, precision=entry.precision, narrowest=narrowest)
        self._sessions: dict[tuple[str, bool], Any] = {}
        self._steps: dict[tuple[int, int, int | None], _Step] = {}
        self._cache: list[Buffer] = []
        self._variant, self._batch, self._capacity = "", 0, 0
        self._flat = np.zeros(0, np.float32)
        self._cuda: Cuda | None = None
        self._device_logits: LogitStore | None = None
        self._closed = False
        self._graphs, self._recorded, self.graph_error = provider == "cuda", 0, ""
        self.reset(1)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def batch(self) -> int:
        return self._batch

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def bytes_moved(self) -> int:
        """Bytes of logits that came over from a device in all steps so far."""
        return 0 if self._device_logits is None else self._device_logits.bytes_fetched

    @property
    def graphs(self) -> bool:
        """Whether steps may become CUDA graphs. Setting it forgets those there are."""
        return self._graphs

    @graphs.setter
    def graphs(self, wanted: bool) -> None:
        if wanted and self._provider != "cuda":
            raise EngineError(f"provider '{self._provider}' runs without CUDA graphs (possible: cuda)")
        self._graphs = wanted
        self._forget_steps()
        self._session = self._open(self._variant)

    @property
    def variant(self) -> str:
        """The name of the graph that runs now."""
        return self._variant

    def forward(self, tokens: Tokens, past_lens: Tokens, logit_index: Tokens | None = None) -> Logits:
        """See Engine.forward. A step of a shape seen before costs the host a few array copies."""
        rows, width = tokens.shape
        longest = max(past_lens.tolist())
        if longest + width > self._capacity:
            used = f"{longest} + {width}"
            raise EngineError(f"{used} tokens exceed the cache of {self._capacity} slots: call reserve first")
        key = (rows, width, None if logit_index is None else logit_index.shape[1])
        if (step := self._steps.get(key)) is None:
            with RECORDING.step(records=False):
                step = self._prepare(*key)
        step.tokens[...] = tokens
        step.past_lens[...] = past_lens
        np.add(step.past_column, step.offsets, out=step.positions)
        if longest + width > self._spec.max_context:
            np.minimum(step.positions, self._spec.max_context - 1, out=step.positions)
        if logit_index is not None:
            step.logit_index[...] = logit_index
        try:
            self._run(step)
        except Exception as error:  # onnxruntime's own exceptions share no base class below this
            if step.options is None:
                raise EngineError(f"{self._model.folder.name} ({self._variant}): {first_line(error)}") from None
            self.graph_error, self.graphs = first_line(error), False
            return self.forward(tokens, past_lens, logit_index)  # the same slots again
        if step.logits is not None:
            return step.logits
        assert self._device_logits is not None
        return self._device_logits.logits(*step.logit_index.shape)

    def reserve(self, capacity: int) -> None:
        """See Engine.reserve. Buckets: multiples of 512 slots; of 128 up to 2048, where attention costs by capacity."""
        if capacity <= self._capacity:
            return
        self._forget_steps()
        for i, buffer in enumerate(self._cache):  # one by one: the old one is gone when the new one is there
            self._cache[i] = buffer.grown(_slots(bucket(capacity, self._variant), self._variant))
        self._capacity = bucket(capacity, self._variant)

    def reset(self, batch: int) -> None:
        """See Engine.reset. Leaves the smallest capacity, or all as it is where neither batch nor cost ask for another.

        Raises EngineError for a batch the variant cannot take.
        """
        if self._closed:
            raise EngineError(f"the engine of {self._model.folder.name} is closed")
        if batch < 1:
            raise EngineError(f"batch must be at least 1, not {batch}")
        variant = self._choose(batch)
        if self._cache and (variant, batch) == (self._variant, self._batch) and self._capacity == bucket(1, variant):
            return
        self._variant, self._session = variant, self._open(variant)
        types = {value.name: value.type for value in self._session.get_inputs()}
        self._release()
        self._batch, self._capacity = batch, bucket(1, variant)
        slots = _slots(self._capacity, variant)
        self._cache = [
            self._zeros((batch, layer.heads, slots, dim), _cache_dtype(types[f"past_key_values.{i}.{kind}"]))
            for i, layer in enumerate(self._model.entry.cache)
            for kind, dim in (("key", layer.key_dim), ("value", layer.value_dim))
        ]

    def copy_row(self, source: int, destination: int) -> None:
        """See Engine.copy_row."""
        for row in (source, destination):
            if not 0 <= row < self._batch:
                raise EngineError(f"row {row} is not one of the engine's {self._batch} (0 to {self._batch - 1})")
        for buffer in self._cache:
            buffer.copy_row(source, destination)

    def close(self) -> None:
        """See Engine.close."""
        self._closed, self._capacity = True, 0
        self._sessions.clear()
        self._release()
        self._session = None
        if self._device_logits is not None:
            self._device_logits.close()
        if self._cuda is not None:
            self._cuda.close()

    def _release(self) -> None:
        """Let go of the cache and of every binding to it."""
        self._forget_steps()
        while self._cache:
            self._cache.pop().close()

    def _zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        if self._provider == "cpu":
            return HostBuffer(shape, dtype)
        if self._cuda is None:
            self._cuda = Cuda()
            self._device_logits = LogitStore(self._cuda, self._spec.vocab_size)
        return CudaBuffer(self._cuda, shape, dtype)

    def _choose(self, batch: int) -> str:
        if self._pinned in ONE_ROW and batch > 1:
            raise EngineError(f"variant '{self._pinned}' takes one row, not {batch}: use variant 'grouped' or 'auto'")
        if self._pinned != "auto":
            return self._pinned
        if self._provider not in ("cpu", "cuda"):
            return "canonical"
        if self._provider != "cpu":
            wanted = ["nonpad"]
        elif batch > 1:
            wanted = ["grouped", "nonpad"]
        else:
            wanted = ["gqa_even", "grouped", "gqa"] if self._exact else ["gqa", "grouped"]
        return next((name for name in wanted if name in self._model.entry.variants), "canonical")

    def _open(self, variant: str) -> Any:
        """The session of a variant; without CUDA graphs, for good, where one that has them cannot be opened."""
        if (variant, self._graphs) not in self._sessions:
            where: dict[str, Any] = {"provider": self._provider, "threads": self._threads}
            try:
                session = open_session(self._model.path(variant), **where, graphs=self._graphs)
            except EngineError as error:
                if not self._graphs:
                    raise
                self._graphs, self.graph_error = False, str(error)
                session = open_session(self._model.path(variant), **where)
            self._sessions[variant, self._graphs] = session
        return self._sessions[variant, self._graphs]

    def _run(self, step: _Step) -> None:
        if step.options is None and not self._graphs:
            self._session.run_with_iobinding(step.binding)
            return
        with RECORDING.step(records=step.options is not None and step.runs < _RUNS_TO_RECORD):
            for address, array in step.uploads:
                assert self._cuda is not None
                self._cuda.upload(address, array)
                self._cuda.wait()
            options = step.options or _run_options(_NO_GRAPH)
            self._session.run_with_iobinding(step.binding, options)
        step.runs += 1

    def _name_graph(self) -> Any:
        """Options that name a new graph; None when there are many: a graph lives as long as its session."""
        if self._recorded >= _MOST_GRAPHS:
            return None
        self._recorded += 1
        return _run_options(str(self._recorded))

    def _forget_steps(self) -> None:
        for step in self._steps.values():
            step.binding = None
            for address, _ in step.uploads:
                assert self._cuda is not None
                self._cuda.free(address)
        self._steps.clear()

    def _prepare(self, rows: int, width: int, wanted: int | None) -> _Step:
        """Build the binding of one shape. Logits of all shapes share one buffer: a view lives until the next call."""
        if self._closed:
            raise EngineError(f"the engine of {self._model.folder.name} is closed")
        if not 1 <= rows <= self._batch:
            raise EngineError(f"{rows} rows given, the engine has {self._batch}")
        shape = (rows, width if wanted is None else wanted, self._spec.vocab_size)
        if self._device_logits is not None:
            if self._device_logits.reserve(shape[0] * shape[1]):
                self._forget_steps()
        elif int(np.prod(shape)) > self._flat.size:
            self._flat = np.zeros(shape, np.float32).reshape(-1)
            self._forget_steps()
        if len(self._steps) >= _KEPT_STEPS:
            self._forget_steps()
        past_lens = np.zeros(rows, np.int64)
        step = _Step(
            binding=self._session.io_binding(),
            tokens=np.zeros((rows, width), np.int64),
            positions=np.zeros((rows, width), np.int64),
            past_lens=past_lens,
            past_column=past_lens[:, None],
            logit_index=np.tile(np.arange(shape[1], dtype=np.int64), (rows, 1)),
            offsets=np.arange(width, dtype=np.int64),
            logits=None if self._device_logits is not None else self._flat[: int(np.prod(shape))].reshape(shape),
        )
        if self._graphs and width <= _WIDEST_GRAPH:
            step.options = self._name_graph()
        self._bind(step, rows)
        self._steps[rows, width, wanted] = step
        return step

    def _bind(self, step: _Step, rows: int) -> None:
        names = {value.name for value in self._session.get_inputs()}
        arrays = {
            "input_ids": step.tokens,
            "position_ids": step.positions,
            "past_lens": step.past_lens,
            "logit_index": step.logit_index,
        }
        for name in sorted(arrays.keys() & names):
            if step.options is None:
                _bind_host(step.binding.bind_input, name, arrays[name])
            else:
                self._bind_device(step, name, arrays[name])
        if step.logits is not None:
            _bind_host(step.binding.bind_output, "logits", step.logits)
        elif self._device_logits is not None:
            shape = (*step.logit_index.shape, self._spec.vocab_size)
            place = (CudaBuffer.device, 0, np.dtype(np.float32), shape, self._device_logits.address)
            step.binding.bind_output("logits", *place)
        for i, buffer in enumerate(self._cache):
            layer = f"{i // 2}.{'value' if i % 2 else 'key'}"
            place = (buffer.device, 0, buffer.dtype, (rows, *buffer.shape[1:]), buffer.pointer)
            step.binding.bind_input(f"past_key_values.{layer}", *place)
            step.binding.bind_output(f"present.{layer}", *place)

    def _bind_device(self, step: _Step, name: str, array: Tokens) -> None:
        assert self._cuda is not None
        address = self._cuda.allocate(array.nbytes)
        step.uploads.append((address, array))
        step.binding.bind_input(name, CudaBuffer.device, 0, array.dtype, array.shape, address)


def _run_options(graph: str) -> Any:
    options = onnxruntime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", graph)
    return options


def _slots(capacity: int, variant: str) -> int:
    """Those of the buffers: ``gqa_even`` writes a second token, which no length counts, behind a step of one."""
    return capacity + (variant == "gqa_even")


def _bind_host(bind: Any, name: str, array: NDArray[Any]) -> None:
    bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def _cache_dtype(onnx_type: str) -> np.dtype[Any]:
    if onnx_type not in _DTYPES:
        raise EngineError(f"a cache of {onnx_type} is not supported (one of: {', '.join(_DTYPES)})")
    return _DTYPES[onnx_type]
