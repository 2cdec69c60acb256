"""Decides what the draft model is compared with: not the free guess of this round, but what free drafters alone would
make of the text that it is about to write.

After a miss a guess promises little, and a token or two later it may promise much again. A draft model that takes the
time of three steps writes the tokens that would have led there, so it must be faster than all of those steps, not than
the first of them. What these would have been is known once the text is: free drafters go over it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .easiness import CLASSES, class_of

_DECAY = 0.98  # per round of a class, whoever proposed: about the last 50 count
# Tokens' worth of belief that free drafters write so many times what the guess of the round promises a second.
_PRIOR_TOKENS, _GOES_ON = 6.0, 1.3
_KNOWN, _SELDOM = 40.0, 4  # tokens of a class from which on only every fourth round is gone over again


class Unaided:
    """Tokens a second of free drafters alone, from a round on in which the draft model proposed, by what their best
    guess promised in that round; shared by all rows."""

    def __init__(self) -> None:
        self._tokens, self._seconds = [0.0] * CLASSES, [0.0] * CLASSES
        self._round = 0

    def speed(self, promised: float, guess: float) -> float:
        """Where the best guess promises ``promised`` tokens, and ``guess`` of them a second (of this round alone)."""
        which = class_of(promised)
        tokens, seconds = self._tokens[which], self._seconds[which]
        self._tokens[which], self._seconds[which] = _DECAY * tokens, _DECAY * seconds
        return (_PRIOR_TOKENS + tokens) / (_PRIOR_TOKENS / (_GOES_ON * guess) + seconds) if guess else 0.0

    def wants(self, promised: float) -> bool:
        """Whether a round of the draft model is to be gone over again: what is hardly known always."""
        self._round += 1
        return self._tokens[class_of(promised)] < _KNOWN or self._round % _SELDOM == 0

    def record(self, promised: float, tokens: float, seconds: float) -> None:
        """What ``replayed`` found of a round in which the best guess promised so many tokens."""
        which = class_of(promised)
        self._tokens[which] += tokens
        self._seconds[which] += seconds


def replayed(
    new: Sequence[int], first: Sequence[int], guess_after: Callable[[int], Sequence[int]], seconds: Sequence[float]
) -> float:
    """Seconds that free drafters alone would have taken to write ``new``. ``first`` is what they would have verified in
    the first step, ``guess_after(n)`` after n of the tokens; ``seconds`` of a step by how many drafts it verifies. Of a
    step that goes on beyond ``new`` only that share counts, for as many tokens as it was to bring at least."""
    took, written, guess = 0.0, 0, first
    while True:
        hits = 0
        for guessed, token in zip(guess, new[written:], strict=False):
            if guessed != token:
                break
            hits += 1
        rest = len(new) - written
        if hits == rest:  # what it says beyond is unknown
            return took + seconds[len(guess)] * rest / (len(guess) + 1)
        took, written = took + seconds[len(guess)], written + hits + 1
        if written >= len(new):
            return took
        guess = guess_after(written)
