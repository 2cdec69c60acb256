"""Decides what to guess from the target's own rows: after each token, the likeliest one the last time (token
recycling, Luo et al. 2408.08696, as a chain: the first column of its matrix, walked from token to token)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ...engines.base import Logits
from .free import Candidate

_CERTAINTY = 3  # a two-bit counter, as in branch prediction: how often in a row the same token came first


class Successors:
    """For each token the likeliest one after it, and how sure that is (1..3). At most one entry a token of the
    vocabulary, about 0.2 KB each; shared by all rows and requests."""

    def __init__(self) -> None:
        self._after: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._after)

    def get(self, token: int) -> tuple[int, int] | None:
        """(the likeliest next token, certainty), or None if ``token`` was never seen."""
        return self._after.get(token)

    def record(self, token: int, successor: int) -> None:
        """``successor`` was the likeliest after ``token``. A sure one is doubted before it is replaced."""
        known, certainty = self._after.get(token, (successor, 0))
        if known == successor:
            self._after[token] = known, min(certainty + 1, _CERTAINTY)
        else:
            self._after[token] = (known, certainty - 1) if certainty > 1 else (successor, 1)

    def record_text(self, tokens: Sequence[int]) -> None:
        """Learn from text alone: each token's successor."""
        for token, successor in pairwise(tokens):
            self.record(token, successor)

    def record_round(self, fed: Sequence[int], new: Sequence[int], rows: Logits) -> None:
        """Learn from one round of the target: ``fed`` [K+1] tokens, ``rows`` [>= K+1, V] their logits, ``new`` what
        was committed. Committed tokens need no look at their rows; rows behind the first rejection are looked at for
        their maximum alone, which is what they are good for (2408.08696, section 3.2)."""
        for token, successor in zip(fed, new, strict=False):
            self.record(token, successor)
        if len(new) < len(fed):
            for token, successor in zip(fed[len(new) :], rows[len(new) : len(fed)].argmax(-1).tolist(), strict=True):
                self.record(token, successor)


class RecyclingDrafter:
    """The free drafter of one row. A guess's class is how sure its pair of tokens is and how far on it stands."""

    name = "recycling"
    prior = (0.2, 0.4, 0.8, 0.25, 0.5, 0.9, 0.25, 0.6, 0.9)  # counted as those of suffix.py

    def __init__(self, successors: Successors) -> None:
        self._successors = successors
        self._last = -1
        self._taken = 0

    def take(self, tokens: Sequence[int]) -> None:
        if not self._taken:  # the prompt: later pairs come with the rounds they were committed in
            self._successors.record_text(tokens)
        self._taken, self._last = len(tokens), tokens[-1]

    def candidates(self) -> Iterator[Candidate]:
        token, depth = self._last, 0
        while (found := self._successors.get(token)) is not None:
            token, certainty = found
            yield token, _CERTAINTY * depth + certainty - 1
            depth = min(depth + 1, len(self.prior) // _CERTAINTY - 1)
