"""Knows how often each token stands in a text: what penalties are for, without an array of the vocabulary's size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Counts = tuple[NDArray[np.int64], NDArray[np.int64]]  # ids, each once, and how often each stands there


class Tally:
    """The tokens of a growing text."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._places: dict[int, int] = {}
        self._table = np.empty((2, 64), np.int64)  # by place: the id, and how often it stands there
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """The text goes on with ``tokens``."""
        for token in tokens:
            if (place := self._places.get(token)) is None:
                self._add(token, len(self._places))
                self._places[token] = len(self._places)
            else:
                self._table[1, place] += 1

    def fork(self) -> Tally:
        """A copy that grows by itself."""
        other = Tally()
        other._places, other._table = self._places.copy(), self._table.copy()
        return other

    def behind(self, drafted: Sequence[int]) -> Counts:
        """What stands in the text and in ``drafted`` behind it. Valid until asked again, or until the text goes on."""
        new, again = dict[int, int](), list[int]()
        for token in drafted:
            if (place := self._places.get(token, new.get(token))) is None:
                place = new[token] = len(self._places) + len(new)
                self._add(token, place)
            else:
                again.append(place)
        ids, counts = self._table[:, : len(self._places) + len(new)]
        if again:
            counts = counts.copy()
            for place in again:
                counts[place] += 1
        return ids, counts

    def _add(self, token: int, place: int) -> None:
        """``token`` stands once at ``place``, the first that is free or one behind it."""
        if place == self._table.shape[1]:
            self._table = np.concatenate((self._table, np.empty_like(self._table)), axis=1)
        self._table[:, place] = token, 1
