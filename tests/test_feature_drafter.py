"""A head that reads its target's features: it says what it would say beside the true ones, sampled the law stays the
target's, and what it has read and what it lacks is counted as it is."""

from __future__ import annotations

import numpy as np
import pytest
from support_features import (
    BlockLaws,
    Laws,
    commit,
    continued,
    digests,
    drafting,
    reads_again_what_it_wrote,
    said,
    texts_are_the_target_s,
)
from support_runtime import (
    Branches,
    FixedCosts,
    ScriptedNoise,
    collect,
    distance,
    draw_with_coins,
    law,
    sharpened,
    target_law,
)
from test_mutants import Mutant, must_die

from leadout.engines.toy import ToyEngine
from leadout.errors import UsageError
from leadout.runtime import admission, steps
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters import feature_drafter, model_drafter
from leadout.runtime.drafters.feature_drafter import FeatureDrafter
from leadout.runtime.drafters.model_drafter import ModelDrafter
from leadout.runtime.samples import Sample
from leadout.runtime.settings import Settings
from leadout.runtime.vocabulary import VocabularyMap

VOCAB = 13
LONG = [(3 * i * i + i) % VOCAB for i in range(40)]
LAWS = Laws(VOCAB)


def pair(*, context=256):
    return LAWS.target(), LAWS.head(context)


def plain_pair(*, context=256):
    """The same without features: the draft knows by itself what the head is told."""
    return ToyEngine(LAWS.p, VOCAB), ToyEngine(LAWS.q_of, VOCAB, max_context=context)


def it_says_what_it_would_say_beside_the_true_features(*_):
    for lengths in ([5, 5, 5], [1, 6, 3], [4, 0, 2], [0, 0, 3], [1, 1, 1]):
        for prompts in ((LONG, LONG[:7], LONG[3:20]), (LONG, LONG, LONG[3:10]), (LONG[:5], LONG, LONG)):
            (one, rows), (other, again) = drafting(pair(), *prompts), drafting(plain_pair(), *prompts)
            assert isinstance(one._model, FeatureDrafter) and type(other._model) is ModelDrafter
            for accepted in (2, 0, 9):
                drafts = said(one, rows, lengths)
                assert drafts == said(other, again, lengths) and list(map(len, drafts)) == lengths
                kept = [min(accepted, len(draft)) for draft in drafts]
                for made, its in ((one, rows), (other, again)):
                    commit(made, its, drafts, kept, [(5 * accepted + place) % VOCAB for place in range(3)])


def text_is_read_beside_the_target_s(*_):
    made, (row,) = drafting(pair(), LONG)
    head = made._model._stepper.engine
    for length, accepted in ((4, 4), (3, 0), (6, 2), (1, 1), (5, 3)):
        (draft,) = said(made, [row], [length])
        text = row.sequence.length - 1  # slots
        assert not head.guessed[0, :text].any(), "of what is text no feature is a guess"
        assert head.guessed[0, text : text + length - 1].all(), "of what is drafted each is"
        commit(made, [row], [draft], [accepted], [1])


def a_step_a_token_and_what_is_unread_with_the_first(*_):
    made, (row,) = drafting(pair(), LONG)
    calls = made._model._stepper.engine.calls
    for length, accepted, width in ((4, 4, 1), (3, 0, 5), (6, 2, 1), (1, 0, 3)):  # four and two are read again
        calls.clear()
        (draft,) = said(made, [row], [length])
        assert calls == [(1, width)] + [(1, 1)] * (length - 1)
        assert made._model.steps == length and made._model.late == width - 1
        commit(made, [row], [draft], [accepted], [1])


def what_it_wrote_itself_it_reads_again(*_):
    reads_again_what_it_wrote(pair(), LONG)


def rows_that_leave_take_that_along(*_):
    made, rows = drafting(pair(), LONG, LONG[:9])
    drafts = said(made, rows, [2, 5])
    commit(made, rows, drafts, [0, 4], [7, 7])
    made._target.engine.copy_row(1, 0)
    made._model.move(1, 0)
    assert made._model.behind([rows[1]]) == 4
    alone, (row,) = drafting(pair(), LONG[:9])
    drafts = said(alone, [row], [5])
    commit(alone, [row], drafts, [4], [7])
    assert said(made, [rows[1]], [4]) == said(alone, [row], [4])


def what_the_cache_holds_is_beside_the_true_ones(*_):
    """The next prompt begins as the last text did: what was drafted there is read again."""
    for head, text, calls in continued(pair, LONG):
        assert sum(width for _, width in calls) < len(text), "not read anew"
        assert not head.guessed[0, : len(text) - 1].any()


