"""Decides nothing: every substring of growing texts, each where it stands (Blumer et al. 1985)."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Automaton(ABC):
    """All substrings of what it was given, in at most two states a token, extended in amortised constant time.

    A state stands for all strings that end at the same places; ``length`` is that of the longest of them and ``link``
    leads to the state of the longest of its ends that also stands elsewhere. State 0 is the empty string's. ``next[s]``
    has the state that each token leads to. What else is known of a state is its heirs': they say in ``_keep`` what it
    begins with.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length = [-1], [0]

    @abstractmethod
    def _keep(self, like: int | None) -> None:
        """Keep of a new state what is known of ``like``, whose strings it takes the shorter ones of; None: nothing."""

    def _append(self, state: int, token: int) -> int:
        """A new state for what ends in ``state`` and goes on with ``token``, where it never did."""
        new = self._state({}, self.length[state] + 1, None)
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        self.link[new] = 0 if state < 0 else self._split(state, token)
        return new

    def _split(self, state: int, token: int) -> int:
        """The state after ``state`` on ``token``, without the longer strings that share it."""
        found, length = self.next[state][token], self.length[state] + 1
        if self.length[found] == length:
            return found
        part = self._state(self.next[found].copy(), length, found)
        self.link[part] = self.link[found]
        while state >= 0 and self.next[state].get(token) == found:
            self.next[state][token] = part
            state = self.link[state]
        self.link[found] = part
        return part

    def _state(self, following: dict[int, int], length: int, like: int | None) -> int:
        self._keep(like)
        self.next.append(following)
        self.link.append(-1)
        self.length.append(length)
        return len(self.next) - 1
