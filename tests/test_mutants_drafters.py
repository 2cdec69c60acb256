"""The tests of the free drafters and the cascade are tested: each of these bugs must be found by one of them."""

from __future__ import annotations

import numpy as np
import pytest
import test_cascade
import test_free_drafters
import test_vigil
from support_runtime import FixedCosts, toy_pair
from test_mutants import Mutant, must_die

from leadout.runtime import admission, decoder
from leadout.runtime.controller import cascade, joint, prices, vigil
from leadout.runtime.drafters import free, ngram, recycling, suffix
from leadout.runtime.drafters.automaton import Automaton
from leadout.runtime.settings import Settings


def draws(count=50):
    """Texts of three tokens, the same ones every time: what the property tests check, without their search."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield rng, rng.integers(0, 3, rng.integers(1, 26)).tolist()


def automata_hold(monkeypatch):
    whole = test_free_drafters.test_an_automaton_knows_every_substring_and_what_followed_it.hypothesis.inner_test
    goes_on = test_free_drafters.test_a_row_s_own_text_goes_on_as_the_slow_search_says.hypothesis.inner_test
    with monkeypatch.context() as patch:
        patch.setattr(suffix, "_HOPS", 10**9)
        for _, text in draws():
            whole(text)
            goes_on(text, 7)


def readers_find_their_place(monkeypatch):
    reader = test_free_drafters.test_a_cursor_is_at_the_longest_end_that_stands_in_a_text_that_grows_meanwhile
    for rng, text in draws():
        reader.hypothesis.inner_test(text, rng.integers(0, 3, 25).tolist(), (rng.random(80) < 0.5).tolist())


def texts_are_bounded_and_apart(monkeypatch):
    pool = test_free_drafters.test_a_pool_never_matches_across_texts_nor_guesses_their_end.hypothesis.inner_test
    for rng, text in draws():
        pool([rng.integers(0, 3, rng.integers(1, 25)).tolist() for _ in range(8)], text)
    test_free_drafters.test_the_pool_drops_the_oldest_and_keeps_the_latest()
    test_free_drafters.test_a_row_s_own_text_is_bounded_and_reaches_into_the_generation_before()


def guesses_are_scored_right(monkeypatch):
    test_free_drafters.test_scores_on_a_scripted_text_count_what_was_reached()
    test_cascade.test_every_free_drafter_is_scored_whoever_proposed()


def rows_teach(monkeypatch):
    test_free_drafters.test_a_round_teaches_its_committed_tokens_and_the_maxima_behind_the_rejection()
    counters = test_free_drafters.test_successors_are_two_bit_counters_one_a_token.hypothesis.inner_test
    for rng, _ in draws():
        counters([tuple(pair) for pair in rng.integers(0, 4, (60, 2)).tolist()])


def periods_go_on(monkeypatch):
    test_free_drafters.test_a_period_goes_on()


def choices_are_the_best(monkeypatch):
    test_cascade.test_a_guess_is_cut_where_a_verified_token_costs_more_than_it_brings(0.6, 0.5)
    test_cascade.test_the_most_promising_of_free_drafters_and_model_drafts()
    test_cascade.test_limits_and_fixed_lengths_hold()
    test_cascade.test_a_draft_model_that_rests_is_tried_again_although_a_guess_is_better()


def start_up_is_measured(monkeypatch):
    for model in (True, False):
        test_cascade.test_the_start_up_measurement_is_the_draft_model_s(model)


def asking_pays_or_sleeps(monkeypatch):
    test_vigil.test_what_does_not_pay_is_asked_ever_more_rarely()
    test_vigil.test_rows_learn_patience_from_those_before_and_one_slow_round_is_not_the_price()
    test_vigil.test_short_rows_in_which_it_never_pays_share_their_breaks()
    test_vigil.test_a_long_row_naps_no_longer_than_it_did()
    test_vigil.test_a_row_that_begins_asleep_takes_its_prompt_in_when_it_is_asked()
    test_vigil.test_a_row_that_begins_asleep_wakes_when_its_prompt_is_little_beside_what_it_wrote()
    test_vigil.test_what_reading_takes_is_learnt_from_prompts()
    test_vigil.test_asking_is_settled_in_steps_alone_and_a_row_pays_its_part_of_a_wide_one()
    test_vigil.test_sleeping_drafters_are_neither_told_nor_scored_and_catch_up()
    test_vigil.test_answers_to_one_prompt_are_told_of_each_other_while_they_sleep()
    test_cascade.test_ragged_rows_pay_for_the_tokens_that_there_are()
    test_cascade.test_a_ragged_row_pays_for_what_it_drafted_itself()
    test_vigil.test_a_length_for_all_rows_is_no_try_of_a_row_it_does_not_pay_for()


def the_draft_s_cache_is_right(monkeypatch):
    with monkeypatch.context() as patch:
        test_cascade.test_the_draft_model_s_cache_is_right_after_rounds_it_had_no_part_in(patch)


def others_draft_while_the_model_rests(monkeypatch):
    with monkeypatch.context() as patch:
        test_cascade.test_the_draft_model_is_not_asked_for_rows_that_guess(patch)
        test_cascade.test_a_model_that_rests_for_one_row_drafts_for_another_that_asks_for_a_length(patch)


def laws_hold(monkeypatch):
    with monkeypatch.context() as patch:
        test_cascade.test_rounds_with_and_without_a_draft_s_law_leave_the_target_s_alone("auto", "block", patch)


def shares_add_up(monkeypatch):
    test_cascade.test_shares_add_up_and_drafted_tokens_are_marked()


def earlier_answers_help(monkeypatch):
    test_cascade.test_an_earlier_answer_speeds_up_a_later_one_until_it_is_forgotten("suffix")


def the_model_is_judged_by_its_own_drafts(monkeypatch):
    """The draft model is the target's twin: whatever the free drafters got wrong, its own record is without a miss."""
    made = []

    class Spied(cascade.Cascade):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "Costs", lambda: FixedCosts(per_draft=0.3))
        patch.setattr(admission, "Cascade", Spied)
        pair = toy_pair(5, order=2)[0], toy_pair(5, order=2)[0]
        request = [([1, 2, 3], Settings(draft="auto", max_new_tokens=90, temperature=1.0, seed=3))]
        share = test_cascade.decode(request, pair=pair, eos=())[2][0].by_drafter
    assert any(share[name]["accepted"] < share[name]["tested"] for name in share), "somebody was wrong"
    assert share["model"]["tested"] > 0
    assert made[0]._model._acceptance._accepted == made[0]._model._acceptance._tested