def whatever_the_context_and_length_texts_are_the_target_s(*_):
    contexts = (256, "auto"), (256, 5), (256, 1), (30, 4), (5, 6), (2, 1)
    texts_are_the_target_s(pair, LONG, contexts, 0.8)


def of_long_texts_it_reads_the_end(*_):
    made, (row,) = drafting(pair(), LONG, reach=6)
    head = made._model._stepper.engine
    assert sum(width for _, width in head.calls) == 6
    said(made, [row], [3])
    assert not head.guessed[0, :7].any() and head.guessed[0, 7]
    assert made._model._begins == [begin := len(LONG) - 1 - 6]
    assert head.given[0, :7, 0].tolist() == digests(LONG)[begin:]


def read_again(made, prompt, reach=None):
    """What the head's slots were read beside, once a decoder goes on with another prompt."""
    row = made._admission.row(0, list(prompt), Settings(draft="model", max_new_tokens=9), Sample(), (), None)
    made._target.reset(1)
    made._prefill([row])
    made._model.reset([row], *([] if reach is None else [reach]))
    made._model.prefill([row])
    (begin,) = made._model._begins
    return begin, made._model._stepper.engine.given[0, : len(prompt) - 1 - begin, 0].tolist()


def behind_another_beginning_the_same_tokens_are_read_anew(*_):
    again = [9] * 40
    for first, reach in ((LONG, None), (LONG, 20), (again, 20)):
        for prompt in ([5, *first[1:]], [*first[:9], 5, *first[10:]], first[:22]):
            made, _ = drafting(pair(), first, reach=reach)
            begin, digested = read_again(made, prompt, reach)
            assert digested == digests(prompt)[begin:-1]


def what_an_interrupted_round_drafted_is_not_held(*_):
    made, (row,) = drafting(pair(), LONG)
    (draft,) = said(made, [row], [6])
    read_again(made, LONG + draft)
    assert not made._model._stepper.engine.guessed[0, : len(LONG + draft) - 2].any()


CHECKS = [  # those first that take least
    text_is_read_beside_the_target_s,
    a_step_a_token_and_what_is_unread_with_the_first,
    what_it_wrote_itself_it_reads_again,
    rows_that_leave_take_that_along,
    of_long_texts_it_reads_the_end,
    behind_another_beginning_the_same_tokens_are_read_anew,
    what_an_interrupted_round_drafted_is_not_held,
    it_says_what_it_would_say_beside_the_true_features,
    what_the_cache_holds_is_beside_the_true_ones,
    whatever_the_context_and_length_texts_are_the_target_s,
]
OURS, AGAIN = feature_drafter.FeatureDrafter, model_drafter.Rereader
MUTANTS = [
    Mutant("a feature of the token itself", OURS, "_of", "[place] + start - 1", "[place] + start"),
    Mutant("features of another place", OURS, "_of", "self._begins[place] + start - 1", "start"),
    Mutant("its own of text too", OURS, "_of", "start >= self._base[place]", "start"),
    Mutant("a guess one token old", OURS, "_of", "start - 1, start - 1 + count", "start - 2, start - 2 + count"),
    Mutant("the first row's for all", OURS, "_features", "self._places[b] if self._places else b, start", "0, start"),
    Mutant("prompts in another order", OURS, "_take", "map(list(prompts).index, prompts)", "range(len(prompts))"),
    Mutant("what was guessed is held", OURS, "reset", "min(held, true)", "held"),
    Mutant("what was being guessed is held", OURS, "reset", "min(self._valid[0], self._base[0])", "self._valid[0]"),
    Mutant("whatever stood before it", OURS, "_follows", "list(self._text[: self._begins[0]]) == list(before)", "True"),
    Mutant("prompts are drafts", OURS, "reset", "[ALL] * len(rows)", "[0] * len(rows)"),
    Mutant("drafted slots are valid", AGAIN, "observe", "observe(place, 0, path)", "observe(place, accepted, path)"),
    Mutant(
        "wide steps are told nothing", steps.Stepper, "_checked", "len(piece) for piece in pieces", "0 for _ in pieces"
    ),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_healthy_code_passes(check):
    check()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, CHECKS, monkeypatch)


