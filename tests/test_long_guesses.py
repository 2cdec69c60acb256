"""Guesses of more than 16 tokens: where text repeats for long, one wide step costs less than several narrow ones."""

from __future__ import annotations

import itertools
from itertools import islice, pairwise

import numpy as np
import pytest
from support_runtime import FixedCosts, collect
from test_cascade import cascade, choose, speed
from test_mutants import Mutant, must_die
from test_policy import next_length, trained

from leadout.engines.toy import ToyEngine
from leadout.runtime.controller import cascade as cascade_module
from leadout.runtime.controller import costs as costs_module
from leadout.runtime.controller import policy as policy_module
from leadout.runtime.controller.costs import Costs
from leadout.runtime.controller.rounds import Round
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters import suffix
from leadout.runtime.drafters.free import corrected
from leadout.runtime.settings import MAX_DRAFT_LENGTH, MAX_GUESS_LENGTH, Settings

PERIOD = 29


def counting(tokens):
    """Token after token, round and round, now and then another way."""
    row = np.full(PERIOD, 1e-3)
    row[(int(tokens[-1]) + 1 + (len(tokens) % 97 == 0)) % PERIOD] = 1.0
    return row / row.sum()


def test_a_sure_guess_is_as_long_as_it_pays_in_steps_of_whole_eights():
    for limit, length in ((99, 63), (62, 55), (31, 31), (30, 23), (22, 16), (16, 16), (7, 7)):
        chooser, _ = cascade(range(99), rate=0.9999)
        assert len(choose(chooser, limit, 0).tokens) == length
    for rate in (0.95, 0.97, 0.98, 0.99):
        lengths = [*range(17), 23, 31, 39, 47, 55, 63]
        plan = choose(cascade(range(99), rate=rate)[0], 99, 0)
        best = max(lengths, key=lambda length: speed(length, rate))
        assert best > 16 and len(plan.tokens) == best


def test_the_draft_model_drafts_no_more_than_16():
    pace, policy = trained(1.0, FixedCosts(per_draft=1e-6, per_token=1e-6))
    assert next_length(pace, policy, limit=MAX_GUESS_LENGTH) == MAX_DRAFT_LENGTH == policy.reach


def test_text_that_repeats_is_written_in_steps_of_64_and_is_the_same():
    texts = {}
    for draft in ("none", "suffix", "auto"):
        target = ToyEngine(counting, PERIOD, max_context=2048)
        widths, all_logits = set(), target.forward
        target.forward = lambda tokens, *rest: (widths.add(tokens.shape[1]), all_logits(tokens, *rest))[1]  # noqa: B023
        decoder = Decoder(target, None, costs=FixedCosts(per_token=0.02))
        texts[draft] = collect(decoder.decode([([1, 2, 3], Settings(draft=draft, max_new_tokens=1200))]), 1)[0][0]
        assert max(widths) == (1 + MAX_GUESS_LENGTH if draft != "none" else 2)
    assert texts["suffix"] == texts["auto"] == texts["none"]


def test_more_hits_than_promised_make_misses_rarer_and_no_chance_more_than_1():
    assert corrected(0.8, 0.5) == 0.4 and corrected(0.8, 1.0) == pytest.approx(0.8)
    assert corrected(0.8, 2.0) == pytest.approx(0.9) and corrected(1.0, 1.3) == 1.0
    chooser, _ = cascade(range(99), costs=FixedCosts(per_token=0.2), rate=0.9)
    drafter = chooser._drafters[0]
    drafter.look([1], 99, 0.0)
    for _ in range(200):
        drafter.settle(4, [0, 1, 2, 3])
    assert drafter.factor > 1.05
    expected = choose(chooser, 99, 0).expected
    assert all(0.0 < after - before <= 1.0 for before, after in pairwise(expected))
    assert expected[16] < 1 + sum(0.92**n for n in range(1, 17)), "what is promised is hardly more"


