"""A draft model that says a whole draft in one step: greedy it says what it would have said token by token, sampled the
law stays the target's, and what it has read and what it costs is counted as it is."""

from __future__ import annotations

import numpy as np
import pytest
from support_runtime import FixedCosts, collect, decode_law, distance, parallel, sharpened, target_law, toy_pair
from test_mutants import Mutant, must_die

from leadout.engines.toy import ToyEngine, mixed_law, table_law
from leadout.errors import UsageError
from leadout.runtime import steps
from leadout.runtime.controller import policy
from leadout.runtime.controller.policy import Pace
from leadout.runtime.controller.rounds import Round
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters import model_drafter, parallel_drafter
from leadout.runtime.drafters.model_drafter import ModelDrafter
from leadout.runtime.drafters.parallel_drafter import ParallelDrafter
from leadout.runtime.samples import Sample
from leadout.runtime.settings import Settings
from leadout.runtime.vocabulary import VocabularyMap

VOCAB = MASK = 13  # the mask is an id that no text has
LONG = [(3 * i * i + i) % VOCAB for i in range(40)]


def engines(*, mask=MASK, order=3, context=256, share=0.3):
    target, draft = toy_pair(VOCAB, order=order, share=share, context=context)
    law = draft.law if mask is None else parallel(draft.law, mask)
    return target, ToyEngine(law, VOCAB, max_context=context, mask_token=mask)


def drafting(*prompts, mask=MASK, context=256):
    """A drafter that has read the prompts' ends, and its rows."""
    making = Decoder(*engines(mask=mask, context=context), costs=FixedCosts())
    settings = Settings(draft="model", max_new_tokens=99)
    rows = [making._admission.row(i, list(prompt), settings, Sample(), (), None) for i, prompt in enumerate(prompts)]
    making._model.reset(rows)
    making._model.prefill(rows)
    making._model._stepper.engine.calls.clear()
    return making._model, rows


def said(drafter, rows, lengths):
    return [draft.tokens for draft in drafter.propose(rows, lengths)]


def commit(drafter, place, row, draft, accepted, more):
    """A round that kept so many of the draft's tokens, and got ``more``."""
    row.sequence.tokens += [*draft[:accepted], more]
    drafter.observe(place, accepted)


def it_says_what_it_would_say_token_by_token(*_):
    for lengths in ([5, 5, 5], [1, 6, 3], [4, 0, 2], [0, 0, 3], [1, 1, 1]):
        prompts = LONG, LONG[:7], LONG[3:20]
        (one, rows), (other, again) = drafting(*prompts), drafting(*prompts, mask=None)
        assert isinstance(one, ParallelDrafter) and type(other) is ModelDrafter
        for accepted in (2, 0, 9):
            drafts = said(one, rows, lengths)
            assert drafts == said(other, again, lengths) and list(map(len, drafts)) == lengths
            for place, draft in enumerate(drafts):
                for drafter, row in ((one, rows[place]), (other, again[place])):
                    commit(drafter, place, row, draft, min(accepted, len(draft)), (5 * accepted + place) % VOCAB)


def a_draft_is_one_step(*_):
    drafter, (row,) = drafting(LONG)
    calls = drafter._stepper.engine.calls
    for length, accepted, text in ((4, 4, 1), (3, 0, 5), (6, 2, 1), (1, 0, 3)):  # four and two are read again
        (draft,) = said(drafter, [row], [length])
        assert calls[-1] == (1, text + length - 1) and drafter.steps == length and drafter.late == text - 1
        commit(drafter, 0, row, draft, accepted, 1)
    assert len(calls) == 4, "what is unread goes in with the masks"
    assert said(drafter, [row], [0]) == [[]] and drafter.steps == 0 and len(calls) == 4
    assert said(drafter, [row], [3]) == said(drafter, [row], [3]), "asked again it reads the last token again"


def what_it_wrote_itself_it_reads_again(*_):
    drafter, (row,) = drafting(LONG)
    assert drafter.behind([row]) == 0
    (draft,) = said(drafter, [row], [5])
    commit(drafter, 0, row, draft, 4, 2)
    assert drafter.behind([row]) == 4, "the four it drafted are read beside the next masks"
    row.sequence.tokens += [3, 1, 4]
    assert drafter.behind([row]) == 7, "and these, which it was not asked for"
    said(drafter, [row], [2])
    assert drafter.late == 7 and drafter.behind([row]) == 0
    row.sequence.tokens += [2, 6]
    assert drafter.behind([row]) == 1, "of which it reads one with every draft"


