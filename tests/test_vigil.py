"""When free drafters are asked: by what they save, and what they missed when they were not."""

from __future__ import annotations

import numpy as np
import pytest
from support_runtime import FixedCosts, toy_pair
from test_cascade import Fixed, cascade, choose, decode

from leadout.runtime import decoder as decoder_module
from leadout.runtime.cascade import Commons
from leadout.runtime.decoder import Decoder
from leadout.runtime.family import Family
from leadout.runtime.free import Calibrated, Calibration
from leadout.runtime.kinds import Kind
from leadout.runtime.policy import AutoLength, Pace
from leadout.runtime.settings import Settings
from leadout.runtime.verify import happened
from leadout.runtime.vigil import Habit, Vigil


def asked(vigil, saved, rounds, spent=1 / 3):
    """In which rounds a row's drafters are asked when asking always saves and takes so much: of the price, 1."""
    found = []
    for i in range(rounds):
        vigil.tick()
        if vigil.awake:
            found.append(i)
            vigil.settle(saved, spent)
    return found


def dull():
    """What is known where asking never saved anything."""
    habit = Habit()
    asked(Vigil(habit), 0.0, 400)
    return habit


def test_what_does_not_pay_is_asked_ever_more_rarely():
    found = asked(Vigil(Habit()), 0.0, 150)
    assert found == [*range(6), 10, 19, 28, 37, 46, 63, 96, 129], "32 rounds apart once it is known of all rows"
    assert asked(Vigil(Habit()), 0.4, 400)[-3:] == [305, 338, 371], "less than half of the price"
    assert asked(Vigil(Habit()), 0.6, 200) == list(range(200)), "more than that"


def test_a_row_is_given_up_sooner_than_all_of_its_kind():
    habit = Habit()
    asked(Vigil(habit), 2.0, 200)
    found = asked(Vigil(habit), 0.0, 60)
    assert found[:20] == list(range(20)) and max(np.diff(found)) == 9, "it naps, but not for long"
    assert habit.pays(habit.usual) and asked(Vigil(habit), 0.0, 1) == [0], "the next begins awake"


def test_it_is_forgotten_again_when_they_are_worth_it():
    vigil = Vigil(Habit())
    asked(vigil, 0.0, 100)
    woken = asked(vigil, 10.0, 60)
    assert woken == list(range(woken[0], 60)), "once awake they stay"
    later = np.diff(asked(vigil, 0.0, 400))
    assert later[later > 1].tolist()[:2] == [5, 9], "naps begin anew"


def test_a_failed_guess_counts_for_three_prices_whatever_it_lost():
    small, large = Habit(), Habit()
    assert asked(Vigil(small), -3.0, 60) == asked(Vigil(large), -1000.0, 60)
    assert small.saved == large.saved < 0.0


def test_rows_begin_asleep_where_asking_never_paid_and_one_of_them_is_asked_now_and_then():
    habit = dull()
    habit.idle = 0
    found = [len(asked(Vigil(habit), 0.0, 20)) for _ in range(30)]
    assert max(found) == 1 and 8 <= sum(found) <= 20, "most in which nobody is asked"
    habit = dull()
    habit.idle = 0
    woken = asked(Vigil(habit), 10.0, 200)
    assert woken == list(range(32, 200)) and asked(Vigil(habit), 10.0, 3) == [0, 1, 2], "reversible"


def test_a_round_stands_for_those_that_were_slept_through():
    """Else those in which a row is worth asking, and therefore asked, would speak for all."""
    habit = Habit(price=1.0)
    habit.record(0.0, 1 / 3, 33)
    assert habit.rounds == 33.0
    habit.record(1.0, 1 / 3, 1)
    assert habit.saved == 1.0 and habit.rounds == pytest.approx(34.0, abs=0.1)
    habit = Habit()
    vigil = Vigil(habit)
    asked(vigil, 0.0, 11), asked(vigil, 10.0, 39)
    assert habit.rounds == pytest.approx(50.0, rel=0.1), "asleep or awake"


def test_the_price_is_learnt_of_rounds_awake_and_one_slow_round_is_not_it():
    habit = Habit()
    habit.record(0.0, 1 / 3, 1)
    assert habit.price == pytest.approx(1.0), "what follows from asking takes twice as long as that"
    habit.record(0.0, 1000.0, 1)
    assert habit.price == pytest.approx(1.1)
    habit.record(0.0, 1000.0, 9)
    assert habit.price == pytest.approx(1.1), "it caught up"


