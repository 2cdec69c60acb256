"""Decides what a draft model with another tokenizer proposes (Timor et al., 2502.05202).

It reads the text in tokens of its own: after each round the text is cut anew, and its cache is rolled back to where old
and new ids part. Sampled drafts are token-level (TLI): q is the draft's law on the tokens that both know, by their
bytes, renormalised, in the target's ids: any rule is exact. Greedy drafts are string-level (SLEM): the draft writes
freely, its text is cut into the target's tokens, and those must be the target's own choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Items

from ...engines.base import LogitRow, Logits
from ...errors import EngineError
from ..held import agreement
from ..prefill import ALL
from ..sequence import Row
from ..steps import Stepper
from ..vocabulary import VocabularyMap
from .base import Draft
from .confidence import Watch
from .model_drafter import AHEAD, ModelDrafter
from .retokenise import Tokenizers, Transcript


class ForeignDrafter(ModelDrafter):
    """A draft model with its own tokenizer and cache. ``_cached[b]`` are the draft's ids in row b's cache, of the row's
    text from its ``_begins[b]``-th id on."""

    def __init__(self, stepper: Stepper, vocabulary: VocabularyMap, tokenizers: Tokenizers) -> None:
        """``vocabulary``: which of the draft's ids are the target's, by their bytes; it has no inputs."""
        super().__init__(stepper, vocabulary)
        self._tokenizers = tokenizers
        self._transcripts: dict[int, Transcript] = {}
        self._cached: list[list[int]] = []

    def reset(self, rows: Items[Row], reach: int = ALL) -> None:
        """Holds nothing of the text before. Of what is lacking, which is known only in its own tokens, it reads
        ``reach`` of those, and never less than what of the text is still cut anew."""
        self._stepper.reset(len(rows))
        self._reach = self._most(reach)
        self._transcripts, self._cached, self._begins = {}, [[] for _ in rows], [0] * len(rows)

    def unread(self, rows: Items[Row]) -> int:
        """In the target's tokens."""
        return sum(min(row.sequence.length - 1, self._reach) for row in rows if self._reads(row))

    def prefill(self, rows: Items[Row]) -> None:
        texts = [self._lacking(place, row)[:-1] if self.room(row) else [] for place, row in enumerate(rows)]
        if any(texts):
            self._feed(texts)

    def room(self, row: Row) -> int:
        """None while a character is unfinished, or before any text: the draft would have nothing to go on."""
        if not self._reads(row):
            return 0
        if (transcript := self._transcripts.get(row.index)) is None:
            transcript = self._transcripts[row.index] = Transcript(self._tokenizers)
        transcript.take(row.sequence.tokens)
        if not transcript.whole or not transcript.own:
            return 0
        return self._room

    def behind(self, rows: Items[Row]) -> int:
        read = zip((self._transcripts.get(row.index) for row in rows), self._begins, self._cached, strict=False)
        lacking = (len(text.own) - begin - len(cached) for text, begin, cached in read if text is not None)
        return self._late(min(self._reach, max(lacking, default=0)))

    watches = False  # a string-level draft's tokens are known only at its end
    resumes = False

    def propose(self, rows: Items[Row], lengths: Items[int], watch: Watch | None = None) -> list[Draft]:
        writers = [self._writer(row, min(n, self.room(row))) for row, n in zip(rows, lengths, strict=True)]
        pending = [self._lacking(place, row) if writers[place] else [] for place, row in enumerate(rows)]
        self.late = self._late(max(map(len, pending), default=0))
        while any(pending):
            logits = self._feed(pending)
            pending = [
                writer.take(scores) if writer is not None and fed else []
                for writer, fed, scores in zip(writers, pending, logits, strict=True)
            ]
        drafts = [Draft() if writer is None else writer.draft for writer in writers]
        self.steps = max(len(draft.tokens) for draft in drafts)  # of the target's tokens: they are what is planned
        return drafts

    def observe(self, place: int, accepted: int, path: Items[int] = ()) -> None:
        """Changes nothing: the text says what of the cache still holds."""

    def move(self, source: int, destination: int) -> None:
        self._stepper.copy_row(source, destination)
        self._cached[destination], self._begins[destination] = list(self._cached[source]), self._begins[source]

    def _writer(self, row: Row, length: int) -> TokenWriter | TextWriter | None:
        if length <= 0:
            return None
        if row.sampler.rule == "greedy":
            return TextWriter(row, length, self.room(row), self._vocabulary, self._transcripts[row.index])
        return TokenWriter(row, length, self._vocabulary, self._choose)

    def _lacking(self, place: int, row: Row) -> list[int]:
        """The draft's ids of the text that its cache does not hold, one at least; the cache is rolled back to them."""
        transcript, cached = self._transcripts[row.index], self._cached[place]
        own = transcript.own[self._begins[place] :]
        valid = min(agreement(cached, own), len(own) - 1)
        if valid < self._stepper.earliest(place):
            valid = 0
        if len(own) - valid > self._reach or len(own) + min(AHEAD, self._room) > self._context + 1:
            self._begins[place] = self._anew(transcript)
            own, valid = transcript.own[self._begins[place] :], 0
        del cached[valid:]
        return own[valid:]

    def _anew(self, transcript: Transcript) -> int:
        """Where in its own ids to begin: not among those that the next round may cut in another way, if they fit."""
        size = len(transcript.own)
        begin = max(0, size - min(self._reach, self._half))
        return begin if begin <= transcript.settled else max(transcript.settled, size - self._half)

    def _feed(self, pending: Items[Items[int]]) -> Logits:
        cached = self._cached[: len(pending)]
        logits = self._stepper.last_logits(pending, [len(ids) for ids in cached])
        for ids, new in zip(cached, pending, strict=True):
            ids += new
        return logits


