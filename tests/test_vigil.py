"""When free drafters are asked: by what they save, and what they missed when they were not."""

from __future__ import annotations

import numpy as np
import pytest
from support_runtime import FixedCosts, toy_pair
from test_cascade import Fixed, cascade, choose, decode

from leadout.runtime import decoder as decoder_module
from leadout.runtime.controller.cascade import Commons
from leadout.runtime.controller.kinds import Kind
from leadout.runtime.controller.policy import AutoLength, Pace
from leadout.runtime.controller.vigil import Habit, Vigil
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters.family import Family
from leadout.runtime.drafters.free import Calibrated, Record
from leadout.runtime.rules.verify import happened
from leadout.runtime.settings import Settings


def asked(vigil, saved, rounds, spent=1.0, chosen=False):
    """In which rounds a row's drafters are asked when asking always saves and takes so much."""
    found = []
    for i in range(rounds):
        vigil.tick()
        if vigil.awake:
            found.append(i)
            vigil.settle(saved, spent, chosen=chosen)
    return found


def test_what_does_not_pay_is_asked_ever_more_rarely():
    assert asked(Vigil(Habit()), 0.0, 90) == [*range(16), 20, 29, 46, 63, 80]
    assert asked(Vigil(Habit()), 0.9, 20) == list(range(16)), "less than it takes"
    assert asked(Vigil(Habit()), -5.0, 20) == list(range(16)), "guesses that fail"
    assert asked(Vigil(Habit()), 1.1, 200) == list(range(200)), "more than it takes"


def test_it_is_forgotten_again_when_they_are_worth_it():
    vigil = Vigil(Habit())
    asked(vigil, 0.0, 100)
    woken = asked(vigil, 2.0, 60)
    assert woken[0] < 16 and woken == list(range(woken[0], 60)), "once awake they stay"
    later = asked(vigil, 0.0, 90)
    gaps = np.diff(later)
    assert gaps[gaps > 1].tolist()[:2] == [5, 9], "naps begin anew, and so does patience"
    assert (gaps == 1).sum() >= 16


def test_a_guess_that_is_chosen_after_a_nap_gets_rounds_to_prove_itself():
    quiet, chosen = Vigil(Habit()), Vigil(Habit())
    assert asked(quiet, 0.0, 21)[-1] == 20 and asked(chosen, 0.0, 21, chosen=True)[-1] == 20
    assert not asked(quiet, 0.0, 4) and asked(chosen, 0.0, 4, chosen=True) == [0, 1, 2, 3]


def test_rows_learn_patience_from_those_before_and_one_slow_round_is_not_the_price():
    habit = Habit()
    lengths = []
    for _ in range(4):
        vigil = Vigil(habit)
        lengths.append(len(asked(vigil, 0.0, 17)))
    assert lengths[0] == 16 and lengths[1] < 16 and habit.patience == 4
    asked(Vigil(habit), 2.0, 40)
    assert habit.patience == 16, "reversible"
    habit.record(1000.0)
    assert habit.price == pytest.approx(1.1)


def test_short_rows_in_which_it_never_pays_share_their_breaks():
    habit = Habit()
    asked_in = [asked(Vigil(habit), 0.0, 18) for _ in range(40)]
    assert [len(each) for each in asked_in[:3]] == [16, 8 + 1, 4 + 2] and 4 <= sum(map(len, asked_in[20:])) <= 12
    assert habit.pause == 64 and any(not each for each in asked_in[20:]), "a row in which nobody is asked"
    woken = asked(Vigil(habit), 2.0, 90)
    assert len(woken) >= 20 and woken == list(range(woken[0], 90)) and habit.pause == 0
    assert asked(Vigil(habit), 2.0, 3) == [0, 1, 2], "the next begins awake"


def test_a_long_row_naps_no_longer_than_it_did():
    habit = Habit()
    asked(Vigil(habit), 0.0, 400)
    assert habit.pause == 0 and habit.patience == 8, "it gave up once"
    for _ in range(9):
        asked(Vigil(habit), 0.0, 40)
    assert max(np.diff(asked(Vigil(habit), 0.0, 400))) == 17


def test_a_row_that_begins_asleep_takes_its_prompt_in_when_it_is_asked():
    chooser, _ = cascade([])
    heard = []
    listener = Fixed([49])
    listener.take = lambda tokens: heard.append(len(tokens))
    chooser._drafters = [Calibrated(listener, Record((0.0,)))]
    habit = chooser._experience.habit
    habit.pause = habit.rest = 3
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
        habit.pause = habit.rest = 3
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
    chooser.begin(list(range(40)))
    assert chooser._experience.habit.reading > 0.0 and chooser._known == 40


def test_asking_is_settled_in_steps_alone_and_a_row_pays_its_part_of_a_wide_one():
    chooser, _ = cascade([7, 8], costs=FixedCosts(per_token=0.2), rate=0.99)
    choose(chooser, 8, 0)
    assert chooser._savings([2], 3) == pytest.approx(2.0 - 0.4)
    assert chooser._savings([2], 1) == pytest.approx(-0.4)
    assert chooser._savings([2, 0, 0, 0], 3) == pytest.approx(0.5 * 2.0 / 4 - 0.4), "three rows wait"
    assert chooser._savings([2, 2, 2, 2], 3) == pytest.approx(0.5 * 2.0 / 4 - 0.1)
    chooser._choice.otherwise = 2.0
    assert chooser._savings([2], 3) == pytest.approx(3 / 2.0 - 1.0 - 0.4), (
        "another drafter would have made two a second"
    )
    chooser._pace.prices.missed = lambda rows, written: 0.1 * (written - 1)
    assert chooser._savings([2], 3) == pytest.approx(3 / 2.0 - 1.0 - 0.4 - 0.2), "and lacks two tokens now"
    assert chooser._savings([2, 0], 3) == pytest.approx(0.5 * 0.5 / 2 - 0.4 - 0.1), "shared"
    chooser._choice.otherwise = 0.0
    assert chooser._savings([2], 3) == pytest.approx(2.0 - 0.4), "nobody would have read them"


def test_sleeping_drafters_are_neither_told_nor_scored_and_catch_up():
    class Listener(Fixed):
        heard = 0

        def take(self, tokens):
            self.heard = len(tokens)

    chooser, _ = cascade([])
    listener, text = Listener([49]), [1]
    chooser._drafters = [Calibrated(listener, Record((0.0,)))]
    chooser.begin(text)
    heard = []
    for _ in range(30):
        assert not chooser.choose(chooser._pace.tick(), text, 8, 0, 0).tokens
        heard.append(listener.heard == len(text))
        chooser.observe([text[-1]], [len(text) + 1], np.zeros((1, 50), np.float32))
        text.append(len(text) + 1)
        chooser.take(text)
    assert heard[:17] == [True] * 17 and [i for i in range(17, 30) if heard[i]] == [20, 21, 29], "told when asked"
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
