"""The Engine contract: one exported model takes one step on one device. An engine knows nothing of drafting."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from .. import bundle
from ..bundle import ModelEntry

Tokens = NDArray[np.int64]
LogitArray = NDArray[np.float32]
Tops = tuple[Tokens, LogitArray]  # the ids and logits of the k largest, largest first
Sight = NDArray[np.bool_]
Features = NDArray[np.floating[Any]]

# Variants of a bundle's graph (export.graphs) that take one row, whose used length is then what attention
# costs; those whose steps bring each row as many tokens as it has, and how many rows these may be; and those that round
# alike in steps of every width, one token included.
ONE_ROW = ("gqa", "gqa_even", "tree_gqa")
RAGGED = {name: int(name.removeprefix("ragged_")) for name in bundle.RAGGED}
EVEN = ("gqa_even", "grouped", *RAGGED)


class LogitRow(Protocol):
    """The float32 logits [vocab_size] of one position, of which a caller takes no more than it needs.

    An array is one; so is a row that is still on a device (``engines.lazy``). ``np.asarray`` brings the whole row.
    """

    @property
    def size(self) -> int: ...

    def argmax(self) -> Any:
        """The lowest id among the largest."""
        ...

    def __getitem__(self, key: Any, /) -> Any: ...

    def astype(self, dtype: Any, /) -> NDArray[Any]: ...

    def __array__(self, dtype: Any = None, /) -> NDArray[Any]: ...


class EachRow(Protocol):
    """The logits of each row, [L, vocab_size], of rows that may have different L."""

    def __iter__(self) -> Iterator[Any]: ...

    def __getitem__(self, key: Any, /) -> Any: ...


class Logits(Protocol):
    """float32 logits [B, L, vocab_size] as ``forward`` returns them, valid until the next call.

    An array is one. Indexing the leading axes gives a part of the same kind, at the end a LogitRow. ``np.asarray``
    brings everything.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    def argmax(self, axis: int, /) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...

    def __getitem__(self, key: Any, /) -> Any: ...

    def __array__(self, dtype: Any = None, /) -> NDArray[Any]: ...


# The last number of a feature says what its row is, where a draft reads blocks: text, whose feature is the other
# numbers; part of a block behind the text, which has no feature; or padding.
TEXT, BLOCK, PADDING = 1.0, 0.0, -1.0

# Tokens of a prompt in one step, a row and altogether. Steps of more than some hundreds are not faster, and they hold
# activations and scores for all tokens: 16 rows of 512 tokens took 3.0 GB with a target of 105 M (int8, two cores),
# 16 rows of 64 took 0.7 GB and as long.
MAX_STEP, MAX_TOGETHER = 512, 1024
# Tokens of a prompt from which on it pays to read it alone, where an engine can (``ReadingEngine``). A target of 16 M
# parameters reads 16 prompts of 32 tokens so in 0.53 of the time, one of 105 M in 0.68; one of 0.5 B reads four of them
# in 0.87 (int8, two cores).
READ_ALONE = 32
MOST_ROWS = 4096  # that anything is planned, built or measured for


