"""Costs of a device that other work slows down: no clock is read here."""

from __future__ import annotations

import random

import pytest
from support_runtime import collect, toy_pair
from test_mutants import Mutant, must_die
from test_policy import next_length

import leadout
from leadout.runtime.bench import Bench
from leadout.runtime.controller import cascade, costs, policy, prices, tempo, typical
from leadout.runtime.controller.costs import Costs
from leadout.runtime.controller.policy import AutoLength, Pace
from leadout.runtime.controller.rounds import Round
from leadout.runtime.controller.tempo import Tempo
from leadout.runtime.controller.typical import KNOWN, Typical
from leadout.runtime.controller.vigil import Vigil
from leadout.runtime.decoder import Decoder
from leadout.runtime.rules.verify import happened
from leadout.runtime.settings import Settings
from leadout.runtime.tune import Tuner

STEP, TOKEN, FIRST, MORE, PLAIN = 1.0, 0.1, 0.3, 0.15, 0.9


def drafted(table, length, slowness=1.0):
    """A round with so long a draft."""
    table.record_draft(1, length, slowness * (FIRST + MORE * (length - 1)))
    table.record_target(1, length + 1, slowness * (STEP + TOKEN * length))


def plainly(table, slowness=1.0):
    table.record_target(1, 1, slowness * PLAIN, drafts=False, modelled=False)


def known(rounds=6):
    """All was measured while nothing else ran."""
    table = Costs()
    for length in [1, 2, 3, 4] * rounds:
        drafted(table, length)
    for _ in range(8 + KNOWN):
        plainly(table)
    for length in (1, 2, 3, 4):
        drafted(table, length)
    return table


def what_slows_all_steps_changes_no_price():
    """The device gets three times as slow, and only drafts are used: beside them plain steps are what they were."""
    table = known()
    for _ in range(40):
        drafted(table, 3, 3.0)
    assert table.usual(3.0) == pytest.approx(1.0, rel=0.15)
    assert table.target(1)[4] / table.plain(1, 1) == pytest.approx((STEP + 3 * TOKEN) / PLAIN, rel=0.15)
    for _ in range(60):
        plainly(table, 3.0)
    assert table.plain(1, 1) == pytest.approx(PLAIN, rel=0.15)


def a_step_that_got_dearer_beside_the_others_is_found_out():
    """Not the device: that goes on with the others."""
    table = known()
    for _ in range(60):
        table.record_draft(1, 2, FIRST + MORE)
        table.record_target(1, 3, 2 * (STEP + 2 * TOKEN))
    dearer = table.target(1)[3] / table.drafts(1)[2] * (FIRST + MORE) / (STEP + 2 * TOKEN)
    assert dearer > 1.6


def one_outlier_says_little():
    found = Tempo()
    found.record(100.0, 1.0)
    assert found.slowness < 1.3
    for _ in range(12):
        found.record(1.0, 1.0)
    assert found.slowness == pytest.approx(1.0, abs=0.01)
    found.record(0.0, 1.0)
    found.record(1.0, 0.0)
    assert found.slowness == pytest.approx(1.0, abs=0.01), "nothing was measured"


def scatter_is_how_far_single_steps_are_off():
    quiet, noisy, rng = Tempo(), Tempo(), random.Random(1)
    for _ in range(300):
        quiet.record(1.0, 1.0)
        noisy.record(rng.choice([0.8, 1.25]), 1.0)
    assert quiet.scatter < 0.01 and 0.15 < noisy.scatter < 0.4
    assert noisy.mean == pytest.approx(1.0, abs=0.2)


def a_typical_step_is_no_first_call_and_no_outlier():
    step = Typical()
    for seconds, expected in ((9.0, 9.0), (1.0, 1.0), (1.2, 1.2), (1.1, 1.15)):
        step.append(seconds)
        assert step.seconds == pytest.approx(expected) and not step.faded
    step.append(1000.0)
    assert step.seconds < 1.15 * 1.2
    before = step.seconds
    step.append(9.0, counts=False)
    assert step.seconds == before
    for _ in range(200):
        step.append(2.0)
    assert step.seconds == pytest.approx(2.0, rel=0.02) and step.times == 32
    step.fade()
    step.append(1.5)
    assert step.faded and step.seconds == 1.5


