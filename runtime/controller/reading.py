"""Decides how much of a prompt the draft model reads, and who is charged for that."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .bill import Bill
from .prices import Prices

# _READ: the factor in ``reach``. (For the demo pair 1 to 2 would do; other texts may look farther back.) _CHEAPER: how
# many times cheaper a token of a prompt is than a plain round, until that was measured.
_READ, _LEAST_READ, _CHEAPER = 3.0, 32, 20.0


class Reading:
    """What it cost that the draft model read prompts, kept until it is known whether it ``proposed`` anything there."""

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self.proposed = False
        self._owed: tuple[Sequence[Bill], float] = [], 0.0  # whose prompts it read, and the seconds that took

    def reach(self, rows: int, room: int) -> int:
        """How many of a prompt's last tokens it reads before answers of up to ``room`` tokens. The farther one is from
        the end, the less it adds: of acceptance 1.1 / n is lost if only the last n are read (demo pair, four kinds of
        text). So the optimum goes with the root of an answer's time over that of a token of a prompt."""
        each = self._prices.reading
        cheaper = self._prices.without_model(rows)[0] / each if each else _CHEAPER
        return max(_LEAST_READ, round(_READ * math.sqrt(room * cheaper)))

    def begin(self, bills: Sequence[Bill], tokens: int, seconds: float) -> None:
        """It read so many ``tokens`` of these requests' prompts, which took so long. The first time that is a
        measurement, and on nobody's bill."""
        owing = bills if self._prices.reading else []
        self._owed, self.proposed = (owing, self._prices.read(tokens, seconds)), False

    def end(self) -> None:
        """Those requests are answered: what they read goes on their bills, a loss where it proposed nothing."""
        bills, seconds = self._owed
        for bill in bills:
            if self.proposed:
                bill.charge(seconds)
            else:
                bill.record(-seconds)
        self._owed, self.proposed = ([], 0.0), False
