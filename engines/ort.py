"""How a graph with a fixed buffer of slots takes a step on ONNX Runtime: which variant, which bindings, which cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ..bundle import Model
from ..errors import EngineError, first_line
from .alone import prompt_step
from .base import MOST_ROWS, ONE_ROW, RAGGED, EachRow, Features, Logits, ModelSpec, Sight, Tokens, Widths
from .kept import KeptSteps, make_room
from .lazy import LogitStore
from .memory import Buffer, CudaBuffer, HostBuffer, bucket, buffer_slots, fresh_cache, logit_rows, on_host, steady
from .ort_step import Step
from .ragged import RaggedSteps
from .recording import RECORDING
from .rounding import even_widths, rounded_alike, uneven
from .sessions import Sessions
from .tensorrt.cuda import Cuda
from .trails import NO_TURN, Trails, Turn
from .variants import ROUNDING_ALIKE, SOONEST, WITHOUT_REST, Choice, branching, require_possible

_EVEN_WIDTH, _PLACES = 2, 1 << 17  # the latter: positions that are copied, 1 MB; those of a longer text are counted
T = TypeVar("T")
NOTHING = np.zeros((1, 1, 1), np.float32)  # features beside any step, until others are given


class SlotEngine:
    """The Engine for dialect ``slots``: ``present`` is bound to the address of ``past``, so nothing is copied.

    ``variant`` "auto" takes what ``variants`` says of those the bundle has; any other name pins that graph. Two differ
    in the last bits of their logits (ragged ones and those for one row do not); with ``exact``, one never differs from
    itself (any batch, any capacity, the widths of ``spec.widths``). Raises EngineError where a pinned one cannot have
    that on this processor. A token of a tree rounds as in a chain only if its slot is the same.

    On cuda steps run as CUDA graphs, a graph a shape, all but prompts, steps that branch and those of models with
    features or recurrent layers.
    """

    def __init__(
        self,
        model: Model,
        *,
        provider: str = "cpu",
        threads: int = 1,
        variant: str = "auto",
        exact: bool = False,
        lean: bool = False,
    ) -> None:
        self._model, self._provider = model, provider
        self._sessions = Sessions(model, provider=provider, threads=threads, lean=lean)
        self._pages = self._sessions.pages
        require_possible(model, provider, variant)
        entry = model.entry
        self._choice = Choice(entry, provider, variant, ROUNDING_ALIKE if exact else SOONEST)
        self._kept = entry.recurrence
        trees = provider in ("cpu", "cuda") and not {"tree", "tree_gqa"}.isdisjoint(entry.variants)
        self._spec = ModelSpec.of(entry, Widths(self._choice.narrowest), trees=trees)
        self._places = np.arange(min(entry.max_context, _PLACES))
        self._row_limit = entry.max_context if provider == "cpu" and self._kept is None else 0
        self._session: Any = None  # of the graph in use; graphs of some widths
        self._of_width: dict[int, str] = {}
        self._ragged_from = MOST_ROWS + 1  # so many rows, by the graph for ragged ones
        self._kept_steps = KeptSteps()
        self._cache: list[Buffer] = []
        self._trails = Trails(self._kept, 0)
        self._variant, self._batch, self._capacity = "", 0, 0
        self._flat, self._least_width = np.zeros(0, np.float32), np.array([_EVEN_WIDTH])
        self._cuda: Cuda | None = None
        self._device_logits: LogitStore | None = None
        self._resets, self._recorded, self._recording = 0, 0, 0.0  # CUDA graphs, seconds for them
        self._told: list[Features] = [NOTHING]
        self.reset(1)
        if exact and provider == "cpu":
            self._settle()

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
        return self._sessions.graphs

    @graphs.setter
    def graphs(self, wanted: bool) -> None:
        self._sessions.want_graphs(wanted)
        self._kept_steps.forget()
        self._run_by(*self._choice.graphs(self._variant, self.even, self._spec.widths))

    @property
    def graph_error(self) -> str:
        """Why steps cannot become CUDA graphs; empty while they can."""
        return self._sessions.error

    @property
    def recording(self) -> float | None:
        """See RecordingEngine."""
        return self._recording if self.graphs else None

    @property
    def even(self) -> bool:
        """Whether a step of one token rounds like wider ones where that has its price (``gqa_even``: 4 to 18 % of a
        small model's step; off it a small one takes ``gqa``). On after every ``reset``; read by the next step."""
        return bool(self._least_width[0] == _EVEN_WIDTH)

    @even.setter
    def even(self, wanted: bool) -> None:
        self._least_width[0] = _EVEN_WIDTH if wanted else 1
        self._run_by(*self._choice.graphs(self._variant, self.even, self._spec.widths))

    @property
    def resets(self) -> int | None:
        """See KeepingEngine: on a CPU, where one row's steps cost by its length and not by its capacity."""
        keeps = self._provider == "cpu" and self._variant in ONE_ROW and self._batch > 0
        return self._resets if keeps else None

    @property
    def reads_alone(self) -> bool:
        """See ReadingEngine."""
        return self._batch > 1 and self._provider == "cpu" and self._kept is None and self._choice.of(1) in ONE_ROW

    @property
    def ragged(self) -> bool:
        """See RaggedEngine."""
        return self._variant in RAGGED and self._batch > 1

    @property
    def variant(self) -> str:
        """The name of the chosen graph (off ``even`` another may run in its place)."""
        return self._variant

    def forward(self, tokens: Tokens, past_lens: Tokens, logit_index: Tokens | None = None) -> Logits:
        """See Engine.forward. A step of a shape seen before costs the host a few array copies."""
        self._check_room(tokens.shape[1], past_lens)
        self._pages.settle()
        if len(tokens) >= self._ragged_from and tokens.shape[1] not in self._of_width:
            return self._taken(partial(self._many().take_alike, tokens, past_lens, logit_index))
        return self._forward(tokens, past_lens, logit_index)

    def forward_ragged(self, pieces: Sequence[Sequence[int]], past_lens: Sequence[int]) -> EachRow:
        """See RaggedEngine.forward_ragged."""
        past, width = max(zip(past_lens, map(len, pieces), strict=True), key=sum)
        self._check_room(width, np.array([past]))
        self._pages.settle()
        return self._taken(partial(self._many().take, pieces, past_lens))

    def _many(self) -> RaggedSteps:
        return self._kept_steps.ragged(self._variant, self._sessions.open, self._cache, self._spec)

    def _taken(self, step: Callable[[], T]) -> T:
        try:
            return step()
        except Exception as error:  # as in ``_run``
            raise self._failed(error) from error

    def _forward(self, tokens: Tokens, past_lens: Tokens, logit_index: Tokens | None) -> Logits:
        (rows, width), longest = tokens.shape, max(past_lens.tolist())
        turn = self._trails.turn(past_lens.tolist(), width)
        step = self._step(rows, width, None if logit_index is None else logit_index.shape[1], 0, turn)
        step.feed(tokens, past_lens)
        if rows == 1 and longest + width <= self._places.size:
            step.positions[0] = self._places[longest : longest + width]
        else:
            step.count_positions(self._spec.max_context)
        if logit_index is not None:
            step.logit_index[...] = logit_index
        step.anchors[...] = self._trails.anchors[:rows]
        return self._run(step, lambda: self._forward(tokens, past_lens, logit_index))

    def row_logits(self, tokens: Sequence[int], past_len: int, last: bool) -> Logits:
        """See RowEngine.row_logits. The step is one that ``forward`` may take, too."""
        end, some = past_len + (width := len(tokens)), last and width > 1
        if end > self._capacity or end > self._row_limit or self._ragged_from == 1:
            index = np.full((1, 1), width - 1, np.int64) if some else None
            return self.forward(np.array([tokens], np.int64), np.array([past_len], np.int64), index)
        if (step := self._steps.get((1, width, 1 if some else None, 0, NO_TURN))) is None:
            step = self._step(1, width, 1 if some else None, 0, NO_TURN)
        step.past_lens[0] = past_len
        if some:
            step.logit_index[0, 0] = width - 1
        ids, places = step.ids, step.places
        for i, token in enumerate(tokens):  # after a target's step numpy's code is out of the cache: none is called
            ids[i], places[i] = token, past_len + i
        self._taken(step.run)
        assert step.logits is not None
        return step.logits

    def read(self, row: int, tokens: Tokens, past_len: int) -> None:
        """See ReadingEngine.read."""
        self._check_room(len(tokens), np.array([past_len]))
        self._pages.settle()
        session = self._sessions.open(self._choice.of(1))
        self._run(prompt_step(session, self._cache, row, tokens, past_len, self._least_width, self._spec))

    def features(self, row: int, start: int, stop: int) -> Features:
        """See FeatureEngine.features."""
        self._sessions.require_open()
        return on_host(self._cache[-1])[row, 0, start:stop]

    def beside(self, features: Features) -> None:
        """See FeatureEngine.beside."""
        self._sessions.require_open()
        self._told[0] = features

    def forward_tree(self, tokens: Tokens, past_lens: Tokens, sees: Sight) -> Logits:
        """See TreeEngine.forward_tree."""
        rows, width = tokens.shape
        self._check_room(width, past_lens)
        step = self._step(rows, width, None, sees.shape[2], NO_TURN)
        step.feed(tokens, past_lens)
        step.sees[...] = sees
        np.add(step.past_column, sees.sum(axis=2) - (1 + sees.shape[2] - width), out=step.positions)
        np.minimum(step.positions, self._spec.max_context - 1, out=step.positions)
        return self._run(step, lambda: self.forward_tree(tokens, past_lens, sees))

    def compact(self, row: int, past_len: int, kept: Sequence[int]) -> None:
        """See TreeEngine.compact."""
        self._sessions.require_open()
        for buffer in self._cache:
            buffer.compact(row, past_len, kept)

    def commit(self, lengths: Sequence[int]) -> None:
        """See CommittingEngine.commit."""
        self._trails.commit(lengths)

    def earliest(self, row: int) -> int:
        """See CommittingEngine.earliest."""
        return self._trails.anchors[row]

    def _settle(self) -> None:
        """Keep to graphs and widths that do round alike on this processor."""
        found, free = even_widths(self, self._choice.narrowest), self._choice.pinned == "auto"
        if free and found is None:
            self._take(WITHOUT_REST)
            found = even_widths(self, self._choice.narrowest)
        elif free and found != Widths(1) and self._variant == "gqa_even":
            self._take(SOONEST)  # gqa: wider steps need no graph of their own
        if found is None:
            raise uneven(f"{self._model.folder.name} ({self._variant})")
        self._spec = rounded_alike(self, found)

    def _take(self, alone: tuple[str, ...]) -> None:
        """Another preference for one row's graph."""
        self._choice.alone = alone
        self._sessions.clear()
        self.reset(1)

    def _check_room(self, width: int, past_lens: Tokens) -> None:
        """Raise EngineError where the step needs more slots than there are."""
        if (longest := max(past_lens.tolist())) + width > self._capacity:
            self._sessions.require_open()
            room = f"{self._capacity} slots: call reserve first"
            raise EngineError(f"{longest} + {width} tokens exceed the cache of {room}")

    def _step(self, *shape: Any) -> Step:
        if (step := self._steps.get(shape)) is None:
            with RECORDING.step(records=False):
                step = self._prepare(*shape)
        return step

    def _run(self, step: Step, again: Callable[[], Logits] | None = None) -> Logits:
        """``again`` takes the same step anew, on the same slots, where its graph could not be recorded."""
        try:
            self._recording += step.run()
        except Exception as error:  # onnxruntime's own exceptions share no base class below this
            if not step.recorded or again is None:
                raise self._failed(error) from error
            self.graphs = False
            self._sessions.refuse_graphs(first_line(error))
            return again()
        self._trails.took(step.past_lens.tolist(), step.tokens.shape[1])
        if step.logits is not None:
            return step.logits
        assert self._device_logits is not None
        return self._device_logits.logits(*step.logit_index.shape)

    def _failed(self, error: BaseException) -> EngineError:
        return EngineError(f"{self._model.folder.name} ({self._variant}): {first_line(error)}")

    def reserve(self, capacity: int) -> None:
        """See Engine.reserve. Slots come in buckets."""
        if capacity <= self._capacity:
            return
        self._sessions.require_open()
        more = bucket(capacity, coarse=steady(self._variant, self._provider), gpu=self._provider == "cuda")
        batch, self._batch = self._batch, 0  # no cache, until all of it has grown: an interrupt may come in between
        self._kept_steps.forget()
        with RECORDING.step(records=False):
            for i, buffer in enumerate(self._cache):  # one by one: the old one is gone when the new one is there
                self._cache[i] = buffer.grown(buffer_slots(more, self._variant))
        self._capacity, self._batch = more, batch

    def reset(self, batch: int) -> None:
        """See Engine.reset. Leaves the smallest capacity, or all as it is where neither batch nor cost ask for another
        (``steady``), a GPU's for fewer rows, too. Raises EngineError for a batch it cannot take."""
        if batch < 1:
            raise EngineError(f"batch must be at least 1, not {batch}")
        self._resets, self._told[0] = self._resets + 1, NOTHING
        variant = self._choice.of(batch)
        least = bucket(1, coarse=(keeps := steady(variant, self._provider)))
        fewer = self._provider != "cpu" and self._batch and batch <= self._cache[0].shape[0]
        if (batch == self._batch or fewer) and variant == self._variant and (keeps or self._capacity == least):
            self.even, self._batch = True, batch
            self._trails.restart()
            return
        self._sessions.open(variant)
        self._release()
        self._variant, self.even = variant, True  # in this order
        rows = batch, buffer_slots(least, variant)
        self._cache.extend(fresh_cache(self._model.entry, self._session, rows, self._zeros))
        self._trails = Trails(self._kept, batch)
        self._batch, self._capacity = batch, least  # last: no row, until all caches are there

    def copy_row(self, source: int, destination: int) -> None:
        """See Engine.copy_row."""
        self._sessions.require_open()
        if others := [row for row in (source, destination) if not 0 <= row < self._batch]:
            raise EngineError(f"row {others[0]} is not one of the engine's {self._batch} (0 to {self._batch - 1})")
        for buffer in self._cache:
            buffer.copy_row(source, destination)
        self._trails.copy_row(source, destination)

    def close(self) -> None:
        """See Engine.close."""
        self._capacity = 0
        self._sessions.close()
        self._release()
        self._session = None
        if self._cuda is not None and self._device_logits is not None:
            self._device_logits.close()
            self._cuda.close()

    def _release(self) -> None:
        """Let go of the cache and of every binding to it."""
        self._batch = 0
        self._kept_steps.forget()
        while self._cache:
            self._cache.pop().close()

    def _zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        if self._provider == "cpu":
            return HostBuffer.zeros(shape, dtype)
        if self._cuda is None:
            self._cuda = Cuda()
            self._device_logits = LogitStore(self._cuda, self._spec.vocab_size)
        return CudaBuffer(self._cuda, shape, dtype)

    def _run_by(self, graph: str, of_width: dict[int, str]) -> None:
        self._session, self._of_width = self._sessions.open(graph), of_width
        self._ragged_from = 1 if graph in RAGGED else 2 if self._variant in RAGGED else MOST_ROWS + 1
        self._steps = self._kept_steps.of(graph, *of_width.values())

    def _prepare(self, rows: int, width: int, wanted: int | None, seen: int, turn: Turn) -> Step:
        """Build the binding of one shape: of a tree with ``seen`` columns in its mask, or (0) of a chain; ``turn`` as
        the trails have it. Logits of all shapes share one buffer: a view lives until the next call."""
        if not 1 <= rows <= self._batch:
            raise EngineError(f"{rows} rows given, the engine has {self._batch}")
        shape = (rows, width if wanted is None else wanted, self._spec.vocab_size)
        if self._device_logits is not None:
            if self._device_logits.reserve(logit_rows(shape[0] * shape[1], self._batch)):
                self._kept_steps.forget()
        elif (size := int(np.prod(shape))) > self._flat.size:
            self._flat = np.zeros(max(size, 2 * self._flat.size), np.float32)
            self._kept_steps.forget()
        make_room(self._steps, many=self._kept is not None or self.graphs)
        special = branching(self._variant, self._model.entry.variants) if seen else self._of_width.get(width)
        session = self._sessions.open(special, branching=bool(seen)) if special else self._session
        flat = None if self._device_logits is not None else self._flat[: int(np.prod(shape))].reshape(shape)
        least = np.array([1]) if special else self._least_width  # a token in each of many rows is never shown twice
        step = Step.shaped(session, (rows, width, shape[1], seen), turn[0], least, flat, self._cuda)
        if self._spec.features:
            step.with_features(self._cache[-1], self._told if self._spec.reads_features else None)
        elif self.graphs and not seen:
            self._recorded += step.name_graph(self._recorded, self._sessions.thread)
        on_device = (store.address, self._spec.vocab_size) if (store := self._device_logits) else None
        step.bind(self._cache, on_device, self._trails.bindings(turn[1]))
        self._steps[rows, width, wanted, seen, turn] = step
        return step
