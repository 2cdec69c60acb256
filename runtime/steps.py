"""Decides how ragged rows become one rectangular step of an engine, and that padding is never read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from ..engines.base import (
    ANY,
    CommittingEngine,
    EachRow,
    Engine,
    EvenEngine,
    FeatureEngine,
    Features,
    KeepingEngine,
    LogitRow,
    Logits,
    RaggedEngine,
    ReadingEngine,
    RecordingEngine,
    RowStep,
    Sight,
    Tokens,
    TreeEngine,
    Widths,
    row_step,
)
from ..engines.rounding import SEVERAL, leaves_one
from ..errors import EngineError, LeadoutError
from .held import Held

_FIRST = np.zeros((1, 1), np.int64)
_RECORDED = (1, 2, 3, 5, 9, 17, 34, 64)  # widths of recorded steps: a few tokens more cost a GPU hardly any time


class Stepper:
    """An engine as the runtime uses it. ``widths`` are those its steps have: those that round alike if ``exact``, any
    after a ``reset`` that needs no equal bits.

    Of an engine that records its steps (``RecordingEngine``) those of up to 64 tokens take one of eight widths (or the
    widest whose logits may all be wanted), and as many rows as the next power of two.
    Padding stands behind a row's own tokens and is written to slots that no length counts. ``past[b]`` is how many
    slots of row b count. Whatever the engine raises comes out as EngineError.
    """

    def __init__(self, engine: Engine, name: str, *, exact: bool = False) -> None:
        self.engine, self.name = engine, name
        self._alike = (engine.spec.widths, engine.spec.fewest_logits) if exact else (ANY, 1)
        self._keep_to(*self._alike)
        self._recording = engine if isinstance(engine, RecordingEngine) and engine.recording is not None else None
        self._row_step = row_step(engine) if self._recording is None else None
        self._evens = engine if isinstance(engine, EvenEngine) else None
        self._keeping = engine if isinstance(engine, KeepingEngine) else None
        self._reading = engine if isinstance(engine, ReadingEngine) else None
        self._ragged = engine if isinstance(engine, RaggedEngine) else None
        self._committing = engine if engine.spec.recurrent and isinstance(engine, CommittingEngine) else None
        self._even, self._held = True, Held()
        self._resets: int | None = None  # of the engine, when it was last reset for one text
        self._features: Callable[[Sequence[int], Sequence[int], int], Features] | None = None
        self._tell: Callable[[Features], None] = lambda features: None

    def read_beside(self, features: Callable[[Sequence[int], Sequence[int], int], Features]) -> None:
        """The engine reads features beside its tokens: ``features(widths, past, width)`` gives those of a step that
        brings ``widths[b]`` tokens on ``past[b]``, [B, width, D]."""
        assert isinstance(self.engine, FeatureEngine)
        self._features, self._tell = features, self.engine.beside

    def reset(self, rows: int, *, even: bool = True) -> None:
        """Start over with ``rows`` rows; ``even``: a step of one token must round like wider ones, if it ever can."""
        with self._saying(f"with {rows} rows"):
            self.engine.reset(rows)
        self._held = Held()
        self._round(even)

    def resume(self, text: Sequence[int], *, even: bool = True) -> int:
        """Start over with one row, whose ``text`` this is: how many of its tokens, from the first on, the cache still
        holds (0 where the engine keeps nothing, or somebody else has reset it)."""
        resets = self._count()
        held = self._held.common(text, even=even) if resets is not None and resets == self._resets else 0
        if held >= max(1, self.earliest(0)):
            self._round(even)
            self.commit([held])
        else:
            self.reset(1, even=even)
            self._resets, held = self._count(), 0
        return held

    def commit(self, lengths: Sequence[int]) -> None:
        """No later step goes back behind the first lengths[b] tokens of row b, but to 0."""
        if self._committing is not None:
            self._committing.commit(lengths)

    def earliest(self, row: int) -> int:
        """The least length the row can be stepped from, but for 0."""
        return 0 if self._committing is None else self._committing.earliest(row)

    def forget(self) -> None:
        """Let no later text go on from what the cache holds."""
        self._held = Held()

    @property
    def ragged(self) -> bool:
        """Whether a step costs by the tokens that it brings all rows, and not by those of the longest piece."""
        return self._ragged is not None and self._ragged.ragged

    def all_logits(self, pieces: Sequence[Sequence[int]], past: Sequence[int]) -> EachRow:
        """Append pieces[b] (not empty) to row b; logits of each row, [>= len(pieces[b]), V], where only the first
        len(pieces[b]) are meant."""
        if len(pieces) == 1 and self._fits(width := len(pieces[0])) and not leaves_one(width):
            if self._row_step is not None and past[0] + width <= self.engine.capacity:
                return self._row_logits(self._row_step, pieces[0], past[0], False)
            return self._forward(pieces, past, width, None)
        widths = [len(piece) for piece in pieces]
        width = max(widths)
        if self.ragged and (width > 1 or not self._fits(1)):
            return self._apart(pieces, past)
        if width == 1:
            return self._one_token(pieces, past)
        if self._recording is not None or (min(widths) == width and self._fits(width)):
            return self._forward(pieces, past, width, None)
        columns = np.arange(width, dtype=np.int64)
        return self._forward(pieces, past, width, np.minimum(columns, np.array(widths, np.int64)[:, None] - 1))

    def last_logits(self, pieces: Sequence[Sequence[int]], past: Sequence[int]) -> Logits:
        """Append pieces[b] (may be empty) to row b, in chunks; logits [B, V] after each row's last token."""
        if all(len(piece) == 1 for piece in pieces):
            only: Logits = self._one_token(pieces, past)[:, 0]
            return only
        logits: Logits = self._ending(pieces, past, [1] * len(pieces))[:, 0]
        return logits

    def ending_logits(self, pieces: Sequence[Sequence[int]], past: Sequence[int], counts: Sequence[int]) -> Logits:
        """The same, but [B, max(counts), V], of which only [b, :counts[b]] is meant: the logits after each of row b's
        last counts[b] tokens."""
        step, (piece, *others) = self._row_step, pieces
        if others or step is None or len(piece) not in self._short:
            return self._ending(pieces, past, counts)
        if past[0] + len(piece) > self.engine.capacity:
            return self._ending(pieces, past, counts)
        logits: Logits = self._row_logits(step, piece, past[0], False)[:, len(piece) - counts[0] :]
        return logits

    def _apart(self, pieces: Sequence[Sequence[int]], past: Sequence[int]) -> EachRow:
        engine = self._ragged
        assert engine is not None
        with self._saying(f"in a step of {sum(map(len, pieces))} tokens in {len(pieces)} rows"):
            if (need := max(map(sum, zip(past, map(len, pieces), strict=True)))) > engine.capacity:
                engine.reserve(need)
            return engine.forward_ragged(pieces, past)

    def _ending(self, pieces: Sequence[Sequence[int]], past: Sequence[int], counts: Sequence[int]) -> Logits:
        longest, past = max(map(len, pieces)), list(past)
        # rows that are short already wait for the last chunk: it brings every row's logits
        while longest > (chunk := self._widest(past)):
            heads = [piece[: min(chunk, max(0, len(piece) - chunk))] for piece in pieces]
            self._forward(heads, past, max(map(len, heads)), np.zeros((len(pieces), 1), np.int64))
            past = [length + len(head) for length, head in zip(past, heads, strict=True)]
            pieces = [piece[len(head) :] for piece, head in zip(pieces, heads, strict=True)]
            longest = max(len(piece) for piece in pieces)
        lengths, begins = (np.array(each, np.int64)[:, None] for each in (list(map(len, pieces)), counts))
        index = np.clip(lengths - begins + np.arange(max(counts)), 0, np.maximum(lengths - 1, 0))
        return self._forward(pieces, past, longest, index)

    @property
    def reads_alone(self) -> bool:
        """Whether ``read`` brings a prompt in sooner than a step of all rows does."""
        return self._reading is not None and self._reading.reads_alone and self._features is None

    def read(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Bring prompts[b] into row b, of which nothing counts so far, in chunks. Nobody wants their logits."""
        engine, chunk = self._reading, self.engine.spec.chunk(1)
        assert engine is not None
        with self._saying("reading prompts row by row"):
            if (need := max(map(len, prompts.values())) + 1) > engine.capacity:
                engine.reserve(need)
            for row, prompt in prompts.items():
                for past in range(0, len(prompt), chunk):
                    piece = np.array(prompt[past : past + chunk], np.int64)
                    engine.read(row, np.pad(piece, (0, self._even and leaves_one(len(piece)))), past)

    def last_row(self, piece: Sequence[int], past: int) -> LogitRow:
        """``last_logits`` [V] of an engine's only row, sooner where the engine can and ``piece`` is short."""
        step, engine = self._row_step, self.engine
        alone = self._fewest == 1 and len(piece) in self._short
        if step is None or not alone or past + len(piece) > engine.capacity:
            only: LogitRow = self.last_logits([piece], [past])[0]
        else:
            only = self._row_logits(step, piece, past, True)[0, 0]
        return only

    def tree_logits(self, pieces: Sequence[Sequence[int]], past: Sequence[int], sees: Sight) -> Logits:
        """Append pieces[b] (at most S tokens) to row b as a tree, ``sees`` [B, S, T] as in TreeEngine.forward_tree;
        logits [B, S, V]."""
        count = sees.shape[1]
        width = self.widths.holding(count)
        if width > count:
            sees = np.pad(sees, ((0, 0), (0, width - count), (0, width - count)))
            sees[:, range(count - width, 0), range(count - width, 0)] = True
        logits = self._checked(pieces, past, width, lambda tokens, lens: self._trees().forward_tree(tokens, lens, sees))
        self._held.cut(past[0])  # no text: branches beside each other
        return logits[:, :count] if width > count else logits

    def compact(self, row: int, past: int, kept: Sequence[int]) -> None:
        """Keep one branch of a tree step: slot past + kept[i] becomes past + i. Nothing to do for the first in all."""
        if any(slot != i for i, slot in enumerate(kept)):
            with self._saying("moving a branch"):
                self._trees().compact(row, past, kept)

    def copy_row(self, source: int, destination: int) -> None:
        """See Engine.copy_row."""
        with self._saying("copying a row"):
            self.engine.copy_row(source, destination)

    def _trees(self) -> TreeEngine:
        assert isinstance(self.engine, TreeEngine)  # spec.trees was asked before
        return self.engine

    def _one_token(self, pieces: Sequence[Sequence[int]], past: Sequence[int]) -> Logits:
        return self._forward(pieces, past, 1, None if self._fits(1) else _FIRST.repeat(len(pieces), 0))

    def _fits(self, width: int) -> bool:
        return self.widths.holding(width) == width

    def _widest(self, past: Sequence[int]) -> int:
        """The widest step: padding, too, must find slots where the capacity is fixed."""
        spec = self.engine.spec
        most = min(spec.chunk(len(past)), spec.max_context + spec.max_verify - 1 - max(past))
        return most if self._fits(most) else max(1, most - 1)

    def _most_padded(self, past: Sequence[int], index: Tokens | None) -> int:
        """The width that a recorded step may be padded to. A cache that already holds the whole context must not grow
        for padding: its slots come by the thousand."""
        engine, most = self.engine, self._widest(past)
        if engine.capacity >= engine.spec.max_context:
            most = min(most, engine.capacity - max(past))
        return most if index is not None else min(most, engine.spec.max_verify)

    def _forward(
        self, pieces: Sequence[Sequence[int]], past: Sequence[int], width: int, index: Tokens | None
    ) -> Logits:
        width, rows, more = self.widths.holding(width), len(pieces), 0
        width += self._even and leaves_one(width) and width < self._widest(past)
        recorded = self._recording is not None and width <= _RECORDED[-1]
        if recorded and (wider := min(recorded_width(width), self._most_padded(past, index))) >= width:
            width, more = wider, recorded_rows(rows, self.engine.batch) - rows
        if more:  # rows behind those that are alive are nobody's
            pieces, past = [*pieces, *[[]] * more], [*past, *[0] * more]
            index = None if index is None else np.pad(index, ((0, more), (0, 0)))
        step, wanted = self.engine.forward, width if index is None else index.shape[1]
        if index is not None and index.size % self._fewest:
            index = np.concatenate([index, index[:, -1:]], axis=1)
        columns = width if index is None else index.shape[1]
        logits = self._checked(pieces, past, width, lambda tokens, lens: step(tokens, lens, index), columns)
        logits = logits[:rows] if more else logits
        return logits[:, :wanted] if wanted < columns else logits

    def _checked(
        self,
        pieces: Sequence[Sequence[int]],
        past: Sequence[int],
        width: int,
        step: Callable[[Tokens, Tokens], Logits],
        columns: int | None = None,
    ) -> Logits:
        engine, rows, fed = self.engine, len(pieces), pieces[0]
        self._held.cut(past[0])
        if self._features is not None:
            self._tell(self._features([len(piece) for piece in pieces], past, width))
        if rows > 1 or len(pieces[0]) < width:
            pieces = [[*piece, *[0] * (width - len(piece))] for piece in pieces]
        tokens = np.array(pieces, np.int64)
        try:
            if (need := max(past) + width) > engine.capacity:
                engine.reserve(need)
            logits = step(tokens, np.array(past, np.int64))
        except LeadoutError:
            raise
        except Exception as error:
            raise self._failure(f"in a step of {rows} x {width} tokens", error) from error
        expected = (rows, columns or width, engine.spec.vocab_size)
        if logits.shape != expected:
            raise EngineError(f"the {self.name} returned logits of shape {logits.shape} instead of {expected}")
        self._held.add(fed, past[0], even=self._even)
        return logits

    def _row_logits(self, step: RowStep, piece: Sequence[int], past: int, last: bool) -> Logits:
        self._held.cut(past)
        if self._features is not None:
            self._tell(self._features([len(piece)], [past], len(piece)))
        try:
            logits = step(piece, past, last)
        except LeadoutError:
            raise
        except Exception as error:
            raise self._failure(f"in a step of 1 x {len(piece)} tokens", error) from error
        self._held.add(piece, past, even=self._even)
        return logits

    def _round(self, even: bool) -> None:
        self._even = even
        self._keep_to(*(self._alike if even else (ANY, 1)))
        if self._evens is not None:
            with self._saying("choosing its graph"):
                self._evens.even = even

    def _keep_to(self, widths: Widths, fewest_logits: int) -> None:
        self.widths, self._fewest = widths, fewest_logits
        self._short = range(widths.holding(1), SEVERAL + 1, widths.multiple)  # those of a row's short way

    def _count(self) -> int | None:
        return None if self._keeping is None else self._keeping.resets

    @contextmanager
    def _saying(self, where: str) -> Iterator[None]:
        """Turn what the engine raises inside into an EngineError that says ``where``. Too slow for what each round
        does."""
        try:
            yield
        except LeadoutError:
            raise
        except Exception as error:
            raise self._failure(where, error) from error

    def _failure(self, where: str, error: Exception) -> EngineError:
        return EngineError(f"the {self.name} failed {where}: {error}")


def recorded_width(width: int) -> int:
    """The width that a step of ``width`` tokens, 64 at most, is given where steps are recorded."""
    return next(each for each in _RECORDED if each >= width)


def recorded_rows(rows: int, batch: int) -> int:
    """How many rows of ``batch`` a step for ``rows`` of them is given there: 1, 2, 4, 8, ... or all."""
    return min(batch, 1 << (rows - 1).bit_length())