def test_an_interrupted_measurement_is_none(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    step = Typical()
    for name, known in (("min", 0), ("median", 2)):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(typical, name, interrupt, raising=False)
            step.append(1.0)
        assert len(step) == known
        step.append(2.0)
        step.append(2.0)
    assert len(step) == 4 and step.seconds == 2.0


def a_draft_s_first_step_is_dearer():
    table = Costs()
    for length in (1, 4):
        for _ in range(3):
            table.record_draft(1, length, FIRST + MORE * (length - 1))
    expected = [0.0, *(FIRST + MORE * (length - 1) for length in range(1, 10))]
    assert table.drafts(1)[:10] == pytest.approx(expected)
    assert table.draft(1) == pytest.approx(expected[4] / 4)
    assert Costs().drafts(1) == [0.0] * 64
    prices = Pace(table).prices
    two, three = (prices.with_model(1)[length] - prices.without_model(1)[length] for length in (2, 3))
    assert three - two == pytest.approx(MORE)


def a_longer_context_begins_as_a_shorter_one_is_known():
    table = known()
    drafted(table, 3)
    table.record_target(1, 4, 1.3 * (STEP + 3 * TOKEN), 300)
    here, there = table.target(1)[4], table.target(1, 300)[4]
    assert here < there < 1.2 * here, "one measurement moves it a little"


def what_a_round_took_is_priced_at_the_pace_it_was_taken():
    table = known()
    before = table.weights
    took = 0.0
    for number in range(200):
        slowness = 1.0 + 2.0 * (number >= 100)
        drafted(table, 3, slowness)
        took += slowness * (FIRST + 2 * MORE + STEP + 3 * TOKEN)
    paid = {step: weight - before.get(step, 0.0) for step, weight in table.weights.items()}
    assert sum(table.price(paid).values()) == pytest.approx(took, rel=0.08)
    assert sum(table.counts.values()) == pytest.approx(400 + 2 * 28 + 8 + KNOWN), "the counts are whole"


def tables_of_one_tempo_can_be_compared():
    shared = Tempo()
    one, other = known(), Costs(tempo=shared)
    one._tempo = shared
    for _ in range(30):
        drafted(one, 3, 2.0)
    for _ in range(KNOWN):
        drafted(other, 3, 2.0)
    assert other.target(1)[4] == pytest.approx(one.target(1)[4], rel=0.15)


def little_doubt_does_not_begin_a_rest():
    """A plain step that was compared once, on a device of which single steps scatter, may be dearer than it seems."""

    def first(doubt):
        table = known()
        table.doubt = lambda rows: doubt
        pace = Pace(table)
        request = AutoLength(pace)
        for _ in range(40):
            if next_length(pace, request):
                request.observe(happened(1, 0))
        pace.rest.restart()
        return pace, next_length(pace, request)

    assert first(0.0)[1] == 0
    assert first(5.0)[1] > 0


def plain_steps_are_measured_at_the_pace_of_those_before_them():
    """Four of them: what they take less than others is no faster device."""
    table = known()
    for _ in range(20):
        drafted(table, 3)
    slowness = table._tempo.slowness
    for _ in range(8):
        plainly(table, 0.7)
    for _ in range(4):
        plainly(table, 0.7)
        assert table._tempo.slowness == slowness
    for _ in range(8):
        plainly(table, 0.7)
    assert table._tempo.slowness < 0.95 * slowness, "then it may be"


def doubt_ends_with_comparisons():
    """What plain steps take was compared with others as often as they came after them."""
    table, rng = Costs(), random.Random(2)
    doubts = []
    for _ in range(12):
        for _ in range(12):
            drafted(table, 3, rng.choice([0.8, 1.25]))
        for _ in range(8 + KNOWN):
            plainly(table, rng.choice([0.8, 1.25]))
        doubts.append(table.doubt(1))
    assert doubts[0] > 0.1 and doubts[-1] < 0.5 * doubts[0]
    assert table.doubt(16) > doubts[-1], "of batches nothing is known"


def what_is_timed_outside_counts_at_the_usual_pace():
    table = known()
    for _ in range(40):
        drafted(table, 3, 3.0)
    pace = Pace(table)
    pace.read([], 20, 60.0)
    assert pace.prices.reading == pytest.approx(1.0, rel=0.15)
    settled = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Costs, "usual", lambda self, seconds: 7.0)
        patch.setattr(Vigil, "settle", lambda self, saved, spent, *, chosen: settled.append(spent))
        collect(Decoder(*toy_pair()).decode([([1, 2] * 4, Settings(draft="auto", max_new_tokens=30))]), 1)
    assert set(settled) == {7.0}


def slow_for_long():
    """What is known of a device that is three times as slow as when it was measured."""
    table = known()
    for _ in range(400):
        drafted(table, 3, 3.0)
    return table


def a_table_on_disk_is_of_an_average_minute():
    again = Costs(slow_for_long().entries())
    assert again.target(1)[4] == pytest.approx(3.0 * (STEP + 3 * TOKEN), rel=0.15)


def what_was_missed_is_what_the_slow_device_took_longer():
    table = slow_for_long()
    table.record_draft(1, 3, 3.0 * (FIRST + 2 * MORE + 10 * 0.05), late=10)
    assert table.catch_up(1, 10) == pytest.approx(10 * 0.05, rel=0.25)


