"""TensorRT without a GPU: device memory on the host, and engines whose blob is an ONNX graph run by ONNX Runtime.

Both fakes are strict where the real ones are: shapes outside the profile are refused, every tensor needs an address,
a captured graph replays the addresses and shapes of its capture, which its context must still have, and nothing that is
captured runs at once.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from leadout.bundle import Model, file_entry
from leadout.engines.tensorrt import compat, engine, manifest
from leadout.errors import EngineError

VERSION, CAPABILITY = "1.2.3", "86"
TOP, WORKSPACE = 4, 512
STREAMS: dict[int, HostCuda] = {}
_NUMBERS = itertools.count(1)


class HostCuda:
    """The interface of ``engines.tensorrt.cuda.Cuda`` over host memory.

    ``moved`` counts the bytes that crossed each way and ``sizes`` holds the sizes of the copies to the host;
    ``launched`` counts graphs; ``blocks`` and ``pins`` are what is allocated, of ``room`` bytes on the device (None:
    any number).
    """

    name, driver = "Host", "13.0"
    room: int | None = None

    def __init__(self, *, captures: bool = True) -> None:
        self.stream = next(_NUMBERS)
        STREAMS[self.stream] = self
        self.captures, self.launched = captures, 0
        self.blocks: dict[int, Any] = {}
        self.pins: dict[int, NDArray[np.uint8]] = {}
        self.moved = {"up": 0, "down": 0}
        self.sizes: set[int] = set()
        self._recording: list[Callable[[], None]] | None = None
        self._queue: list[Callable[[], None]] = []

    @property
    def capturing(self) -> bool:
        return self._recording is not None

    def do(self, work: Callable[[], None]) -> None:
        """Queue work (a real stream runs it when it likes), or take it into the graph being captured."""
        (self._queue if self._recording is None else self._recording).append(work)

    def allocate(self, size: int) -> int:
        assert self._recording is None, "memory allocated while capturing"
        if self.room is not None and size + sum(map(len, self.blocks.values())) > self.room:
            raise EngineError("CUDA: out of memory (error 2)")
        block = ctypes.create_string_buffer(b"\xff" * max(size, 1), max(size, 1))  # NaN, as float
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int) -> None:
        assert not self._queue, "memory freed while work is queued"
        del self.blocks[address]

    def pinned(self, size: int) -> NDArray[np.uint8]:
        block = np.zeros(max(size, 1), np.uint8)
        self.pins[block.ctypes.data] = block
        return block

    def unpin(self, block: NDArray[np.uint8]) -> None:
        del self.pins[block.ctypes.data]

    def fill(self, address: int, byte: int, size: int) -> None:
        self._inside(address, size)
        self.do(lambda: ctypes.memset(address, byte, size) and None)

    def upload(self, address: int, array: NDArray[Any]) -> None:
        self._move(address, array.ctypes.data, array, "up")

    def download(self, array: NDArray[Any], address: int) -> None:
        self._move(array.ctypes.data, address, array, "down")

    def copy(self, destination: int, source: int, size: int) -> None:
        self._inside(source, size)
        self._inside(destination, size)
        self.do(lambda: ctypes.memmove(destination, source, size) and None)

    def copy_strided(self, destination: int, pitch: int, source: int, source_pitch: int, size: int, count: int) -> None:
        for piece in range(count):
            self.copy(destination + piece * pitch, source + piece * source_pitch, size)

    def wait(self) -> None:
        assert self._recording is None, "waited while capturing"
        queue, self._queue = self._queue, []
        for work in queue:
            work()

    def capture(self, work: Callable[[], None]) -> list[Callable[[], None]]:
        self._recording = []
        try:
            work()
            if not self.captures:
                raise EngineError("CUDA: operation not permitted when stream is capturing (error 900)")
            return self._recording
        finally:
            self._recording = None

    def launch(self, graph: list[Callable[[], None]]) -> None:
        self.launched += 1
        self._queue += graph

    def discard(self, graph: list[Callable[[], None]]) -> None:
        graph.clear()

    def close(self) -> None:
        self.stream = 0

    def _move(self, to: int, source: int, array: NDArray[Any], way: str) -> None:
        assert array.flags.c_contiguous
        self._inside(to if way == "up" else source, array.nbytes)

        def work() -> None:
            self.moved[way] += array.nbytes
            self.sizes |= {array.nbytes} if way == "down" else set()
            ctypes.memmove(to, source, array.nbytes)

        self.do(work)

    def _inside(self, address: int, size: int) -> None:
        """The range belongs to one allocation: what a device would answer with an illegal access."""
        assert any(start <= address and address + size <= start + len(b) for start, b in self.blocks.items())


class _Dtype:
    def __init__(self, name: str, dtype: Any) -> None:
        self.name, self.dtype, self.itemsize = name, np.dtype(dtype), np.dtype(dtype).itemsize


TYPES = {
    "tensor(float)": _Dtype("FLOAT", np.float32),
    "tensor(float16)": _Dtype("HALF", np.float16),
    "tensor(int64)": _Dtype("INT64", np.int64),
}


class FakeEngine:
    """The part of ICudaEngine that is used. ``graph`` is ONNX; its metadata hold profiles and aliases as JSON."""

    def __init__(self, graph: bytes) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        self.session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        meta = self.session.get_modelmeta().custom_metadata_map
        self.profiles, self.alias = json.loads(meta["profiles"]), json.loads(meta["aliases"])
        self.ports = {port.name: port for port in (*self.session.get_inputs(), *self.session.get_outputs())}
        self.inputs = [port.name for port in self.session.get_inputs()]
        self.num_io_tensors, self.num_optimization_profiles = len(self.ports), len(self.profiles)
        self.device_memory_size_v2 = WORKSPACE
        self.contexts: list[FakeContext] = []

    def get_tensor_name(self, index: int) -> str:
        return list(self.ports)[index]

    def get_tensor_mode(self, name: str) -> str:
        return "input" if name in self.inputs else "output"

    def get_tensor_location(self, name: str) -> str:
        return "device"

    def get_tensor_dtype(self, name: str) -> _Dtype:
        return TYPES[self.ports[name].type]

    def get_tensor_shape(self, name: str) -> list[int]:
        return [d if isinstance(d, int) else -1 for d in self.ports[name].shape]

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        most = self.profiles[profile]
        return [tuple(d if isinstance(d, int) else bound for d in self.ports[name].shape) for bound in (1, 1)] + [
            tuple(d if isinstance(d, int) else most[d] for d in self.ports[name].shape)
        ]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.alias.get(name)

    def create_runtime_config(self) -> FakeConfig:
        return FakeConfig()

    def create_execution_context(self, config: FakeConfig) -> FakeContext:
        assert config.strategy == "user managed", "each context would take memory for itself"
        self.contexts.append(FakeContext(self))
        return self.contexts[-1]


class FakeConfig:
    """The part of IRuntimeConfig that is used."""

    strategy = "static"

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.strategy = strategy


class FakeContext:
    """The part of IExecutionContext that is used. ``runs`` are the (rows, width, wanted) of every enqueue."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine, self.profile = engine, -1
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.runs: list[tuple[int, ...]] = []
        self.memory = (0, 0)

    def set_device_memory(self, memory: int, size: int) -> None:
        self.memory = memory, size

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return stream in STREAMS

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        most = self.engine.get_tensor_profile_shape(name, self.profile)[2]
        self.shapes[name] = tuple(shape)
        fixed = self.engine.get_tensor_shape(name)
        return len(shape) == len(most) and all(
            1 <= d <= bound and known in (-1, d) for d, bound, known in zip(shape, most, fixed, strict=True)
        )

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return address % 16 == 0

    def execute_async_v3(self, stream: int) -> bool:
        engine, cuda = self.engine, STREAMS[stream]
        assert set(self.addresses) == set(engine.ports), "a tensor without an address"
        assert all(self.addresses[o] == self.addresses[i] for o, i in engine.alias.items()), "past is not present"
        assert self.memory[1] >= engine.device_memory_size_v2, "nowhere to work in"
        cuda._inside(*self.memory)
        addresses, shapes, captured = dict(self.addresses), dict(self.shapes), cuda.capturing
        self.runs.append((*shapes["input_ids"], shapes["logit_index"][1]))

        def work() -> None:
            same = (self.addresses, self.shapes) == (addresses, shapes)
            assert same or not captured, "a graph of a context that was changed since"
            self._run(cuda, addresses, shapes)

        cuda.do(work)
        return True

    def _run(self, cuda: HostCuda, addresses: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        def view(name: str, shape: tuple[int, ...]) -> NDArray[Any]:
            kind = TYPES[self.engine.ports[name].type]
            size = math.prod(shape) * kind.itemsize
            cuda._inside(addresses[name], size)
            block = (ctypes.c_uint8 * size).from_address(addresses[name])
            return np.frombuffer(block, kind.dtype).reshape(shape)

        feeds = {name: view(name, shapes[name]).copy() for name in self.engine.inputs}
        names = [name for name in self.engine.ports if name not in self.engine.inputs]
        for name, value in zip(names, self.engine.session.run(names, feeds), strict=True):
            view(name, value.shape)[...] = value


class FakeRuntime:
    kind: type[FakeEngine] = FakeEngine

    def __init__(self, log: Any) -> None:
        self._log = log

    def deserialize_cuda_engine(self, blob: bytes) -> FakeEngine | None:
        if not blob.startswith(b"\x08"):  # the first field of every ONNX file
            self._log.log(Severity.ERROR, "the engine plan file is\nnot compatible")
            return None
        return self.kind(blob)


class Severity(enum.IntEnum):
    INTERNAL_ERROR, ERROR, WARNING, INFO = range(4)


class FakeLogger:
    Severity, WARNING = Severity, Severity.WARNING


SDK = SimpleNamespace(
    __name__="tensorrt",
    __version__=VERSION,
    ILogger=FakeLogger,
    Runtime=FakeRuntime,
    TensorIOMode=SimpleNamespace(INPUT="input", OUTPUT="output"),
    TensorLocation=SimpleNamespace(DEVICE="device", HOST="host"),
    ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user managed"),
)


def no_gpu() -> bool:
    """Whether this machine has no CUDA device (or nothing to ask for one)."""
    try:
        compat.compute_capability()
    except EngineError:
        return True
    return False


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SDK and CUDA be the fakes, with a device of compute capability 86."""
    monkeypatch.setattr(compat, "sdk", lambda name: SDK)
    monkeypatch.setattr(compat, "compute_capability", lambda: CAPABILITY)
    monkeypatch.setattr(compat, "logger", functools.cache(compat.logger.__wrapped__))
    monkeypatch.setattr(engine, "Cuda", HostCuda)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What an engine is built for."""

    capacity: int = 64
    rows: int = 3
    prefill: int = 24
    verify: int = 6
    heads: tuple[str, ...] = ("greedy", "logsumexp", "top_ids", "top_logits")


def build(model: Model, plan: Plan = Plan(), *, sdk: str = "tensorrt") -> Path:
    """Write ``<sdk>-86-fp32.engine`` and its manifest beside the model's graphs: the canonical graph with a fixed
    capacity and the heads. Returns the engine's path."""
    graph = onnx.load(model.path("canonical"))
    names = _fix_capacity(graph, plan.capacity)
    _add_heads(graph, plan.heads)
    rows, width, wanted = names
    profiles = [
        {rows: plan.rows, width: plan.prefill, wanted: plan.verify},
        {rows: plan.rows, width: plan.verify, wanted: plan.verify},
    ]
    parts = [f"{i}.{kind}" for i in range(len(model.entry.cache)) for kind in ("key", "value")]
    aliases = {f"present.{part}": f"past_key_values.{part}" for part in parts}
    helper.set_model_props(graph, {"profiles": json.dumps(profiles), "aliases": json.dumps(aliases)})
    path = model.folder / f"{sdk}-{CAPABILITY}-fp32.engine"
    path.write_bytes(graph.SerializeToString())
    write_manifest(model, path, plan, aliases, sdk)
    return path


def write_manifest(model: Model, path: Path, plan: Plan, aliases: dict[str, str], sdk: str = "tensorrt") -> None:
    entry = file_entry(path)
    found = manifest.EngineManifest(
        sdk=sdk,
        version=VERSION,
        compute_capability=CAPABILITY,
        precision="fp32",
        capacity=plan.capacity,
        profiles=tuple(manifest.Profile(max_batch=plan.rows, max_width=w) for w in (plan.prefill, plan.verify)),
        aliases=aliases,
        heads=plan.heads,
        top=TOP,
        graph_sha256=model.entry.variants["canonical"].sha256,
        engine_sha256=entry.sha256,
        engine_bytes=entry.bytes,
        log=(),
    )
    path.with_suffix(".json").write_text(manifest.dump(found), encoding="utf-8")


def _fix_capacity(model: onnx.ModelProto, capacity: int) -> tuple[str, str, str]:
    """Give every cache tensor ``capacity`` slots; returns the names of the dims rows, width and wanted."""
    named = {}
    for value in (*model.graph.input, *model.graph.output):
        dims = value.type.tensor_type.shape.dim
        if value.name.startswith(("past_key_values.", "present.")):
            dims[2].ClearField("dim_param")
            dims[2].dim_value = capacity
        if value.name in ("input_ids", "logit_index"):
            named[value.name] = [dim.dim_param for dim in dims]
    del model.graph.value_info[:]
    return (*named["input_ids"], named["logit_index"][1])  # type: ignore[return-value]


def _add_heads(model: onnx.ModelProto, heads: tuple[str, ...]) -> None:
    graph = model.graph
    wanted = [d.dim_param for v in graph.input if v.name == "logit_index" for d in v.type.tensor_type.shape.dim]
    ints = {"head.k": np.array([TOP]), "head.last": np.array([-1]), "head.axis": np.array([2])}
    graph.initializer.extend(numpy_helper.from_array(array.astype(np.int64), name) for name, array in ints.items())
    nodes = {
        "greedy": [("ArgMax", ["logits"], ["greedy"], {"axis": -1, "keepdims": 0})],
        "logsumexp": [("ReduceLogSumExp", ["logits", "head.last"], ["logsumexp"], {"keepdims": 0})],
        "top_logits": [("TopK", ["logits", "head.k"], ["top_logits", "top_ids"], {})],
        "drafted_logits": [
            ("Unsqueeze", ["drafted_ids", "head.axis"], ["head.index"], {}),
            ("GatherElements", ["logits", "head.index"], ["head.drafted"], {"axis": 2}),
            ("Squeeze", ["head.drafted", "head.axis"], ["drafted_logits"], {}),
        ],
    }
    shapes = {"top_ids": [*wanted, TOP], "top_logits": [*wanted, TOP]}
    for head in heads:
        graph.node.extend(helper.make_node(k, i, o, **attributes) for k, i, o, attributes in nodes.get(head, []))
        kind = TensorProto.INT64 if head in ("greedy", "top_ids") else TensorProto.FLOAT
        graph.output.append(helper.make_tensor_value_info(head, kind, shapes.get(head, wanted)))
    if "drafted_logits" in heads:
        graph.input.append(helper.make_tensor_value_info("drafted_ids", TensorProto.INT64, wanted))
