"""What to expect of the draft model where free drafters expect to be right, too."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_runtime import FixedCosts
from test_cascade import cascade, choose
from test_mutants import Mutant, must_die

from leadout.runtime.controller.cascade import Cascade
from leadout.runtime.controller.easiness import Easiness
from leadout.runtime.settings import MAX_DRAFT_LENGTH

EASY, HARD = 4.0, 1.0


def seen(easy=(4, 4), hard=(1, 0), rounds=200):
    """After ``rounds`` of each kind, with these verdicts (tested, accepted)."""
    easiness = Easiness()
    for _ in range(rounds):
        easiness.record(EASY, *easy)
        easiness.record(HARD, *hard)
    return easiness


def test_nothing_is_known_at_first():
    assert list(Easiness().factors(EASY)) == [1.0] * (MAX_DRAFT_LENGTH + 1)


def test_more_is_expected_where_more_was_accepted():
    easy, hard = (list(seen().factors(promised)) for promised in (EASY, HARD))
    assert easy[0] == hard[0] == 1.0 and easy[1] > 1.2 and hard[1] < 0.9
    assert easy[1:5] == sorted(easy[1:5]) and hard[1:5] == sorted(hard[1:5], reverse=True)


def test_a_class_nobody_saw_is_like_all_rounds():
    assert list(seen().factors(2.0)) == [1.0] * (MAX_DRAFT_LENGTH + 1)


def test_positions_behind_a_rejection_are_not_counted():
    easiness = Easiness()
    for _ in range(100):
        easiness.record(EASY, 1, 0)
    assert easiness._all._tested[1] == 0.0 and easiness._all._tested[0] > 30


@given(st.lists(st.tuples(st.floats(1, 9), st.integers(0, 8), st.integers(0, 8)), max_size=60))
def test_factors_are_of_expected_tokens(rounds):
    easiness = Easiness()
    for promised, tested, accepted in rounds:
        easiness.record(promised, tested, min(tested, accepted))
    for promised in (1.0, 1.5, 2.0, 3.0, 4.0, 9.0):
        factors = easiness.factors(promised)
        assert factors[0] == 1.0 and all(1 / 20 < factor < 20 for factor in factors)


def test_the_model_gets_the_round_where_it_is_as_sure_and_drafts_more_there():
    """A guess of four at 0.6: 1 + 0.6 + 0.36 + ... = 2.3 tokens, more than the model promises in the mean."""
    chooser, _ = cascade([7, 8, 9, 10], model=True, rate=0.6, costs=FixedCosts(per_draft=0.1))
    assert choose(chooser, 4, 4).by == "fixed"
    chooser, _ = cascade([7, 8, 9, 10], model=True, rate=0.6, costs=FixedCosts(per_draft=0.1))
    for _ in range(200):
        chooser._experience.easiness.record(2.3, 4, 4)
        chooser._experience.easiness.record(HARD, 1, 0)
    plan = choose(chooser, 4, 4)
    assert plan.by == "model" and plan.length == 4


def test_a_cascade_records_the_models_rounds_alone():
    for model in (True, False):
        chooser, _ = cascade([7, 8, 9, 10], model=model, rate=0.01 if model else 0.9)
        plan = choose(chooser, 4, 4)
        chooser.observe([1, *([5] * plan.drafts)], [5, 6], np.zeros((9, 12)), [plan.drafts])
        assert (chooser._experience.easiness._all._tested[0] > 0) == (plan.by == "model") == model


CHECKS = (
    test_more_is_expected_where_more_was_accepted,
    test_a_class_nobody_saw_is_like_all_rounds,
    test_positions_behind_a_rejection_are_not_counted,
    test_the_model_gets_the_round_where_it_is_as_sure_and_drafts_more_there,
    test_a_cascade_records_the_models_rounds_alone,
)
MUTANTS = (
    Mutant("classes are all rounds", Easiness, "record", "self._classes[which].rates(rates)", "rates"),
    Mutant("upside down", Easiness, "record", "mine / mean", "mean / mine"),
    Mutant(
        "every position counts", Easiness, "record", "counts.record(tested, accepted)", "counts.record(9, accepted)"
    ),
    Mutant("guesses are recorded, too", Cascade, "observe", 'choice.plan.by == "model"', "True"),
    Mutant("no factor", Cascade, "_where_it_is_as_easy", "mean * factor for", "mean for"),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, [lambda _, check=check: check() for check in CHECKS], monkeypatch)
