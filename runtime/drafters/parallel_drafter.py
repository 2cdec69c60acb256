"""Decides what a draft model proposes that says a whole draft in one step (PARD, An et al. 2504.18583).

After the text that it has not read yet it reads mask tokens, one for each token of the draft but the first. A mask
stands for a token that is not known yet, and its logits are the law of the token after it. So x_k is drawn from
q_k(. | text), which does not depend on x_1 to x_{k-1}; any rule is exact, as for every q, and drafts of eight tokens
take hardly longer than drafts of two.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from ...engines.base import Logits
from ..sequence import Row
from ..steps import Stepper
from ..vocabulary import VocabularyMap
from .base import Draft
from .confidence import Watch
from .model_drafter import Rereader


class ParallelDrafter(Rereader):
    """A draft model that was trained to go on behind its ``mask_token``, one of its own ids, for ``block`` tokens at
    most if it says so. The slots of masks are never valid: the next step writes the text over them, what was accepted
    of the draft beside the masks of the next."""

    at_once = True
    unmasked = 1  # tokens of a draft that no mask stands for: what the text itself says next

    def __init__(self, stepper: Stepper, vocabulary: VocabularyMap) -> None:
        super().__init__(stepper, vocabulary)
        spec = stepper.engine.spec
        assert spec.mask_token is not None
        self._mask, self._longest = spec.mask_token, min(spec.max_verify, spec.block or spec.max_verify)

    def room(self, row: Row) -> int:
        return min(super().room(row), self._longest)

    def propose(self, rows: Items[Row], lengths: Items[int], watch: Watch | None = None) -> list[Draft]:
        drafts = [Draft() for _ in rows]
        if not any(lengths):
            self._begin(rows, [])
            return drafts
        unread = [self._rest(b, row) if n else [] for b, (row, n) in enumerate(zip(rows, lengths, strict=True))]
        self._begin(rows, unread)
        logits = self._ask(rows, lengths, unread)
        self.steps = max(lengths)
        for place in range(self.steps):
            if place and watch is not None and not watch.more(place):
                break
            for b, (row, draft, n) in enumerate(zip(rows, drafts, lengths, strict=True)):
                goes_on = place < n and len(draft.tokens) == place
                if goes_on and self._choose(row, draft, logits[b][place]) and watch is not None:
                    watch.saw(b, self._chance(draft, logits[b][place]))
        if watch is not None:
            for draft, classes in zip(drafts, watch.classes, strict=True):
                draft.classes = classes
        return drafts

    def _rest(self, place: int, row: Row) -> list[int]:
        """What is to be read of the row's text: its last token at least, for a draft begins with what that says."""
        self.keep(place, row.sequence.length - 1)
        return self._unfed(place, row, [])

    def _ask(self, rows: Items[Row], lengths: Items[int], unread: Items[Items[int]]) -> Logits:
        """One step: logits [B, max(lengths), V], row b's at [b, :lengths[b]]."""
        masks = [[self._mask] * (n - self.unmasked) for n in lengths]
        beside = self._beside(rows, lengths, [[*text, *more] for text, more in zip(unread, masks, strict=True)])
        texts = [mine if n else others for mine, others, n in zip(unread, beside, lengths, strict=True)]
        pieces = [[*self._vocabulary.tokens(text), *more] for text, more in zip(texts, masks, strict=True)]
        logits = self._stepper.ending_logits(pieces, self._valid[: len(rows)], lengths)
        for b, (text, n) in enumerate(zip(texts, lengths, strict=True)):
            self._valid[b] += len(text) - (1 - self.unmasked if n else 0)
        return logits
