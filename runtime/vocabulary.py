"""Decides what a draft's logits and ids mean to its target: q is 0 for every token that the draft cannot say.

``draft/vocabulary.npz`` (no pickle), for a draft of V_d logits and a target of V_t, where the two differ:

    outputs   int64 [V_d]   the target's id of each logit, -1 for none; no id twice
    inputs    int64 [V_t]   optional: the draft's id of each of the target's; without it they are the same

With a ``draft/tokenizer.json`` beside it, the draft has another tokenizer (``drafters/foreign_draft.py``).

Whatever the map says, answers are the target's: a rule is exact for every q (2211.17192, theorem 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bundle import NO_ARRAYS, TOKENIZER, VOCABULARY, Model
from ..engines.base import LogitRow
from ..errors import BundleError
from .drafters.retokenise import Tokenizers
from .text import Codec

Ids = NDArray[np.int64]


class VocabularyMap:
    """Puts a draft's rows of logits [V_d] into the target's ids [V_t], and the target's tokens into the draft's."""

    def __init__(
        self, outputs: Ids, size: int, inputs: Ids | None = None, tokenizers: Tokenizers | None = None
    ) -> None:
        """``outputs`` and ``inputs`` as in the file; ``size``: V_t; ``tokenizers``, if they are not the same. Raises
        BundleError if this is no such map."""
        self.size, self.tokenizers = size, tokenizers
        self._inputs, self._outputs = inputs, outputs
        order = np.argsort(outputs, kind="stable")
        columns: Ids = order[int((outputs < 0).sum()) :]
        self.ids: Ids = outputs[columns]
        self._check(outputs, inputs)
        first = np.array_equal(columns, np.arange(columns.size))
        # in the order of the target's ids, so that ties go to the lowest; a slice copies nothing
        self._columns = slice(columns.size) if first else columns
        self.identical = first and outputs.size == columns.size == size and np.array_equal(self.ids, columns)
        self._column_of = np.full(size, -1, np.int64)
        self._column_of[self.ids] = columns

    @classmethod
    def shared(cls, draft: int, target: int) -> VocabularyMap:
        """The map between two models with the same ids, of which the draft has ``draft`` and the target ``target``. An
        id that the draft lacks is never drafted, and is read as its last one."""
        inputs = np.minimum(np.arange(target), draft - 1) if draft < target else None
        outputs = np.arange(draft)
        return cls(np.where(outputs < target, outputs, -1), target, inputs)

    @classmethod
    def read(cls, model: Model, size: int, codec: Codec) -> VocabularyMap | None:
        """The map of a bundle's draft for a target of ``size`` ids; None where the bundle has none. Raises
        BundleError."""
        if VOCABULARY not in model.entry.files:
            return None
        path = model.folder / VOCABULARY
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                arrays = {name: np.asarray(stored[name]) for name in stored.files}
            if unknown := sorted(set(arrays) - {"outputs", "inputs"}):
                raise ValueError(f"unknown array '{unknown[0]}'")
            if any(array.dtype != np.int64 or array.ndim != 1 for array in arrays.values()):
                raise ValueError("ids must be int64, in one dimension")
            outputs = arrays["outputs"]
            if outputs.size != model.entry.vocab_size:
                raise ValueError(f"{outputs.size} ids for {model.entry.vocab_size} logits")
            foreign = TOKENIZER in model.entry.files
            tokenizers = Tokenizers(codec.tokenizer, Codec(model.folder / TOKENIZER).tokenizer) if foreign else None
            return cls(outputs, size, arrays.get("inputs"), tokenizers)
        except (*NO_ARRAYS, BundleError) as error:
            raise BundleError(f"{path}: not a map of vocabularies: {error}; export the pair again") from None

    def tokens(self, target_ids: Sequence[int]) -> Sequence[int]:
        """The draft's ids of the target's."""
        if self._inputs is None:
            return target_ids
        found: list[int] = self._inputs[np.asarray(target_ids, np.int64)].tolist()
        return found

    def row(self, logits: LogitRow) -> LogitRow:
        """Logits [V_d] as a row [V_t], -inf for what the draft cannot say. Nothing is copied before it is asked for."""
        return logits if self.identical else MappedRow(self, logits)

    def target_id(self, column: int) -> int:
        """The target's id of one of the draft's logits; -1 for none."""
        return int(self._outputs[column])

    def column(self, target_id: int) -> int:
        """Where among the draft's logits the target's token stands; -1 for nowhere."""
        return int(self._column_of[target_id])

    def kept(self, logits: LogitRow) -> LogitRow:
        """The logits of tokens that both know, in the order of the target's ids (``ids``)."""
        every = isinstance(self._columns, slice) and self.ids.size == logits.size
        kept: LogitRow = logits if every else np.asarray(logits)[self._columns]
        return kept

    def _check(self, outputs: Ids, inputs: Ids | None) -> None:
        if not self.ids.size or outputs.min() < -1 or self.ids[-1] >= self.size or not np.diff(self.ids).all():
            raise BundleError(
                f"outputs must be ids of the target (0 to {self.size - 1}) or -1, one at least, none twice"
            )
        if inputs is not None and (inputs.shape != (self.size,) or inputs.min() < 0):
            raise BundleError(f"inputs must be an id of the draft, from 0, for each of the target's {self.size}")


class MappedRow:
    """A LogitRow [V_t] over a draft's [V_d]. Its greatest costs no more than the draft's own. ``kept`` are the logits
    of the tokens that both know, ``ids`` those tokens."""

    __slots__ = ("_logits", "_map")

    def __init__(self, vocabulary: VocabularyMap, logits: LogitRow) -> None:
        self._map, self._logits = vocabulary, logits

    @property
    def size(self) -> int:
        return self._map.size

    @property
    def kept(self) -> LogitRow:
        return self._map.kept(self._logits)

    @property
    def ids(self) -> Ids:
        return self._map.ids

    def argmax(self) -> int:
        return int(self.ids[self.kept.argmax()])

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, (int, np.integer)):
            return np.asarray(self)[key]
        column = self._map.column(int(key))
        return np.float32(-math.inf) if column < 0 else self._logits[column]

    def astype(self, dtype: Any) -> NDArray[Any]:
        """The whole row, in an array of its own."""
        row = np.full(self._map.size, -math.inf, dtype)
        row[self.ids] = np.asarray(self.kept)
        return row

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self.astype(np.float32 if dtype is None else dtype)
