"""The tests of grammars are tested: each of these bugs must be found by one of them."""

from __future__ import annotations

import functools
import random

import pytest
import test_grammar
from support_grammar import grammars
from test_mutants import Mutant, must_die

from leadout.runtime import admission, grammar
from leadout.runtime.controller import cascade
from leadout.runtime.drafters import forced, model_drafter
from leadout.runtime.grammars import Grammars
from leadout.runtime.rules import sampling
from leadout.runtime.settings import Settings


def laws_hold(monkeypatch):
    for options in test_grammar.LAWS[:2]:
        test_grammar.test_whole_runs_have_the_target_s_law_on_what_the_grammar_allows(options, monkeypatch)


def processors_come_after(monkeypatch):
    test_grammar.test_processors_come_after_the_grammar("rejection", monkeypatch)


def answers_stay(monkeypatch):
    for sampling_ in test_grammar.SAMPLINGS[:2]:
        asked = test_grammar.requests(**sampling_, draft="model", draft_length=4)
        plain = test_grammar.alone(asked)
        assert test_grammar.written(asked)[:2] == plain
        settings = (settings for _, settings in asked)
        assert all(map(test_grammar.is_legal, plain[0], settings, plain[1]))


def states_are_functions_of_the_text(monkeypatch):
    check = test_grammar.test_what_was_asked_before_changes_no_answer.hypothesis.inner_test
    numbers = random.Random(1)
    for _ in range(60):
        parts = numbers.choices(["a", "[ab]", "ab", "c?", "(gh|h)", "d*", "[a-k]{1,2}", "(cab|ca)", "b+", "g"], k=3)
        steps = [
            (numbers.choice("qaqef"), numbers.choices(range(test_grammar.VOCAB), k=numbers.randrange(5)))
            for _ in range(9)
        ]
        check(parts, steps)


def what_is_kept_is_used(monkeypatch):
    """A mask that was worked out for a draft's row is not worked out again for the target's."""
    bound, looked = test_grammar.fresh({"regex": "[a-k]{9}"}, []), []
    matcher = bound._matcher

    class Watched:
        def __getattr__(self, name):
            looked.append(name)
            return getattr(matcher, name)

    bound._matcher = Watched()
    for _ in range(3):
        for drafted in ([], [0], [0, 1]):
            test_grammar.says(bound, drafted)
            assert bound.allows(2, drafted)
    assert looked.count("unsafe_compute_mask_ptr") == 3 and looked.count("rollback") == 0


def copies_are_apart(monkeypatch):
    one = test_grammar.fresh({"regex": "[ab]c[de]"}, [0])
    other = one.fork()
    other.extend([2])
    assert test_grammar.says(one, []) == (2,) and test_grammar.says(other, []) == (3, 4)
    assert other.allows(3, []) and not one.allows(3, []) and other.fork().allows(3, [])
    chain = sampling.Chain(Settings(regex="[ab]c[de]"), test_grammar.VOCAB, [1], (), one)
    copy = chain.fork()
    copy.extend([2])
    assert test_grammar.says(chain.grammar, []) == (2,) and test_grammar.says(copy.grammar, []) == (3, 4)


def texts_without_an_end_end(monkeypatch):
    for sampling_ in ({}, {"temperature": 1.0, "seed": 4}):
        draft = {"draft": "model", "draft_length": 4}
        test_grammar.test_where_no_token_ends_a_text_it_ends_when_it_is_complete(draft, sampling_)
    test_grammar.test_a_stop_string_and_a_complete_answer_share_a_round()


def what_is_forbidden_is_silent(monkeypatch):
    test_grammar.test_behind_what_is_forbidden_nothing_is_said_and_nothing_raised()


def columns_are_forbidden(monkeypatch):
    test_grammar.test_columns_without_a_token_are_forbidden()


def long_rows_hold(monkeypatch):
    test_grammar.test_a_long_row_s_shortcut_gives_what_the_whole_row_gives(1.0)


