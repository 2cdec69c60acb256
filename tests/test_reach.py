"""What a draft model reads of a long text is its end. No answer differs for it, and its drafts are what that end makes
of them."""

from __future__ import annotations

import math
import types

import numpy as np
import pytest
from support_runtime import FixedCosts, collect, decode_law, distance, sharpened, target_law, toy_pair
from test_mutants import Mutant, must_die
from test_policy import costs

from leadout.engines.toy import mixed_law, table_law
from leadout.runtime import ahead
from leadout.runtime.controller import policy, reading
from leadout.runtime.controller.policy import AutoLength, FixedLength, Pace
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters import model_drafter
from leadout.runtime.prefill import ALL
from leadout.runtime.samples import Sample
from leadout.runtime.settings import Settings

VOCAB, REACH = 11, 20
LONG = [(3 * i * i + i) % VOCAB for i in range(60)]


def drafting(prompt=LONG):
    """A drafter whose drafts depend on all that it has read, and a row for it."""
    making = Decoder(*toy_pair(VOCAB, context=256))
    row = making._admission.row(0, prompt, Settings(draft="model", max_new_tokens=99), Sample(), (), None)
    return making._model, row


def drafted(drafter, *rows, length=4):
    return [draft.tokens for draft in drafter.propose(rows, [length] * len(rows))]


def from_the_end(text, reach=REACH):
    """What a drafter says that knows the last ``reach`` tokens of the text and no other."""
    drafter, row = drafting(text[-reach:])
    drafter.reset([row])
    return drafted(drafter, row)[0]


def committed(row, count):
    row.sequence.tokens += [(5 * i + 2) % VOCAB for i in range(count)]


def only_the_end_of_a_prompt_is_read(*_):
    drafter, row = drafting()
    drafter.reset([row], REACH)
    assert drafter.unread([row]) == REACH
    drafter.prefill([row])
    assert drafter._stepper.engine.calls == [(1, REACH)] and drafter.behind([row]) == 0
    assert drafted(drafter, row)[0] == from_the_end(LONG, REACH + 1)
    drafter.reset([row])
    drafter.prefill([row])
    assert drafted(drafter, row)[0] == from_the_end(LONG, 60) != from_the_end(LONG, REACH + 1)


def after_a_rest_it_begins_anew(*_):
    drafter, row = drafting()
    drafter.reset([row], REACH)
    drafter.prefill([row])
    committed(row, REACH - 2)
    assert drafter.behind([row]) == REACH - 3, "but for two that a draft in use may lack"
    assert drafted(drafter, row)[0] == from_the_end(row.sequence.tokens, 2 * REACH - 1), "so much it makes up for"
    drafter.observe(0, 1)
    assert drafter._valid == [2 * REACH - 1 + 1], "of the four drafted the first was right"
    drafter.observe(0, 0)
    committed(row, REACH + 2)
    assert drafter.behind([row]) == REACH - 2
    assert drafted(drafter, row)[0] == from_the_end(row.sequence.tokens) and drafter.late == REACH - 2


def rows_begin_each_for_itself(*_):
    drafter, row = drafting()
    _, other = drafting(LONG[10:40])
    rows = [row, other, row]
    drafter.reset(rows, REACH)
    assert drafter.unread(rows) == 2 * REACH, "equal prompts are read once"
    drafter.prefill(rows)
    ends = [from_the_end(each.sequence.tokens, REACH + 1) for each in rows]
    assert drafted(drafter, *rows) == ends
    for place in range(3):
        drafter.observe(place, 0)
    drafter.move(1, 0)
    committed(other, 3)
    assert drafted(drafter, other) == [from_the_end(other.sequence.tokens, REACH + 4)]
    assert len(other.sequence.tokens) == 33 and drafter._begins[:2] == [9, 9]


def beside_others_it_reads_as_much_as_they_draft(*_):
    drafter, row = drafting()
    _, other = drafting(LONG[10:40])
    drafter.reset([row, other], REACH)
    drafter.prefill([row, other])
    committed(other, 2 * REACH)
    assert drafter.propose([row, other], [3, 0])[1].tokens == []
    assert drafted(drafter, row, other)[1] == from_the_end(other.sequence.tokens)


def of_a_text_that_ends_before_its_cache_begins_it_holds_nothing(*_):
    drafter, row = drafting()
    drafter.reset([row], REACH)
    drafter.prefill([row])
    assert drafter._begins[0] > 1 and drafter._valid[0] > 0
    drafter.keep(0, drafter._begins[0] - 1)
    assert drafter._valid == [0]


