"""The state of one round: made when it begins, and handed to all that decide something in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Why = Literal["promises", "measured", "tried"]


@dataclass(slots=True)
class Round:
    """``rows``: how many share the step. ``limits``: the longest drafts that the draft model may make for each row.

    ``length``: the length of the draft model's drafts for requests without a fixed one. ``why`` it was chosen:
    "promises", because it promises most (this may be 0); "measured" or "tried", to learn something, whatever it
    promises. ``otherwise``: the tokens a second that guesses promise, 0 where nobody guesses.
    """

    rows: int = 1
    limits: Sequence[int] = ()
    length: int = 0
    why: Why = "promises"
    otherwise: float = 0.0

    @property
    def explores(self) -> bool:
        """Whether its length is to show something, whatever it promises."""
        return self.why != "promises"
