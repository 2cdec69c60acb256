"""``golden.npz``: what transformers said, as the exporter wrote it down: any engine can be held to it anywhere."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bundle import NO_ARRAYS, Model
from ..errors import BundleError
from .base import Features, Tokens

GOLDEN = "golden.npz"
TOLERANCE = 1e-4  # of logits in float32: absolute up to 1, and relative to the largest above


def _needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING


@dataclasses.dataclass(frozen=True, slots=True)
class Golden:
    """``golden.npz``: tokens [R, T] int64, lengths [R], and the ids and values [R, T, K] of the largest logits; of a
    model that reads features, those ``beside`` each token [R, T, D]; where rows end in a block that is read at once,
    how many tokens of each are ``texts`` [R] before it."""

    tokens: Tokens
    lengths: Tokens
    ids: NDArray[np.int32]
    logits: NDArray[np.float32]
    beside: Features | None = None
    texts: Tokens | None = None

    @classmethod
    def of(cls, model: Model) -> Golden | None:
        """Those of a bundle's model; None where it has none (directories that others wrote)."""
        return cls.read(model.folder / GOLDEN) if GOLDEN in model.entry.files else None

    @classmethod
    def read(cls, path: Path) -> Golden:
        """Raises BundleError if the file is not what the exporter writes."""
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                fields = dataclasses.fields(cls)
                return cls(**{each.name: stored[each.name] for each in fields if each.name in stored or _needed(each)})
        except NO_ARRAYS as error:
            raise BundleError(f"{path}: not golden rows: {error}; export the pair again") from None

    def rows(self) -> list[list[int]]:
        """The token rows without padding."""
        return [row[:length].tolist() for row, length in zip(self.tokens, self.lengths, strict=True)]
