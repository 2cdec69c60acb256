"""Decides what to guess by prompt lookup: the plainest free drafter, and everybody's baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from .free import Candidate


class NgramDrafter:
    """Prompt lookup (Saxena 2023): finds the latest earlier place where the last n tokens (n = 4, 3, 2, 1) stood, and
    proposes what followed there; past the end of the text the copy goes on into itself, so that a period repeats.

    A guess's class is the length of the match before it, the copied tokens included, up to 8.
    """

    name = "ngram"
    prior = (0.25, 0.5, 0.65, 0.7, 0.7, 0.75, 0.75, 0.8)  # counted as those of suffix.py
    LONGEST = 4

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._tokens: Sequence[int] = ()
        self._indexed = 0

    def take(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        for end in range(self._indexed, len(tokens) - 1):  # the last token has no successor yet
            for n in range(1, min(self.LONGEST, end + 1) + 1):
                self._after[tuple(tokens[end + 1 - n : end + 1])] = end + 1
        self._indexed = len(tokens) - 1

    def candidates(self) -> Iterator[Candidate]:
        tokens = self._tokens
        for n in range(min(self.LONGEST, len(tokens)), 0, -1):
            if (source := self._after.get(tuple(tokens[-n:]))) is not None:
                period = len(tokens) - source
                for i in count():
                    yield tokens[source + i % period], min(n + i, len(self.prior)) - 1
                return
