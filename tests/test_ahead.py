"""Drafting ahead: a draft made early is the draft that would have been made, or it is dropped; nobody can tell."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from support_ahead import come_as_far_as, interrupts, is_done
from support_runtime import FixedCosts, collect, decode_law, distance, sharpened, target_law, toy_pair

from leadout.engines.toy import mixed_law, table_law
from leadout.errors import EngineError, UsageError
from leadout.runtime import decoder
from leadout.runtime.ahead import AheadDrafter, Worth
from leadout.runtime.controller.cascade import Cascade
from leadout.runtime.controller.costs import Costs, context_bucket
from leadout.runtime.controller.joint import Plan
from leadout.runtime.controller.policy import Pace
from leadout.runtime.controller.rounds import Round
from leadout.runtime.decoder import Decoder
from leadout.runtime.held import agreement
from leadout.runtime.settings import Settings

PROMPTS = ([1], [4, 5, 6, 4, 5, 6, 4, 5], list(range(11)))
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 7, "top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    {"temperature": 1.0, "seed": 2, "rule": "block"},
    {"temperature": 0.7, "seed": 3, "rule": "rejection", "presence_penalty": 0.2},
]


def run(requests, *, draft_ahead: Any = True, pair=None, eos=(3,)):
    """Everything each round committed, and who drafted ahead."""
    decoder_ = Decoder(*(pair or toy_pair(11, share=0.1)), draft_ahead=draft_ahead)
    events = list(decoder_.decode(requests, eos_token_ids=eos))
    rounds = [(event.index, event.tokens, event.finish_reason) for event in events]
    return rounds, [event.stats.by_drafter for event in events if event.stats], decoder_.ahead


@pytest.mark.parametrize("most", [0, 1, 2, 3, None], ids=lambda n: f"{n} steps")
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "coupled", "block", "rejection"])
def test_every_round_is_what_it_is_without(sampling, most, monkeypatch):
    """However far the work ahead comes: the same drafts, verdicts and text, in every rule (a toy's numbers do not
    depend on the width of a step)."""
    come_as_far_as(monkeypatch, most)
    tried = kept = 0
    for prompt in PROMPTS:
        for length in (1, 4):
            requests = [(prompt, Settings(max_new_tokens=40, draft_length=length, **sampling))]
            rounds, shares, who = run(requests, eos=())
            assert (rounds, shares) == run(requests, draft_ahead=False, eos=())[:2]
            tried, kept = tried + who.tried, kept + who.kept
    assert tried > 40 and (kept > 10 if most is None or most > 1 else kept == 0)


def lengths_by_turns(pace: Pace, this: Round, policies: Any, limits: Any, late: Any) -> list[int]:
    lengths = (5, 2, 3, 6, 1, 1, 4, 0, 3, 2)
    return [min(lengths[pace._rounds % len(lengths)], *limits)]


@pytest.mark.parametrize("sampling", SAMPLINGS[:3], ids=["greedy", "coupled", "block"])
def test_lengths_that_change_and_free_drafters_in_between(sampling, monkeypatch):
    """A draft made ahead is cut, or drafted on, or stale: its cache is right all the same."""
    come_as_far_as(monkeypatch, None)
    monkeypatch.setattr(decoder, "Costs", lambda: FixedCosts(per_draft=0.2))
    choose, kept = Cascade.choose, 0

    def free_by_turns(cascade: Cascade, this: Round, tokens: list[int], limit: int, most: int, allotted: int) -> Plan:
        choose(cascade, this, tokens, limit, most, allotted)
        if cascade._pace._rounds % 3 == 2:
            return Plan("suffix", (tokens[-3:] * 2)[: min(4, limit)])
        return Plan(length=allotted)

    monkeypatch.setattr(Pace, "lengths", lengths_by_turns)
    monkeypatch.setattr(Cascade, "choose", free_by_turns)
    for draft in ("model", "auto"):
        requests = [([1, 2, 3, 1, 2], Settings(draft=draft, max_new_tokens=70, **sampling))]
        rounds, shares, who = run(requests, pair=toy_pair(11, share=0.05), eos=())
        assert (rounds, shares) == run(requests, pair=toy_pair(11, share=0.05), draft_ahead=False, eos=())[:2]
        kept += who.kept
    assert kept > 5


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_law_of_whole_runs_is_the_target_s(rule, monkeypatch):
    """Three rounds at least, every branch: kept drafts, dropped ones, and the coin that guesses the bonus token."""
    come_as_far_as(monkeypatch, None)
    target, prompt = table_law(3, seed=4), [1, 2, 1]
    laws = target, mixed_law(target, table_law(3, seed=5), 0.8)
    made: list[Decoder] = []

    class Ahead(Decoder):
        def __init__(self, *engines: Any) -> None:
            super().__init__(*engines, draft_ahead=True)
            made.append(self)

    monkeypatch.setattr("support_runtime.Decoder", Ahead)
    found = decode_law(laws, 3, 4, monkeypatch, prompt, temperature=0.5, draft_length=1, rule=rule)
    assert distance(found, target_law(sharpened(target, prompt, power=2.0), 3, 4)) < 1e-12
    tried, kept = (sum(getattr(each.ahead, name) for each in made) for name in ("tried", "kept"))
    assert 0 < kept < tried, "some are kept and some are not"


def test_a_kept_draft_takes_no_steps_and_a_dropped_one_leaves_the_cache_right(monkeypatch):
    """A twin draft is always right: after the first round the draft model steps only beside the target."""
    come_as_far_as(monkeypatch, None)
    with monkeypatch.context() as patch:
        by_turns = (5, 2, 3, 6, 1, 4)
        patch.setattr(
            Pace, "lengths", lambda pace, this, policies, limits, late: [min(by_turns[pace._rounds % 6], *limits)]
        )
        who = run([([1, 2], Settings(max_new_tokens=70))], pair=(toy_pair(11)[0], toy_pair(11)[0]), eos=())[2]
        assert who.tried == who.kept > 10, "also where a draft made ahead is cut"
    charged: list[int] = []
    monkeypatch.setattr(Costs, "record_draft", lambda self, rows, steps, *others: charged.append(steps))
    requests = [([1, 2], Settings(max_new_tokens=40, draft_length=4))]
    with monkeypatch.context() as patch:
        come_as_far_as(patch, 2)
        run(requests, pair=(toy_pair(11)[0], toy_pair(11)[0]), eos=())
    assert charged == [4, *[3] * 7], "what was drafted ahead costs a round nothing"
    charged.clear()
    target, twin = toy_pair(11)[0], toy_pair(11)[0]
    rounds, _, who = run(requests, pair=(target, twin), eos=())
    assert [len(tokens) for _, tokens, _ in rounds] == [5] * 8
    assert charged == [4, *[0] * 7]
    assert who.counts() == {"tried": 7, "kept": 7}, "the last round has no next"
    steps = [width for _, width in twin.calls]
    assert steps == [1, 1, *([1] * 3), *([1] * 5 * 6), *([1] * 5)], "prompt, first draft, seven times a guess and four"


def test_the_thread_gives_the_same_text_and_is_at_rest_between_rounds():
    target, draft = toy_pair(11, share=0.1)
    inside, forward, step = threading.Lock(), draft.forward, target.forward

    def alone(*args: Any) -> Any:
        assert inside.acquire(blocking=False), "two threads in one engine"
        time.sleep(0.003)  # longer than the target: whoever does not wait for the step meets it
        try:
            return forward(*args)
        finally:
            inside.release()

    def slow(*args: Any) -> Any:
        time.sleep(0.001)
        return step(*args)

    draft.forward, target.forward = alone, slow
    requests = [(PROMPTS[1], Settings(max_new_tokens=60, draft_length=5, temperature=1.0, seed=1))]
    decoder_ = Decoder(target, draft, draft_ahead=True)
    texts = []
    for event in decoder_.decode(requests, eos_token_ids=()):
        assert inside.acquire(blocking=False)
        inside.release()
        texts += event.tokens
    plain, _, _ = run(requests, draft_ahead=False, eos=())
    assert texts == [token for _, tokens, _ in plain for token in tokens]


def test_after_an_interrupt_the_thread_comes_to_rest_first(monkeypatch):
    """Who was interrupted while he waited for its step did not wait to the end."""
    target, draft = toy_pair(11, share=0.1)
    inside, entered, forward, reset = threading.Lock(), threading.Event(), draft.forward, draft.reset

    def alone(*args: Any) -> Any:
        assert inside.acquire(blocking=False), "two threads in one engine"
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            time.sleep(0.03)
        try:
            return forward(*args)
        finally:
            inside.release()

    def at_rest(rows: int) -> None:
        assert not inside.locked(), "reset in the middle of a step"
        reset(rows)

    def interrupted(*_: Any) -> Any:
        entered.wait()
        raise KeyboardInterrupt

    draft.forward, draft.reset = alone, at_rest
    decoder_, settings = Decoder(target, draft, draft_ahead=True), Settings(max_new_tokens=20, draft_length=4)
    for request in ([(PROMPTS[1], settings)], [(PROMPTS[1], Settings(max_new_tokens=20, branches=(2, 1)))]):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(AheadDrafter, "_end", interrupted)
            list(decoder_.decode([(PROMPTS[2], settings)]))
        entered.clear()
        assert collect(decoder_.decode(request), 1)[0] == collect(Decoder(*toy_pair(11)).decode(request), 1)[0]


def test_after_an_interrupt_nobody_waits_for_ever():
    """Wherever it comes while the thread is told to begin, told to stop or waited for."""
    decoder_, count = Decoder(*toy_pair(11), draft_ahead=True), 0
    requests = [(PROMPTS[1], Settings(max_new_tokens=7, draft_length=2))]

    def answer() -> None:
        collect(decoder_.decode(requests), 1)

    answer()  # its thread begins
    for _ in interrupts(answer, ("ahead.py", "worker.py", "threading.py")):
        assert is_done(answer)
        count += 1
    assert count > 20


def test_a_batch_works_ahead_only_once_a_single_row_is_left(monkeypatch):
    come_as_far_as(monkeypatch, None)
    requests = [(prompt, Settings(max_new_tokens=9 + 20 * i, draft_length=3)) for i, prompt in enumerate(PROMPTS)]
    rounds, shares, who = run(requests, eos=())
    assert (rounds, shares) == run(requests, draft_ahead=False, eos=())[:2]
    alone = len(rounds) - max(i for i, (index, _, _) in enumerate(rounds) if index != 2) - 1
    assert 0 < who.tried <= alone


@pytest.mark.parametrize(
    ("broken", "message"), [(("draft",), "the draft failed"), (("draft", "target"), "the target failed")]
)
def test_what_fails_ahead_is_an_error_and_the_target_s_own_comes_first(broken, message, monkeypatch):
    come_as_far_as(monkeypatch, None)
    engines = dict(zip(("target", "draft"), toy_pair(11), strict=True))
    propose = AheadDrafter.propose

    def fault(name: str) -> Any:
        forward = engines[name].forward

        def once(*args: Any) -> Any:
            engines[name].forward = forward
            raise MemoryError("no more")

        return once

    decoder_ = Decoder(*engines.values(), draft_ahead=True)
    request = ([1, 2], Settings(max_new_tokens=30, draft_length=2))
    stream = decoder_.decode([request])
    next(stream)
    with monkeypatch.context() as patch:

        def then_break(self: Any, *args: Any) -> Any:
            drafts = propose(self, *args)
            for name in broken:
                engines[name].forward = fault(name)
            return drafts

        patch.setattr(AheadDrafter, "propose", then_break)
        with pytest.raises(EngineError, match=message):
            list(stream)
    again, _ = collect(decoder_.decode([request]), 1)
    assert again == collect(Decoder(*toy_pair(11)).decode([request]), 1)[0]


def test_texts_agree_as_far_as_they_are_the_same():
    pairs = [([], [1]), ([1, 2], [1, 2, 3]), ([1, 2], [2, 2]), ([1, 2, 3], [1, 2, 4])]
    assert [agreement(*each) for each in pairs] == [0, 2, 0, 2]


@pytest.mark.parametrize(("target", "draft", "on"), [(1.0, 0.2, True), (1.2, 0.2, True), (1.5, 0.1, False)])
def test_worth_goes_the_better_way_and_tries_the_other_again(target, draft, on):
    """Rounds of 3 or 6 drafts at 0.1 on a target of 1, and more on longer contexts, which grow; ahead costs these parts
    of both. Some first calls are slow, and the table of costs follows what is done."""
    costs = Costs()
    dearer = {past: 1.0 + 0.3 * context_bucket(past) for past in (0, 128, 256, 512, 1024, 2048)}
    for past, factor in dearer.items():
        for width in (2, 4, 7):
            costs.record_target(1, width, factor, past)
        costs.record_draft(1, 1, 0.1 * factor, past)
    worth, history = Worth(costs), []
    for number in range(700):
        length, past = (3, 6)[number // 2 % 2], min(number**2, 4000)
        factor = 1.0 + 0.3 * context_bucket(past)
        history.append(worth.on)
        step, drafting = (target, 0.1 * draft) if worth.on else (1.0, 0.1)
        slow = 20.0 * (number in ((40, 44) if on else (22, 25)))
        costs.record_target(1, length + 1, step * factor, past)
        worth.record(length, (slow + step + drafting * length) * factor, past)
    switched = [i for i in range(1, 700) if history[i] != history[i - 1]]
    assert not any(history[:34]) and all(history[34:52]) and history[60:170] == [on] * 110
    assert len(switched) <= 6 and history.count(on) > 550


def test_worth_compares_with_what_a_context_cost_before():
    """Ahead makes the target's step half as dear again, on a context that only rounds with it reach."""
    costs = Costs()
    for past in (0, 1024):
        costs.record_draft(1, 1, 0.1, past)
        for _ in range(3):
            costs.record_target(1, 4, 1.0, past)
    worth = Worth(costs)
    for _ in range(34):
        worth.record(3, 1.3, 0)
    assert worth.on
    costs._tables["target"][1, context_bucket(1024)][4].seconds = 1.5  # the table follows what is done
    for _ in range(18):
        worth.record(3, 1.5, 1024)
    assert not worth.on