def dead_ends_are_errors_where_they_are_met(monkeypatch):
    check = test_grammar.test_what_cannot_be_spelled_is_an_error_where_the_text_comes_to_it_and_not_in_a_draft
    for options in ({"draft_length": 3}, {"draft_length": 5}, {"branches": (2, 2)}):
        check(options, {}, False, monkeypatch)


def limits_are_errors_where_they_are_met(monkeypatch):
    for length in (3, 5):
        test_grammar.test_a_limit_of_llguidance_is_an_error_where_the_text_comes_to_it_and_not_in_a_draft(
            length, "model", {}, False, monkeypatch
        )


def what_is_forced_is_drafted(monkeypatch):
    test_grammar.test_what_is_forced_is_guessed_with_its_end()
    test_grammar.test_auto_drafts_what_is_forced_for_requests_with_a_grammar_alone()
    test_grammar.test_rows_with_a_grammar_teach_others_nothing()


def failing(check):
    """``check``, which fails by an assertion where an error that it expects does not come."""

    @functools.wraps(check)
    def checked(monkeypatch):
        try:
            check(monkeypatch)
        except pytest.fail.Exception as error:
            raise AssertionError(str(error)) from None

    return checked


def grammars_are_kept_and_forgotten(monkeypatch):
    with monkeypatch.context() as patch:
        test_grammar.test_a_grammar_is_compiled_once_kept_and_forgotten(patch)
    one, made = Settings(regex="a"), grammars(test_grammar.WIDE)
    ended, endless = made.of(one, [test_grammar.LAST]), made.of(one, [])
    assert test_grammar.says(ended, [0]) == (test_grammar.LAST,) and len(test_grammar.says(endless, [0])) > 1
    stops = {"grammar": 'start: t "b"\nt[stop="c"]: /a+/'}
    test_grammar.test_what_cannot_be_compiled_is_refused_with_the_reason_before_anything_runs(stops, "taken back: roll")


CHECKS = [  # those first that take least
    copies_are_apart,
    columns_are_forbidden,
    what_is_forbidden_is_silent,
    what_is_kept_is_used,
    what_is_forced_is_drafted,
    dead_ends_are_errors_where_they_are_met,
    limits_are_errors_where_they_are_met,
    texts_without_an_end_end,
    long_rows_hold,
    grammars_are_kept_and_forgotten,
    answers_stay,
    processors_come_after,
    states_are_functions_of_the_text,
    laws_hold,
]
CHECKS = [failing(check) for check in CHECKS]

G, C = grammar.Grammar, sampling.Chain