def the_next_turn_goes_on_from_there(*_):
    drafter, row = drafting()
    drafter.reset([row], REACH)
    drafter.prefill([row])
    said = [*LONG, *drafted(drafter, row)[0]]
    for more, read, known in ((3, 3, REACH + 8), (REACH + 9, REACH, REACH + 1)):
        said = [*said, *[(7 * i + 1) % VOCAB for i in range(more)]]
        _, row = drafting(said)
        drafter.reset([row], REACH)
        assert drafter.unread([row]) == read
        drafter.prefill([row])
        assert drafted(drafter, row)[0] == from_the_end(said, known)


def ahead_of_the_target_it_reads_no_other_text(*_):
    """With a law of the last two tokens, a draft that knows more than those says the same."""
    both = {}
    for reach in (ALL, 6):
        for working in (False, True):
            target, draft = toy_pair(VOCAB, order=2, context=256)
            made = Decoder(target, draft, costs=FixedCosts(), draft_ahead=working)
            made._pace.reach = lambda *_, reach=reach: reach
            request = LONG, Settings(max_new_tokens=60, draft="model", draft_length=3)
            texts, last = collect(made.decode([request], eos_token_ids=()), 1)
            assert draft.calls[0] == (1, min(reach, len(LONG) - 1))
            both[reach, working] = texts, last[0].stats.accepted, last[0].stats.rounds
    assert len(set(map(str, both.values()))) == 1 and both[ALL, False][1] > 20


def beyond_its_context_it_goes_on_from_the_end(*_):
    making = Decoder(toy_pair(VOCAB, context=256)[0], toy_pair(VOCAB, context=70)[1])
    row = making._admission.row(0, LONG, Settings(draft="model", max_new_tokens=120), Sample(), (), None)
    drafter = making._model
    drafter.reset([row], 50)
    assert drafter.unread([row]) == 35, "half of its context"
    drafter.reset([row])
    drafter.prefill([row])
    assert drafter._stepper.engine.calls == [(1, 35)], "with what is left a draft and the next find room"
    assert drafted(drafter, row)[0] == from_the_end(LONG, 36)
    drafter.observe(0, 0)
    committed(row, 2)
    assert drafted(drafter, row)[0] == from_the_end(row.sequence.tokens, 38), "nothing is read again before it must be"
    drafter.observe(0, 0)
    committed(row, 1)
    assert drafted(drafter, row)[0] == from_the_end(row.sequence.tokens, 35) and drafter.late == 33
    drafter.observe(0, 0)
    committed(row, 5)
    row.sequence.limit = len(row.sequence.tokens) - 60 + 3  # the text ends before its context does
    assert drafted(drafter, row, length=2)[0] == from_the_end(row.sequence.tokens, 40)[:2] and drafter.late == 3


