"""Decides what a head proposes that drafts a block in one step from its target's features (DFlash, Chen et al.
2602.06036).

Of the text it reads features alone, those of every token that the target has read, each beside its own token: so its
slots are the target's. Behind them stand the text's last token and a mask for each token of the draft, which says the
law of what stands in its place. As x_k is drawn from q_k(. | text), whatever x_1 to x_{k-1} became, any rule is exact.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from ...engines.base import BLOCK, PADDING, Features
from ..sequence import Row
from .feature_drafter import FeatureDrafter
from .parallel_drafter import ParallelDrafter


class BlockDrafter(FeatureDrafter, ParallelDrafter):
    """The head, beside its target, whose rows stand where its own do."""

    first = 0
    unmasked = 0
    lacks = 2  # what the last block began with is text now

    def _beside(self, rows: Items[Row], lengths: Items[int], pending: Items[Items[int]]) -> Items[Items[int]]:
        pieces = super()._beside(rows, lengths, pending)
        unread = [row.sequence.length - 1 - self._known(b) for b, row in enumerate(rows)]  # the last has no feature yet
        return [piece if n else piece[: max(0, most)] for piece, n, most in zip(pieces, lengths, unread, strict=True)]

    def _features(self, widths: Items[int], past: Items[int], width: int) -> Features:
        features = np.zeros((len(widths), width, self._head.spec.features), np.float32)
        features[:, :, -1] = PADDING
        for b, (count, start) in enumerate(zip(widths, past, strict=True)):
            place = self._places[b] if self._places else b
            text = max(0, min(count, self._base[place] - 1 - start))
            if text:
                before = self._begins[place] + start
                features[b, :text] = self._target.features(place, before, before + text)
            features[b, text:count, -1] = BLOCK
        return features