MUTANTS = [
    Mutant("rows after a draft are as before it", C, "_allowed", "within(logits, drafted)", "within(logits, ())"),
    Mutant("a row with penalties is free", C, "_penalised", "self._allowed(logits, drafted)", "np.asarray(logits)"),
    Mutant("the likeliest is taken unasked", C, "_best_allowed", "grammar.allows(token, drafted)", "True"),
    Mutant("the likeliest is asked for elsewhere", C, "_best_allowed", "allows(token, drafted)", "allows(token, ())"),
    Mutant("a long row is not asked", sampling.Sampler, "_loudest", "chain.grammar.allows(token, drafted)", "True"),
    Mutant("a long row is not masked", sampling.Sampler, "_loudest", "chain.left(logits, drafted)",
           "(None, np.asarray(logits))"),
    Mutant("the text is not told", C, "extend", "self.grammar.extend(tokens)", "pass"),
    Mutant("a copy shares the state", C, "fork", "self.grammar.fork()", "self.grammar"),
    Mutant("what is supposed is in no mask", grammar.Supposed, "within", "[*self._tokens, *drafted]", "drafted"),
    Mutant("what is supposed is not seen", grammar.Supposed, "allows", "[*self._tokens, *drafted]", "drafted"),
    Mutant("what is supposed is forgotten", grammar.Supposed, "fork", "self._tokens", "()"),
    Mutant("what was known of another draft stays", G, "_place", "_places[same + 1 :]", "_places[same + 2 :]"),
    Mutant("a draft is never taken back", G, "_stand", "back > 0 and", "False and"),
    Mutant("what was taken back is not taken again", G, "_stand", "if back < 0", "if False"),
    Mutant("one too few is taken back", G, "_stand", "rollback(back)", "rollback(max(1, back - 1))"),
    Mutant("forbidden drafts are gone on with", G, "_place", "same == count else None",
           "same == count else self._places[-1]"),
    Mutant("a known token is any token", G, "allows", "place.allowed == token", "place.allowed >= 0"),
    Mutant("any spelling will do", G, "_legal", "token == forced[0]", "matcher.validate_tokens([token]) == 1"),
    Mutant("a complete text goes on", G, "_legal", "or token in self._compiled.ends", "or True"),
    Mutant("nothing is kept", G, "_looked", "place.known = True", "pass"),
    Mutant("the stand-in may be written", G, "_looked", "compiled.stand_in) is not None", "None) is not None"),
    Mutant("the stand-in may be chosen", G, "_legal", "token != self._compiled.stand_in and", ""),
    Mutant("a complete text has no way out", G, "_looked", "mask.any() or not matcher.is_accepting()", "True"),
    Mutant("the longest text is the complete one", G, "ending", "return count\n", "continue\n"),
    Mutant("the text is not remembered", G, "extend", "self._text += tokens", "pass"),
    Mutant("a broken matcher stays", G, "_failure", "self._renew()", "pass"),
    Mutant("a limit in a draft is one of the text", G, "_place", "self._take_singly(new)", "0"),
    Mutant("what was taken before a limit is lost", G, "_take_singly", "return count\n", "return 0\n"),
    Mutant("a limit is met and stays", G, "_take_singly", "self._matcher = before", "pass"),
    Mutant("a draft that cannot go on is an error", model_drafter.ModelDrafter, "_choose", "and not draft.tokens", ""),
    Mutant("what cannot be taken back is compiled", G, "check", "not self._matcher.rollback(1)", "False"),
    Mutant("all ends are one", Grammars, "of", "frozenset(ends))", "frozenset([0]))"),
    Mutant("grammars are compiled for each", Grammars, "of", "self._kept.get(key)", "None"),
    Mutant("what is asked for again counts as old", Grammars, "of", "self._kept.move_to_end(key)", "pass"),
    Mutant("grammars are kept for ever", Grammars, "of", "> _KEPT", "< 0"),
    Mutant("the latest is dropped first", Grammars, "of", "last=False", "last=True"),
    Mutant("grammars are not forgotten", admission.Admission, "forget", "self._grammars.forget()", "pass"),
    Mutant("a complete answer does not stop", admission, "ending", "complete if told is None", "None if told is None"),
    Mutant("tokens behind the end are told", admission, "ending", "stop(new[:complete])", "stop(new)"),
    Mutant("all texts are of one kind", admission.Admission, "row", ", grammar is not None)", ")"),
    Mutant("what is forced is drafted by nobody", cascade.Commons, "drafters",
           "made.append(ForcedDrafter(grammar))", "pass"),
    Mutant("the prompt is part of the answer", forced.ForcedDrafter, "take", "self._taken = len(tokens)\n    if (",
           "self._taken = 0\n    if ("),
    Mutant("a shorter text is not taken back", forced.ForcedDrafter, "take", "self._matcher.rollback(back)", "pass"),
    Mutant("a guess moves the state", forced.ForcedDrafter, "candidates", "matcher.rollback(taken)", "pass"),
    Mutant("no end is guessed", forced.ForcedDrafter, "candidates", "if complete and", "if False and"),
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_healthy_code_passes(check, monkeypatch):
    check(monkeypatch)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, CHECKS, monkeypatch)
