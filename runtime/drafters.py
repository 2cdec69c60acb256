"""Decides which tokens to propose: what a draft model says. (What costs nothing is in ``free.py``.)"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..engines.base import LogitRow, Logits
from .sampling import Probs
from .sequence import Row
from .settings import MODEL_DRAFTS
from .steps import Stepper


@dataclass(slots=True)
class Draft:
    """Proposed tokens, the distributions they were drawn from (``q`` None: the proposal is deterministic), and the
    name of the drafter."""

    tokens: list[int] = field(default_factory=list)
    q: list[Probs] | None = None
    by: str = "model"


class Drafter(Protocol):
    """Proposes for all live rows of a batch at once. Rows are known by their place in the batch. ``steps`` is how many
    the last proposal took."""

    steps: int

    def reset(self, rows: int) -> None:
        """Forget everything; expect ``rows`` rows."""
        ...

    def prefill(self, rows: Items[Row]) -> None:
        """Take in the prompts of the rows that draft with this."""
        ...

    def room(self, row: Row) -> int:
        """The longest draft it can give this row now."""
        ...

    def propose(self, rows: Items[Row], lengths: Items[int]) -> list[Draft]:
        """Up to lengths[b] tokens for row b; an empty draft where that is 0. Commits nothing."""
        ...

    def observe(self, place: int, accepted: int) -> None:
        """Row ``place`` kept the first ``accepted`` of its drafts and got one more token."""
        ...

    def move(self, source: int, destination: int) -> None:
        """Row ``source`` now stands at ``destination``, whose row has left."""
        ...


class ModelDrafter:
    """A draft model with its own cache. ``_valid[b]`` of its slots agree with row b's committed text.

    Whatever it lacks (a prompt; one token; two after a fully accepted round; more after a rest) goes in with the
    first step of a draft: there is no extra call. The last drafted token is never fed.
    """

    def __init__(self, stepper: Stepper, vocab_size: int) -> None:
        """``vocab_size`` is the target's: ids beyond it are ignored, ids the draft lacks never drafted."""
        self._stepper, self._vocab_size = stepper, vocab_size
        self._valid: list[int] = []
        self._base: list[int] = []
        self.steps = 0

    def reset(self, rows: int) -> None:
        self._stepper.engine.reset(rows)
        self._valid, self._base = [0] * rows, [0] * rows

    def prefill(self, rows: Items[Row]) -> None:
        mine = [row.settings.draft in MODEL_DRAFTS and self.room(row) for row in rows]
        prompts = [row.sequence.tokens[:-1] if m else [] for m, row in zip(mine, rows, strict=True)]
        if any(prompts):
            self._feed(prompts)

    def room(self, row: Row) -> int:  # its own context may be shorter than the target's
        return max(0, self._stepper.engine.spec.max_context + 1 - row.sequence.length)

    def propose(self, rows: Items[Row], lengths: Items[int]) -> list[Draft]:
        return self.resume(rows, lengths, [Draft() for _ in rows])

    def resume(self, rows: Items[Row], lengths: Items[int], drafts: list[Draft]) -> list[Draft]:
        """Make drafts[b], which this began after row b's very text, lengths[b] long if it is shorter."""
        self._base = [row.sequence.length for row in rows]
        each = list(zip(rows, lengths, drafts, strict=True))
        short = [n > len(draft.tokens) for _, n, draft in each]
        pending = [self._lacking(b, row, draft) if short[b] else [] for b, (row, _, draft) in enumerate(each)]
        self.steps = max((n - len(draft.tokens) for _, n, draft in each), default=0)
        for _ in range(self.steps):
            logits = self._feed(pending)
            for place, (row, n, draft) in enumerate(each):
                if len(draft.tokens) < n:
                    self._choose(row, draft, logits[place])
            pending = [draft.tokens[-1:] if len(draft.tokens) < n else [] for _, n, draft in each]
        return drafts

    def keep(self, place: int, length: int) -> None:
        """No more than the first ``length`` tokens of row ``place`` are what its cache was made from."""
        self._valid[place] = min(self._valid[place], length)

    def observe(self, place: int, accepted: int) -> None:
        self._valid[place] = min(self._valid[place], self._base[place] + accepted)

    def move(self, source: int, destination: int) -> None:
        self._stepper.engine.copy_row(source, destination)
        self._valid[destination] = self._valid[source]

    def _lacking(self, place: int, row: Row, draft: Draft) -> list[int]:
        """What the cache lacks of the row's text and draft."""
        valid, length = self._valid[place], row.sequence.length
        return [*row.sequence.tokens[valid:], *draft.tokens[max(0, valid - length) :]]

    def _feed(self, pending: Items[Items[int]]) -> Logits:
        valid = self._valid[: len(pending)]
        logits = self._stepper.last_logits(pending, valid)
        self._valid[: len(pending)] = [v + len(p) for v, p in zip(valid, pending, strict=True)]
        return logits

    def _choose(self, row: Row, draft: Draft, logits: LogitRow) -> None:
        token, q = row.sampler.propose(self._fit(logits), draft.tokens, row.sequence.length)
        draft.tokens.append(token)
        if q is not None:
            draft.q = [*(draft.q or []), q]

    def _fit(self, logits: LogitRow) -> LogitRow:
        if (missing := self._vocab_size - logits.size) <= 0:
            row: LogitRow = logits[: self._vocab_size]
            return row
        return np.concatenate([logits, np.full(missing, -np.inf, np.float32)])