@dataclasses.dataclass(frozen=True, slots=True)
class Widths:
    """Which steps round alike: those of at least ``narrowest`` tokens a row, a multiple of ``multiple``."""

    narrowest: int = 1
    multiple: int = 1

    def holding(self, tokens: int) -> int:
        """The least such width for so many tokens."""
        return -(-max(tokens, self.narrowest) // self.multiple) * self.multiple


ANY, FROM_TWO = Widths(), Widths(2)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a caller may rely on, all counts of tokens: ids below ``vocab_size``, positions below ``max_context``.

    One step of a prompt brings at most ``max_step`` tokens a row and about ``max_together`` in all rows (a longer one
    goes in pieces), and of at most ``max_verify`` in a row may all logits be wanted. An engine whose capacity is fixed
    has max_context + max_verify - 1 slots a row.
    ``precision`` (fp32, fp16, bf16, int8, int4) says how coarsely it rounds; all steps of ``widths`` are meant to round
    alike (``leadout check`` looks), where logits of a multiple of ``fewest_logits`` tokens, in all rows, are asked for.
    ``trees``: it takes the steps of a TreeEngine. ``mask_token``: the id by which a draft is asked for tokens behind
    one that it does not know yet (None: it was not trained for that); ``block``: the most of them that it was trained
    to say (None: no such limit).
    ``features``: how many numbers a FeatureEngine gives of each token (0: it is none); ``reads_features``: its steps
    read as many beside each token. ``recurrent``: layers keep states, so it is a CommittingEngine.
    """

    vocab_size: int
    max_context: int
    max_step: int = MAX_STEP
    max_together: int = MAX_TOGETHER
    max_verify: int = 512
    precision: str = "fp32"
    widths: Widths = FROM_TWO
    fewest_logits: int = 1
    trees: bool = False
    mask_token: int | None = None
    block: int | None = None
    features: int = 0
    reads_features: bool = False
    recurrent: bool = False

    @classmethod
    def of(cls, entry: ModelEntry, widths: Widths, *, trees: bool) -> ModelSpec:
        """The spec of a bundle's model in the dialect ``slots``."""
        kept = entry.recurrence
        return cls(
            entry.vocab_size,
            entry.max_context,
            **({} if kept is None else {"max_step": kept.widest, "max_verify": kept.widest}),
            precision=entry.precision,
            widths=widths,
            trees=trees,
            mask_token=entry.mask_token,
            block=entry.block,
            features=entry.features or 0,
            reads_features=entry.reads_features,
            recurrent=kept is not None,
        )

    def chunk(self, rows: int) -> int:
        """Tokens of a prompt that one step brings each of ``rows`` rows."""
        return max(1, min(self.max_step, self.max_together // rows))


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
        (all of them by default). Returns float32 [B, L, vocab_size], valid until the next call: a view of an array,
        or logits that stay on the device until they are asked for.
        Changes slots past_lens[b] .. past_lens[b]+S-1 of rows b < B and nothing else. Token i of row b stands at
        position past_lens[b] + i; positions from max_context on are padding and may hold anything.
        Raises EngineError if past_lens[b] + S exceeds the capacity, or the runtime fails. Nothing else is checked, for
        every round comes here: shapes, ids below ``spec.vocab_size`` and lengths from 0 on are for the caller to get
        right (``Stepper`` does).
        """
        ...

    def reserve(self, capacity: int) -> None:
        """Make room for at least ``capacity`` slots a row (rounded up to a bucket). Keeps all rows.

        Raises EngineError where the capacity is fixed and less.
        """
        ...

    def reset(self, batch: int) -> None:
        """Start over with ``batch`` rows. Forgets every row; keeps the loaded model."""
        ...

    def copy_row(self, source: int, destination: int) -> None:
        """Make ``destination`` a copy of ``source`` (all slots). Leaves the other rows alone."""
        ...

    def close(self) -> None:
        """Release the model and the cache. Calling it twice is fine; all else raises EngineError from then on."""
        ...


@runtime_checkable
class RowEngine(Engine, Protocol):
    """An engine with a short way for a few tokens of its first row: on a CPU the overhead of ``forward`` is a fifth of
    a small draft's step."""

    def row_logits(self, tokens: Sequence[int], past_len: int, last: bool) -> Logits:
        """``forward`` for S new tokens of row 0: float32 logits [1, S, vocab_size], or of the ``last`` of them alone
        [1, 1, vocab_size]; the same bits.

        tokens: S ids, S >= 1; past_len: slots of the row that count. Raises EngineError as ``forward`` does.
        """
        ...


@runtime_checkable
class EvenEngine(Engine, Protocol):
    """An engine whose steps of one token need not round like wider ones: they are faster if they do not."""

    even: bool
    """Whether they round alike (``spec.widths``). True after ``reset``; may be set between any two steps."""


@runtime_checkable
class KeepingEngine(Engine, Protocol):
    """An engine whose cache stays valid until the next ``reset``, and which reads a prompt in pieces as it would at
    once, to the last bit. So a text that begins like the one before it may go on from the cache."""

    resets: int | None
    """How often it was reset. Each caller begins with a reset, so while this is unchanged no other has used the engine.
    None where the cache is not to be continued."""


@runtime_checkable
class ReadingEngine(Engine, Protocol):
    """An engine that may have a faster way for the prompt of one of its rows than steps of all."""

    reads_alone: bool
    """Whether it has, for as many rows as it was reset to."""

    def read(self, row: int, tokens: Tokens, past_len: int) -> None:
        """Bring S tokens [S] to slots past_len .. past_len+S-1 of ``row``, and change nothing else that counts: one
        slot behind them may hold anything. Another graph may do it than ``forward``'s, and round in its own way.
        Raises EngineError as ``forward`` does."""
        ...


@runtime_checkable
class RaggedEngine(Engine, Protocol):
    """An engine whose steps may bring each row another number of tokens, at the price of those tokens."""

    ragged: bool
    """Whether they may, for as many rows as it was reset to."""

    def forward_ragged(self, pieces: Sequence[Sequence[int]], past_lens: Sequence[int]) -> EachRow:
        """``forward`` for pieces[b], not empty, in row b: all logits of each, [len(pieces[b]), vocab_size], with the
        bits that a step of that row alone gives them. Raises EngineError as ``forward`` does."""
        ...


@runtime_checkable
class RecordingEngine(Engine, Protocol):
    """An engine that records the first step of each shape for later ones to replay (a CUDA graph), which takes as long
    as many steps."""

    recording: float | None
    """Seconds that recording has taken so far, without the steps themselves. None where nothing is recorded."""


@runtime_checkable
class CommittingEngine(Engine, Protocol):
    """An engine (if ``spec.recurrent``) some of whose layers keep a state for each row. No token can be taken out of a
    state again, so tokens that are not committed are kept apart from it."""

    def commit(self, lengths: Sequence[int]) -> None:
        """The first lengths[b] tokens of row b are text: no later step goes back behind them, but to 0."""
        ...

    def earliest(self, row: int) -> int:
        """The least length that the row can be stepped from, but for 0. Beyond what was committed where it was stepped
        far ahead of that: ``spec.max_step`` tokens can always be taken back."""
        ...


@runtime_checkable
class FeatureEngine(Engine, Protocol):
    """An engine that gives, beside logits, a vector of ``spec.features`` numbers of every token: what a draft model may
    read that was trained to (EAGLE, Li et al. 2401.15077)."""

    def features(self, row: int, start: int, stop: int) -> Features:
        """Those of the row's slots from ``start`` to ``stop``, [stop - start, features], as the last step over each
        gave them; a view, valid until the next step. They move with their slots (``reserve``, ``copy_row``,
        ``compact``)."""
        ...

    def beside(self, features: Features) -> None:
        """What the next step's tokens are read beside, [B, S, features], where ``spec.reads_features``."""
        ...


RowStep = Callable[[Sequence[int], int, bool], Logits]


def row_step(engine: Engine) -> RowStep | None:
    """``row_logits`` of an engine whose class has it, else None. (The instance is not asked: a wrapper that passes on
    all that it does not define would be bypassed.)"""
    return getattr(engine, "row_logits", None) if hasattr(type(engine), "row_logits") else None


@runtime_checkable
class TreeEngine(Engine, Protocol):
    """An engine whose steps may branch, if ``spec.trees`` says so."""

    def forward_tree(self, tokens: Tokens, past_lens: Tokens, sees: Sight) -> Logits:
        """``forward`` for S new tokens a row that do not follow one another: all logits [B, S, vocab_size].

        tokens [B, S] int64; past_lens [B] int64. ``sees`` [B, S, T] bool, T >= S, says which of the last T slots token
        i attends to, itself included: the last S of them are the new tokens, those before them tokens of earlier steps.
        Every slot before these T is seen by all. A token's position is the number of tokens it sees besides itself.
        Writes the cache as ``forward`` does. Raises EngineError if the capacity is exceeded.
        """
        ...

    def compact(self, row: int, past_len: int, kept: Sequence[int]) -> None:
        """Make one branch of a tree the row's continuation: slot past_len + kept[i] moves to past_len + i.

        ``kept`` ascends. Slots before past_len stay; those behind past_len + len(kept) may hold anything.
        """
        ...
