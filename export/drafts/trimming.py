"""Which tokens a draft may say: those that are frequent, so that its head is small (FR-Spec, 2502.14856).

The head of a small model with a large vocabulary is a third of its weights, read at every step. Cut to the frequent
tokens, q is 0 outside, and every rule stays exact.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import ExportError, UsageError
from ..checkpoints.pairing import Ids

_CHUNK = 1 << 16  # characters that are encoded at once


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The draft's ids that were asked for: a list of them (``ids``), or the ``most`` frequent by ``counts`` [V]."""

    counts: NDArray[np.int64]
    most: int = 0
    ids: Ids | None = None

    def among(self, columns: Ids, always: Sequence[int]) -> Ids:
        """Those of ``columns`` that are wanted, in order, and ``always`` (ends of text) with them."""
        if self.ids is not None:
            return columns[np.isin(columns, self.ids) | np.isin(columns, always)]
        counts = self.counts[columns] + (1 + self.counts.sum()) * np.isin(columns, always)
        return np.sort(columns[np.argsort(-counts, kind="stable")[: self.most]])

    def describe(self, columns: Ids) -> str:
        """How much of the calibration texts ``columns`` cover."""
        total = int(self.counts.sum())
        return f", {self.counts[columns].sum() / total:.1%} of the calibration texts" if total else ""


def read_wanted(asked: int | str | Path, tokenizer: Any, logits: int, texts: Sequence[str | Path]) -> Wanted:
    """``asked``: how many tokens (the most frequent in ``texts``), or a file of ids. Raises UsageError."""
    if tokenizer is None and texts:
        raise UsageError("calibration texts need a draft with a tokenizer.json")
    counts = count_tokens(tokenizer, logits, texts)
    if not isinstance(asked, int):
        return Wanted(counts, ids=_read_ids(Path(asked), logits))
    if not 1 <= asked <= logits:
        raise UsageError(f"draft-vocabulary must be between 1 and {logits} tokens, or a file of ids, not {asked}")
    if not counts.any():
        raise UsageError(f"draft-vocabulary {asked} keeps the most frequent tokens: give --calibration TEXTFILE")
    return Wanted(counts, most=asked)


def count_tokens(tokenizer: Any, logits: int, texts: Sequence[str | Path]) -> NDArray[np.int64]:
    """How often each of the draft's ids stands in ``texts``, int64 [logits]. Raises UsageError naming a bad file."""
    counts = np.zeros(logits, np.int64)
    for path in map(Path, texts):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read calibration text '{path}': {error}") from None
        pieces = [text[i : i + _CHUNK] for i in range(0, len(text), _CHUNK)]
        for encoding in tokenizer.encode_batch(pieces, add_special_tokens=False):
            counts += np.bincount(np.asarray(encoding.ids, np.int64), minlength=logits)[:logits]
    return counts


def _read_ids(path: Path, logits: int) -> Ids:
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"draft-vocabulary '{path}' is neither a number nor a file of ids: {error}") from None
    for word in words:
        if not word.isdecimal() or int(word) >= logits:
            raise UsageError(f"{path}: '{word[:20]}' is not a token id of the draft (0 to {logits - 1})")
    if not words:
        raise UsageError(f"{path}: no token ids")
    return np.unique(np.array(words, np.int64))


def kept_mass(logits: NDArray[np.float32], columns: Ids) -> float:
    """The mean probability [..., V] -> that ``columns`` have together."""
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return float((weights[..., columns].sum(-1) / weights.sum(-1)).mean())


@contextlib.contextmanager
def trimmed_head(model: Any, columns: Ids | None) -> Iterator[None]:
    """Let ``model`` give the logits of ``columns`` alone (None: of all). The embedding stays whole, tied or not."""
    head = model.get_output_embeddings()
    if columns is None:
        yield
        return
    if not isinstance(getattr(head, "weight", None), torch.nn.Parameter):
        raise ExportError(f"{type(model).__name__}: its head has no weight whose rows could be left out")
    whole = {name: value for name in ("weight", "bias") if (value := getattr(head, name, None)) is not None}
    rows = torch.from_numpy(columns)
    try:
        for name, value in whole.items():
            setattr(head, name, torch.nn.Parameter(value.detach()[rows].clone(), requires_grad=False))
        yield
    finally:
        for name, value in whole.items():
            setattr(head, name, value)
