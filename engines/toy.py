"""An engine without weights, whose next-token law is known exactly: for tests and demonstrations."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError
from .base import LogitArray, ModelSpec, Sight, Tokens

Law = Callable[[NDArray[np.int64]], NDArray[np.float64]]

_BUCKET = 16
_NEVER_WRITTEN = -1


class ToyEngine:
    """An Engine over ``law``: context (int64 [n], n >= 1) -> probabilities (float64 [vocab_size]).

    The context is read from the cache's slots, not from the caller: a stale slot, a missing roll-back or a wrong
    ``past_lens`` gives another context and so another law. Logits are log-probabilities, in float64 where a real engine
    gives float32, so that what is made of them can be held to the law beyond all rounding; the array returned is one
    buffer that the next call overwrites, as with a real engine. ``calls`` records (rows, width) of every step.
    """

    def __init__(self, law: Law, vocab_size: int, *, max_context: int = 256, mask_token: int | None = None) -> None:
        self.law = law
        self.spec = ModelSpec(vocab_size=vocab_size, max_context=max_context, trees=True, mask_token=mask_token)
        self.calls: list[tuple[int, int]] = []
        self.resets = 0
        self._cache = np.full((1, 0), _NEVER_WRITTEN, np.int64)
        self._buffer: NDArray[Any] = np.empty(0)

    @property
    def batch(self) -> int:
        return self._cache.shape[0]

    @property
    def capacity(self) -> int:
        return self._cache.shape[1]

    def forward(self, tokens: Tokens, past_lens: Tokens, logit_index: Tokens | None = None) -> LogitArray:
        rows, width = tokens.shape
        self._check(tokens, past_lens)
        self.calls.append((rows, width))
        index = np.tile(np.arange(width), (rows, 1)) if logit_index is None else logit_index
        logits = self._view(rows, index.shape[1])
        for row, past in enumerate(past_lens.tolist()):
            self._cache[row, past : past + width] = tokens[row]
            for column, position in enumerate(index[row].tolist()):
                logits[row, column] = self._logits(row, self._cache[row, : past + position + 1])
        return logits

    def forward_tree(self, tokens: Tokens, past_lens: Tokens, sees: Sight) -> LogitArray:
        rows, width = tokens.shape
        self._check(tokens, past_lens)
        self.calls.append((rows, width))
        logits = self._view(rows, width)
        for row, past in enumerate(past_lens.tolist()):
            self._cache[row, past : past + width] = tokens[row]
            start = past + width - sees.shape[2]
            before, branches = self._cache[row, :start], self._cache[row, start : past + width]
            for column in range(width):
                logits[row, column] = self._logits(row, np.concatenate([before, branches[sees[row, column]]]))
        return logits

    def compact(self, row: int, past_len: int, kept: Sequence[int]) -> None:
        moved = self._cache[row, [past_len + slot for slot in kept]]
        self._cache[row, past_len : past_len + len(kept)] = moved
        self._cache[row, past_len + len(kept) :] = _NEVER_WRITTEN

    def reserve(self, capacity: int) -> None:
        short = capacity - self.capacity
        if short > 0:
            grown = -(-short // _BUCKET) * _BUCKET
            self._cache = np.pad(self._cache, ((0, 0), (0, grown)), constant_values=_NEVER_WRITTEN)

    def reset(self, batch: int) -> None:
        self.resets += 1
        self._cache = np.full((batch, self.capacity), _NEVER_WRITTEN, np.int64)

    def copy_row(self, source: int, destination: int) -> None:
        self._cache[destination] = self._cache[source]

    def close(self) -> None:
        self._cache = np.full((1, 0), _NEVER_WRITTEN, np.int64)

    def _check(self, tokens: Tokens, past_lens: Tokens) -> None:
        rows, width = tokens.shape
        if rows > self.batch or past_lens.shape != (rows,):
            raise EngineError(f"{rows} rows with {past_lens.shape[0]} lengths asked of a toy engine of {self.batch}")
        if (end := int(past_lens.max()) + width) > self.capacity:
            raise EngineError(f"slot {end} asked of a toy engine with {self.capacity} slots a row; reserve more")

    def _view(self, rows: int, columns: int) -> LogitArray:
        size = rows * columns * self.spec.vocab_size
        if self._buffer.size < size:
            self._buffer = np.empty(size)
        return self._buffer[:size].reshape(rows, columns, self.spec.vocab_size)

    def _logits(self, row: int, context: NDArray[np.int64]) -> NDArray[np.float64]:
        if context.size > self.spec.max_context:  # padding: may hold anything, and must not be read
            return np.full(self.spec.vocab_size, np.nan)
        if (context < 0).any():
            raise EngineError(f"a toy engine was asked to read slots of row {row} that were never written")
        with np.errstate(divide="ignore"):
            return np.log(self.law(context))


def table_law(
    vocab_size: int, *, seed: int = 0, order: int | None = None, sharpness: float = 1.0, rows: int = 251
) -> Law:
    """A law that picks one of ``rows`` random rows by a checksum of the last ``order`` tokens (None: of all)."""
    weights = np.exp(sharpness * np.random.default_rng(seed).normal(size=(rows, vocab_size)))
    table = weights / weights.sum(axis=1, keepdims=True)

    def law(context: NDArray[np.int64]) -> NDArray[np.float64]:
        seen = context if order is None else context[-order:]
        row: NDArray[np.float64] = table[zlib.crc32(seen.tobytes()) % rows]
        return row

    return law


def mixed_law(first: Law, second: Law, share: float) -> Law:
    """``share`` of ``second`` mixed into ``first``: a draft that agrees with its target more or less."""
    return lambda context: (1 - share) * first(context) + share * second(context)
