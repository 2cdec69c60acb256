"""The Engine contract: one exported model takes one step on one device. An engine knows nothing of drafting."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
Logits = NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a caller may rely on: ids below ``vocab_size``, positions below ``max_context`` (both counts of tokens)."""

    vocab_size: int
    max_context: int


class Engine(Protocol):
    """A model with a key-value cache of ``batch`` rows, ``capacity`` slots each.

    A row's cache is addressed by length: the caller says how many slots of each row count (``past_lens``), and
    rolling back is saying less the next time. What lies beyond is never read.
    """

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def batch(self) -> int: ...

    @property
    def capacity(self) -> int: ...

    def forward(self, tokens: Tokens, past_lens: Tokens, logit_index: Tokens | None = None) -> Logits:
        """Run S new tokens on each of the first B rows (B <= batch) and return the logits asked for.

        tokens [B, S] int64; past_lens [B] int64; logit_index [B, L] int64, which of the S positions want logits
        (all of them by default). Returns float32 [B, L, vocab_size], a view that is valid until the next call.
        Changes slots past_lens[b] .. past_lens[b]+S-1 of rows b < B and nothing else. Token i of row b stands at
        position past_lens[b] + i; positions from max_context on are padding and may hold anything.
        Raises EngineError if past_lens[b] + S exceeds the capacity.
        """
        ...

    def reserve(self, capacity: int) -> None:
        """Make room for at least ``capacity`` slots a row (rounded up to a bucket). Keeps all rows."""
        ...

    def reset(self, batch: int) -> None:
        """Start over with ``batch`` rows. Forgets every row; keeps the loaded model."""
        ...

    def copy_row(self, source: int, destination: int) -> None:
        """Make ``destination`` a copy of ``source`` (all slots). Leaves the other rows alone."""
        ...

    def close(self) -> None:
        """Release the model and the cache. Calling it twice is fine."""
        ...
