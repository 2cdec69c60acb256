"""Decides what the draft model is compared with: not with the free guess of this round, but with how fast free drafters
alone would write the text that the draft model is about to write.

After a miss a guess promises little, and a token or two later it may promise much again. A draft model that takes the
time of three steps writes the tokens that would have led there, so it must be faster than all of those steps, and not
only than the first. Once the text is known, free drafters go over it again to find those steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .easiness import CLASSES, class_of

_DECAY = 0.98  # per round of a class, whoever proposed: about the last 50 count
# The prior: free drafters write _GOES_ON times as fast as the round's guess promises; it counts for _PRIOR_TOKENS.
_PRIOR_TOKENS, _GOES_ON = 6.0, 1.3
_KNOWN, _SELDOM = 40.0, 4  # tokens of a class from which on only every fourth round is gone over again


class Unaided:
    """Tokens a second of free drafters alone, from a round on in which the draft model proposed, by what their best
    guess promised in that round; shared by all rows."""

    def __init__(self) -> None:
        self._tokens, self._seconds = [0.0] * CLASSES, [0.0] * CLASSES
        self._round = 0

    def speed(self, promised: float, guess: float) -> float:
        """Tokens a second of free drafters alone, where the best guess promises ``promised`` tokens in this round, and
        ``guess`` tokens a second."""
        which = class_of(promised)
        tokens, seconds = self._tokens[which], self._seconds[which]
        self._tokens[which], self._seconds[which] = _DECAY * tokens, _DECAY * seconds
        return (_PRIOR_TOKENS + tokens) / (_PRIOR_TOKENS / (_GOES_ON * guess) + seconds) if guess else 0.0

    def wants(self, promised: float) -> bool:
        """Whether the draft model's round is to be replayed: always while little is known of its class, else seldom."""
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
    """Seconds that free drafters alone would have taken to write ``new``. ``first``: what they would have verified in
    the first step; ``guess_after(n)``: what they guess after n of the tokens; ``seconds``: of a step, by the length of
    the draft it verifies. Of a step whose guess goes on beyond ``new`` only the share of the tokens in ``new`` counts.
    """
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
