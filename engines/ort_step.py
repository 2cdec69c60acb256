"""Decides what one shape of call reads and writes on ONNX Runtime, and whether its runs become a CUDA graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from threading import Thread, current_thread
from time import perf_counter
from typing import Any
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from .base import Features, LogitArray, Sight, Tokens
from .memory import Buffer, CudaBuffer, HostBuffer
from .providers import onnxruntime
from .recording import RECORDING, OneThread
from .tensorrt.cuda import Cuda

WIDEST_GRAPH, MOST_GRAPHS = 64, 256
_RUNS_TO_RECORD = 3  # one to allocate, one that is recorded, one that replays
_NO_GRAPH = "-1"


@dataclasses.dataclass(slots=True)
class Step:
    """A binding made once, and the arrays it reads and writes (``logits`` None: they stay on the device ``cuda``).

    ``ids`` and ``places`` are ``tokens`` and ``positions`` in the form that Python writes fastest. ``least_width`` is
    one array for all steps of an engine. ``anchors`` [B] and ``replayed`` [P] = 0 .. P-1 say which tokens of the trails
    are read again (``trails.py``).

    ``given`` [B, S, D] are the features that the step gives, which are copied to their slots in ``kept`` [batch, slots,
    D]; ``beside`` [B, S, D] are those that it reads: what the list ``told``, one for all steps of an engine, holds when
    the step is run. Each is None where there are no features.

    In a session that records CUDA graphs, ``options`` name the step's graph, and ``thread`` takes its runs. A
    ``recorded`` step reads device memory, which ``uploads`` fill from the arrays, and is recorded when a thread first
    runs it (``recorders`` are these threads; their numbers would be used again). Other steps on a device have
    ``copies``: inputs that are bound anew before each run, for ONNX Runtime copies them when they are bound.
    """

    session: Any
    binding: Any
    tokens: Tokens
    positions: Tokens
    past_lens: Tokens
    past_column: Tokens
    logit_index: Tokens
    least_width: Tokens
    offsets: Tokens
    sees: Sight
    anchors: Tokens
    replayed: Tokens
    logits: LogitArray | None
    given: Features | None = None
    kept: Features | None = None
    beside: Features | None = None
    told: list[Features] | None = None
    cuda: Cuda | None = None
    options: Any = None
    thread: OneThread | None = None
    recorded: bool = False
    uploads: list[tuple[int, NDArray[Any]]] = dataclasses.field(default_factory=list)
    copies: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    recorders: WeakSet[Thread] = dataclasses.field(default_factory=WeakSet)
    ids: memoryview = dataclasses.field(init=False)
    places: memoryview = dataclasses.field(init=False)

    @classmethod
    def shaped(
        cls,
        session: Any,
        shape: tuple[int, int, int, int],
        replayed: int,
        least_width: Tokens,
        logits: LogitArray | None,
        cuda: Cuda | None,
    ) -> Step:
        """A step of ``shape`` (rows, tokens, logits a row, columns of its mask: 0 for a chain) that reads ``replayed``
        tokens again, not bound yet."""
        rows, width, columns, seen = shape
        past_lens = np.zeros(rows, np.int64)
        return cls(
            session=session,
            binding=session.io_binding(),
            tokens=np.zeros((rows, width), np.int64),
            positions=np.zeros((rows, width), np.int64),
            past_lens=past_lens,
            past_column=past_lens[:, None],
            logit_index=np.tile(np.arange(columns, dtype=np.int64), (rows, 1)),
            least_width=least_width,
            offsets=np.arange(width, dtype=np.int64),
            sees=np.tile(np.tri(width, seen or width, dtype=np.bool_), (rows, 1, 1)),
            anchors=np.zeros(rows, np.int64),
            replayed=np.arange(replayed, dtype=np.int64),
            logits=logits,
            cuda=cuda,
        )

    def __post_init__(self) -> None:
        self.ids, self.places = self.tokens.reshape(-1).data, self.positions.reshape(-1).data

    def run(self) -> float:
        """Take the step. Returns the seconds spent on recording it. Raises whatever ONNX Runtime does."""
        recording = 0.0
        if self.told is not None:
            assert self.beside is not None
            self.beside[...] = self.told[0]
        if self.cuda is None:
            self.session.run_with_iobinding(self.binding)
        elif self.thread is None:
            recording = self._run_on(self.cuda)
        else:
            recording = self.thread.take(partial(self._run_on, self.cuda))
        if self.given is not None and self.kept is not None:
            width = self.given.shape[1]
            for row, past in enumerate(self.past_lens.tolist()):
                self.kept[row, past : past + width] = self.given[row]
        return recording

    def feed(self, tokens: Tokens, past_lens: Tokens | int) -> None:
        """What the step brings, and behind how many tokens of each row."""
        self.tokens[...] = tokens
        self.past_lens[...] = past_lens

    def count_positions(self, context: int) -> None:
        """Tokens stand behind ``past_lens``; from position ``context`` on they are padding, whose places must exist."""
        np.add(self.past_column, self.offsets, out=self.positions)
        np.minimum(self.positions, context - 1, out=self.positions)

    def with_features(self, kept: Buffer, told: list[Features] | None) -> None:
        """Give features to their slots in ``kept``, the host's, and read those that ``told`` holds then, if any."""
        assert isinstance(kept, HostBuffer)
        self.kept, self.told = kept.array[:, 0], told
        self.given = np.zeros((*self.tokens.shape, kept.shape[-1]), kept.dtype)
        self.beside = None if told is None else np.zeros_like(self.given)

    def name_graph(self, recorded: int, thread: OneThread) -> bool:
        """Let the step become a CUDA graph, the next after ``recorded`` of them, run by ``thread``. Steps of prompts
        become none, nor does any beyond MOST_GRAPHS, for a graph lives as long as its session. Returns whether it
        becomes one."""
        self.thread = thread
        self.recorded = self.tokens.shape[1] <= WIDEST_GRAPH and recorded < MOST_GRAPHS
        self.options = graph_options(recorded + 1 if self.recorded else None)
        return self.recorded

    def _run_on(self, cuda: Cuda) -> float:
        records = self.recorded and current_thread() not in self.recorders
        with RECORDING.step(records=records):
            for address, array in self.uploads:
                cuda.upload(address, array)
                cuda.wait()
            for name, value in self.copies:
                self.binding.bind_ortvalue_input(name, value)
            how = () if self.options is None else (self.options,)
            started = perf_counter()
            # All of these runs at once, so that only one step is slow; each reads and writes the same.
            for _ in range(_RUNS_TO_RECORD - 1 if records else 0):
                self.session.run_with_iobinding(self.binding, *how)
            recording = perf_counter() - started
            self.session.run_with_iobinding(self.binding, *how)
        if records:
            self.recorders.add(current_thread())
        return recording

    def bind(
        self,
        cache: Sequence[Buffer],
        logits: tuple[int, int] | None,
        beside: Iterable[tuple[str, str, HostBuffer, HostBuffer]] = (),
    ) -> None:
        """Bind all that the graph reads and writes. ``logits``: their address on a device and their number in a row
        (None: they go to the array); ``cache``: buffers that are read and written in place, with those of features
        last, if the step gives any; ``beside``: what ``Trails.bindings`` says."""
        self._bind_inputs()
        self._bind_outputs(logits)
        rows = self.tokens.shape[0]
        for i, buffer in enumerate(cache if self.kept is None else cache[:-1]):
            self._bind_cache(part_of(i), buffer)
        for read, written, old, new in beside:
            self.binding.bind_ortvalue_input(read, in_place(old.array[:rows]))
            self.binding.bind_ortvalue_output(written, in_place(new.array[:rows]))

    def free(self) -> None:
        """Let go of the binding and of memory on the device."""
        self.binding = None
        for address, _ in self.uploads:
            assert self.cuda is not None
            self.cuda.free(address)

    def _bind_inputs(self) -> None:
        """The arrays that the graph has inputs for."""
        names = {value.name for value in self.session.get_inputs()}
        arrays: dict[str, NDArray[Any]] = {
            "input_ids": self.tokens,
            "position_ids": self.positions,
            "past_lens": self.past_lens,
            "logit_index": self.logit_index,
            "least_width": self.least_width,
            "tree_mask": self.sees,
            "anchors": self.anchors,
            "replayed": self.replayed,
        }
        if self.beside is not None:
            arrays["features_in"] = self.beside
        for name in sorted(arrays.keys() & names):
            if self.recorded:
                self._bind_device(name, arrays[name])
            elif self.cuda is not None:
                self.copies.append((name, in_place(arrays[name])))
            else:
                self.binding.bind_ortvalue_input(name, in_place(arrays[name]))

    def _bind_outputs(self, logits: tuple[int, int] | None) -> None:
        if self.given is not None:
            self.binding.bind_ortvalue_output("features", in_place(self.given))
        if self.logits is not None:
            self.binding.bind_ortvalue_output("logits", in_place(self.logits))
        elif logits is not None:
            shape = (*self.logit_index.shape, logits[1])
            self.binding.bind_output("logits", CudaBuffer.device, 0, np.dtype(np.float32), shape, logits[0])

    def _bind_cache(self, part: str, buffer: Buffer) -> None:
        """One buffer as ``past_key_values`` and as ``present`` of ``part``."""
        rows = self.tokens.shape[0]
        if isinstance(buffer, HostBuffer):
            value = in_place(buffer.array[:rows])
            self.binding.bind_ortvalue_input(f"past_key_values.{part}", value)
            self.binding.bind_ortvalue_output(f"present.{part}", value)
        else:
            place = (CudaBuffer.device, 0, buffer.dtype, (rows, *buffer.shape[1:]), buffer.pointer)
            self.binding.bind_input(f"past_key_values.{part}", *place)
            self.binding.bind_output(f"present.{part}", *place)

    def _bind_device(self, name: str, array: NDArray[Any]) -> None:
        assert self.cuda is not None
        address = self.cuda.allocate(array.nbytes)
        self.uploads.append((address, array))
        self.binding.bind_input(name, CudaBuffer.device, 0, array.dtype, array.shape, address)


def part_of(index: int) -> str:
    """What graphs call a cache's part, by the index of its buffer: a layer and key or value, like ``0.key``."""
    return f"{index // 2}.{'value' if index % 2 else 'key'}"


def graph_options(number: int | None) -> Any:
    """Run options that name a CUDA graph, or (None) say that a run records and replays none."""
    options = onnxruntime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", _NO_GRAPH if number is None else str(number))
    return options


def in_place(array: NDArray[Any]) -> Any:
    """An OrtValue on the memory of ``array``, which is contiguous. (Binding one takes a third of the time of binding an
    address and a shape.)"""
    return import_module("onnxruntime").OrtValue.ortvalue_from_numpy(array)