def a_text_of_any_length_is_drafted_to_its_end(*_):
    for context, length, ahead_too in ((40, 3, False), (40, 3, True), (12, 3, True), (5, 6, False), (1, 1, False)):
        for sampling in ({}, {"temperature": 1.0, "seed": 3}):
            settings = Settings(max_new_tokens=80, draft="model", draft_length=length, **sampling)
            alone = Settings(max_new_tokens=80, draft="none", **sampling)
            for prompts in ([LONG], [LONG, LONG[:7], LONG[:30]]):
                target, draft = toy_pair(VOCAB, order=2, context=256)[0], toy_pair(VOCAB, order=2, context=context)[1]
                made = Decoder(target, draft, costs=FixedCosts(), draft_ahead=ahead_too)
                texts, last = collect(made.decode([(p, settings) for p in prompts], eos_token_ids=()), len(prompts))
                plain = Decoder(toy_pair(VOCAB, order=2, context=256)[0], None)
                assert texts == collect(plain.decode([(p, alone) for p in prompts], eos_token_ids=()), len(prompts))[0]
                drafts = [stats.drafted / stats.rounds for stats in (each.stats for each in last.values())]
                assert min(drafts) > 0.9 * min(length, context + 1 - context // 2)


def what_is_read_pays(*_):
    pace = Pace(costs(per_draft=0.1))
    auto, fixed = AutoLength(pace), FixedLength(3)
    assert pace.reach([auto], 64) == pytest.approx(3 * math.sqrt(64 * 20), abs=1), "what it costs is not known"
    pace.read([auto], 100, 2.0)
    assert pace.reach([auto], 64) == pytest.approx(3 * math.sqrt(64 / 0.02), abs=1)
    assert pace.reach([auto], 256) == pytest.approx(2 * pace.reach([auto], 64), abs=1)
    assert pace.reach([auto], 1) == 32
    assert pace.reach([fixed], 64) == pace.reach([auto, fixed], 64) == ALL, "a fixed draft depends on no clock"


def a_decoder_asks_how_far(*_):
    target, draft = toy_pair(VOCAB, context=256)
    made = Decoder(target, draft, costs=FixedCosts())
    made._pace.reach = types.MethodType(lambda *given: asked.append(given[1:]) or REACH, made._pace)
    asked = []
    collect(made.decode([(LONG, Settings(max_new_tokens=7, draft="model"))], eos_token_ids=()), 1)
    assert draft.calls[0] == (1, REACH) and asked[0][1] == 7


CHECKS = [
    of_a_text_that_ends_before_its_cache_begins_it_holds_nothing,
    only_the_end_of_a_prompt_is_read,
    after_a_rest_it_begins_anew,
    rows_begin_each_for_itself,
    beside_others_it_reads_as_much_as_they_draft,
    the_next_turn_goes_on_from_there,
    ahead_of_the_target_it_reads_no_other_text,
    beyond_its_context_it_goes_on_from_the_end,
    a_text_of_any_length_is_drafted_to_its_end,
    what_is_read_pays,
    a_decoder_asks_how_far,
]
MODEL = model_drafter.ModelDrafter
MUTANTS = [
    Mutant("all is read", MODEL, "_skip", "> self._reach", "> 10**9"),
    Mutant(
        "a cache that begins anew keeps its slots",
        MODEL,
        "_skip",
        "length - min(self._reach, self._half)), 0",
        "length), 0",
    ),
    Mutant("a rest is made up for", MODEL, "_unfed", "self._skip(place, row, length)", "pass"),
    Mutant("a context is never full", MODEL, "_skip", "or ends > self._context + 1", "or False"),
    Mutant("a full context is begun with", MODEL, "_skip", "min(self._reach, self._half)", "self._reach"),
    Mutant("a text near its end begins anew", MODEL, "_skip", "row.sequence.room, ", ""),
    Mutant("nothing is drafted behind a draft", MODEL, "_skip", "min(AHEAD, row.sequence.room, self._room)", "1"),
    Mutant("a draft is as long as its context", MODEL, "__init__", "+ 1 - self._half", "+ 1"),
    Mutant("it seems to read more than it does", MODEL, "_most", "min(reach, self._half)", "reach"),
    Mutant("it seems to lack all", MODEL, "behind", "min(self._reach, max(", "max(0, max("),
    Mutant("it seems to lack what it skipped", MODEL, "behind", "self._known(b)", "self._valid[b]"),
    Mutant("a row that moves begins where another did", MODEL, "move", ", self._begins[destination]", ", _"),
    Mutant("slots are places in the text", MODEL, "_begin", "row.sequence.length - begin", "row.sequence.length"),
    Mutant("what was fed ahead is kept whatever was said", MODEL, "keep", "length - self._begins[place]", "length"),
    Mutant("a turn reads all that is new", MODEL, "reset", "len(text) - held > self._reach", "False"),
    Mutant("a turn begins where the text does", MODEL, "reset", "[begin if held else self.first]", "[self.first]"),
    Mutant("a fixed draft depends on a clock", policy.Pace, "reach", "if bills_of(policies)", "if True"),
    Mutant("the price does not matter", reading.Reading, "reach", "/ each if", "/ 0.01 if"),
    Mutant("ahead reads all", ahead.AheadDrafter, "reset", "rows, reach)", "rows)"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_healthy_code_passes(check):
    check()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, CHECKS, monkeypatch)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_draft_that_knows_little_leaves_the_law_alone(rule, monkeypatch):
    monkeypatch.setattr(Pace, "reach", lambda *_: 1)
    target, other = table_law(3, seed=4), table_law(3, seed=5)
    prompt, laws = [1, 2, 1, 2, 1], (target, mixed_law(target, other, 0.8))
    found = decode_law(laws, 3, 3, monkeypatch, prompt, temperature=0.5, rule=rule, draft="model", draft_length=2)
    assert distance(found, target_law(sharpened(target, prompt, power=2.0), 3, 3)) < 1e-12
    assert np.isclose(sum(found.values()), 1.0)
