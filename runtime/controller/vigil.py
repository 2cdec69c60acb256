"""Decides how often free drafters are asked: always while that saves more time than it takes, else less and less often,
so that they cost next to nothing in text of which they know nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

_PATIENCE, _LEAST_PATIENCE = 16, 4  # rounds in a row that may cost more than they save
_TRIAL = 4  # the patience after a nap that ended with a guess which was chosen
_FIRST_NAP, _LONGEST_NAP = 4, 16
_LONGEST_PAUSE = 64  # rounds, of any rows, during which new rows begin asleep
_DECAY, _PRICE_DECAY, _OUTLIER = 0.9, 0.95, 3.0
_READING = 1 / 32  # the share of the time slept that being told of the prompt may take when they wake
_A_PROMPT = 2 * _LONGEST_NAP  # tokens: to be told of fewer, as after a nap, is dominated by a cold cache


@dataclass(slots=True)
class Habit:
    """What all rows of a decoder know about asking free drafters. ``price``: seconds a row and round (a slow round
    counts for at most three times that); ``reading``: seconds to tell the drafters of one token of text; ``patience``:
    what a new row begins with, less after rows that gave up. Once it cannot fall further, new rows begin asleep for a
    ``pause`` of rounds (of any rows), of which ``rest`` are left."""

    price: float = 0.0
    reading: float = 0.0
    patience: int = _PATIENCE
    pause: int = 0
    rest: int = 0

    def pays(self) -> None:
        """What a row's drafters saved was worth asking for."""
        self.patience, self.pause, self.rest = _PATIENCE, 0, 0

    def give_up(self) -> None:
        """A row's drafters went to sleep without having paid."""
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
    """Whether one row's free drafters are asked for guesses, and scored, or sleep: then they are not told of the text.

    What asking saved is averaged over about ten rounds. Once it was below the price for ``patience`` rounds in a row,
    the drafters sleep for 4 rounds, are asked once, sleep for 8, and then for 16 each time, and on where they would be
    asked in vain (``sleep_on``). A guess that is chosen after a nap keeps them awake for 4 more rounds; once they pay
    again, the next nap is short. After several rows that gave up, the next one begins asleep.
    """

    def __init__(self, habit: Habit) -> None:
        self._habit = habit
        paused = habit.pause > 0
        self._sleep, self._nap = habit.rest + paused, _LONGEST_NAP if paused else _FIRST_NAP
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

    @property
    def is_due(self) -> bool:
        """Whether they sleep, and will be asked in the next round."""
        return self._sleep == 1

    def sleep_on(self) -> None:
        """They would be asked in vain: let them sleep for a little longer."""
        self._sleep += _FIRST_NAP

    def tick(self) -> None:
        """A round begins."""
        self._sleep = max(0, self._sleep - 1)
        if self._sleep:
            self._habit.rest = max(0, self._habit.rest - 1)

    def put_off(self, rounds: float) -> None:
        """When they wake they must be told of a text, which takes as long as ``rounds`` rounds. If they sleep, let them
        sleep on until that is little compared with the time slept."""
        if self._sleep:
            self._sleep = max(self._sleep, math.ceil(rounds / _READING))

    def settle(self, saved: float, spent: float, *, chosen: bool) -> None:
        """A round in which they were asked is over. ``saved``: the seconds that it saved (below 0 where a guess was
        verified and failed); ``spent``: those that asking took; ``chosen``: whether their guess was verified."""
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
