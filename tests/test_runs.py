"""Whether a text ends as it went on before: what is asked, at next to no cost, before free drafters are woken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_runtime import FixedCosts
from test_cascade import cascade
from test_mutants import Mutant, must_die

from leadout.runtime.controller import cascade as cascading
from leadout.runtime.controller.vigil import Vigil
from leadout.runtime.drafters import runs, suffix
from leadout.runtime.drafters.runs import RUN, OwnRuns, Runs
from leadout.runtime.drafters.suffix import SuffixPool

TEXTS = st.lists(st.integers(0, 2), max_size=30)


def an_own_end_is_known_where_it_stood_before(text: list[int], cuts: list[int]) -> None:
    """However the text was told."""
    known = OwnRuns(100)
    for length in sorted({*(cut for cut in cuts if cut < len(text)), len(text)}):
        told = text[:length]
        before = [told[at : at + RUN] for at in range(length - RUN)]
        assert known.repeat(told) == (length >= RUN and told[-RUN:] in before), told


@given(TEXTS, st.lists(st.integers(0, 30), max_size=4))
def test_an_own_end_is_known_where_it_stood_before(text: list[int], cuts: list[int]) -> None:
    an_own_end_is_known_where_it_stood_before(text, cuts)


def of_other_texts_the_last_ones_are_known() -> None:
    """No run goes from one text into the next; what is older than two windows is forgotten."""
    known = Runs(8)
    known.add([1, 2, 3, 4, 5])
    known.add([6, 7])
    assert known.end([0, 1, 2, 3, 4]) and known.end([2, 3, 4, 5]) and not known.end([3, 4, 5, 6])
    assert not known.end([1, 2, 3]) and not known.end([])
    for first in range(0, 700, 100):
        known.add([*range(first + 10, first + 22)])
    assert not known.end([1, 2, 3, 4]) and known.end([612, 613, 614, 615]) and known.end([512, 513, 514, 515])
    assert len(known._latest) + len(known._older) <= 2 * (8 + 9)
    pool = SuffixPool()
    pool.add([1, 2, 3, 4, 5])
    assert pool.runs.end([9, 1, 2, 3, 4]) and pool._waiting, "without an automaton"


def test_of_other_texts_the_last_ones_are_known() -> None:
    of_other_texts_the_last_ones_are_known()


def asleep(earlier: tuple[int, ...] = ()) -> cascading.Cascade:
    """The cascade of a row that begins asleep beside a draft model, where asking did not pay."""
    made, _ = cascade(model=True, costs=FixedCosts(per_token=0.2))
    habit = made._experience.habit
    habit.pause = habit.rest = 2
    made._vigil = Vigil(habit)
    if earlier:
        made._commons.pool.add(earlier)
    return made


def asked_in(row: cascading.Cascade, text: list[int], news: list[int]) -> list[int]:
    """In which rounds, each of which writes the next of ``news``, the row's free drafters are asked."""
    row.begin(text)
    found = []
    for i, token in enumerate(news):
        row.choose(row._pace.tick(), text, 8, 0, 0)
        found += [i] * row.asks
        row.observe([text[-1]], [token], np.zeros((1, 100), np.float32))
        text.append(token)
        row.take(text)
    return found


def who_would_be_asked_in_vain_sleeps_on() -> None:
    """Looked at every four rounds; woken where the end of the text stood before, in it or in another's."""
    new = [*range(20, 60)]
    assert asked_in(asleep(), [1, 2, 3], list(new)) == []
    again = [*new[:8], 1, 2, 3, 4, 5, 6, *new[8:]]
    own = asked_in(asleep(), [1, 2, 3, 4, 5, 6], list(again))
    assert own and own[0] in range(12, 16) and len(own) == 1, own
    other = asked_in(asleep((*range(9), 1, 2, 3, 4, 5, 6, 7)), [8], list(again))
    assert other and other[0] in range(12, 16), other
    assert asked_in(asleep(), [3, 4, 20, 21, 9, 3, 4], list(new))[:1] == [2], "when it would have woken"
    free = asleep()
    free._runs = None  # who always has a guess is always worth asking
    assert asked_in(free, [1, 2, 3], list(new))[:1] == [2]


def test_who_would_be_asked_in_vain_sleeps_on() -> None:
    who_would_be_asked_in_vain_sleeps_on()


def test_only_who_needs_a_repetition_is_asked_for_one() -> None:
    assert cascade(model=True)[0]._runs is not None
    assert cascade()[0]._runs is None, "recycled tokens are there for any end"


MUTANTS = [
    Mutant("the end itself was before", runs.OwnRuns, "repeat", ": -1]", ":]"),
    Mutant("runs over a cut are lost", runs.OwnRuns, "repeat", "self._taken - RUN + 1", "self._taken"),
    Mutant("all is taken again and again", runs.OwnRuns, "repeat", "self._taken = len(tokens) - 1", "self._taken = 99"),
    Mutant("nothing is forgotten", runs.Runs, "add", ">= self._window", "< 0"),
    Mutant("what is forgotten is forgotten at once", runs.Runs, "end", "or mark in self._older", ""),
    Mutant("other texts are not looked at", suffix.SuffixPool, "add", "self.runs.add", "str"),
    Mutant("who sleeps wakes", cascading.Cascade, "_glance", "self._vigil.sleep_on()", "pass"),
    Mutant("who sleeps never wakes", cascading.Cascade, "_glance", "not (self._runs", "(True or self._runs"),
    Mutant("only the own text counts", cascading.Cascade, "_glance", "or self._commons.pool.runs.end(tokens)", ""),
    Mutant("for ever", Vigil, "sleep_on", "_FIRST_NAP", "100"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    text = [0, 1, 2, 3, 0, 1, 2, 3, 0, 0, 0, 0, 0, 1, 2, 3]
    checks = [
        lambda _: an_own_end_is_known_where_it_stood_before(text, [5, 6, 9, 11]),
        lambda _: of_other_texts_the_last_ones_are_known(),
        lambda _: who_would_be_asked_in_vain_sleeps_on(),
    ]
    must_die(mutant, checks, monkeypatch)
