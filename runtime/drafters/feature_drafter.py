"""Decides what a head proposes that reads its target's features (EAGLE, Li et al. 2401.15077).

Token t of a text is read beside the target's feature of the token before it. So the head begins with a text's second
token, and its cache holds one token less than the target's. For a token behind one that it drafted itself, there is no
such feature yet, and its own estimate takes the place; once the token is text, it is read again beside the true one.
q is what the head says, however it was made, so any rule is exact.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import cast

import numpy as np

from ...engines.base import Engine, FeatureEngine, Features
from ..prefill import ALL
from ..sequence import Row
from ..steps import Stepper
from ..vocabulary import VocabularyMap
from .model_drafter import Rereader


class FeatureDrafter(Rereader):
    """The head, beside ``target``, whose rows stand where its own do."""

    first = 1

    def __init__(self, stepper: Stepper, vocabulary: VocabularyMap, target: Engine) -> None:
        super().__init__(stepper, vocabulary)
        self._target, self._head = cast(FeatureEngine, target), cast(FeatureEngine, stepper.engine)
        self._places: Items[int] = ()  # the target's row of each row of a step, while prompts are read
        self._text: Items[int] = ()  # of the only row, from which its slots are
        stepper.read_beside(self._features)

    def reset(self, rows: Items[Row], reach: int = ALL) -> None:
        true = min(self._valid[0], self._base[0]) if len(self._valid) == 1 else 0
        super().reset(rows, reach)
        self._valid = [min(held, true) for held in self._valid]  # the slots behind were read beside guesses
        self._base, self._text = [ALL] * len(rows), rows[0].sequence.tokens if len(rows) == 1 else ()

    def _follows(self, before: Items[int]) -> bool:
        """Features are of a whole text: one that differs in what stands before the slots has others."""
        return list(self._text[: self._begins[0]]) == list(before)

    def _take(self, prompts: Items[Items[int]], held: int) -> None:
        self._places = list(dict.fromkeys(map(list(prompts).index, prompts)))
        try:
            super()._take(prompts, held)
        finally:
            self._places = ()

    def _features(self, widths: Items[int], past: Items[int], width: int) -> Features:
        """The features [B, width, D] of a step that brings row b ``widths[b]`` tokens on top of ``past[b]`` slots."""
        if len(widths) == 1 and widths[0] == width:
            return self._of(self._places[0] if self._places else 0, past[0], widths[0])[None]
        features = np.zeros((len(widths), width, self._head.spec.features), np.float32)
        for b, (count, start) in enumerate(zip(widths, past, strict=True)):
            if count:
                features[b, :count] = self._of(self._places[b] if self._places else b, start, count)
        return features

    def _of(self, place: int, start: int, count: int) -> Features:
        """The features [count, D] for the tokens in slots from ``start`` on: those of the tokens before them, the
        target's in the text, the head's own in a draft."""
        if start >= self._base[place]:
            return self._head.features(place, start - 1, start - 1 + count)
        before = self._begins[place] + start - 1
        return self._target.features(place, before, before + count)
