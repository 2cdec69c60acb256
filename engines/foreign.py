"""The engine for graphs of other exporters: optimum and onnx-community ("concat"), onnxruntime-genai ("genai").

Their graphs know one past length for a whole batch (and GroupQueryAttention refuses several rows with a past), so
rows are run one at a time, each with a cache of its own. That is right for every model, also with sliding windows or
implied positions, and a row's logits do not depend on its batch, not even in the last bit. The price is that the
weights are read once for each row. For batched verification export the checkpoint with ``leadout export``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bundle import Model
from ..errors import EngineError, first_line
from .base import LogitArray, ModelSpec, Tokens
from .foreign_cache import ConcatCache, RowCache, SharedCache, bind_input, bind_output
from .foreign_graph import Port, Signature, ort_ports
from .providers import onnxruntime, open_session
from .rounding import even_widths, rounded_alike, uneven

BUCKET = 128
ITSELF = "export the checkpoint itself with: leadout export"
_CACHES: dict[str, type[ConcatCache] | type[SharedCache]] = {"concat": ConcatCache, "genai": SharedCache}


def require_possible(model: Model, provider: str) -> None:
    """Raise EngineError unless the dialect of ``model`` is known and ``provider`` runs it."""
    name, dialect = model.folder, model.entry.dialect
    if dialect not in _CACHES:
        raise EngineError(f"{name}: dialect '{dialect}' is unknown (one of: slots, {', '.join(_CACHES)})")
    if provider != "cpu":
        raise EngineError(f"{name}: a {dialect} model runs on provider cpu, not {provider}; for {provider} {ITSELF}")


class ForeignEngine:
    """An Engine (see ``engines.base``) over a graph that Leadout did not make; CPU only.

    A graph may hold tables for just ``max_context`` positions, so tokens beyond are never run, and one position is
    kept in reserve (``spec.max_context`` is one less than the model's own) so that no step of two narrows to one.
    Raises EngineError where its steps do not round alike on this processor and have to (``exact``).
    """

    def __init__(
        self, model: Model, *, provider: str = "cpu", threads: int = 1, variant: str = "auto", exact: bool = False
    ) -> None:
        entry, self._name, self._folder = model.entry, str(model.folder), model.folder.name
        require_possible(model, provider)
        self.spec = ModelSpec(entry.vocab_size, entry.max_context - 1, precision=entry.precision)
        self._limit, self._least = entry.max_context, entry.least_slots or 0
        self._shapes, self._cache = entry.cache, _CACHES[entry.dialect]
        graph = model.path("canonical" if variant == "auto" else variant)
        self._session = open_session(graph, provider=provider, threads=threads)
        self._quiet = onnxruntime().RunOptions()
        self._quiet.log_severity_level = 4  # what goes wrong is raised, not printed
        with self._naming():
            self._signature = Signature.read(
                ort_ports(self._session.get_inputs()), ort_ports(self._session.get_outputs())
            )
            if self._signature.cache(entry.cache[0].heads, entry.cache[0].key_dim) != entry.cache:
                raise EngineError("the cache of the graph has other shapes than the manifest says; import it again")
        self._io = self._session.io_binding()
        self.resets = 0  # see KeepingEngine: on a CPU, rows that are read in pieces round as if read at once
        self._scratch: NDArray[Any] = np.empty(0, self._signature.logits.dtype)
        self._out: LogitArray = np.empty((0, 0, 0), np.float32)
        self.capacity = BUCKET
        self.reset(1)
        self._probe()
        if exact:
            if (found := even_widths(self, self.spec.widths.narrowest)) is None:
                raise uneven(self._name, ITSELF)
            self.spec = rounded_alike(self, found)

    @property
    def batch(self) -> int:
        return len(self._rows)

    def forward(self, tokens: Tokens, past_lens: Tokens, logit_index: Tokens | None = None) -> LogitArray:
        self._check_open()
        batch, width = tokens.shape
        if batch > self.batch or len(past_lens) != batch:
            raise EngineError(f"{batch} rows of tokens, {len(past_lens)} past_lens, for an engine of {self.batch} rows")
        if width < 1 or int(past_lens.max()) + width > self.capacity:
            raise EngineError(
                f"a step of {width} after {int(past_lens.max())} slots exceeds the capacity {self.capacity}"
            )
        wanted = np.broadcast_to(np.arange(width), (batch, width)) if logit_index is None else logit_index
        out = self._result(batch, wanted.shape[1])
        with self._naming():
            for row in range(batch):
                self._step(self._rows[row], tokens[row], int(past_lens[row]), wanted[row], out[row])
        return out

    def reserve(self, capacity: int) -> None:
        self._check_open()
        if capacity > self.capacity:
            grown = -(-capacity // BUCKET) * BUCKET
            if (slots := self._slots(grown)) > self._slots(self.capacity):
                for row in self._rows:
                    row.reserve(slots)
            self.capacity = grown  # last: rows outlast an interrupt, and none may be shorter than this says

    def reset(self, batch: int) -> None:
        self._check_open()
        self.resets += 1
        slots = self._slots(self.capacity)
        self._rows: list[RowCache] = [self._cache(self._signature, self._shapes, slots) for _ in range(batch)]

    def _slots(self, capacity: int) -> int:
        """Of a row's buffers. With as many as the text has, none that may forget does."""
        return max(min(capacity, self._limit), self._least)

    def copy_row(self, source: int, destination: int) -> None:
        self._check_open()
        if source != destination:
            self._rows[destination].copy_from(self._rows[source])

    def close(self) -> None:
        self._rows, self._session, self._io = [], None, None

    def _check_open(self) -> None:
        if self._session is None:
            raise EngineError(f"the engine of {self._folder} is closed")

    def _step(self, row: RowCache, tokens: Tokens, past: int, wanted: Tokens, out: LogitArray) -> None:
        """One row: run what fits below the limit, put the wanted logits into ``out`` [L, V]; padding gets zeros."""
        count = min(len(tokens), self._limit - past)
        if count < 1:
            out[:] = 0
            return
        # the head, too, must not narrow to a width of one or an odd one, or its last bits change with the step
        first = max(0, min(int(wanted.min()), count - 2)) if self._signature.keep else 0
        first -= first % 2
        logits = self._run(row, tokens[:count], past, count - first)
        inside = wanted < count
        out[:] = logits[np.where(inside, wanted, first) - first]
        out[~inside] = 0

    def _run(self, row: RowCache, tokens: Tokens, past: int, keep: int) -> NDArray[Any]:
        """Run the graph on one row; logits of the last ``keep`` positions, [keep, V], valid until the next run."""
        size = keep * self.spec.vocab_size
        if self._scratch.size < size:
            self._scratch = np.empty(size, self._scratch.dtype)
        logits = self._scratch[:size].reshape(1, keep, self.spec.vocab_size)
        feeds = list(self._feeds(tokens, past, keep))  # named, so that the arrays outlive the run
        for port, array in feeds:
            bind_input(self._io, port, array)
        row.bind(self._io, past, len(tokens))
        bind_output(self._io, self._signature.logits, logits)
        self._session.run_with_iobinding(self._io, self._quiet)
        row.commit(past + len(tokens))
        row_logits: NDArray[Any] = logits[0]
        return row_logits

    def _feeds(self, tokens: Tokens, past: int, keep: int) -> Iterator[tuple[Port, NDArray[Any]]]:
        graph, length = self._signature, past + len(tokens)
        yield graph.ids, np.ascontiguousarray(tokens[None], graph.ids.dtype)
        if graph.mask:
            yield graph.mask, np.ones((1, length), graph.mask.dtype)
        if graph.positions:
            yield graph.positions, np.arange(past, length, dtype=graph.positions.dtype)[None]
        if graph.branch:
            yield graph.branch, np.array([past > 0])
        if graph.keep:
            yield graph.keep, np.full((1,) * len(graph.keep.shape), keep, graph.keep.dtype)

    def _result(self, batch: int, width: int) -> LogitArray:
        if self._out.shape[:2] != (batch, width):
            self._out = np.empty((batch, width, self.spec.vocab_size), np.float32)
        return self._out

    def _probe(self) -> None:
        """Take two steps of two tokens, the second after rolling back one: what the graph cannot do fails here, with
        its name, and not in the loop."""
        pair = np.zeros(2, np.int64)
        with self._naming():
            self._run(self._rows[0], pair, 0, 2)
        with self._naming("take several tokens behind others, as verifying a draft needs"):
            self._run(self._rows[0], pair, 1, 2)
        self.reset(1)

    @contextlib.contextmanager
    def _naming(self, what: str = "take this step") -> Iterator[None]:
        """Put the model's name before what went wrong, on one line; ``what`` the graph was to do."""
        try:
            yield
        except EngineError as error:
            raise EngineError(f"{self._name}: {error}") from None
        except Exception as error:  # onnxruntime's own exceptions have no common base
            raise EngineError(f"{self._name}: the graph cannot {what}: {first_line(error):.300}") from error
