"""Decides how often free drafters are asked: always while they save more time than asking takes, else ever more
rarely, so that text they know nothing of costs next to nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

_PATIENCE, _LEAST_PATIENCE = 16, 4  # rounds in a row that may cost more than they save
_TRIAL = 4  # of those after a nap, if it ended with a guess that was chosen
_FIRST_NAP, _LONGEST_NAP = 4, 16
_LONGEST_PAUSE = 64  # rounds of any rows in which no new one begins by asking
_DECAY, _PRICE_DECAY, _OUTLIER = 0.9, 0.95, 3.0
_READING = 1 / 32  # of the time that a row slept, what reading its prompt may take when it wakes
_A_PROMPT = 2 * _LONGEST_NAP  # tokens: fewer were written in a nap, and are told out of a cold cache


@dataclass(slots=True)
class Habit:
    """What all rows of a decoder know of asking: its ``price`` (seconds a row and round; one slow round counts for
    three times that at most), what drafters take to be told of a token of text (``reading``, seconds), the ``patience``
    a new row begins with, less where rows before it gave up, and where there is none left to lose, the ``rest`` of a
    ``pause``: rounds of any rows before a new one begins by asking."""

    price: float = 0.0
    reading: float = 0.0
    patience: int = _PATIENCE
    pause: int = 0
    rest: int = 0

    def pays(self) -> None:
        """What a row's drafters saved was worth asking for."""
        self.patience, self.pause, self.rest = _PATIENCE, 0, 0

    def give_up(self) -> None:
        """A row's drafters went to sleep without having been worth it."""
        if self.patience > _LEAST_PATIENCE:
            self.patience = max(_LEAST_PATIENCE, self.patience // 2)
        else:
            self.pause = min(max(2 * self.pause, _LONGEST_NAP), _LONGEST_PAUSE)
            self.rest = self.pause

    def record(self, seconds: float) -> None:
        """A row was asked in a round, and that took so long."""
        latest = min(seconds, _OUTLIER * self.price) if self.price else seconds
        self.price += (1.0 - _PRICE_DECAY if self.price else 1.0) * (latest - self.price)

    def read(self, tokens: int, seconds: float) -> None:
        """A row's drafters were told of so many ``tokens`` of its text, which took so long."""
        if tokens >= _A_PROMPT:
            latest = seconds / tokens
            self.reading = min(latest, _OUTLIER * self.reading) if self.reading else latest


class Vigil:
    """Whether one row's free drafters are asked (to look, and be scored) or sleep: then they are not even told.

    What asking saved counts for about ten rounds. Once it is below the price for as many rounds in a row as there is
    patience, they sleep for 4 rounds, are asked once, sleep for 8, and then for 16 each time. A guess that is chosen
    after a nap keeps them awake for 4 rounds more; when they are worth their price, the next nap is short again. Where
    one row after the other gave up, the next begins as after a nap, or asleep.
    """

    def __init__(self, habit: Habit) -> None:
        self._habit = habit
        paused = habit.pause > 0
        self._sleep, self._nap = habit.rest + (habit.rest > 0), _LONGEST_NAP if paused else _FIRST_NAP
        self._patience, self._wakes = 1 if paused else habit.patience, paused
        self._hopes = True  # it has not given up, or was worth it since
        self._saved = self._asked = 0.0

    @property
    def awake(self) -> bool:
        """Whether they are asked in this round."""
        return self._sleep == 0

    @property
    def sleeps_on(self) -> bool:
        """Whether they will not be asked in the next round either."""
        return self._sleep > 1

    def tick(self) -> None:
        """A round begins."""
        self._sleep = max(0, self._sleep - 1)
        if self._sleep:
            self._habit.rest = max(0, self._habit.rest - 1)

    def put_off(self, rounds: float) -> None:
        """What they have to be told when they wake takes as long as so many ``rounds``: if they sleep, then until that
        is little beside what was written meanwhile."""
        if self._sleep:
            self._sleep = max(self._sleep, math.ceil(rounds / _READING))

    def settle(self, saved: float, spent: float, *, chosen: bool) -> None:
        """A round in which they were asked is over: the seconds it ``saved`` (below 0 where a guess was chosen and
        failed), those that asking took, and whether it was their guess that was verified."""
        self._habit.record(spent)
        self._saved, self._asked = _DECAY * self._saved + saved, _DECAY * self._asked + 1.0
        if self._saved > self._habit.price * self._asked:
            self._patience, self._nap, self._hopes = _PATIENCE, _FIRST_NAP, True
            self._habit.pays()
        elif self._wakes and chosen:
            self._patience = _TRIAL
        else:
            self._patience -= 1
        self._wakes = False
        if self._patience <= 0:
            self._rest()

    def _rest(self) -> None:
        if self._hopes:
            self._hopes = False
            self._habit.give_up()
        self._sleep, self._nap = self._nap + 1, min(2 * self._nap, _LONGEST_NAP)
        self._patience, self._wakes = 1, True
        self._saved = self._asked = 0.0
