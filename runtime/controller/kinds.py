"""Decides which texts teach about each other. A guess that is right in nine greedy texts of ten may be wrong in every
other sampled one; and where a text copies itself, as edits do, free drafters are at their best and the draft model
earns less than elsewhere; and what a grammar forces is sure. So what rounds show is kept apart by kinds of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_LONGEST, _END, _FEWEST = 4096, 96, 16  # tokens that are looked at, places at the end that are asked, the fewest
_SHARE = 0.6  # of those places (of prompts of four kinds all edits are above 0.8, all others but one below 0.5)


class Kind(NamedTuple):
    """Whether tokens are drawn, whether the text repeats itself (``repeats``), and whether a grammar binds it."""

    sampled: bool = False
    repeats: bool = False
    bound: bool = False


GREEDY = Kind()


def repeats(prompt: Sequence[int]) -> bool:
    """Whether most places near the end of a prompt stand behind three tokens that stood there before."""
    text, seen = prompt[-_LONGEST:], set[tuple[int, int, int]]()
    stood = []
    for three in zip(text, text[1:], text[2:], strict=False):
        stood.append(three in seen)
        seen.add(three)
    end = stood[-_END:]
    return len(end) >= _FEWEST and sum(end) > _SHARE * len(end)
