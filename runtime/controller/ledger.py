"""Decides when a round's lessons are learnt: several rounds' at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

_ROUNDS = 4


class Ledger:
    """What rounds showed of costs and drafts, noted as it is seen and entered every fourth round: after a model's step
    Python finds nothing in the cache, so that four rounds' entries take hardly longer than one's. ``due``: what the
    last round showed is to be known in the next."""

    def __init__(self) -> None:
        self.due = True
        self._rounds = 0
        self._waiting: list[Callable[[], None]] = []

    def note(self, entry: Callable[..., None], *args: object, **more: object) -> None:
        """``entry(*args, **more)`` is to be called."""
        self._waiting.append(partial(entry, *args, **more))

    def tick(self) -> bool:
        """A round begins. Whether what was noted has just been entered."""
        self._rounds += 1
        entered, self.due = self.due, self._rounds % _ROUNDS == 0
        if entered:
            self.enter()
        return entered

    def enter(self) -> None:
        """Enter what was noted, in order."""
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            entry()
