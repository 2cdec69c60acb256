"""Decides what is known of several answers to one prompt: every piece of them, and which of them went on how."""

from __future__ import annotations

from collections.abc import Sequence

from .suffix import WINDOW

_MOST = 8 * WINDOW  # states, about 0.5 KB each


class Family:
    """The prompt and the answers of one call to it in one automaton of all their substrings, extended by any answer at
    any time (Blumer et al. 1987, for several texts): answers that begin alike share their states, and the prompt is
    taken in once.

    A text is known by a bit: the prompt's is 1, and each answer gets the next one when it joins. ``votes[s][token]``
    has the bits of the texts in which ``token`` came after the strings of state s: the weights of a graph in which all
    continuations are merged. Weights count texts and not places, so that an answer that repeats itself has one vote.
    States and edges as in ``suffix.SuffixAutomaton``; at most two states a token, and 131,072 altogether.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        """``prompt``: what all answers begin with; of a longer one than the window the end."""
        self.next: list[dict[int, int]] = [{}]
        self.votes: list[dict[int, int]] = [{}]
        self.link, self.length = [-1], [0]
        self._prompt, self._start, self._answers = prompt, -1, 0

    def join(self) -> int:
        """A new answer; its bit."""
        self._answers += 1
        return 1 << self._answers

    def start(self) -> int:
        """The state in which every answer begins: the end of the prompt, indexed when it is first asked for."""
        if self._start < 0:
            self._start = 0
            for token in self._prompt[-WINDOW:]:
                self._start = self.extend(self._start, token, 1)
            self._prompt = ()
        return self._start

    def extend(self, state: int, token: int, text: int) -> int:
        """The text of bit ``text``, which ends in ``state``, goes on with ``token``: the state in which it ends now.

        The end of a text is always the longest string of its state, because nothing precedes it: so it stays where it
        is however its neighbours grow. Once there is no room, 0: nothing is known of how such a text goes on.
        """
        if len(self.next) + 2 > _MOST:
            return 0
        new = self._follow(state, token)
        while state >= 0 and not (before := self.votes[state].get(token, 0)) & text:
            self.votes[state][token] = before | text  # where the text has voted, it has in all shorter contexts too
            state = self.link[state]
        return new

    def _follow(self, state: int, token: int) -> int:
        if token in self.next[state]:
            return self._split(state, token)
        new = self._state({}, {}, self.length[state] + 1)
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
        part = self._state(self.next[found].copy(), self.votes[found].copy(), length)
        self.link[part] = self.link[found]
        while state >= 0 and self.next[state].get(token) == found:
            self.next[state][token] = part
            state = self.link[state]
        self.link[found] = part
        return part

    def _state(self, following: dict[int, int], votes: dict[int, int], length: int) -> int:
        self.next.append(following)
        self.votes.append(votes)
        self.link.append(-1)
        self.length.append(length)
        return len(self.next) - 1
