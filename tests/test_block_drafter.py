"""A head that drafts blocks from its target's features: what it says comes of all of the text and of no guess, sampled
the law stays the target's, and what it has read and what it lacks is counted as it is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support_features import (
    BlockLaws,
    commit,
    continued,
    digests,
    drafting,
    reads_again_what_it_wrote,
    said,
    texts_are_the_target_s,
)
from support_runtime import (
    FixedCosts,
    collect,
)
from test_mutants import Mutant, must_die

from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters import block_drafter, feature_drafter, model_drafter, parallel_drafter
from leadout.runtime.drafters.block_drafter import BlockDrafter
from leadout.runtime.samples import Sample
from leadout.runtime.settings import Settings
from leadout.runtime.vocabulary import VocabularyMap

VOCAB = 13  # and so is the mask called, an id that no text has
MOST = 7  # tokens of a block
LONG = [(3 * i * i + i) % VOCAB for i in range(40)]


LAWS = BlockLaws(VOCAB)
PROMPTS = (LONG, LONG[:7], LONG[3:20]), (LONG, LONG, LONG[3:10]), (LONG[:5], LONG, LONG), (LONG,), ([4],)


def pair(*, context=256, most=MOST):
    return LAWS.target(), LAWS.head(context, most)


def expected(text, length):
    told = digests(text[:-1])
    laws = [LAWS.behind(told, text[-1], place, length + 1) for place in range(1, length + 1)]
    return [int(each.argmax()) for each in laws]


def it_says_what_comes_of_all_of_the_text(*_):
    for lengths in ([5, 5, 5], [1, 6, 3], [4, 0, 2], [0, 0, 3], [1, 1, 1]):
        for prompts in PROMPTS:
            made, rows = drafting(pair(), *prompts)
            asked = lengths[: len(rows)]
            assert isinstance(made._model, BlockDrafter)
            for accepted in (2, 0, 9):
                drafts = said(made, rows, asked)
                texts = [row.sequence.tokens for row in rows]
                assert drafts == [expected(text, n) for text, n in zip(texts, asked, strict=True)]
                kept = [min(accepted, len(draft)) for draft in drafts]
                commit(made, rows, drafts, kept, [(5 * accepted + place) % VOCAB for place in range(len(rows))])


def a_draft_is_one_step(*_):
    made, (row,) = drafting(pair(), LONG)
    calls = made._model._stepper.engine.calls
    for length, accepted, text in ((4, 4, 1), (3, 0, 6), (6, 2, 2), (1, 0, 4)):  # what began the last block with them
        calls.clear()
        (draft,) = said(made, [row], [length])
        assert calls == [(1, text + length)] and made._model.steps == length and made._model.late == max(0, text - 2)
        commit(made, [row], [draft], [accepted], [1])


def it_is_asked_for_no_more_than_it_was_taught(*_):
    made, (row,) = drafting(pair(), LONG)
    assert made._model.room(row) == MOST
    whole = Decoder(*pair(most=None), costs=FixedCosts())
    assert whole._model.room(row) > MOST


def what_it_wrote_itself_it_reads_again(*_):
    reads_again_what_it_wrote(pair(), LONG)


def rows_that_leave_take_that_along(*_):
    made, rows = drafting(pair(), LONG, LONG[:9])
    drafts = said(made, rows, [2, 5])
    commit(made, rows, drafts, [0, 4], [7, 7])
    made._target.engine.copy_row(1, 0)
    made._model.move(1, 0)
    assert made._model.behind([rows[1]]) == 4
    assert said(made, [rows[1]], [4]) == [expected(rows[1].sequence.tokens, 4)]


def beside_others_it_reads_what_the_target_has_read(*_):
    made, rows = drafting(pair(), LONG, LONG[:9])
    drafts = said(made, rows, [1, 1])
    commit(made, rows, drafts, [0, 0], [1, 1])
    for _ in range(4):
        commit(made, rows, [[], []], [0, 0], [2, 3])
    assert made._model.behind(rows) == 4
    said(made, rows, [3, 0])
    assert made._model._valid == [row.sequence.length - 1 for row in rows]


def what_the_cache_holds_is_text(*_):
    """The next prompt begins as the last text did: what stood in blocks there is read again."""
    for _, _, calls in continued(pair, LONG):
        assert calls[0][1] < 12, "not read anew"


def whatever_the_context_and_length_texts_are_the_target_s(*_):
    contexts = (256, "auto"), (256, 5), (256, 1), (30, 4), (9, 6), (3, 1)
    texts_are_the_target_s(pair, LONG, contexts, 0.7)


def of_long_texts_it_reads_the_end(*_):
    made, (row,) = drafting(pair(), LONG, reach=6)
    head = made._model._stepper.engine
    assert sum(width for _, width in head.calls) == 6
    said(made, [row], [3])
    assert made._model._begins == [begin := len(LONG) - 1 - 6]
    assert head.given[0, :6, 0].tolist() == digests(LONG)[begin:-1]


CHECKS = [
    it_says_what_comes_of_all_of_the_text,
    a_draft_is_one_step,
    it_is_asked_for_no_more_than_it_was_taught,
    what_it_wrote_itself_it_reads_again,
    rows_that_leave_take_that_along,
    beside_others_it_reads_what_the_target_has_read,
    what_the_cache_holds_is_text,
    whatever_the_context_and_length_texts_are_the_target_s,
    of_long_texts_it_reads_the_end,
]
OURS, MASKED, TOLD = block_drafter.BlockDrafter, parallel_drafter.ParallelDrafter, feature_drafter.FeatureDrafter
MUTANTS = [
    Mutant("the last token is text", OURS, "_features", "self._base[place] - 1 - start", "self._base[place] - start"),
    Mutant("one token of text is a guess", OURS, "_features", "- 1 - start", "- 2 - start"),
    Mutant("features of another place", OURS, "_features", "self._begins[place] + start", "start"),
    Mutant("features of the token before", OURS, "_features", "before, before + text", "before - 1, before + text - 1"),
    Mutant("the first row's for all", OURS, "_features", "features(place, before", "features(0, before"),
    Mutant("prompts in another order", OURS, "_features", "self._places[b] if self._places else b", "b"),
    Mutant("padding is of the block", OURS, "_features", "= PADDING", "= BLOCK"),
    Mutant("rows beside are fed what has no feature", OURS, "_beside", ".length - 1 -", ".length -"),
    Mutant("what began a block is text", MASKED, "_ask", "(1 - self.unmasked if n else 0)", "0"),
    Mutant("rows beside forget a token", MASKED, "_ask", "1 - self.unmasked if n else 0", "1 - self.unmasked"),
    Mutant("a mask too few", MASKED, "_ask", "(n - self.unmasked)", "(n - 1)"),
    Mutant("blocks of any length", MASKED, "room", "self._longest", "99"),
    Mutant("what stood in a block is held", TOLD, "reset", "min(held, true)", "held"),
    Mutant("prompts are blocks", TOLD, "reset", "[ALL] * len(rows)", "[0] * len(rows)"),
    Mutant("it lacks one token at most", model_drafter.ModelDrafter, "_late", "self.lacks", "1"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_healthy_code_passes(check):
    check()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, CHECKS, monkeypatch)


def test_siblings_read_one_prompt():
    made = Decoder(*pair(), costs=FixedCosts())
    settings = Settings(max_new_tokens=20, draft="model", draft_length=3, temperature=1.0, seed=5)
    texts, _ = collect(made.decode([(LONG, settings)] * 4, siblings=[Sample(number, 0) for number in range(4)]), 4)
    assert made._model._stepper.engine.calls[0] == (1, len(LONG) - 1), "all but the last token, once"
    assert len({tuple(text) for text in texts}) > 1


def test_a_trimmed_head_says_its_drafts_in_the_target_s_ids():
    keep = np.array([1, 2, 4, 5, 7, 8, 10, 12])
    target, head = pair()
    behind = LAWS.behind
    kept = lambda _, *asked: behind(*asked)[keep] / behind(*asked)[keep].sum()  # noqa: E731
    head.laws = type("Trimmed", (), {"behind": kept, "vocab": VOCAB})()
    head.spec = dataclasses.replace(head.spec, vocab_size=keep.size)
    made = Decoder(target, head, vocabulary=VocabularyMap(keep, VOCAB, np.arange(VOCAB)), costs=FixedCosts())
    texts, last = collect(made.decode([(LONG, Settings(max_new_tokens=60, draft="model", draft_length=4))]), 1)
    plain = Decoder(LAWS.target(), None)
    assert texts == collect(plain.decode([(LONG, Settings(max_new_tokens=60, draft="none"))]), 1)[0]
    assert last[0].stats.accepted > last[0].stats.rounds / 2