def a_row_s_guesses_do_not_depend_on_its_neighbours(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "Costs", lambda: FixedCosts())
        batch = [
            (test_cascade.REPEATS, Settings(draft=draft, draft_length=4, max_new_tokens=50))
            for draft in ("model", "ngram")
        ]
        together = test_cascade.decode(batch, eos=())[2]
        alone = [test_cascade.decode([request], eos=())[2][0] for request in batch]
    assert [each.by_drafter for each in together] == [each.by_drafter for each in alone]


def fixed_drafts_stay(monkeypatch):
    with monkeypatch.context() as patch:
        test_cascade.test_fixed_drafts_of_a_batch_are_never_cut(patch)


def what_the_model_missed_is_paid_for(monkeypatch):
    test_cascade.test_a_guess_pays_for_what_the_draft_model_then_lacks()
    test_cascade.test_rows_of_a_batch_pay_for_what_the_draft_model_then_lacks()
    test_vigil.test_asking_is_settled_in_steps_alone_and_a_row_pays_its_part_of_a_wide_one()


CHECKS = [  # those first that take least
    what_the_model_missed_is_paid_for,
    guesses_are_scored_right,
    rows_teach,
    periods_go_on,
    start_up_is_measured,
    asking_pays_or_sleeps,
    choices_are_the_best,
    texts_are_bounded_and_apart,
    others_draft_while_the_model_rests,
    fixed_drafts_stay,
    automata_hold,
    shares_add_up,
    earlier_answers_help,
    the_model_is_judged_by_its_own_drafts,
    a_row_s_guesses_do_not_depend_on_its_neighbours,
    the_draft_s_cache_is_right,
    readers_find_their_place,
    laws_hold,
]

