"""What belongs to one round and ends with it: made at its start and handed to all who decide something in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Why = Literal["promises", "measured", "tried"]


@dataclass(slots=True)
class Round:
    """``rows`` share its step; ``late`` says, if it is asked, for how many tokens the draft model has to make up, and
    ``limits`` are the longest drafts that it may give each row.

    ``length`` is that of the draft model's drafts where a request asks for no fixed one, and ``why`` it is: because
    nothing else promises as much (be it none), or, whatever it promises, to be measured or tried after a rest.
    ``otherwise`` are the tokens a second that guesses promise; 0 where nobody guesses.
    """

    rows: int = 1
    late: Callable[[], int] = lambda: 0
    limits: Sequence[int] = ()
    length: int = 0
    why: Why = "promises"
    otherwise: float = 0.0

    @property
    def explores(self) -> bool:
        """Whether its length is to show something, whatever it promises."""
        return self.why != "promises"
