"""Takes ragged rows in one step without padding: the tokens of all rows one after the other, of each as many as it
has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError
from .base import RAGGED, LogitArray, ModelSpec, Tokens
from .memory import Buffer, on_host
from .ort_step import in_place, part_of
from .rounding import shown

_KEPT = 128  # arrays of different lengths for one input


class RaggedSteps:
    """The steps of the rows of ``cache`` by ``session``, whose graph ``variant`` (export.graphs.ragged) takes a fixed
    number of rows. More rows take several steps of it, fewer leave some of its rows without tokens."""

    def __init__(self, variant: str, session: Any, cache: Sequence[Buffer], spec: ModelSpec) -> None:
        arrays, self._at_once = [on_host(buffer) for buffer in cache], RAGGED[variant]
        self._batch = len(arrays[0])
        places = range(0, self._batch, self._at_once)
        self._groups = [_Group(session, arrays, range(at, at + self._at_once), spec) for at in places]

    def take(self, pieces: Sequence[Sequence[int]], past_lens: Sequence[int]) -> list[LogitArray]:
        """Bring pieces[b] behind the first past_lens[b] slots of row b: logits [len(pieces[b]), V] of each, views that
        live until the next call. Raises EngineError for more rows than there are."""
        found = list[LogitArray]()
        for group, rows in self._grouped(len(pieces)):
            mine = [pieces[row] for row in rows]
            logits = group.take(mine, [past_lens[row] for row in rows])
            found += [logits[begin:end] for begin, end in pairwise(accumulate(map(len, mine), initial=0))]
        return found

    def take_alike(self, tokens: Tokens, past_lens: Tokens, logit_index: Tokens | None) -> LogitArray:
        """``Engine.forward`` in terms of that: logits [B, L, V]."""
        made, (count, width) = list[LogitArray](), tokens.shape
        for group, rows in self._grouped(count):
            wanted = np.tile(np.arange(width), (len(rows), 1)) if logit_index is None else logit_index[rows]
            places = wanted + width * np.arange(len(rows))[:, None]
            logits = group.take(tokens[rows].tolist(), past_lens[rows].tolist(), places.reshape(-1).tolist())
            made.append(logits.reshape(*wanted.shape, -1))
        return made[0] if len(made) == 1 else np.concatenate(made)

    def _grouped(self, count: int) -> Iterator[tuple[_Group, range]]:
        """Who takes which of so many rows."""
        if count > self._batch:
            raise EngineError(f"{count} rows given, the engine has {self._batch}")
        for group, begin in zip(self._groups, range(0, count, self._at_once), strict=False):
            yield group, range(begin, min(count, begin + self._at_once))


class _Group:
    """As many rows as the graph takes, ``rows`` of the ``cache`` (some perhaps beyond it). What it reads is bound again
    only where its length changes. A step has as many tokens and gives as many logits as round alike."""

    def __init__(self, session: Any, cache: Sequence[NDArray[Any]], rows: range, spec: ModelSpec) -> None:
        self._session, self._binding, self._spec = session, session.io_binding(), spec
        self._ids, self._places, self._wanted = (
            _Fed(self._binding, name, batched=True) for name in ("input_ids", "position_ids", "logit_index")
        )
        self._order = _Fed(self._binding, "order")
        self._tokens = [_Fed(self._binding, f"row_tokens.{row}") for row in range(len(rows))]
        self._lasts = [np.zeros(1, np.int32) for _ in rows]
        self._totals = [np.zeros((), np.int32) for _ in rows]
        for row, (last, total) in enumerate(zip(self._lasts, self._totals, strict=True)):
            self._binding.bind_ortvalue_input(f"row_last.{row}", in_place(last))
            self._binding.bind_ortvalue_input(f"row_total.{row}", in_place(total))
        self._cache, self._first = cache, rows[0]
        self._nobody = [np.zeros((1, each.shape[1], shown(1), each.shape[3]), each.dtype) for each in cache]
        self._seated = [True] * len(rows)
        self._seat(0)
        self._widths: list[int] | None = None  # of the last step
        self._counts: list[int] = []  # how many tokens attention is shown of each row then
        self._flat, self._logits = np.zeros(0, np.float32), np.zeros((0, spec.vocab_size), np.float32)

    def take(
        self, pieces: Sequence[Sequence[int]], past_lens: Sequence[int], wanted: Sequence[int] | None = None
    ) -> LogitArray:
        """The logits [L, V] of all tokens of all rows, in order, or of those at the places ``wanted``."""
        self._seat(len(pieces))
        if (widths := [len(piece) for piece in pieces]) != self._widths:
            self._show(widths)
        for row, seen in enumerate(self._counts):
            end = seen + (past_lens[row] if row < len(pieces) else 0)
            self._totals[row][...], self._lasts[row][0] = end, end - 1
        count, last = sum(widths), self._spec.max_context - 1
        padding = [0] * (-count % self._spec.widths.multiple)
        places = (min(past + i, last) for past, width in zip(past_lens, widths, strict=True) for i in range(width))
        self._ids.put([*(token for piece in pieces for token in piece), *padding])
        self._places.put([*places, *padding])
        places_of_logits = range(count) if wanted is None else wanted
        found = len(places_of_logits)
        self._wanted.put([*places_of_logits, *[0] * (-found % self._spec.fewest_logits)])
        self._make_room(self._wanted.length)
        self._session.run_with_iobinding(self._binding)
        return self._logits[:found]

    def _show(self, widths: list[int]) -> None:
        """Say which tokens each row's attention is shown, the last one twice where it would be computed alone; and
        where, among all that it gives, each token's part stands. This holds for as long as ``widths`` do."""
        order, begin, given = list[int](), 0, 0
        self._widths, self._counts = None, []  # none, until all is said: an interrupt may come in between
        for row, tokens in enumerate(self._tokens):
            width = widths[row] if row < len(widths) else 0
            own = [*range(begin, begin + width)] or [0]  # of a row without tokens nobody wants anything
            tokens.put(own + own[-1:] * (shown(len(own)) - len(own)))
            order += range(given, given + width)
            begin, given = begin + width, given + tokens.length
            self._counts.append(tokens.length)
        self._order.put([*order, *[0] * (-begin % self._spec.widths.multiple)])
        self._widths = widths

    def _seat(self, count: int) -> None:
        """Let the first ``count`` rows have their caches, and no other: who brings nothing writes to nobody's."""
        for row, seated in enumerate(self._seated):
            if seated != (row < count):
                at = self._first + row
                for i, (whole, nobody) in enumerate(zip(self._cache, self._nobody, strict=True)):
                    part, mine = f"{part_of(i)}.{row}", whole[at : at + 1]
                    value = in_place(nobody if seated else mine)
                    self._binding.bind_ortvalue_input(f"past_key_values.{part}", value)
                    self._binding.bind_ortvalue_output(f"present.{part}", value)
                self._seated[row] = not seated

    def _make_room(self, count: int) -> None:
        if len(self._logits) != count:
            if (size := count * self._spec.vocab_size) > self._flat.size:
                self._flat = np.zeros(size, np.float32)
            self._logits = self._flat[:size].reshape(count, -1)
            self._binding.bind_ortvalue_output("logits", in_place(self._logits[None]))


class _Fed:
    """An input of int64 whose length changes from step to step, [N], or [1,N] (``batched``)."""

    def __init__(self, binding: Any, name: str, *, batched: bool = False) -> None:
        self._binding, self._name, self._batched = binding, name, batched
        self._made: dict[int, tuple[NDArray[np.int64], Any]] = {}
        self.length = -1

    def put(self, values: Sequence[int]) -> None:
        """What the next step reads."""
        count = len(values)
        if (made := self._made.get(count)) is None:
            if len(self._made) >= _KEPT:
                self._made.clear()
            array = np.zeros(count, np.int64)
            made = self._made[count] = array, in_place(array[None] if self._batched else array)
            self.length = -1
        if self.length != count:
            self._binding.bind_ortvalue_input(self._name, made[1])
            self.length = count
        made[0][...] = values