def test_a_row_that_begins_asleep_takes_its_prompt_in_when_it_is_asked():
    chooser, _ = cascade([])
    heard = []
    listener = Fixed([49])
    listener.take = lambda tokens: heard.append(len(tokens))
    chooser._drafters = [Calibrated(listener, Calibration((0.0,)))]
    habit = chooser._experience.habit
    habit.price, habit.rounds, habit.idle = 1.0, 100.0, 29
    chooser._vigil, text = Vigil(habit), [1, 2, 3]
    chooser.begin(text)
    for _ in range(4):
        assert not heard
        chooser.choose(chooser._pace.tick(), text, 8, 0, 0)
        chooser.observe([text[-1]], [9], np.zeros((1, 50), np.float32))
        text.append(9)
        chooser.take(text)
    assert [*dict.fromkeys(heard)] == [6, 7], "before it looked, and after the round"


def test_a_row_that_begins_asleep_wakes_when_its_prompt_is_little_beside_what_it_wrote():
    """20 tokens to be told, a round takes 0.1 s: at 1 ms a token that is 1/32 of 7 rounds, at 10 of 64."""

    def first_asked(reading):
        chooser, _ = cascade([7], costs=FixedCosts(per_token=0.2))
        chooser._pace.prices.without_model = lambda rows: [0.1] * 64
        habit = chooser._experience.habit
        habit.price, habit.rounds, habit.idle = 1.0, 100.0, 29
        habit.reading = reading
        chooser._vigil, text = Vigil(habit), list(range(20))
        chooser.begin(text)
        for i in range(1, 100):
            chooser.choose(chooser._pace.tick(), text, 8, 0, 0)
            if chooser._choice.asked:
                return i
        raise AssertionError("it never wakes")

    assert [first_asked(0.0), first_asked(0.001), first_asked(0.01)] == [4, 7, 64]


def test_what_reading_takes_is_learnt_from_prompts():
    habit = Habit()
    habit.read(15, 9.0)
    assert habit.reading == 0.0, "too few to say"
    habit.read(100, 2.0)
    assert habit.reading == pytest.approx(0.02)
    habit.read(100, 1000.0)
    assert habit.reading == pytest.approx(0.06), "an outlier"
    habit.read(100, 1.0)
    assert habit.reading == pytest.approx(0.01)
    awake = Vigil(Habit())
    awake.put_off(100.0)
    assert awake.awake, "who is awake is not put to sleep"
    chooser, _ = cascade([7])
    chooser.begin(list(range(80)))
    assert chooser._experience.habit.reading > 0.0 and chooser._known == 80


def test_asking_is_settled_in_steps_alone_and_a_row_pays_its_part_of_a_wide_one():
    chooser, _ = cascade([7, 8], costs=FixedCosts(per_token=0.2), rate=0.99)
    choose(chooser, 8, 0)
    assert chooser._savings([2], 3) == pytest.approx(2.0 - 0.4)
    assert chooser._savings([2], 1) == pytest.approx(-0.4)
    assert chooser._savings([2, 0, 0, 0], 3) == pytest.approx(0.8 * 2.0 / 4 - 0.4), "three rows wait"
    assert chooser._savings([2, 2, 2, 2], 3) == pytest.approx(0.8 * 2.0 / 4 - 0.1)
    chooser._choice.otherwise = 2.0
    assert chooser._savings([2], 3) == pytest.approx(3 / 2.0 - 1.0 - 0.4), (
        "another drafter would have made two a second"
    )
    chooser._pace.prices.missed = lambda rows, written: 0.1 * (written - 1)
    assert chooser._savings([2], 3) == pytest.approx(3 / 2.0 - 1.0 - 0.4 - 0.2), "and lacks two tokens now"
    assert chooser._savings([2, 0], 3) == pytest.approx(0.8 * 0.5 / 2 - 0.4 - 0.1), "shared"
    chooser._choice.otherwise = 0.0
    assert chooser._savings([2], 3) == pytest.approx(2.0 - 0.4), "nobody would have read them"


