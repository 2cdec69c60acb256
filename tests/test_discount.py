"""What the best guesses of earlier rounds say about the promises of the next one."""

from __future__ import annotations

import numpy as np
import pytest
from test_cascade import Fixed, cascade, choose
from test_mutants import Mutant, must_die

from leadout.runtime.controller.cascade import Cascade
from leadout.runtime.drafters.free import Calibrated, Discount, Record


def test_promises_that_hold_are_not_discounted_and_others_are():
    kept, broken = Discount(), Discount()
    for _ in range(300):
        kept.record([0.5, 0.5], 1)
        broken.record([0.5, 0.5], 0)
    assert kept.factor == pytest.approx(1.0) and broken.factor < 0.1


def test_a_row_begins_with_what_all_rows_showed_and_learns_faster():
    shared = Discount()
    for _ in range(300):
        shared.record([0.5, 0.5], 0)
    row = Discount(shared)
    assert row.factor == pytest.approx(shared.factor)
    for _ in range(30):
        row.record([0.5], 1)
        shared.record([0.5], 1)
    assert row.factor > 2 * shared.factor


def test_rounds_without_a_guess_bring_the_belief_back():
    discount = Discount()
    for _ in range(50):
        discount.record([0.9], 0)
    before = discount.factor
    for _ in range(2000):
        discount.record([], 0)
    assert before < 0.4 and discount.factor == pytest.approx(1.0, abs=0.01)


def told(new, rate=0.9):
    """The one drafter of a cascade, which guessed 7, 8, 9, 10, after a round that wrote ``new``."""
    chooser, _ = cascade([7, 8, 9, 10], rate=rate)
    fed = [1, *choose(chooser, 4, 0).tokens]
    chooser.observe(fed, new, np.zeros((9, 12)), [len(fed) - 1])
    return chooser._drafters[0]


def test_a_guess_is_held_to_its_promises_as_far_as_it_was_reached():
    for new, hits, reached in (
        ([7, 8, 5], 2, 3),
        ([5], 0, 1),
        ([7, 8], 2, 2),
        ([7, 5, 9, 10], 1, 2),
        ([7, 8, 9, 10, 5], 4, 4),
    ):
        for discount in told(new)._discounts:
            assert (discount._hits, discount._promised) == (hits, pytest.approx(0.9 * reached))


def test_less_is_proposed_of_what_was_never_kept():
    chooser, _ = cascade([7, 8, 9, 10], rate=0.9)
    assert len(choose(chooser, 4, 0).tokens) == 4
    for _ in range(100):
        chooser._drafters[0].settle(1, [5])
    plan = choose(chooser, 4, 0)
    assert len(plan.tokens) < 4 and plan.expected[-1] < 1.5


def test_who_breaks_promises_takes_nothing_from_the_others():
    """A drafter that is sure of one token, and always wrong, beside one that is less sure of four, and right."""
    chooser, _ = cascade([7, 8, 9, 10], rate=0.6)
    honest, boaster = chooser._drafters[0], Calibrated(Fixed([5]), Record((0.99,)))
    boaster.score = lambda committed: 0  # it learns nothing: only its promises are looked at
    chooser._drafters = [boaster, honest]
    proposed = []
    for _ in range(60):
        fed = [1, *choose(chooser, 1, 0).tokens]
        proposed += fed[1:]
        chooser.observe(fed, [7], np.zeros((9, 12)), [len(fed) - 1])
        assert honest.factor >= 1.0
    assert 4 < proposed.count(5) < 8 and proposed.count(7) > 50, "it is tried again, once in a while"


def test_a_new_row_begins_with_what_rows_before_it_showed_of_the_drafter():
    shared = Record((0.9,))
    for _ in range(20):
        row = Calibrated(Fixed([7]), shared)
        row.look([1], 1, 0.0)
        row.settle(1, [5])
    assert Calibrated(Fixed([7]), shared).factor < 0.5 < Calibrated(Fixed([7]), Record((0.9,))).factor


CHECKS = (
    test_promises_that_hold_are_not_discounted_and_others_are,
    test_a_row_begins_with_what_all_rows_showed_and_learns_faster,
    test_a_guess_is_held_to_its_promises_as_far_as_it_was_reached,
    test_less_is_proposed_of_what_was_never_kept,
    test_who_breaks_promises_takes_nothing_from_the_others,
    test_a_new_row_begins_with_what_rows_before_it_showed_of_the_drafter,
)
MUTANTS = (
    Mutant("the other way round", Discount, "factor", "+ self._hits", "+ self._promised"),
    Mutant("a row knows nothing of others", Discount, "__init__", "before.factor", "1.0"),
    Mutant("unreached tokens count", Calibrated, "settle", "break", "continue"),
    Mutant("survivals for chances", Calibrated, "settle", "survival / before", "survival"),
    Mutant("the best one's promise is everybody's", Cascade, "observe", "if each is choice.best.by else 0", ""),
    Mutant("one discount for all", Cascade, "_best_guess", "each.factor, [1.0]", "self._drafters[0].factor, [1.0]"),
    Mutant("a row keeps it to itself", Calibrated, "__init__", "self._discount, shared.discount", "(self._discount,)"),
    Mutant("no discount", Cascade, "_best_guess", "corrected(survival / before, factor)", "survival / before"),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, [lambda _, check=check: check() for check in CHECKS], monkeypatch)