def a_bill_gives_the_benefit_of_the_doubt():
    def saved(doubt):
        table, recorded = known(), []
        table.doubt = lambda rows: doubt
        pace = Pace(table)
        request = AutoLength(pace)
        request.bill.record = recorded.append
        pace.settle(Round(), [request], [3], 2, 0)
        pace.enter()
        return recorded[0], pace.prices.without_model(1)[0]

    (without, plain), (with_it, _) = saved(0.0), saved(0.5)
    assert with_it - without == pytest.approx(0.5 * 3 * plain)


CHECKS = [
    what_slows_all_steps_changes_no_price,
    a_step_that_got_dearer_beside_the_others_is_found_out,
    one_outlier_says_little,
    scatter_is_how_far_single_steps_are_off,
    a_typical_step_is_no_first_call_and_no_outlier,
    a_draft_s_first_step_is_dearer,
    a_longer_context_begins_as_a_shorter_one_is_known,
    what_a_round_took_is_priced_at_the_pace_it_was_taken,
    tables_of_one_tempo_can_be_compared,
    little_doubt_does_not_begin_a_rest,
    plain_steps_are_measured_at_the_pace_of_those_before_them,
    doubt_ends_with_comparisons,
    what_is_timed_outside_counts_at_the_usual_pace,
    a_bill_gives_the_benefit_of_the_doubt,
    a_table_on_disk_is_of_an_average_minute,
    what_was_missed_is_what_the_slow_device_took_longer,
]
C, RECORD = costs.Costs, (costs.Costs, "_record")
MUTANTS = [
    Mutant("a slow device's steps are dear ones", *RECORD, "seconds / self._tempo.slowness", "seconds"),
    Mutant("nobody says how slow it is", *RECORD, "self._tempo.record(seconds, typical.seconds)", "pass"),
    Mutant("the device alone is slow", *RECORD, "step != self._last", "False"),
    Mutant("an outlier is the device", tempo.Tempo, "record", "max(-_MOST, min(_MOST, surprise))", "surprise"),
    Mutant("no scatter", tempo.Tempo, "record", "self._variance +=", "0 *"),
    Mutant("first calls count", typical.Typical, "append", "min(first)", "max(first)"),
    Mutant("the last one is it", typical.Typical, "append", "1.0 / min(KNOWN", "1.0 + 0.0 * min(KNOWN"),
    Mutant("all count", typical.Typical, "append", "elif counts and", "elif"),
    Mutant(
        "all draft steps are alike",
        C,
        "_drafts",
        "_line({0: 0.0} |",
        "_line({0: 0.0, 1: known[max(known)] / max(known)} or",
    ),
    Mutant("contexts begin anew", C, "_begun", "if places and not typical", "if False"),
    Mutant("a slow round is as cheap", C, "_pay", "times * self._tempo.slowness", "times"),
    Mutant("every table has its tempo", C, "__init__", "tempo or Tempo()", "Tempo()"),
    Mutant("no doubt", policy.Pace, "_speeds", "(1.0 + self.prices.costs.doubt(rows))", "1.0"),
    Mutant("tables on disk are of the first minute", C, "entries", "seconds * self._tempo.mean", "seconds"),
    Mutant("a slow draft missed much", C, "record_draft", "known * self._tempo.slowness", "known"),
    Mutant("no doubt about a bill", policy.Pace, "_settle", "1.0 + prices.costs.doubt(rows)", "1.0"),
    Mutant("a slow reading is a dear one", prices.Prices, "read", "self.costs.usual(seconds)", "seconds"),
    Mutant(
        "slow guesses are dear ones",
        cascade.Cascade,
        "take",
        "self._pace.prices.costs.usual(",
        "(",
    ),
    Mutant("doubt stays", C, "doubt", "self._compared[rows.bit_length()]", "1"),
    Mutant("plain steps tell the pace at once", C, "record_target", "(plain and not beside)", "plain"),
    Mutant("every plain step is a comparison", C, "record_target", "plain and self._stretch == 1", "plain"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_healthy_code_passes(check):
    check()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, [lambda patch, check=check: check() for check in CHECKS], monkeypatch)


def test_who_is_compared_shares_a_tempo(tiny_bundle):
    """What bench and tune decode plainly and what they speculate with run in turns on one device."""
    with leadout.load(tiny_bundle) as pair:
        bench, tuner = Bench(pair, {}), Tuner(pair, {})
        sides = bench.plain, bench.speculative, bench.single
        assert len({id(decoder.costs._tempo) for decoder in sides}) == 1
        sweeps = tuner._plain, tuner._sweep, tuner._sweep_of(pair.draft)
        assert len({id(decoder.costs._tempo) for decoder in sweeps}) == 1
