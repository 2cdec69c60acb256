"""Knows how often each token stands in a text: what penalties are for, without an array of the vocabulary's size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Counts = tuple[NDArray[np.int64], NDArray[np.int64]]  # ids, each once, and how often each stands there


class Tally:
    """The tokens of a growing text."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._places: dict[int, int] = {}
        self._table = np.zeros((2, 64), np.int64)  # by place: the id, and how often it stands there
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """The text goes on with ``tokens``."""
        for token in tokens:
            place = self._places.setdefault(token, len(self._places))
            if place == self._table.shape[1]:
                self._table = np.concatenate((self._table, np.zeros_like(self._table)), axis=1)
            self._table[0, place] = token
            self._table[1, place] += 1

    def fork(self) -> Tally:
        """A copy that grows by itself."""
        other = Tally()
        other._places, other._table = self._places.copy(), self._table.copy()
        return other

    def behind(self, drafted: Sequence[int]) -> Counts:
        """What stands in the text and in ``drafted`` behind it. Valid until the text goes on."""
        ids, counts = self._table[:, : len(self._places)]
        if not drafted:
            return ids, counts
        counts, others = counts.copy(), Counter[int]()
        for token in drafted:
            if (place := self._places.get(token)) is None:
                others[token] += 1
            else:
                counts[place] += 1
        more = np.array([list(others), list(others.values())], np.int64)
        return np.append(ids, more[0]), np.append(counts, more[1])