def test_sleeping_drafters_are_neither_told_nor_scored_and_catch_up():
    class Listener(Fixed):
        heard = 0

        def take(self, tokens):
            self.heard = len(tokens)

    chooser, _ = cascade([])
    listener, text = Listener([49]), [1]
    chooser._drafters = [Calibrated(listener, Calibration((0.0,)))]
    chooser.begin(text)
    heard = []
    for _ in range(30):
        assert not chooser.choose(chooser._pace.tick(), text, 8, 0, 0).tokens
        heard.append(listener.heard == len(text))
        chooser.observe([text[-1]], [len(text) + 1], np.zeros((1, 50), np.float32))
        text.append(len(text) + 1)
        chooser.take(text)
    naps = [i for i, told in enumerate(heard) if not told]
    assert naps and naps[0] > 3 and heard[naps[0] :].count(True) >= 2, "told when asked"
    learned = chooser._commons.successors
    assert all(learned.get(token) == (token + 1, 1) for token in range(1, 29)), "once each, awake or asleep"


def test_answers_to_one_prompt_are_told_of_each_other_while_they_sleep():
    family, commons = Family([1, 2]), Commons()
    chooser, _ = cascade()
    rows = [type(chooser)(Settings(draft="auto"), commons, chooser._pace, None, family) for _ in range(2)]
    for row in rows:
        row.take([1, 2])
    rows[0].take([1, 2, 3, 4])
    rows[1].take([1, 2, 3])
    siblings = next(each for each in rows[1]._drafters if each.drafter.name == "siblings")
    assert [token for token, _ in siblings.drafter.candidates()][:1] == [4]


def test_a_length_for_all_rows_is_no_try_of_a_row_it_does_not_pay_for():
    """Its guess is the better one: the draft model is forced on a row only to be measured or tried."""
    chooser, good = cascade([5, 5], costs=FixedCosts(per_token=0.1), model=True, rate=0.6)
    bad = AutoLength(chooser._pace)
    for _ in range(40):
        bad.observe(happened(1, 0))
    chooser._model = bad
    this = chooser._pace.tick(2)
    chooser._pace.lengths(this, [good, bad], [16, 16])
    plan = chooser.choose(this, [1], 16, 16, 3)
    assert not this.explores and plan.by == "fixed"


def test_texts_stay_the_target_s_with_drafters_that_sleep_and_wake(monkeypatch):
    """Asking costs a fortune: they sleep from the first, wake, catch up; nothing of it is seen in a text."""
    monkeypatch.setattr(decoder_module, "Costs", lambda: FixedCosts(per_token=3.0))
    prompts = ([1], [4, 5, 6, 4, 5, 6, 4, 5], list(range(20)))
    for sampling in ({}, {"temperature": 0.8, "seed": 7}):
        plain = decode([(prompt, Settings(draft="none", max_new_tokens=70, **sampling)) for prompt in prompts], eos=())
        maker = Decoder(*toy_pair(order=2))
        maker._admission.commons.experience(Kind(sampling.get("temperature", 0.0) > 0)).habit.price = 1e9
        found = decode(
            [(p, Settings(draft="auto", max_new_tokens=70, **sampling)) for p in prompts], decoder=maker, eos=()
        )
        assert found[:2] == plain[:2]


def test_the_pace_forgets_its_tables_of_steps():
    costs = FixedCosts(per_token=0.5)
    pace = Pace(costs)
    assert pace.prices.steps(1)[2] == 2.0
    costs._tables["target"][1, 0][3].seconds = 1.75
    for _ in range(8):
        pace.tick()
    assert pace.prices.steps(1)[2] == 1.75


def test_costs_are_told_in_which_rounds_free_drafters_were_asked(monkeypatch):
    """They sleep sooner or later: what steps and the host take while they do is kept apart."""
    steps, hosts = [], []
    monkeypatch.setattr(
        FixedCosts, "record_target", lambda self, *a, drafts, asked, **how: steps.append((drafts, asked))
    )
    monkeypatch.setattr(FixedCosts, "record_host", lambda self, *a, quiet: hosts.append(quiet))
    for draft in ("none", "suffix"):
        steps.clear(), hosts.clear()
        decoder = Decoder(*toy_pair(order=2), costs=FixedCosts(per_token=3.0))
        request = Settings(draft=draft, max_new_tokens=60, temperature=1.0, seed=3)
        decode([(list(range(20)), request)], decoder=decoder, eos=())
        decoder._pace.enter()
        assert hosts == [not drafts and not asked for drafts, asked in steps], "nobody drafted, nor was asked"
        assert {asked for _, asked in steps} == ({False} if draft == "none" else {False, True})
