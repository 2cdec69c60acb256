"""Decides how often free drafters are asked: always while they save more time than asking takes, else ever more
rarely, so that text they know nothing of costs next to nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

# A round in which drafters are asked is longer than by what that takes itself: their structures are where the target's
# weights were, and its threads fell asleep over it (4 to 6 times as much on the demo pair; 2 to 4 decide alike).
_AND_AFTER = 3.0
_PRICE_DECAY, _OUTLIER = 0.95, 3.0
_HOPE = 0.5  # of the price: what asking must be thought to save
_WORST = 3.0  # prices that a round may lose: where steps are long, one guess that failed is no reason to ask no more
_DECAY, _LASTING_DECAY = 0.985, 0.998  # per round: about the last 60 of a row count, the last 500 of all
_BELIEF, _LASTING_BELIEF = 8.0, 30.0  # rounds' worth: of a row in what is usual, of all in that asking just pays
_FIRST_NAP, _SHORT_NAP, _LONGEST_NAP = 4, 8, 32
_READING = 1 / 32  # of the time that a row slept, what reading its prompt may take when it wakes
_A_PROMPT = 2 * _LONGEST_NAP  # tokens: fewer were written in a nap, and are told out of a cold cache


@dataclass(slots=True)
class Habit:
    """What all rows of a decoder know of asking: its ``price`` (seconds a row and round; one slow round counts for
    three times that at most), what drafters take to be told of a token of text (``reading``, seconds), what asking
    ``saved`` in so many ``rounds`` (seconds; older ones count less, and each for those that were slept through before
    it), and for how many rounds of any rows nobody has been asked (``idle``)."""

    price: float = 0.0
    reading: float = 0.0
    saved: float = 0.0
    rounds: float = 0.0
    idle: int = 0

    @property
    def usual(self) -> float:
        """Seconds that asking a row saves in a round, as far as is known."""
        return (self.saved + _LASTING_BELIEF * self.price) / (self.rounds + _LASTING_BELIEF)

    def pays(self, saved: float) -> bool:
        """Whether a row is to be asked that saves so much in a round."""
        return saved >= _HOPE * self.price

    def record(self, saved: float, spent: float, rounds: int) -> float:
        """A row was asked, for the first time in so many of its ``rounds``: what that ``saved``, and took itself. (That
        is no price of asking after a nap: drafters are told what was written meanwhile, out of a cold cache.) What
        counts as saved."""
        if rounds == 1 or not self.price:
            price = _AND_AFTER * spent
            latest = min(price, _OUTLIER * self.price) if self.price else price
            self.price += (1.0 - _PRICE_DECAY if self.price else 1.0) * (latest - self.price)
        counts, older = max(saved, -_WORST * self.price), _LASTING_DECAY**rounds
        self.saved, self.rounds = older * self.saved + rounds * counts, older * self.rounds + rounds
        self.idle = 0
        return counts

    def read(self, tokens: int, seconds: float) -> None:
        """A row's drafters were told of so many ``tokens`` of its text, which took so long."""
        if tokens >= _A_PROMPT:
            latest = seconds / tokens
            self.reading = min(latest, _OUTLIER * self.reading) if self.reading else latest


class Vigil:
    """Whether one row's free drafters are asked (to look, and be scored) or sleep: then they are not even told.

    They are asked while that is thought to save half of its price and more: by what it saved this row, shrunk to what
    is usual. Else they sleep for 4 rounds, are asked once, sleep for 8 and so on, up to 32 where asking usually does
    not pay; there a row begins with the longest nap, too, less the rounds for which nobody has been asked.
    """

    def __init__(self, habit: Habit) -> None:
        self._habit = habit
        self._saved = self._asked = 0.0
        self._sleep, self._nap, self._stands_for = 0, _FIRST_NAP, 1  # the next that is asked, for so many rounds
        if not habit.pays(habit.usual):
            self._nap = _LONGEST_NAP
            self._fall_asleep(_LONGEST_NAP - habit.idle)

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
        self._habit.idle += 1

    def put_off(self, rounds: float) -> None:
        """What they have to be told when they wake takes as long as so many ``rounds``: if they sleep, then until that
        is little beside what was written meanwhile."""
        if self._sleep:
            self._fall_asleep(max(self._sleep, math.ceil(rounds / _READING)) - 1)

    def settle(self, saved: float, spent: float) -> None:
        """A round in which they were asked is over: the seconds it ``saved`` (below 0 where a guess was chosen and
        failed), and those that asking took."""
        habit = self._habit
        counts = habit.record(saved, spent, self._stands_for)
        self._saved, self._asked, self._stands_for = _DECAY * self._saved + counts, _DECAY * self._asked + 1.0, 1
        if habit.pays((_BELIEF * habit.usual + self._saved) / (_BELIEF + self._asked)):
            self._nap = _FIRST_NAP
        else:
            longest = _SHORT_NAP if habit.pays(habit.usual) else _LONGEST_NAP
            self._fall_asleep(min(self._nap, longest))
            self._nap = min(2 * self._nap, longest)

    def _fall_asleep(self, rounds: int) -> None:
        self._sleep = rounds + 1 if rounds > 0 else 0
        self._stands_for = max(1, self._sleep)
