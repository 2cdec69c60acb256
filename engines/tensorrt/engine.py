"""How a TensorRT engine takes a step: fixed capacity, a cache that is written in place, a CUDA graph for each shape."""

from __future__ import annotations

import dataclasses
from time import perf_counter
from typing import Any

import numpy as np

from ...bundle import Model
from ...errors import EngineError
from ..base import ModelSpec, Tokens
from ..lazy import LazyLogits, LogitStore
from ..recording import RECORDING
from . import compat, manifest
from .cuda import Cuda
from .session import Session
from .step import Step

_KEPT_STEPS, _WIDEST_GRAPH = 64, 64
INPUTS = ("input_ids", "position_ids", "past_lens", "logit_index")
REQUIRED_HEADS = ("greedy", "logsumexp", "top_logits")


class TensorRTEngine:
    """The Engine (see ``engines.base``) over a built engine: ``present`` shares the memory of ``past``.

    Steps of up to 64 tokens a row run as CUDA graphs unless ``graphs`` is set to False; ``graph_error`` says why they
    cannot, and is empty while they can.
    """

    def __init__(self, model: Model, *, provider: str) -> None:
        """Open the engine of ``model`` for this device, for one row. ``provider`` names the SDK. Raises EngineError,
        BundleError."""
        if model.entry.dialect != "slots":
            raise EngineError(f"{model.folder}: a {model.entry.dialect} model runs on provider cpu, not {provider}")
        version, capability = compat.version(provider), compat.compute_capability()
        self.path, self.manifest = manifest.find(model, provider, version, capability)
        self._bundle = model.folder.parent
        self.cuda = Cuda()
        self._logits = LogitStore(self.cuda, model.entry.vocab_size)
        self._caches: dict[str, int] = {}
        self._steps: dict[tuple[int, int, int], Step] = {}
        self._rows = self._batch = self._bytes_moved = 0
        self._recording = 0.0
        try:
            self.session = Session(provider, self.path, self.cuda)
        except BaseException:
            self.cuda.close()
            raise
        try:
            self._check_tensors(model)
            self.reset(1)
        except BaseException:
            self.close()
            raise
        verify, slots = self.session.limits[-1], self.manifest.capacity
        self.spec = ModelSpec(
            vocab_size=model.entry.vocab_size,
            max_context=min(model.entry.max_context, slots - verify.wanted + 1),
            max_step=min(slots, max(limits.width for limits in self.session.limits)),
            max_together=max(limits.rows * limits.width for limits in self.session.limits),
            max_verify=verify.wanted,
            precision=self.manifest.precision,
            mask_token=model.entry.mask_token,
        )
        self.graphs, self.graph_error = True, ""
        self._last_position = model.entry.max_context - 1

    @property
    def batch(self) -> int:
        return self._batch

    @property
    def capacity(self) -> int:
        return self.manifest.capacity

    @property
    def bytes_moved(self) -> int:
        """Bytes that crossed between host and device in all steps so far."""
        return self._bytes_moved + self._logits.bytes_fetched

    @property
    def recording(self) -> float | None:
        """See RecordingEngine."""
        return self._recording if self.graphs else None

    def forward(self, tokens: Tokens, past_lens: Tokens, logit_index: Tokens | None = None) -> LazyLogits:
        """See Engine.forward. Moves ids and a few numbers a row to the host; logits stay where they are."""
        rows, width = tokens.shape
        self._check_step(rows, int(past_lens.max()) + width)
        wanted = width if logit_index is None else logit_index.shape[1]
        with RECORDING.step(records=False):
            step = self._steps.get((rows, width, wanted)) or self._prepare(rows, width, wanted)
            step.fill(tokens, past_lens, logit_index, self._last_position)
            try:
                self._run(step)
            finally:
                self.cuda.wait()
        self._bytes_moved += step.bytes
        return self._logits.logits(rows, wanted, *step.best(), step.tops())

    def reserve(self, capacity: int) -> None:
        """See Engine.reserve. All slots there will be are there already."""
        if capacity > self.capacity:
            again = self._rebuild(capacity=capacity)
            raise EngineError(f"{capacity} slots a row asked of {self.path.name}, which has {self.capacity}; {again}")

    def reset(self, batch: int) -> None:
        """See Engine.reset. Caches become zero: what memory held may be NaN, and masked NaN is still NaN."""
        if self.cuda.stream == 0:
            raise EngineError(f"the engine {self.path} is closed")
        most = min(limits.rows for limits in self.session.limits)
        if not 1 <= batch <= most:
            profiles = tuple(dataclasses.replace(one, max_batch=max(batch, 1)) for one in self.manifest.profiles)
            again = self._rebuild(profiles=profiles)
            raise EngineError(
                f"{batch} rows asked of {self.path.name} (1 to {most}); take a smaller batch size, or {again}"
            )
        if batch > self._rows:
            self._allocate(batch)
        self._batch = batch
        self.fill_cache(0)

    def fill_cache(self, byte: int) -> None:
        """Set every byte of every slot of the rows there are."""
        for name, address in self._caches.items():
            self.cuda.fill(address, byte, self._batch * self._row_bytes(name))
        self.cuda.wait()

    def copy_row(self, source: int, destination: int) -> None:
        """See Engine.copy_row. On the device."""
        for row in (source, destination):
            if not 0 <= row < self._batch:
                raise EngineError(f"row {row} is not one of the engine's {self._batch} (0 to {self._batch - 1})")
        for name, address in self._caches.items():
            size = self._row_bytes(name)
            self.cuda.copy(address + destination * size, address + source * size, size)
        self.cuda.wait()

    def close(self) -> None:
        """See Engine.close."""
        if self.cuda.stream == 0:
            return
        self._forget_steps()
        self.session.close()
        self._logits.close()
        for address in self._caches.values():
            self.cuda.free(address)
        self._caches, self._batch, self._rows = {}, 0, 0
        self.cuda.close()

    def _run(self, step: Step) -> None:
        """A step as wide as a draft becomes a graph when it is new, for it comes again. A prompt's seldom does."""
        if step.graph is None and step.width <= _WIDEST_GRAPH and self.graphs and not self.graph_error:
            started = perf_counter()
            try:
                self._record(step)
            except EngineError as error:
                self.graph_error = str(error)
            self._recording += perf_counter() - started
        if self.graphs and step.graph is not None:
            self.cuda.launch(step.graph)
            return
        context = self.session.contexts[step.profile]
        self.session.bind(context, step.shapes, step.addresses)
        step.enqueue(self.session, context)

    def _record(self, step: Step) -> None:
        """Take the step in a context of its own, which sets itself up for the shape, and capture another; the step is
        still to be taken then, on the same slots. Raises EngineError where that cannot be."""
        context = self.session.context(step.profile)
        self.session.bind(context, step.shapes, step.addresses)
        step.enqueue(self.session, context)
        self.cuda.wait()
        if not self.session.capturable(context):
            raise EngineError(f"{self.path.name} cannot be captured as a CUDA graph; {self._rebuild()}")
        step.graph = self.cuda.capture(lambda: step.enqueue(self.session, context))
        step.context = context

    def _check_step(self, rows: int, slots: int) -> None:
        if not 1 <= rows <= self._batch:
            raise EngineError(f"{rows} rows given, the engine has {self._batch}")
        if slots > self.capacity:
            raise EngineError(f"a step up to slot {slots} exceeds the {self.capacity} slots a row of {self.path.name}")

    def _prepare(self, rows: int, width: int, wanted: int) -> Step:
        profile = self.session.profile(rows, width, wanted)
        if len(self._steps) >= _KEPT_STEPS:  # a prompt's width seldom comes again, a draft's does
            self._steps.pop(max(self._steps, key=lambda kept: kept[1])).close()
        shared = self._caches | {"logits": self._logits.address}
        shared |= {output: shared[source] for output, source in self.manifest.aliases.items()}
        caches = {name: (rows, *self.session.shape(name)[1:]) for name in self._caches}
        step = Step(self.session, self.cuda, profile, (rows, width, wanted, self.manifest.top), shared, caches)
        self._steps[rows, width, wanted] = step
        return step

    def _forget_steps(self) -> None:
        for step in self._steps.values():
            step.close()
        self._steps.clear()

    def _allocate(self, rows: int) -> None:
        self._batch = 0  # no row, until all caches are there: memory may be short
        self._forget_steps()
        for address in self._caches.values():
            self.cuda.free(address)
        self._caches, self._rows = {}, 0
        for name in self.manifest.aliases.values():
            self._caches[name] = self.cuda.allocate(rows * self._row_bytes(name))
        self._logits.reserve(rows * max(limits.wanted for limits in self.session.limits))
        self._rows = rows

    def _rebuild(self, **changes: Any) -> str:
        """What to do about an engine that does not fit."""
        wanted: manifest.EngineManifest = dataclasses.replace(self.manifest, **changes)
        return f"rebuild it: {wanted.command(self._bundle)}"

    def _row_bytes(self, name: str) -> int:
        return int(np.prod(self.session.shape(name)[1:])) * self.session.item_bytes(name)

    def _check_tensors(self, model: Model) -> None:
        """What the engine says of itself must be what its manifest and the bundle say."""
        parts = [f"{layer}.{kind}" for layer in range(len(model.entry.cache)) for kind in ("key", "value")]
        wanted = {f"present.{part}": f"past_key_values.{part}" for part in parts}
        again = self._rebuild(top=self.manifest.top or 1)
        if not wanted == self.session.aliases() == dict(self.manifest.aliases):
            raise EngineError(f"{self.path} does not write its cache in place (present is not past); {again}")
        if {self.session.shape(name)[2] for name in wanted.values()} != {self.capacity}:
            raise EngineError(f"{self.path} has another capacity than its manifest says; {again}")
        if missing := [head for head in REQUIRED_HEADS if head not in self.session.outputs]:
            raise EngineError(f"{self.path} lacks the output '{missing[0]}'; {again}")
        known = {*INPUTS, *wanted.values()}
        if strange := [name for name in self.session.inputs if name not in known]:
            raise EngineError(f"{self.path} wants the input '{strange[0]}', which nothing feeds; {again}")
        if self.session.type_name("logits") != "FLOAT":
            raise EngineError(f"{self.path} gives logits as {self.session.type_name('logits')}; {again}")