A, P, D = suffix.SuffixAutomaton, suffix.SuffixPool, decoder.Decoder

MUTANTS = [
    Mutant("a split part forgets what followed", A, "_keep", "self.successor[like]", "-1"),
    Mutant("a split part is linked past", Automaton, "_split", "self.link[found] = part", "pass"),
    Mutant("a reader ignores splits", A, "step", "matched <= self.length[self.link[state]]", "False"),
    Mutant("a reader claims its old match", A, "step", "matched = self.length[state]", "pass"),
    Mutant("exceptions do not count", A, "_learn", "self.confidence[state] >>= 1", "pass"),
    Mutant("matches do not grow", suffix.Cursor, "candidates", "matched + 1", "matched"),
    Mutant("the text's end stops a guess", suffix.Cursor, "candidates", "if confidence[state]:", "if True:"),
    Mutant(
        "texts run into each other", P, "add", "(*tokens[-self._window + 1 :], _END)", "tokens[-self._window + 1 :]"
    ),
    Mutant("nothing is dropped", P, "_index", "[generations[-1], Suffix", "[*generations, Suffix"),
    Mutant("a text is taken in twice", suffix.OwnText, "take", "self._taken = len(tokens)", "pass"),
    Mutant("a row's text grows for ever", suffix.OwnText, "take", "== self._window", "== -1"),
    Mutant("the older generation stands still", suffix.OwnText, "take", "self._older.step(tokens[at])", "pass"),
    Mutant("a period ends with the text", ngram.NgramDrafter, "candidates", "i % period", "i"),
    Mutant("guesses behind a miss are counted", free.Calibrated, "score", "break", "continue"),
    Mutant("every guess was right", free.Calibrated, "score", "guessed == token)", "True)"),
    Mutant("survivals do not multiply", free.Calibrated, "look", "survival *= rates", "survival = rates"),
    Mutant(
        "rows of the token before",
        recycling.Successors,
        "record_round",
        "rows[len(new) : len(fed)]",
        "rows[len(new) - 1 : len(fed) - 1]",
    ),
    Mutant("rejected rows teach nothing", recycling.Successors, "record_round", "len(new) < len(fed)", "False"),
    Mutant("a sure successor is replaced at once", recycling.Successors, "record", "certainty > 1", "False"),
    Mutant(
        "only text that was drafted is scored", cascade.Cascade, "observe", "each.score(new)", "each.score(fed[1:])"
    ),
    Mutant("the model before any guess", cascade.Cascade, "choose", "promised > beside(", "promised > 0 * beside("),
    Mutant("the model never", cascade.Cascade, "choose", "promised > beside(", "promised > 99 + beside("),
    Mutant("the model beyond its room", cascade.Cascade, "choose", "min(limit, model_limit)", "limit"),
    Mutant("no try after a rest", cascade.Cascade, "_from_model", "this.explores", "False"),
    Mutant("what does not pay by itself is a try", cascade.Cascade, "_from_model", "this.explores", "True"),
    Mutant("verification is free", prices.Prices, "steps", "steps[width] for width", "steps[2] for width"),
    Mutant("they never sleep", vigil.Vigil, "_rest", "self._nap + 1", "0"),
    Mutant("all sleep while the model rests", D, "_plan", "and all(map(dozes, rows))", ""),
    Mutant("they sleep while the model rests", cascade.Cascade, "dozes", "self._vigil.sleeps_on", "True"),
    Mutant("they never wake", vigil.Vigil, "tick", "self._sleep - 1", "self._sleep"),
    Mutant("all rows begin by asking", vigil.Vigil, "__init__", "habit.rest + paused", "0"),
    Mutant("a break never ends", vigil.Vigil, "tick", "self._habit.rest - 1", "self._habit.rest"),
    Mutant("every nap is a row that gave up", vigil.Vigil, "_rest", "if self._hopes", "if True"),
    Mutant("who was worth it is not asked", vigil.Habit, "pays", "_PATIENCE, 0, 0", "_PATIENCE, self.pause, self.rest"),
    Mutant("breaks stay short", vigil.Habit, "give_up", "2 * self.pause", "self.pause"),
    Mutant("who sleeps reads the prompt", cascade.Cascade, "begin", "if self._vigil.awake", "if True"),
    Mutant("who sleeps wakes whatever it has to read", vigil.Vigil, "put_off", "rounds / _READING", "0 * rounds"),
    Mutant("who sleeps wakes when that takes all it wrote", vigil.Vigil, "put_off", "/ _READING", ""),
    Mutant("what reading takes is never learnt", vigil.Habit, "read", "tokens >= _A_PROMPT", "False"),
    Mutant("naps stay short", vigil.Vigil, "_rest", "2 * self._nap", "self._nap"),
    Mutant("a guess that failed saved time", vigil.Vigil, "settle", "+ saved,", "+ abs(saved),"),
    Mutant("asking is free", vigil.Habit, "record", "(latest - self.price)", "0.0"),
    Mutant("one slow round is the price", vigil.Habit, "record", "min(seconds, _OUTLIER * self.price)", "seconds"),
    Mutant("what they slept through is lost", cascade.Cascade, "_catch_up", "self._known - 1", "len(tokens) - 1"),
    Mutant(
        "siblings sleep too",
        cascade.Cascade,
        "take",
        "self._tell_eager(tokens)\n        self._glance",
        "self._glance",
    ),
    Mutant("a wide step is another row's", cascade.Cascade, "_savings", "prices.drafted(drafts)", "0"),
    Mutant("ragged rows wait for the longest", prices.Prices, "drafted", "if self.ragged", "if False"),
    Mutant("all pay alike for ragged drafts", cascade.Cascade, "_savings", "own / max", "1 / max"),
    Mutant("a mean is rounded down", prices.Prices, "step_width", "math.ceil(", "int("),
    Mutant(
        "rows stay ragged", prices.Prices, "begin", "self.widths, self.ragged = widths, ragged", "self.ragged = ragged"
    ),
    Mutant(
        "guesses leave the model nothing to read",
        joint,
        "beside",
        " + missed",
        "",
    ),
    Mutant("a batch leaves it nothing to read", joint, "together", "speed >= alone", "speed >= this.otherwise"),
    Mutant("one token a row is missed", joint, "together", "max(promised)", "1.0"),
    Mutant("what it missed is saved", cascade.Cascade, "_savings", " - missed", ""),
    Mutant("it misses what it would not read", cascade.Cascade, "_savings", "/ rows if promised else 0.0", "/ rows"),
    Mutant("a fixed length is cut", cascade.Cascade, "_best_guess", "not whole or", "True or"),
    Mutant("answers are not remembered", cascade.Cascade, "finish", "self._commons.pool.add(tokens)", "pass"),
    Mutant("a seed of the past survives", admission.Admission, "forget", "self.commons = Commons()", "pass"),
    Mutant("the model is judged by others' drafts", D, "_extend", 'if draft.by == "model":', "if True:"),
    Mutant("a fixed draft is cut", joint.Plan, "cut", "self.whole or", "False or"),
    Mutant("the model's call wipes out guesses", D, "_propose", "new if n else old", "new"),
    Mutant("a moved row leaves its draft cache", D, "_retire", "self._drafting.move(len(live), place)", "pass"),
    Mutant(
        "the model's unlikely drafts are dropped",
        D,
        "_propose",
        "new if n else old",
        "old if n and new.q and new.q[0][new.tokens[0]] < 0.4 else new if n else old",
    ),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_healthy_code_passes(check, monkeypatch):
    check(monkeypatch)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, CHECKS, monkeypatch)
