"""Which tokens a draft may say, and what they are called on either side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import ExportError, UsageError
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.pairing import Ids, Match, Vocabulary, match
from .other_tokenizer import is_foreign, match_bytes, require_coverage
from .trimming import Wanted, read_wanted


@dataclasses.dataclass(frozen=True, slots=True)
class DraftIds:
    """The ids of a draft beside its target's, and those of them that are wanted (None: all)."""

    match: Match
    wanted: Wanted | None

    @classmethod
    def choose(
        cls,
        target: Vocabulary,
        draft: Vocabulary,
        asked: int | str | Path | None,
        texts: Sequence[str | Path],
        trained: Ids | None = None,
    ) -> DraftIds:
        """``asked`` and ``texts`` as in ``read_wanted``; ``trained``: the target's ids that the draft was trained to
        say, and calls 0, 1, 2 ... (None: its ids are those of its vocabulary). Raises ExportError, UsageError."""
        if trained is not None and not np.array_equal(trained, np.arange(target.logits)):
            if asked is not None:
                raise UsageError(f"draft-vocabulary: '{draft.source}' says {trained.size} tokens alone already")
            note = f"trained to say {trained.size} of the target's {target.logits} tokens"
            return cls(Match(trained, None, target.logits, note), None)
        if not is_foreign(target, draft):
            found = match(target, draft)
        elif asked is None:
            found = match_bytes(target, draft)
        else:
            raise UsageError("draft-vocabulary trims a draft of the target's tokenizer; this one has another")
        if asked is None:
            return cls(found, None)
        return cls(found, read_wanted(asked, draft.tokenizer or target.tokenizer, draft.logits, texts))

    def columns(self, checkpoint: Checkpoint, logits: NDArray[np.float32], ends: Sequence[int]) -> Ids | None:
        """The draft's ids whose logits its graph shall give, in order; None for all: a head that nobody asked to trim
        stays, padding too, for it may be one table with the embedding. ``logits``: the draft's,
        in text of its own; ``ends``: the target's ids that end a text, which the draft must be able to say. Raises
        ExportError if the checkpoint has another head."""
        if checkpoint.vocab_size != self.match.outputs.size:
            raise ExportError(
                f"'{checkpoint.source}': config.json says {self.match.outputs.size} tokens, its head has"
                f" {checkpoint.vocab_size}"
            )
        if self.match.tokenizer is not None:
            self._join_ends(checkpoint.eos_token_ids, ends)
            require_coverage(checkpoint.source, logits, self.match.columns)
        if self.wanted is None:
            return None
        can_end = np.flatnonzero(np.isin(self.match.outputs, ends)).tolist()
        columns = self.wanted.among(self.match.columns, can_end)
        return None if columns.size == checkpoint.vocab_size else columns

    def _join_ends(self, theirs: Sequence[int], ours: Sequence[int]) -> None:
        """The draft's end of text is the target's, whatever it is called; changes ``match.outputs``."""
        theirs = [i for i in theirs if 0 <= i < self.match.outputs.size]  # small models may keep GPT-2's 50256
        ours = [i for i in ours if 0 <= i < self.match.target_logits]
        if theirs and ours and not np.isin(self.match.outputs, ours).any():
            self.match.outputs[theirs[0]] = ours[0]

    def describe(self, columns: Ids) -> str:
        """For people: how many tokens a trimmed head has left, and how much of the calibration texts they cover."""
        assert self.wanted is not None
        covered = self.wanted.describe(columns)
        return f"head of {columns.size} of {self.match.outputs.size} tokens{covered}"
