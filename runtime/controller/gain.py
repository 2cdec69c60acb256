"""Says what a round is worth that promises so many tokens and takes so long: whether a draft pays, and how long."""

from __future__ import annotations

from collections.abc import Sequence

# What tokens count for that a row of a batch writes beyond what the slowest does: it leaves sooner, the slowest stays,
# and a step of fewer rows saves less than the share of those that left (0.5 to 0.75 of it, with 2 to 16 rows). Of the
# draft model's it is more, for rows that are behind in one round are ahead in another; those that repeat go on.
BY_DRAFTS, BY_GUESSES = 0.8, 0.5
_MARGIN = 1.1


def cap(
    plans: Sequence[tuple[Sequence[float], int]], seconds: Sequence[float], fixed: int, ahead: float
) -> tuple[float, int]:
    """The longest draft that pays for rows that share a step, for the step is as wide for all as for the longest:
    argmax of (what the expected tokens of all are worth) / (expected seconds). That maximum, then the length.

    ``plans``: of each row the expected tokens of drafts of 0, 1, 2, ... (as long as anything is added) and the length
    it wants (0 where there is nothing to cut); ``seconds`` of a round with drafts of 0..63; ``fixed``: the longest
    draft that may not be cut; ``ahead`` as for ``worth``.
    """
    longest = max(length for _, length in plans)
    speeds = [
        worth([expected[min(width, length, len(expected) - 1)] for expected, length in plans], ahead)
        / seconds[max(width, fixed)]
        for width in range(longest + 1)
    ]
    best = max(speeds)
    return best, speeds.index(best)


def pays(faster: float, longer: float) -> bool:
    """Whether to draft at all for a round that promises to be ``faster`` by that factor and takes ``longer`` by that
    one. What it takes beyond a round without drafts counts 1.1: near the break-even there is nothing to gain, and
    estimates err."""
    return faster * longer > 1.0 + _MARGIN * (longer - 1.0)


def worth(tokens: Sequence[float], ahead: float) -> float:
    """What a round counts for in which the rows of a batch expect so many ``tokens`` each: those that a row has beyond
    the slowest count ``ahead`` (``BY_DRAFTS``, ``BY_GUESSES``)."""
    if len(tokens) == 1:
        return tokens[0]
    slowest = len(tokens) * min(tokens)
    return slowest + ahead * (sum(tokens) - slowest)
