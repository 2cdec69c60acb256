"""The tests of drafting ahead are tested: each of these bugs must be found by one of them."""

from __future__ import annotations

import pytest
import test_ahead
import test_ahead_beside
from test_mutants import Mutant, must_die

from leadout.runtime import ahead
from leadout.runtime.drafters import model_drafter
from leadout.runtime.rules import sampling


def rounds_are_the_same(monkeypatch):
    for options in test_ahead.SAMPLINGS[1:3]:
        with monkeypatch.context() as patch:
            test_ahead.test_every_round_is_what_it_is_without(options, None, patch)


def laws_hold(monkeypatch):
    for rule in ("rejection", "block"):
        with monkeypatch.context() as patch:
            test_ahead.test_the_law_of_whole_runs_is_the_target_s(rule, patch)


def lengths_change(monkeypatch):
    with monkeypatch.context() as patch:
        test_ahead.test_lengths_that_change_and_free_drafters_in_between(test_ahead.SAMPLINGS[2], patch)


def batches_wait(monkeypatch):
    with monkeypatch.context() as patch:
        test_ahead.test_a_batch_works_ahead_only_once_a_single_row_is_left(patch)


def steps_are_saved(monkeypatch):
    with monkeypatch.context() as patch:
        test_ahead.test_a_kept_draft_takes_no_steps_and_a_dropped_one_leaves_the_cache_right(patch)


def faults_are_told(monkeypatch):
    test = test_ahead.test_what_fails_ahead_is_an_error_and_the_target_s_own_comes_first
    with monkeypatch.context() as patch:
        try:
            test(("draft",), "the draft failed", patch)
        except pytest.fail.Exception as missing:  # what pytest.raises raises is no AssertionError
            raise AssertionError(missing) from None


def the_thread_is_at_rest(monkeypatch):
    test_ahead.test_the_thread_gives_the_same_text_and_is_at_rest_between_rounds()


def it_is_off_where_it_loses(monkeypatch):
    test_ahead.test_worth_goes_the_better_way_and_tries_the_other_again(1.2, 0.2, True)
    test_ahead.test_worth_goes_the_better_way_and_tries_the_other_again(1.5, 0.1, False)
    test_ahead.test_worth_compares_with_what_a_context_cost_before()


def watched_drafts_teach_what_was_seen(monkeypatch):
    for most in (2, None):
        with monkeypatch.context() as patch:
            test_ahead_beside.test_watched_drafts_write_the_same_text(most, patch)
    test_ahead_beside.test_a_resumed_draft_asks_before_it_grows()


CHECKS = [  # those first that take least
    it_is_off_where_it_loses,
    faults_are_told,
    batches_wait,
    steps_are_saved,
    watched_drafts_teach_what_was_seen,
    lengths_change,
    rounds_are_the_same,
    the_thread_is_at_rest,
    laws_hold,
]

A = ahead.AheadDrafter
MUTANTS = [
    Mutant("kept although the text is another", A, "_settle", "committed != run.supposed", "False"),
    Mutant(
        "the bonus token is not compared",
        A,
        "_settle",
        "committed != run.supposed",
        "committed[:-1] != run.supposed[:-1]",
    ),
    Mutant("never kept", A, "_settle", "committed != run.supposed", "True"),
    Mutant("the cache of a dropped draft stays", A, "_settle", "same = agreement(", "same = 99 + 0 * agreement("),
    Mutant("a draft longer than was asked for", A, "_settle", "tokens[:length]", "tokens"),
    Mutant("a cut draft's cache counts", A, "_begin", "row.sequence.cached + len(draft.tokens)", "10**6"),
    Mutant("the bonus token is not supposed", A, "_go_on", "run.supposed += guessed", "guessed"),
    Mutant(
        "the verified drafts are not supposed", A, "_go_on", "suppose(run.row, run.supposed)", "suppose(run.row, [])"
    ),
    Mutant("history is not supposed", ahead, "suppose", "chain.extend(tokens)", "pass"),
    Mutant("supposing commits", ahead, "suppose", "row.sampler.chain.fork()", "row.sampler.chain"),
    Mutant("supposing writes the text", ahead, "suppose", "[*row.sequence.tokens, *tokens]", "row.sequence.tokens"),
    Mutant(
        "a fork shares its history",
        sampling.Chain,
        "fork",
        "self._seen.fork(), self._written.fork()",
        "self._seen, self._written",
    ),
    Mutant("q is forgotten", A, "_settle", "q and q[:length]", "None"),
    Mutant("q of another token", A, "_settle", "q and q[:length]", "q and [q[0]] * length"),
    Mutant("faults are swallowed", A, "_end", "work.get()", "work.get() and None"),
    Mutant("the worker is not waited for", A, "_end", "work.get()", "None"),
    Mutant(
        "kept tokens are charged",
        model_drafter.ModelDrafter,
        "resume",
        "self._stepped()",
        "self.steps = len(tokens) + 1",
    ),
    Mutant("drafts are begun anew", model_drafter.ModelDrafter, "_unfed", "*drafted[max(0, known - length) :]", ""),
    Mutant("the slower way is taken", ahead.Worth, "_decide", "with_it < without", "with_it > without"),
    Mutant("slow first calls decide", ahead.Worth, "_decide", "[:-_OUTLIERS]", ""),
    Mutant("prices follow what is done", ahead.Worth, "record", "Costs(self._costs.entries())", "self._costs"),
    Mutant("drafts nobody watched have classes", model_drafter.ModelDrafter, "resume", "and not kept", ""),
    Mutant("a resumed draft grows unasked", model_drafter.ModelDrafter, "resume", "not tokens or", "not self.steps or"),
    Mutant("kept drafts are certain", model_drafter.ModelDrafter, "resume", "watch.missed(0, kept)", "pass"),
    Mutant("all contexts cost alike", ahead.Worth, "_price", "context_bucket(past)", "0"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_healthy_code_passes(check, monkeypatch):
    check(monkeypatch)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, CHECKS, monkeypatch)
