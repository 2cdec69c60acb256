"""The tests of siblings are tested: each of these bugs must be found by one of them."""

from __future__ import annotations

import numpy as np
import pytest
import test_siblings
from test_mutants import Mutant, must_die

from leadout.runtime import admission, decoder
from leadout.runtime.controller import cascade
from leadout.runtime.drafters import family, model_drafter, siblings
from leadout.runtime.drafters.automaton import Automaton
from leadout.runtime.rules import noise


def turns(count=40):
    """Texts of three tokens written by turns, the same ones every time."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        texts = [rng.integers(0, 3, rng.integers(0, 11)).tolist() for _ in range(rng.integers(2, 5))]
        yield rng.integers(0, 3, rng.integers(1, 9)).tolist(), texts, rng.integers(0, 4, 40).tolist()


def families_hold(monkeypatch):
    for case in turns():
        test_siblings.test_a_family_knows_who_went_on_how_after_every_string.hypothesis.inner_test(*case)
        test_siblings.test_an_answer_goes_on_where_most_of_the_others_went.hypothesis.inner_test(*case)


def majorities_are_drafted(monkeypatch):
    test_siblings.test_the_majority_is_drafted_and_dissent_is_told_apart()
    test_siblings.test_an_answer_that_repeats_itself_has_one_vote()


def families_are_bounded(monkeypatch):
    with monkeypatch.context() as patch:
        test_siblings.test_a_family_is_bounded_and_what_has_no_room_is_not_guessed(patch)


def streams_are_apart(monkeypatch):
    test_siblings.test_streams_of_a_seed_are_apart_and_the_first_is_the_seed_s_own()


def answers_are_the_same(monkeypatch):
    for draft in ("siblings", "auto"):
        test_siblings.test_an_answer_is_the_same_with_any_draft_and_any_number_of_siblings(draft, 4)


def laws_hold(monkeypatch):
    for case in (("siblings", "rejection", 3), ("auto", "block", 3)):
        test_siblings.test_two_answers_that_draft_from_each_other_are_independent_draws_from_the_law(*case, monkeypatch)


def rows_know_as_much(monkeypatch):
    with monkeypatch.context() as patch:
        test_siblings.test_rows_of_a_round_know_as_much_of_each_other_whoever_guesses_first(patch)


def finished_ones_help(monkeypatch):
    test_siblings.test_finished_answers_are_drafted_from()
    test_siblings.test_equal_prompts_of_a_batch_are_siblings_without_being_asked_for_together()
    test_siblings.test_samples_that_have_no_seed_share_the_one_that_was_drawn()


def prompts_are_fed_once(monkeypatch):
    test_siblings.test_equal_prompts_are_fed_once()


CHECKS = [  # those first that take least
    families_hold,
    majorities_are_drafted,
    families_are_bounded,
    streams_are_apart,
    rows_know_as_much,
    finished_ones_help,
    prompts_are_fed_once,
    answers_are_the_same,
    laws_hold,
]

F, S, D = family.Family, siblings.SiblingsDrafter, decoder.Decoder

# A function that others import by its name is changed where they hold it.
MUTANTS = [
    Mutant("a split part forgets the votes", F, "_keep", "self.votes[like].copy()", "{}"),
    Mutant("a split part shares the votes", F, "_keep", "self.votes[like].copy()", "self.votes[like]"),
    Mutant("a split part is linked past", Automaton, "_split", "self.link[found] = part", "pass"),
    Mutant("a known edge is not split", F, "_follow", "self._split(state, token)", "self.next[state][token]"),
    Mutant("only the longest context votes", F, "extend", "state = self.link[state]", "break"),
    Mutant("the last vote is the only one", F, "extend", "before | text", "text"),
    Mutant("all answers have one vote together", F, "join", "1 << self._answers", "2"),
    Mutant("a family grows for ever", F, "extend", "> _MOST", "< 0"),
    Mutant("an answer drafts from itself", S, "_count", "texts & ~self._text", "texts"),
    Mutant("the minority is drafted", S, "_count", "> most", ">= most"),
    Mutant("matches do not grow", S, "candidates", "matched + 1", "matched"),
    Mutant(
        "a match keeps its length", S, "candidates", "hops + 1\n            matched = family.length[state]", "hops + 1"
    ),
    Mutant("dissent is not told apart", siblings, "_evidence", "if ways == 1", "if True"),
    Mutant("the prompt is taken for the answer's", S, "take", "len(tokens)\n    for", "0\n    for"),
    Mutant(
        "a round's tokens are told when the row guesses", D, "_extend", "row.cascade.take(row.sequence.tokens)", "pass"
    ),
    Mutant("all answers share one stream", admission.Admission, "_stream", "sample.number + (", "0 + ("),
    Mutant("streams overlap with seeds", noise.Noise, "__init__", "seed | stream << 64", "seed + stream"),
    Mutant(
        "every call's answers are siblings",
        cascade.Commons,
        "drafters",
        "SiblingsDrafter(family)",
        "SiblingsDrafter(self._experiences.setdefault('x', family))",
    ),
    Mutant(
        "all prompts are one", test_siblings, "samples", "families[tuple(prompt)]", "max(families.values(), key=bool)"
    ),
    Mutant(
        "each answer has its own seed",
        test_siblings,
        "samples",
        "tuple(prompt)], seed)",
        "tuple(prompt)], seed + number)",
    ),
    Mutant(
        "prompts are copied from the front", decoder, "prefill", "reversed(range(len(prompts)))", "range(len(prompts))"
    ),
    Mutant("the first prompt is everybody's", decoder, "prefill", "copy_row(sources[place]", "copy_row(0"),
    Mutant("nothing is copied", decoder, "prefill", "sources[place] != place", "False"),
    Mutant("the draft's prompt is fed again", model_drafter.ModelDrafter, "prefill", "len(prompt) for", "0 for"),
    Mutant(
        "the draft is thought to know more",
        model_drafter.ModelDrafter,
        "prefill",
        "len(prompt) for",
        "len(prompt) + 1 for",
    ),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_healthy_code_passes(check, monkeypatch):
    check(monkeypatch)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, CHECKS, monkeypatch)