@pytest.mark.parametrize("length", [1, 2, 3, "auto"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("kind", [Laws, BlockLaws])
def test_the_law_is_the_target_s(kind, rule, length, monkeypatch):
    laws, prompt = kind(3, share=0.6, sharpness=1.0), [1, 2]
    options = Settings(
        max_new_tokens=3, ignore_eos=True, temperature=0.5, rule=rule, draft="model", draft_length=length
    )

    def run(branches: Branches) -> tuple[int, ...]:
        with monkeypatch.context() as patch:
            patch.setattr(admission, "Noise", lambda seed, stream=0: ScriptedNoise(branches))
            draw_with_coins(patch)
            events = list(Decoder(laws.target(), laws.head()).decode([(prompt, options)]))
            return tuple(token for event in events for token, _ in event.tokens)

    found = law(run)
    assert distance(found, target_law(sharpened(laws.p, prompt, power=2.0), 3, 3)) < 1e-12
    assert np.isclose(sum(found.values()), 1.0)


@pytest.mark.parametrize("draft", ["auto", "suffix", "none"])
@pytest.mark.parametrize("kind", [Laws, BlockLaws])
def test_whoever_drafts_beside_it_the_text_is_the_target_s(kind, draft):
    """Rounds of others leave tokens to be read later, beside features that were kept."""
    laws, repeating = kind(VOCAB), LONG[:6] * 6
    made = Decoder(laws.target(), laws.head(), costs=FixedCosts())
    plain = Decoder(laws.target(), None)
    for prompt in (repeating, LONG, repeating):
        texts, _ = collect(made.decode([(prompt, Settings(max_new_tokens=80, draft=draft))]), 1)
        assert texts == collect(plain.decode([(prompt, Settings(max_new_tokens=80, draft="none"))]), 1)[0]


@pytest.mark.parametrize("kind", [Laws, BlockLaws])
def test_prompts_of_every_length_are_read(kind):
    """Steps of 33, 49, ... tokens are padded by one, and so is what they are read beside."""
    laws = kind(VOCAB)
    made = Decoder(laws.target(), laws.head(), costs=FixedCosts())
    plain = Decoder(laws.target(), None)
    for length in (*range(33, 37), *range(49, 53), 67):
        prompt = [(7 * place + length) % VOCAB for place in range(length)]
        texts, _ = collect(made.decode([(prompt, Settings(max_new_tokens=6, draft="model", draft_length=3))]), 1)
        assert texts == collect(plain.decode([(prompt, Settings(max_new_tokens=6, draft="none"))]), 1)[0]


@pytest.mark.parametrize("rows", [1, 2])
def test_of_a_prompt_of_one_token_there_is_nothing_to_read(rows):
    """A head begins with a text's second token: what the first text takes to read says nothing."""
    made = Decoder(LAWS.target(), LAWS.head())
    for prompt in ([5], [5, 6, 7], LONG):
        texts, _ = collect(made.decode([(prompt, Settings(max_new_tokens=8))] * rows), rows)
        assert len(texts[0]) == 8


def test_siblings_read_one_prompt():
    made = Decoder(*pair(), costs=FixedCosts())
    settings = Settings(max_new_tokens=20, draft="model", draft_length=3, temperature=1.0, seed=5)
    requests = [(LONG, settings)] * 4
    texts, _ = collect(made.decode(requests, siblings=[Sample(number, 0) for number in range(4)]), 4)
    assert made._model._stepper.engine.calls[0] == (1, len(LONG) - 2), "all but the first token and the last, once"
    assert len({tuple(text) for text in texts}) > 1


def test_a_trimmed_head_says_its_drafts_in_the_target_s_ids():
    keep = np.array([1, 2, 4, 5, 7, 8, 10, 12])
    target, head = pair()
    q = LAWS.q
    head.laws = type("Trimmed", (), {"q": staticmethod(lambda read: q(read)[keep] / q(read)[keep].sum())})
    head.spec = type(head.spec)(vocab_size=keep.size, max_context=256, features=2, reads_features=True)
    made = Decoder(target, head, vocabulary=VocabularyMap(keep, VOCAB, np.arange(VOCAB)), costs=FixedCosts())
    texts, last = collect(made.decode([(LONG, Settings(max_new_tokens=60, draft="model", draft_length=4))]), 1)
    plain = Decoder(LAWS.target(), None)
    assert texts == collect(plain.decode([(LONG, Settings(max_new_tokens=60, draft="none"))]), 1)[0]
    assert last[0].stats.accepted > last[0].stats.rounds / 2


@pytest.mark.parametrize("kind", [Laws, BlockLaws])
def test_it_proposes_no_trees_and_does_not_draft_ahead(kind):
    laws = kind(VOCAB)
    with pytest.raises(UsageError, match=r"draft_ahead: a .* cannot"):
        Decoder(laws.target(), laws.head(), draft_ahead=True)
    made = Decoder(laws.target(), laws.head(), draft_ahead="auto")
    assert made.ahead is None and not made.branches
    with pytest.raises(UsageError, match="branches: a head that reads its target's features proposes no trees"):
        made.decode([(LONG, Settings(branches=(2, 2), draft="model", rule="greedy"))])
