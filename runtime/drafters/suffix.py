"""Proposes what followed the last time: the longest repeated end of the text, found in the text itself and in earlier
requests, goes on as it went on then (SuffixDecoding, Oliaro et al. 2411.04975; SAM-Decoding, Hu et al. 2411.10666)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .automaton import Automaton
from .edits import EditedCopy
from .free import Candidate
from .runs import Runs

WINDOW = 16384  # tokens a generation: a text, and the pool, keep the last one to two of these
_HOPS = 8  # contexts of the last token that learn what follows, longest first; repetitive text has one for each token
_END = -1  # stands between the texts of a pool: no token, so no match runs across it
# A guess's class: how long the match before it is, the tokens guessed before it included (1, 2-3, 4-7, 8-15, 16-31 and
# more), how many of the next three shorter matches were followed by something else (none, one, more), and how often it
# was seen to follow (once, two or three times, more often).
_LENGTHS, _DISSENTERS, _CERTAINTIES = 6, 3, 3
_ASKED = 3
# Counted on 36 files of Python's standard library, class by class, rounded; where a record starts from.
_OWN = (
    *(0.20, 0.40, 0.65, 0.20, 0.40, 0.65, 0.20, 0.40, 0.65),
    *(0.50, 0.75, 0.90, 0.30, 0.50, 0.65, 0.25, 0.35, 0.60),
    *(0.72, 0.86, 0.93, 0.58, 0.76, 0.84, 0.38, 0.58, 0.67),
    *(0.86, 0.93, 0.97, 0.73, 0.81, 0.90, 0.60, 0.70, 0.76),
    *(0.93, 0.95, 0.97, 0.84, 0.95, 0.97, 0.74, 0.83, 0.95),
    *(0.96, 0.98, 0.98, 0.92, 0.92, 0.97, 0.85, 0.85, 0.95),
)
_EARLIER = (
    *(0.04, 0.10, 0.20, 0.04, 0.10, 0.20, 0.04, 0.10, 0.20),
    *(0.19, 0.29, 0.54, 0.11, 0.22, 0.39, 0.09, 0.15, 0.40),
    *(0.60, 0.76, 0.88, 0.36, 0.46, 0.66, 0.17, 0.20, 0.45),
    *(0.90, 0.95, 0.95, 0.80, 0.70, 0.90, 0.55, 0.50, 0.60),
    *(0.97, 0.95, 0.97, 0.95, 0.85, 0.95, 0.84, 0.90, 0.90),
    *(0.97, 0.97, 0.97, 0.95, 0.95, 0.95, 0.80, 0.85, 0.90),
)


class SuffixAutomaton(Automaton):
    """Every substring of one growing text. Each state knows one successor: what followed, with a counter that goes up
    with every repetition and halves with every exception, and the ``place`` of what followed last."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0
        self.successor, self.confidence, self.place = [_END], [0], [0]
        self.last = 0

    def extend(self, token: int) -> None:
        """Append ``token``."""
        self._learn(token)
        self.size += 1
        self.last = self._append(self.last, token)

    def step(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Follow a text that is not the automaton's own: the state and the length of its longest end, after ``token``,
        that stands in here."""
        while state and matched <= self.length[self.link[state]]:  # the state may have been split since
            state = self.link[state]
        while state and token not in self.next[state]:
            state = self.link[state]
            matched = self.length[state]
        state = self.next[state].get(token, -1)
        return (state, matched + 1) if state >= 0 else (0, 0)

    @property
    def repeated(self) -> int:
        """The state of the longest end of the text that stands elsewhere, too."""
        return max(self.link[self.last], 0)

    def dissenters(self, state: int, token: int) -> int:
        """How many of the next three shorter contexts than ``state`` something else than ``token`` followed."""
        dissent = 0
        for _ in range(_ASKED):
            if (state := self.link[state]) <= 0:
                break
            dissent += self.successor[state] != token
        return dissent

    def _learn(self, token: int) -> None:
        state = self.last
        for _ in range(_HOPS):
            self.place[state] = self.size
            if self.successor[state] == token:
                self.confidence[state] += 1
            elif self.confidence[state] > 1:
                self.confidence[state] >>= 1
            else:
                self.successor[state], self.confidence[state] = token, 1
            if (state := self.link[state]) < 0:
                return

    def _keep(self, like: int | None) -> None:
        self.successor.append(_END if like is None else self.successor[like])
        self.confidence.append(0 if like is None else self.confidence[like])
        self.place.append(self.size if like is None else self.place[like])


def _evidence(matched: int, dissenters: int, confidence: int) -> int:
    length = min(matched.bit_length(), _LENGTHS) - 1
    return _CERTAINTIES * (_DISSENTERS * length + min(dissenters, _DISSENTERS - 1)) + (
        min(confidence.bit_length(), _CERTAINTIES) - 1
    )


class Cursor:
    """Where a text stands in an automaton: a state, and the length of the text's longest end that stands in there."""

    def __init__(self, automaton: SuffixAutomaton, state: int = 0, matched: int = 0) -> None:
        self.automaton, self.state, self.matched = automaton, state, matched

    def step(self, token: int) -> None:
        """The text goes on with ``token``."""
        self.state, self.matched = self.automaton.step(self.state, self.matched, token)

    def candidates(self) -> Iterator[Candidate]:
        """What followed there, and what followed that, with a class by length and certainty of each match and by who
        agrees. Where the text ends, the longest end of it that stands elsewhere goes on: a period repeats."""
        automaton, state, matched = self.automaton, self.state, self.matched
        successor, confidence = automaton.successor, automaton.confidence
        while True:
            while successor[state] < 0 and state:
                if confidence[state]:
                    return  # an earlier text ended here
                state = automaton.link[state]
                matched = automaton.length[state]
            if not state:
                return
            token = successor[state]
            yield token, _evidence(matched, automaton.dissenters(state, token), confidence[state])
            state, matched = automaton.next[state][token], matched + 1


class OwnText:
    """The free drafter over a row's own prompt and output, the last one to two ``window`` tokens of it. ``copy`` is
    told of each token where it stands."""

    name, prior = "suffix", _OWN

    def __init__(self, window: int = WINDOW, copy: EditedCopy | None = None) -> None:
        self._window, self._taken, self._copy = window, 0, copy
        self._automaton, self._begins = SuffixAutomaton(), 0
        self._older: Cursor | None = None

    def take(self, tokens: Sequence[int]) -> None:
        for at in range(self._taken, len(tokens)):
            if self._automaton.size == self._window:
                self._older, self._automaton, self._begins = self._here(), SuffixAutomaton(), at
            if self._older is not None:
                self._older.step(tokens[at])
            self._automaton.extend(tokens[at])
            if self._copy is not None:
                grown, stood = self._automaton, self._automaton.repeated
                self._copy.follow(tokens[at], grown.length[stood], self._begins + grown.place[stood])
        self._taken = len(tokens)

    def candidates(self) -> Iterator[Candidate]:
        here, older = self._here(), self._older
        return here.candidates() if older is None or here.matched >= older.matched else older.candidates()

    def _here(self) -> Cursor:
        """The end of the text, where it stood before."""
        state = self._automaton.repeated
        return Cursor(self._automaton, state, self._automaton.length[state])


class SuffixPool:
    """The texts of earlier requests, the last one to two ``window`` tokens of them; the oldest go together."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._waiting: list[tuple[int, ...]] = []
        self._generations = [SuffixAutomaton()]
        self.runs = Runs(window)  # of all texts, those that wait as well

    def add(self, tokens: Sequence[int]) -> None:
        """Take a finished text in, or the end of one that is longer than the window. It is indexed when it is first
        looked for: an answer that is finished need not wait."""
        self._waiting.append((*tokens[-self._window + 1 :], _END))
        self.runs.add(tokens[-self._window + 1 :])
        while sum(map(len, self._waiting[1:])) >= 2 * self._window:  # of what came before these nothing would be kept
            del self._waiting[0]

    @property
    def generations(self) -> list[SuffixAutomaton]:
        """The older automaton, if there is one, and the one that grows."""
        while self._waiting:
            self._index(self._waiting.pop(0))
        return self._generations

    def _index(self, text: Sequence[int]) -> None:
        # none, until the text is in whole: an interrupt may come in between
        generations, self._generations = self._generations, [SuffixAutomaton()]
        if generations[-1].size + len(text) > self._window:
            generations = [generations[-1], SuffixAutomaton()]
        for token in text:
            generations[-1].extend(token)
        self._generations = generations


class EarlierTexts:
    """The free drafter over a pool. It knows the texts that were there when the row began, and those added to the
    automata that held them."""

    name, prior = "suffix", _EARLIER

    def __init__(self, pool: SuffixPool) -> None:
        self._pool, self._taken = pool, 0
        self._cursors: list[Cursor] = []

    def take(self, tokens: Sequence[int]) -> None:
        if not self._cursors:
            self._cursors = [Cursor(automaton) for automaton in reversed(self._pool.generations)]
        for token in tokens[self._taken :]:
            for cursor in self._cursors:
                cursor.step(token)
        self._taken = len(tokens)

    def candidates(self) -> Iterator[Candidate]:
        return max(self._cursors, key=lambda cursor: cursor.matched).candidates()
