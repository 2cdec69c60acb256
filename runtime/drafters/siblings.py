"""Decides what to guess from other answers to the same prompt: what most of them wrote after the longest end of the
text that stands in any (consensus among parallel samples, Li et al. 2503.05330).

Matching by suffix, merging the continuations into a weighted graph and verifying one path of it are the paper's. The
weights (one vote a text), the walk (from the longest match, along the most votes) and the calibration by length and
agreement are ours: the paper's aggregation was not at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .family import Family
from .free import Candidate

_HOPS = 32  # ends of the text that are looked for in the others, longest first; an answer that repeats itself has many
_AGREEMENTS = 4  # one text went that way, several did; or some parted: most went that way, half or fewer
_LENGTHS = 6  # matches of 1, 2-3, 4-7, 8-15, 16-31 and more tokens
# Counted on the demo pair: 2, 4 and 8 answers to 16 held-out prompts at temperatures 0.5, 0.8 and 1, class by class.
_PRIOR = (
    *(0.15, 0.45, 0.15, 0.05),
    *(0.40, 0.75, 0.25, 0.15),
    *(0.60, 0.85, 0.30, 0.25),
    *(0.70, 0.90, 0.50, 0.30),
    *(0.90, 0.95, 0.80, 0.50),
    *(0.95, 0.97, 0.90, 0.60),
)


class SiblingsDrafter:
    """The free drafter of one answer over what the others of its family have written so far, prompt included.

    A guess's class is the length of the match before it, the guessed tokens included, and how the others agree.
    """

    name, prior = "siblings", _PRIOR

    def __init__(self, family: Family) -> None:
        self._family = family
        self._text = family.join()
        self._state = self._taken = -1

    def take(self, tokens: Sequence[int]) -> None:
        if self._taken < 0:  # the prompt, which all answers share
            self._state, self._taken = self._family.start(), len(tokens)
        for token in tokens[self._taken :]:
            self._state = self._family.extend(self._state, token, self._text)
        self._taken = len(tokens)

    def candidates(self) -> Iterator[Candidate]:
        """The token most of the others wrote there, and what most wrote after it. Where they end, the longest end of
        the text that goes on elsewhere does."""
        family, state, hops = self._family, self._state, 0
        matched = family.length[state]
        while state and hops < _HOPS:
            token, votes, voters, ways = self._count(state)
            if votes:
                yield token, _evidence(matched, votes, voters, ways)
                state, matched, hops = family.next[state][token], matched + 1, 0
            else:
                state, hops = family.link[state], hops + 1
                matched = family.length[state]

    def _count(self, state: int) -> tuple[int, int, int, int]:
        """Of the others that went on from ``state``: the token with the most votes (of equals the first written), its
        votes, the voters altogether, and how many tokens they voted for."""
        best, most, voters, ways = -1, 0, 0, 0
        for token, texts in self._family.votes[state].items():
            if others := texts & ~self._text:
                voters, ways = voters | others, ways + 1
                if (votes := others.bit_count()) > most:
                    best, most = token, votes
        return best, most, voters.bit_count(), ways


def _evidence(matched: int, votes: int, voters: int, ways: int) -> int:
    agreement = min(votes, 2) - 1 if ways == 1 else 2 if 2 * votes > voters else 3
    return _AGREEMENTS * (min(matched.bit_length(), _LENGTHS) - 1) + agreement