def rows_that_leave_take_that_along(*_):
    drafter, rows = drafting(LONG, LONG[:9])
    drafts = said(drafter, rows, [2, 5])
    for place, accepted in enumerate((0, 4)):
        commit(drafter, place, rows[place], drafts[place], accepted, 7)
    drafter.move(1, 0)
    assert drafter.behind([rows[1]]) == 4
    alone, (row,) = drafting(LONG[:9])
    (draft,) = said(alone, [row], [5])
    commit(alone, 0, row, draft, 4, 7)
    assert said(drafter, [rows[1]], [4]) == said(alone, [row], [4])


def beside_others_it_reads_on(*_):
    drafter, rows = drafting(LONG, LONG[:9])
    said(drafter, rows, [1, 1])
    for place in (0, 1):
        drafter.observe(place, 0)
    rows[1].sequence.tokens += [(2 * i) % VOCAB for i in range(7)]
    said(drafter, [rows[0], rows[1]], [4, 0])
    assert drafter.behind([rows[0]]) == 0 and drafter.behind(rows) == 2, "as many as the other's last token and masks"
    assert drafter._stepper.engine.calls[-1] == (2, 4)


def texts_are_the_target_s(*_):
    for how in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
        for context, length in ((256, "auto"), (256, 5), (256, 1), (30, 4), (5, 6), (1, 1)):
            for prompts in ([LONG], [LONG[:4], LONG, LONG[5:16]]):
                alone = Settings(max_new_tokens=60, draft="none", **how)
                drafted = Settings(max_new_tokens=60, draft="model", draft_length=length, **how)
                draft = engines(context=context)[1]
                made = Decoder(engines()[0], draft, costs=FixedCosts())
                texts, last = collect(made.decode([(p, drafted) for p in prompts]), len(prompts))
                plain = Decoder(engines()[0], None)
                assert texts == collect(plain.decode([(p, alone) for p in prompts]), len(prompts))[0]
                drafts = [stats.drafted / stats.rounds for stats in (each.stats for each in last.values())]
                assert length == "auto" or min(drafts) > 0.9 * min(length, context + 1 - context // 2), "to the end"


def a_watched_draft_is_cut_and_never_longer_than_what_was_asked(*_):
    pace = Pace(FixedCosts(per_draft=0.5, per_token=0.1))
    auto = policy.AutoLength(pace)
    this = Round(limits=[99], length=3)
    one, whole = (pace.watch(this, [auto], at_once=at_once) for at_once in (False, True))
    assert one.limits == [16] and whole.limits == [6]
    assert pace.watch(Round(limits=[4], length=3), [auto], at_once=True).limits == [4]
    for _ in range(2):
        one.saw(0, 0.3)
        whole.saw(0, 0.3)
    assert whole.more(2) and not one.more(2), "only the target's step is still to be paid for"
    drafter, (row,) = drafting(LONG)
    whole = pace.watch(this, [auto], at_once=True)
    whole.more = lambda length: 0 < length < 4
    (draft,) = drafter.propose([row], whole.limits, whole)
    assert len(draft.tokens) == len(draft.classes) == 4 and drafter.steps == 6, "the step was as wide as was asked"


def a_decoder_asks_it_so(*_):
    target, draft = engines(share=0.05)
    made = Decoder(target, draft, costs=FixedCosts())
    limits = []
    watch = made._pace.watch
    made._pace.watch = lambda *given, **how: limits.append(how) or watch(*given, **how)
    _, last = collect(made.decode([(LONG, Settings(max_new_tokens=150, draft="model"))]), 1)
    assert limits and all(how == {"at_once": True} for how in limits)
    assert last[0].stats.tokens_per_round > 3 and len(draft.calls) <= last[0].stats.rounds + 1


def a_step_gives_the_logits_after_the_last_of_each_row(*_):
    drafter, _ = drafting(LONG, LONG)
    stepper, engine = drafter._stepper, drafter._stepper.engine
    for widest in (512, 3):
        stepper._widest = lambda past, widest=widest: widest
        for pieces, counts in (
            ([LONG[:9], LONG[:3]], [3, 2]),
            ([LONG[:2], LONG[:8]], [1, 3]),
            ([LONG[:5], []], [2, 0]),
        ):
            stepper.reset(2)
            found = np.array(stepper.ending_logits(pieces, [0, 0], counts))
            for row, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
                for i in range(count):
                    text = np.array(piece[: len(piece) - count + i + 1])
                    assert np.allclose(found[row, i], np.log(engine.law(text)), atol=1e-5)


CHECKS = [  # those first that take least
    it_says_what_it_would_say_token_by_token,
    a_draft_is_one_step,
    what_it_wrote_itself_it_reads_again,
    rows_that_leave_take_that_along,
    beside_others_it_reads_on,
    a_watched_draft_is_cut_and_never_longer_than_what_was_asked,
    a_decoder_asks_it_so,
    a_step_gives_the_logits_after_the_last_of_each_row,
    texts_are_the_target_s,
]
OURS = parallel_drafter.ParallelDrafter
MUTANTS = [
    Mutant("nothing is read again", OURS, "_rest", "row.sequence.length - 1", "row.sequence.length"),
    Mutant("masks are text", OURS, "_ask", "+= len(text)", "+= len(text) + len(masks[b])"),
    Mutant("one mask too few", OURS, "_ask", "* (n - self.unmasked)", "* max(0, n - 2)"),
    Mutant("one mask too many", OURS, "_ask", "* (n - self.unmasked)", "* n"),
    Mutant("rows beside get no text", OURS, "_ask", "mine if n else others", "mine"),
    Mutant("one token is read again for nothing", model_drafter.ModelDrafter, "_late", "self.lacks", "2"),
    Mutant("a step is one token's", OURS, "propose", "self.steps = max(lengths)", "self.steps = 1"),
    Mutant("nobody watches", OURS, "propose", "not watch.more(place)", "False"),
    Mutant("the first is watched", OURS, "propose", "if place and watch", "if watch"),
    Mutant("all rows are as long", OURS, "propose", "place < n and ", ""),
    Mutant(
        "the first law for all",
        OURS,
        "propose",
        "self._choose(row, draft, logits[b][place])",
        "self._choose(row, draft, logits[b][0])",
    ),
    Mutant("a watched draft is as long as any", policy.Pace, "watch", "2 * this.length", "99"),
    Mutant(
        "masks are paid for twice", policy.Pace, "watch", "self.prices.without_model(this.rows) if at_once else ", ""
    ),
    Mutant("one place off", steps.Stepper, "_ending", "np.arange(max(counts))", "np.arange(max(counts)) - 1"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_healthy_code_passes(check):
    check()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, CHECKS, monkeypatch)


@pytest.mark.parametrize("length", [1, 2, 3, "auto"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_law_is_the_target_s(rule, length, monkeypatch):
    """The laws behind masks know nothing of what was drawn before, and here they are far from the target's."""
    target, other = table_law(3, seed=4), table_law(4, seed=5)
    behind = lambda context: other(context)[:3] / other(context)[:3].sum()  # noqa: E731
    draft = lambda context: mixed_law(target, behind, 0.5)(context) if 3 not in context else behind(context)  # noqa: E731
    prompt, options = [1, 2], {"temperature": 0.5, "rule": rule, "draft": "model", "draft_length": length}
    found = decode_law((target, draft), 3, 3, monkeypatch, prompt, mask_token=3, **options)
    assert distance(found, target_law(sharpened(target, prompt, power=2.0), 3, 3)) < 1e-12
    assert np.isclose(sum(found.values()), 1.0)


def test_a_trimmed_draft_says_its_drafts_in_the_target_s_ids():
    """Masks are ids of the draft, whatever these are called on the other side."""
    keep = np.array([1, 2, 4, 5, 7, 8, 10, 12])
    target, whole = engines()
    trimmed = lambda context: whole.law(context)[keep] / whole.law(context)[keep].sum()  # noqa: E731
    draft = ToyEngine(parallel(trimmed_in_full(trimmed, keep), MASK), VOCAB, mask_token=MASK)
    draft.law = lambda context, law=draft.law: law(context)[keep]
    draft.spec = type(draft.spec)(vocab_size=keep.size, max_context=256, mask_token=MASK)
    outputs = VocabularyMap(keep, VOCAB, np.arange(VOCAB))
    made = Decoder(target, draft, vocabulary=outputs, costs=FixedCosts())
    texts, last = collect(made.decode([(LONG, Settings(max_new_tokens=60, draft="model", draft_length=4))]), 1)
    plain = Decoder(engines()[0], None)
    assert texts == collect(plain.decode([(LONG, Settings(max_new_tokens=60, draft="none"))]), 1)[0]
    assert last[0].stats.accepted > last[0].stats.rounds / 2


def trimmed_in_full(law, keep):
    def full(context):
        row = np.full(VOCAB, 1e-9)
        row[keep] = law(context)
        return row

    return full


def test_it_does_not_draft_ahead():
    with pytest.raises(UsageError, match="draft_ahead: a draft model that says its drafts in one step cannot"):
        Decoder(*engines(), draft_ahead=True)
    assert Decoder(*engines(), draft_ahead="auto").ahead is None
