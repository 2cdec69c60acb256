"""Says what a round is worth by the tokens it promises and the time it takes: whether a draft pays, and which
length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..settings import MAX_DRAFT_LENGTH

# What a token counts for that a row of a batch writes beyond what the slowest row writes. Such a row ends sooner, but
# the batch lasts as long as its slowest row, and a step of fewer rows saves only 0.5 to 0.75 of the share of those that
# left (2 to 16 rows). Tokens of the draft model count more than guesses: a row that is behind in one round is ahead in
# another, while a row whose text repeats stays ahead.
BY_DRAFTS, BY_GUESSES = 0.8, 0.5
_MARGIN = 1.1


def cap(
    plans: Sequence[tuple[Sequence[float], int]], seconds: Callable[[int], float], ahead: float
) -> tuple[float, int]:
    """The longest draft that pays for rows that share a step: argmax of (what the expected tokens of all are worth) /
    (expected seconds). That maximum, then the length.

    ``plans``: of each row the expected tokens of drafts of 0, 1, 2, ... (as long as anything is added) and the length
    it wants (0 where there is nothing to cut); ``seconds(longest)`` of a round whose drafts are cut to that; ``ahead``
    as for ``worth``.
    """
    wanted = {length for _, length in plans}
    widths = sorted({*range(min(max(wanted), MAX_DRAFT_LENGTH) + 1), *wanted})  # of 64 for 16 rows most are as good
    speeds = [
        worth([expected[min(width, length, len(expected) - 1)] for expected, length in plans], ahead) / seconds(width)
        for width in widths
    ]
    best = max(speeds)
    return best, widths[speeds.index(best)]


def pays(faster: float, longer: float) -> bool:
    """Whether to draft at all: ``faster`` is the factor by which the round promises more tokens a second than one
    without drafts, ``longer`` the factor by which it takes more time. The additional time counts 1.1 times, because
    near the break-even there is little to gain and estimates err."""
    return faster * longer > 1.0 + _MARGIN * (longer - 1.0)


def worth(tokens: Sequence[float], ahead: float) -> float:
    """What a round counts for, in tokens, whose rows expect so many ``tokens`` each: tokens that a row has beyond the
    slowest row count ``ahead`` (``BY_DRAFTS`` or ``BY_GUESSES``)."""
    if len(tokens) == 1:
        return tokens[0]
    slowest = len(tokens) * min(tokens)
    return slowest + ahead * (sum(tokens) - slowest)