def test_who_disagrees_is_evidence_of_its_own():
    drafter = suffix.OwnText()
    drafter.take([1, 2, 3, 4, 5, 8, 3, 4, 6, 8, 4, 7, 8, 1, 2, 3, 4])
    assert list(islice(drafter.candidates(), 2)) == [
        (5, suffix._evidence(4, 2, 1)),  # after 3, 4 came 6, after 4 alone 7
        (8, suffix._evidence(5, 0, 1)),
    ]
    classes = [suffix._evidence(*each) for each in itertools.product((1, 2, 4, 8, 16, 32), (0, 1, 2), (1, 2, 4))]
    assert classes == list(range(len(drafter.prior))), "longer matches, then dissent, then how often it followed"
    assert suffix._evidence(99, 3, 99) == classes[-1]
    agreed, disputed = (drafter.prior[suffix._evidence(8, dissenters, 1)] for dissenters in (0, 2))
    assert agreed > disputed + 0.2


def test_a_wide_step_counts_when_it_was_measured_twice():
    costs = Costs()
    for width in (1, 1, 9, 9, 17, 17):
        costs.record_target(1, width, 1.0 + width)
    costs.record_target(1, 64, 900.0)
    assert costs.target(1)[64] == pytest.approx(65.0), "its first step is slow, and none would follow"
    costs.record_target(1, 64, 60.0)
    assert costs.target(1)[64] == 60.0
    alone = Costs()
    alone.record_target(1, 64, 5.0)
    assert alone.target(1)[64] == 5.0, "better than nothing"


def test_a_round_of_the_model_s_is_on_the_bill_beside_a_long_guess_of_another_row():
    pace, policy = trained(0.9, FixedCosts(per_draft=0.1))
    pace.lengths(this := Round(), [policy], [16])
    before = policy.bill._squares
    pace.settle(this, [policy], [3], 40, 1)
    pace.enter()
    assert policy.bill._squares != before


CHECKS = (
    test_a_sure_guess_is_as_long_as_it_pays_in_steps_of_whole_eights,
    test_the_draft_model_drafts_no_more_than_16,
    test_text_that_repeats_is_written_in_steps_of_64_and_is_the_same,
    test_more_hits_than_promised_make_misses_rarer_and_no_chance_more_than_1,
    test_who_disagrees_is_evidence_of_its_own,
    test_a_wide_step_counts_when_it_was_measured_twice,
    test_a_round_of_the_model_s_is_on_the_bill_beside_a_long_guess_of_another_row,
)
MUTANTS = (
    Mutant("any width", cascade_module.Cascade, "_best_guess", "length not in _LENGTHS", "False"),
    Mutant("16 at most", cascade_module.Cascade, "choose", "MAX_GUESS_LENGTH", "16"),
    Mutant("chances above 1", cascade_module, "corrected", "if factor < 1.0 else", "if True else"),
    Mutant("a corrected chance", cascade_module.Cascade, "_best_guess", "corrected(survival / before, factor)", "1.0"),
    Mutant("who agrees", suffix.SuffixAutomaton, "dissenters", "!= token", "== token"),
    Mutant("nobody disagrees", suffix, "_evidence", "min(dissenters, _DISSENTERS - 1)", "0"),
    Mutant("any number of dissenters", suffix, "_evidence", "min(dissenters, _DISSENTERS - 1)", "dissenters"),
    Mutant("the empty match is asked, too", suffix.SuffixAutomaton, "dissenters", "<= 0", "< 0"),
    Mutant(
        "no bill beside a long guess",
        policy_module.Pace,
        "settle",
        'this.why != "measured"',
        'this.why != "measured" and length <= 16',
    ),
    Mutant("a bad moment is for good", costs_module.Costs, "target", "width <= _NARROW or", "True or"),
    Mutant("what was measured alone is lost", costs_module.Costs, "target", "} or known", "}"),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, [lambda _, check=check: check() for check in CHECKS], monkeypatch)
