"""Decides what is known of several answers to one prompt: every piece of them, and which of them went on how."""

from __future__ import annotations

from collections.abc import Sequence

from .automaton import Automaton
from .suffix import WINDOW

_MOST = 8 * WINDOW  # states, about 0.5 KB each


class Family(Automaton):
    """The prompt and the answers of one call to it in one automaton of all their substrings, extended by any answer at
    any time (Blumer et al. 1987, for several texts): answers that begin alike share their states, and the prompt is
    taken in once.

    A text is known by a bit: the prompt's is 1, and each answer gets the next one when it joins. ``votes[s][token]``
    has the bits of the texts in which ``token`` came after the strings of state s: the weights of a graph in which all
    continuations are merged. Weights count texts and not places, so that an answer that repeats itself has one vote.
    There are at most 131,072 states.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        """``prompt``: what all answers begin with; of a longer one than the window the end."""
        super().__init__()
        self.votes: list[dict[int, int]] = [{}]
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
        return self._split(state, token) if token in self.next[state] else self._append(state, token)

    def _keep(self, like: int | None) -> None:
        self.votes.append({} if like is None else self.votes[like].copy())
