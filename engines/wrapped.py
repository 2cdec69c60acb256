"""An engine around another one, for subclasses that observe its steps or decide what they take."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from .base import (
    CommittingEngine,
    EachRow,
    Engine,
    EvenEngine,
    FeatureEngine,
    Features,
    Logits,
    ModelSpec,
    RaggedEngine,
    ReadingEngine,
    RowStep,
    Sight,
    Tokens,
    TreeEngine,
    row_step,
)


class Wrapped:
    """``engine`` with ``step`` around each of its steps; all else is the engine's own."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self._row_step = engine, row_step(engine)

    def step(self, rows: int, width: int, past: int) -> AbstractContextManager[object]:
        """What stands around a step of ``width`` tokens in each of ``rows`` rows, the first on ``past`` tokens."""
        return nullcontext()

    @property
    def spec(self) -> ModelSpec:
        return self.engine.spec

    @property
    def even(self) -> bool:
        """``EvenEngine.even``; who has no choice rounds as it always does."""
        return getattr(self.engine, "even", True)

    @even.setter
    def even(self, wanted: bool) -> None:
        if isinstance(self.engine, EvenEngine):
            self.engine.even = wanted

    @property
    def resets(self) -> int | None:
        """``KeepingEngine.resets``, if the engine has them."""
        return getattr(self.engine, "resets", None)

    @property
    def recording(self) -> float | None:
        """``RecordingEngine.recording``, if the engine has it."""
        return getattr(self.engine, "recording", None)

    @property
    def batch(self) -> int:
        return self.engine.batch

    @property
    def capacity(self) -> int:
        return self.engine.capacity

    def forward(self, tokens: Tokens, past_lens: Tokens, logit_index: Tokens | None = None) -> Logits:
        rows, width = tokens.shape
        with self.step(rows, width, past_lens[0]):
            return self.engine.forward(tokens, past_lens, logit_index)

    @property
    def row_logits(self) -> RowStep | None:
        """``RowEngine.row_logits``, if the engine has it."""
        return None if self._row_step is None else self._row_logits

    def forward_tree(self, tokens: Tokens, past_lens: Tokens, sees: Sight) -> Logits:
        assert isinstance(self.engine, TreeEngine)
        rows, width = tokens.shape
        with self.step(rows, width, past_lens[0]):
            return self.engine.forward_tree(tokens, past_lens, sees)

    def compact(self, row: int, past_len: int, kept: Sequence[int]) -> None:
        assert isinstance(self.engine, TreeEngine)
        self.engine.compact(row, past_len, kept)

    def commit(self, lengths: Sequence[int]) -> None:
        """``CommittingEngine.commit``; to who keeps slots alone it says nothing."""
        if isinstance(self.engine, CommittingEngine):
            self.engine.commit(lengths)

    def earliest(self, row: int) -> int:
        return self.engine.earliest(row) if isinstance(self.engine, CommittingEngine) else 0

    @property
    def reads_alone(self) -> bool:
        """``ReadingEngine.reads_alone``, if the engine has it."""
        return getattr(self.engine, "reads_alone", False)

    def read(self, row: int, tokens: Tokens, past_len: int) -> None:
        assert isinstance(self.engine, ReadingEngine)
        with self.step(1, len(tokens), past_len):
            self.engine.read(row, tokens, past_len)

    @property
    def ragged(self) -> bool:
        """``RaggedEngine.ragged``, if the engine has it."""
        return getattr(self.engine, "ragged", False)

    def forward_ragged(self, pieces: Sequence[Sequence[int]], past_lens: Sequence[int]) -> EachRow:
        assert isinstance(self.engine, RaggedEngine)
        with self.step(len(pieces), -(-sum(map(len, pieces)) // len(pieces)), past_lens[0]):
            return self.engine.forward_ragged(pieces, past_lens)

    def features(self, row: int, start: int, stop: int) -> Features:
        assert isinstance(self.engine, FeatureEngine)
        return self.engine.features(row, start, stop)

    def beside(self, features: Features) -> None:
        assert isinstance(self.engine, FeatureEngine)
        self.engine.beside(features)

    def reserve(self, capacity: int) -> None:
        self.engine.reserve(capacity)

    def reset(self, batch: int) -> None:
        self.engine.reset(batch)

    def copy_row(self, source: int, destination: int) -> None:
        self.engine.copy_row(source, destination)

    def close(self) -> None:
        self.engine.close()

    def _row_logits(self, tokens: Sequence[int], past_len: int, last: bool) -> Logits:
        assert self._row_step is not None
        with self.step(1, len(tokens), past_len):
            return self._row_step(tokens, past_len, last)