def test_auto_measures_and_true_does_not(monkeypatch):
    come_as_far_as(monkeypatch, None)
    requests = [([1, 2], Settings(max_new_tokens=90, draft_length=1))]
    always, measured = (run(requests, draft_ahead=mode, eos=())[2] for mode in (True, "auto"))
    assert always.tried > measured.tried > 0
    assert Decoder(*toy_pair(11)).ahead is None and Decoder(toy_pair(11)[0], None, draft_ahead=True).ahead is None


def test_it_is_off_where_both_share_a_cpu_and_refused_where_there_is_no_draft(tiny_bundle, tiny_pair, tmp_path):
    import leadout

    texts = []
    for mode in ("auto", True, False):
        with leadout.load(tiny_bundle, draft_ahead=mode) as pair:
            assert (pair.decoder.ahead is None) == (mode is not True) and pair.draft_ahead is (mode is True)
            settings: dict[str, Any] = {"draft": "model", "draft_length": 3, "max_new_tokens": 40, "ignore_eos": True}
            texts.append([pair.generate("def f(", **settings, **s).token_ids for s in SAMPLINGS[:2]])
            if mode is True:
                assert pair.decoder.ahead.tried > 0
    assert texts[0] == texts[1] == texts[2]
    for wrong in ("yes", 2, None, 1, 1.0, np.zeros(2)):
        with pytest.raises(UsageError, match="draft_ahead must be True, False or 'auto'"):
            leadout.load(tiny_bundle, draft_ahead=wrong)


def test_who_forgets_keeps_no_thread():
    made, before = Decoder(*toy_pair(7, order=2), draft_ahead=True), threading.active_count()
    for _ in range(2):
        collect(made.decode([([1, 2, 3], Settings(draft="model", draft_length=3, max_new_tokens=20))]), 1)
        assert threading.active_count() == before + 1
        made.forget()
        assert threading.active_count() == before
