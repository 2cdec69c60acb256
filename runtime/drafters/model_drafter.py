"""Decides which tokens a draft model proposes, one at a time. (Drafters that need no model: ``free.py``.)"""

from __future__ import annotations

from collections.abc import Sequence as Items

from ...engines.base import LogitRow, Logits
from ...errors import UsageError
from ..prefill import ALL, prefill
from ..sequence import Row
from ..settings import MAX_DRAFT_LENGTH, MODEL_DRAFTS
from ..steps import Stepper
from ..vocabulary import VocabularyMap
from .base import Draft
from .confidence import Watch, chance_of

AHEAD = 2 * MAX_DRAFT_LENGTH + 1  # tokens: a draft, and the one that is made while it is verified


class ModelDrafter:
    """A draft model with its own cache. Its first ``_valid[b]`` slots hold row b's committed text from token
    ``_begins[b]`` on; of the text before that it knows nothing.

    Text that it has not read yet (a prompt; one token; two after a fully accepted round; more after a rest) goes in
    with the first step of a draft, without a call of its own. Where that is more than its ``reach``, its cache begins
    anew with the last ``reach`` tokens; where the text outgrows the model's context, with half of a context. The last
    drafted token is never fed. A draft ends early where the request allows no token that the draft model knows."""

    watches = True  # whether it asks a Watch when to stop
    at_once = rereads = False
    resumes = True  # whether a draft of it can be gone on with
    first = 0  # the token of a text that it begins with
    lacks = 2  # committed tokens that it has not read, at most, if it drafted in the round before
    late = steps = 0

    def __init__(self, stepper: Stepper, vocabulary: VocabularyMap) -> None:
        """``vocabulary`` says which of the target's tokens the draft can say and how it reads them."""
        self._stepper, self._vocabulary = stepper, vocabulary
        self._context = stepper.engine.spec.max_context
        self.resumes = self.resumes and not stepper.engine.spec.recurrent  # what was drafted ahead is taken back
        self._half = max(1, self._context // 2)
        self._room = self._context + 1 - self._half  # for drafts, once its cache has begun anew
        self._reach = ALL
        self._valid: list[int] = []
        self._begins: list[int] = [self.first]
        self._base: list[int] = []

    def reset(self, rows: Items[Row], reach: int = ALL) -> None:
        self._reach, begin, held = self._most(reach), self.first, 0
        if len(rows) == 1 and self._reads(rows[0]):
            prompt = rows[0].sequence.tokens[:-1]
            begin = self._begins[0] if len(prompt) > self._reach else self.first
            text = self._vocabulary.tokens(prompt[begin:])
            held = self._stepper.resume(text if self._follows(prompt[:begin]) else [])
            if held and len(text) - held > self._reach:
                held = self._stepper.resume([])
        else:
            self._stepper.reset(len(rows))
        self._begins = [begin if held else self.first] * len(rows)
        self._valid, self._base = [held] * len(rows), [0] * len(rows)

    def unread(self, rows: Items[Row]) -> int:
        prompts = {tuple(row.sequence.tokens[:-1]) for row in rows if self._reads(row)}  # equal ones are read once
        return sum(max(0, min(len(prompt) - self._known(0), self._reach)) for prompt in prompts)

    def forget(self) -> None:
        self._stepper.forget()

    def prefill(self, rows: Items[Row]) -> None:
        held, prompts = self._valid[0], [list[int]() for _ in rows]
        for place, row in enumerate(rows):
            if self._reads(row):
                self._skip(place, row, row.sequence.length - 1)
                prompts[place] = row.sequence.tokens[self._begins[place] : -1]
        self._take(prompts, held)
        self._valid = [len(prompt) for prompt in prompts]

    def room(self, row: Row) -> int:
        return self._room

    def behind(self, rows: Items[Row]) -> int:
        reading = ((b, row) for b, row in enumerate(rows) if self._reads(row))
        lacking = (row.sequence.length - self._known(b) for b, row in reading)
        return self._late(min(self._reach, max(lacking, default=0)))

    def propose(self, rows: Items[Row], lengths: Items[int], watch: Watch | None = None) -> list[Draft]:
        if len(rows) == 1:
            return [self.resume(rows[0], lengths[0], Draft(), watch)]
        drafts = [Draft() for _ in rows]
        pending = [
            self._unfed(b, row, []) if n > 0 else [] for b, (row, n) in enumerate(zip(rows, lengths, strict=True))
        ]
        self._begin(rows, pending)
        while any(pending) and (watch is None or not self.steps or watch.more(self.steps)):
            logits = self._feed(self._beside(rows, lengths, pending))
            self._stepped()
            for place, (row, draft, n) in enumerate(zip(rows, drafts, lengths, strict=True)):
                chosen = bool(pending[place]) and self._choose(row, draft, logits[place])
                if chosen and watch is not None:
                    watch.saw(place, self._chance(draft, logits[place]))
                pending[place] = draft.tokens[-1:] if chosen and len(draft.tokens) < n else []
        if watch is not None:
            for draft, classes in zip(drafts, watch.classes, strict=True):
                draft.classes = classes
        return drafts

    def resume(self, row: Row, length: int, draft: Draft, watch: Watch | None = None) -> Draft:
        """Make ``draft``, which this began after the very text of ``row``, the only one, ``length`` long if it is
        shorter; shorter where ``watch`` says so. (That never saw what it began with: a resumed draft has no classes.)

        What stands around it is a good part of a small draft's step: nothing here is done for many rows.
        """
        tokens, kept = draft.tokens, len(draft.tokens)
        pending: Items[int] = self._unfed(0, row, tokens) if kept < length else []
        self._begin([row], [pending])
        if watch is not None:
            watch.missed(0, kept)
        while pending and (watch is None or not tokens or watch.more(len(tokens))):
            logits = self._stepper.last_row(self._vocabulary.tokens(pending), self._valid[0])
            self._valid[0] += len(pending)
            self._stepped()
            chosen = self._choose(row, draft, logits)
            if chosen and watch is not None:
                watch.saw(0, self._chance(draft, logits))
            pending = tokens[-1:] if chosen and len(tokens) < length else []
        if watch is not None and not kept:
            draft.classes = watch.classes[0]
        return draft

    def keep(self, place: int, length: int) -> None:
        """No more than the first ``length`` tokens of row ``place`` are what its cache was made from: none of it, where
        that begins behind them."""
        self._valid[place] = max(0, min(self._valid[place], length - self._begins[place]))

    def observe(self, place: int, accepted: int, path: Items[int] = ()) -> None:
        self._valid[place] = min(self._valid[place], self._base[place] + accepted)

    def move(self, source: int, destination: int) -> None:
        self._stepper.copy_row(source, destination)
        self._valid[destination], self._begins[destination] = self._valid[source], self._begins[source]

    def _follows(self, before: Items[int]) -> bool:
        """Whether the cache may be continued in a text that begins with ``before``. Always: it does not depend on
        that."""
        return True

    def _most(self, reach: int) -> int:
        """``reach``, limited: the whole context if it is at least that, else at most half of it."""
        return self._context if reach >= self._context else min(reach, self._half)

    def _take(self, prompts: Items[Items[int]], held: int) -> None:
        """Read the prompts; of a single one what comes after its first ``held`` tokens."""
        prefill(self._stepper, [self._vocabulary.tokens(prompt) for prompt in prompts], held)

    def _begin(self, rows: Items[Row], unread: Items[Items[int]]) -> None:
        """A draft begins, of which ``unread`` is to be read first."""
        pairs = zip(rows, self._begins, strict=False)
        self._base, self.steps = [row.sequence.length - begin for row, begin in pairs], 0
        self._stepper.commit(self._valid)
        self.late = self._late(max(map(len, unread), default=0))

    def _stepped(self) -> None:
        """A step of the draft was taken. The first one read only text, so no later step goes back behind it. (The
        unread text alone may be as long as recurrent layers can take back, and the draft has to be taken back as
        well.)"""
        self.steps += 1
        if self.steps == 1:
            self._stepper.commit(self._valid)

    def _late(self, unread: int) -> int:
        """How many of so many unread tokens are more than a draft in use lacks."""
        return max(0, unread - self.lacks)

    def _known(self, place: int) -> int:
        """How many tokens of the row's text it has read, or will never read."""
        return self._begins[place] + self._valid[place]

    def _skip(self, place: int, row: Row, length: int) -> None:
        """Begin anew where more is lacking of the row's first ``length`` tokens than is read, or where what may be
        drafted behind them would find no place."""
        ends = length + min(AHEAD, row.sequence.room, self._room) - self._begins[place]
        if length - self._known(place) > self._reach or ends > self._context + 1:
            self._begins[place], self._valid[place] = max(self.first, length - min(self._reach, self._half)), 0

    def _unfed(self, place: int, row: Row, drafted: Items[int]) -> list[int]:
        """What is to be read of the row's text and draft."""
        length = row.sequence.length
        self._skip(place, row, length)
        known = self._known(place)
        return [*row.sequence.tokens[known:], *drafted[max(0, known - length) :]]

    def _reads(self, row: Row) -> bool:
        """Whether it may ever draft for the row."""
        return row.settings.draft in MODEL_DRAFTS

    def _beside(self, rows: Items[Row], lengths: Items[int], pending: Items[Items[int]]) -> Items[Items[int]]:
        """``pending``, and for rows that others draft for the text that the cache lacks, as far as the step is wide
        anyway: that takes no time, and leaves less to read later."""
        width, pieces = max(map(len, pending)), list(pending)
        for b, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            if n == 0 and self._reads(row):
                self._skip(b, row, row.sequence.length)
                known = self._known(b)
                pieces[b] = row.sequence.tokens[known : known + width]
        return pieces

    def _feed(self, pending: Items[Items[int]]) -> Logits:
        valid = self._valid[: len(pending)]
        logits = self._stepper.last_logits([self._vocabulary.tokens(each) for each in pending], valid)
        self._valid[: len(pending)] = [v + len(p) for v, p in zip(valid, pending, strict=True)]
        return logits

    def _chance(self, draft: Draft, logits: LogitRow) -> float | None:
        """How likely the token was that was just drafted."""
        token = draft.tokens[-1]
        return chance_of(logits, self._vocabulary.column(token)) if draft.q is None else draft.q[-1].item(token)

    def _choose(self, row: Row, draft: Draft, logits: LogitRow) -> bool:
        try:
            token, q = row.sampler.propose(self._vocabulary.row(logits), draft.tokens, row.sequence.length)
        except UsageError:  # nothing that the draft can say may be said; the target may know more, or go elsewhere
            if self._vocabulary.identical and not draft.tokens:
                raise
            return False
        draft.tokens.append(token)
        if q is not None:
            draft.q = [*(draft.q or []), q]
        return True


class Rereader(ModelDrafter):
    """A draft model whose slots of drafted tokens are never valid: what was accepted of a draft is read again, as
    text."""

    resumes = False
    rereads = True
    lacks = 1

    def observe(self, place: int, accepted: int, path: Items[int] = ()) -> None:
        super().observe(place, 0, path)