class TokenWriter:
    """Token level: tokens drawn in the target's ids, each fed back as the draft's own."""

    def __init__(
        self, row: Row, length: int, vocabulary: VocabularyMap, choose: Callable[[Row, Draft, LogitRow], bool]
    ) -> None:
        self.draft = Draft()
        self._row, self._length, self._vocabulary, self._choose = row, length, vocabulary, choose
        self._asked = 0

    def take(self, logits: LogitRow) -> list[int]:
        """Draw from the draft's ``logits``; what to feed for the next token, nothing after the last."""
        self._choose(self._row, self.draft, logits)
        self._asked += 1
        goes_on = len(self.draft.tokens) == self._asked < self._length
        return [self._vocabulary.column(self.draft.tokens[-1])] if goes_on else []


class TextWriter:
    """String level: the draft's likeliest text, in its own tokens, until that is enough of the target's."""

    def __init__(self, row: Row, length: int, room: int, vocabulary: VocabularyMap, transcript: Transcript) -> None:
        self.draft = Draft()
        self._row, self._length, self._vocabulary, self._transcript = row, length, vocabulary, transcript
        self._most = min(2 * length, room)  # tokens of the draft: they may be shorter than the target's
        self._own: list[int] = []

    def take(self, logits: LogitRow) -> list[int]:
        """Write one token more; what to feed for the next, nothing after the last. Its end of text is the target's."""
        own = int(logits.argmax())
        if not math.isfinite(logits[own]):
            raise EngineError("no finite maximum among the draft's logits: NaN or infinity from the engine")
        end = self._vocabulary.target_id(own)
        if end in self._row.sequence.ends:
            self.draft.tokens = [*self._transcript.drafted(self._own), end][: self._length]
            return []
        self._own.append(own)
        if len(self._own) >= min(self._length, self._most):
            self.draft.tokens = self._transcript.drafted(self._own)[: self._length]
        return [own] if len(self.draft.tokens) < self._length and len(self._own) < self._most else []
