"""The loop, end to end on toy engines: a draft, a batch, a cut or a fault never changes the text."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support_runtime import collect, toy_pair

from leadout.engines.toy import ToyEngine, table_law
from leadout.errors import ContextError, EngineError, LeadoutError, UsageError
from leadout.runtime.controller.costs import Costs
from leadout.runtime.controller.policy import Pace
from leadout.runtime.decoder import Decoder
from leadout.runtime.settings import Settings

EOS = 3
PROMPTS = ([1], [2, 1], [4, 5, 6, 4, 5, 6, 4, 5], list(range(20)), [7] * 41)


def decode(requests, *, eos=(EOS,), pair=None, stop=None, exact=True):
    decoder = Decoder(*(pair or toy_pair()), exact=exact)
    texts, last = collect(decoder.decode(requests, eos_token_ids=eos, stop_matcher_factory=stop), len(requests))
    return texts, [last[i].finish_reason for i in range(len(requests))]


def by_hand(prompt, settings, law, context=96, eos=EOS):
    """Greedy decoding without any of the production code."""
    tokens = list(prompt)
    while len(tokens) < context and len(tokens) - len(prompt) < settings.max_new_tokens:
        tokens.append(int(law(np.array(tokens)).astype(np.float32).argmax()))
        if tokens[-1] == eos:
            break
    return tokens[len(prompt) :]


def test_greedy_is_the_argmax_of_every_context():
    target, draft = toy_pair()
    for prompt in PROMPTS:
        settings = Settings(max_new_tokens=40, draft_length=4)
        assert decode([(prompt, settings)], pair=(target, draft))[0][0] == by_hand(prompt, settings, target.law)


@pytest.mark.parametrize("order", [None, 2])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 7, "top_p": 0.9, "repetition_penalty": 1.2}])
def test_no_draft_length_or_drafter_changes_a_text(sampling, order):
    for prompt in PROMPTS:
        plain = decode([(prompt, Settings(draft="none", **sampling))], pair=toy_pair(order=order))
        for draft, length in itertools.product(("model", "ngram"), (1, 2, 5, 16, "auto")):
            settings = Settings(draft=draft, draft_length=length, **sampling)
            assert decode([(prompt, settings)], pair=toy_pair(order=order)) == plain, (draft, length)


def ragged(sampling):
    kinds = (("model", 4), ("ngram", 3), ("none", 0), ("model", "auto"), ("model", 1))
    return [
        (prompt, Settings(draft=draft, draft_length=length, max_new_tokens=12 + 9 * i, **sampling))
        for i, (prompt, (draft, length)) in enumerate(zip(PROMPTS, kinds, strict=True))
    ]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.0, "rule": "coupled"}])
def test_a_ragged_batch_equals_each_alone(sampling):
    requests = [(prompt, settings) for prompt, settings in ragged(sampling | {"seed": 5})]
    alone = [decode([request]) for request in requests]
    assert decode(requests) == ([text for (text,), _ in alone], [reason for _, (reason,) in alone])


def test_every_row_of_a_batch_samples_for_itself():
    mixed = [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.7, "seed": 2, "top_k": 3}, {"logit_bias": {2: 9.0}}]
    requests = [([1, 2, 3], Settings(draft_length=3, **sampling)) for sampling in mixed]
    alone = [decode([request])[0][0] for request in requests]
    assert decode(requests)[0] == alone and len(set(map(tuple, alone))) == 4


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_seed_repeats_a_sampled_text_alone_or_in_a_batch(rule):
    settings = Settings(temperature=1.0, seed=9, rule=rule, draft_length=3, max_new_tokens=30)
    request = ([1, 2, 3], settings)
    first = decode([request], eos=())
    assert first == decode([request], eos=())
    other = ([5, 6], Settings(draft_length=6))
    assert decode([other, request, other], eos=())[0][1] == first[0][0]
    seedless = Settings(temperature=1.0, rule=rule, draft_length=3, max_new_tokens=30)
    assert decode([([1, 2, 3], seedless)], eos=()) != decode([([1, 2, 3], seedless)], eos=())


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 22), min_size=1, max_size=30),
            st.fixed_dictionaries(
                {
                    "max_new_tokens": st.integers(1, 30),
                    "min_new_tokens": st.integers(0, 5),
                    "draft": st.sampled_from(["model", "ngram"]),
                    "draft_length": st.sampled_from([0, 1, 3, 16, "auto"]),
                    "temperature": st.sampled_from([0.0, 0.9]),
                    "stop_token_ids": st.sampled_from([(), (8,)]),
                    "seed": st.integers(0, 9),
                }
            ),
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_any_batch_equals_plain_decoding(requests, exact):
    speculative = decode([(prompt, Settings(**options)) for prompt, options in requests], eos=(3, 4), exact=exact)
    for i, (prompt, options) in enumerate(requests):
        plain = decode([(prompt, Settings(**(options | {"draft": "none"})))], eos=(3, 4), exact=exact)
        assert (speculative[0][i], speculative[1][i]) == (plain[0][0], plain[1][0])


@pytest.mark.parametrize("draft", ["model", "ngram", "none"])
def test_the_context_ends_a_text_exactly(draft):
    for length in (1, 40, 47):
        settings = Settings(max_new_tokens=500, draft=draft, draft_length=7)
        texts, reasons = decode([([2] * length, settings)], eos=(), pair=toy_pair(context=48))
        assert (len(texts[0]), reasons[0]) == (48 - length, "context")
    with pytest.raises(ContextError, match="prompt has 48 tokens; this target takes at most 47"):
        decode([([2] * 48, settings)], pair=toy_pair(context=48))


def test_max_new_tokens_is_exact_and_named_before_context():
    for count in (1, 2, 7):
        settings = Settings(max_new_tokens=count, draft_length=5)
        assert (len(decode([([1], settings)], eos=())[0][0]), decode([([1], settings)], eos=())[1]) == (
            count,
            ["length"],
        )


def test_a_draft_with_a_shorter_context_and_another_vocabulary_still_helps():
    target = toy_pair()[0]
    for vocab, context in ((23, 20), (30, 96), (17, 96)):
        draft = ToyEngine(table_law(vocab, seed=8), vocab, max_context=context)
        settings = Settings(max_new_tokens=60, draft_length=4)
        assert decode([([1, 2], settings)], pair=(target, draft)) == decode([([1, 2], settings)])


def test_a_stop_matcher_cuts_inside_a_round():
    settings = Settings(max_new_tokens=40, draft_length=6)
    (full,), _ = decode([([1, 2], settings)], eos=())
    for cut in range(1, 12):
        seen: list[int] = []

        def matcher(new, cut=cut, seen=seen):
            seen.extend(new)
            return None if len(seen) < cut else len(new) - (len(seen) - cut)

        texts, reasons = decode([([1, 2], settings)], eos=(), stop=lambda index, matcher=matcher: matcher)
        assert texts == [full[:cut]] and reasons == ["stop"]


def test_events_tell_who_proposed_and_stats_add_up():
    target, twin = toy_pair()[0], toy_pair()[0]
    events = list(Decoder(target, twin).decode([([1, 2], Settings(max_new_tokens=13, draft_length=4))]))
    assert [[from_draft for _, from_draft in event.tokens] for event in events[:2]] == [[True] * 4 + [False]] * 2
    stats = events[-1].stats
    assert stats is not None and [event.stats for event in events[:-1]] == [None] * (len(events) - 1)
    assert stats.tokens == 13 == sum(len(event.tokens) for event in events) and stats.rounds == len(events) == 3
    assert stats.accepted == stats.tested == stats.drafted == 10 and stats.acceptance_rate == 1.0
    assert stats.accepted_per_position == [3, 3, 2, 2] == stats.tested_per_position
    assert stats.tokens_per_round == pytest.approx(13 / 3) and 0 < stats.host_share < 1
    assert stats.to_dict()["tokens_per_second"] == stats.tokens / stats.total_seconds > 0


def test_acceptance_counts_only_what_was_tested():
    pair = toy_pair(share=0.5)
    _, last = collect(Decoder(*pair).decode([([1, 2], Settings(max_new_tokens=90, draft_length=4))]), 1)
    stats = last[0].stats
    assert stats.accepted < stats.tested < stats.drafted
    assert all(a <= t for a, t in zip(stats.accepted_per_position, stats.tested_per_position, strict=True))
    assert stats.tested_per_position[1:] <= stats.accepted_per_position[:-1]


def test_exact_mode_never_steps_the_target_by_one():
    for prompt, draft_length, (exact, narrowest) in itertools.product(PROMPTS, (0, 2), ((True, 2), (False, 1))):
        pair = toy_pair()
        decode([(prompt, Settings(max_new_tokens=9, draft_length=draft_length))], pair=pair, exact=exact)
        widths = {width for _, width in pair[0].calls}
        assert min(widths) >= narrowest and (draft_length or narrowest in widths)


def test_long_prompts_go_in_by_chunks():
    for length in (512, 513, 514, 1025, 1026):
        pair = toy_pair(context=1100)
        prompts = [[i % 23 for i in range(length)], [1, 2, 3], [5] * 600]
        requests = [(prompt, Settings(max_new_tokens=5, draft_length=2)) for prompt in prompts]
        texts, _ = decode(requests, pair=pair, eos=())
        assert texts == [by_hand(prompt, requests[0][1], pair[0].law, 1100, None) for prompt in prompts]
        for engine in pair:
            assert max(width for _, width in engine.calls) <= 512
        assert min(width for _, width in pair[0].calls) >= 2


class Choosy(ToyEngine):
    """Would rather not round its steps of one token like wider ones."""

    even = True

    def reset(self, batch):
        super().reset(batch)
        self.even = True


@pytest.mark.parametrize(
    ("settings", "even"),
    [
        ({}, True),
        ({"temperature": 1.0, "seed": 1}, True),
        ({"temperature": 1.0, "draft": "none"}, True),  # coupled: the seed that was drawn gives the same text again
        ({"temperature": 1.0, "rule": "lenient", "leniency": 0.5}, False),
        ({"temperature": 1.0, "rule": "rejection"}, False),
        ({"temperature": 1.0}, False),
    ],
)
def test_bits_are_the_same_where_somebody_could_compare_them(settings, even):
    target, draft = toy_pair()
    choosy = Choosy(target.law, target.spec.vocab_size, max_context=target.spec.max_context)
    decoder = Decoder(choosy, draft)
    collect(decoder.decode([([1, 2], Settings(max_new_tokens=4, **settings))]), 1)
    assert choosy.even == even
    collect(decoder.decode([([1, 2], Settings(max_new_tokens=4)), ([1], Settings(max_new_tokens=4, **settings))]), 2)
    assert choosy.even, "one of the rows is greedy"


@pytest.mark.parametrize(("seed", "narrowest"), [(1, 2), (None, 1)])
def test_where_nobody_could_compare_bits_the_target_steps_by_one(seed, narrowest):
    """And what steps cost is looked up, and noted, by their own width."""
    pair = toy_pair()
    assert pair[0].spec.widths.narrowest == 2
    decoder = Decoder(*pair)
    settings = Settings(max_new_tokens=9, temperature=1.0, draft_length=0, seed=seed)
    for _ in range(2):
        before = decoder.costs.counts
        collect(decoder.decode([([1, 2], settings)]), 1)
        assert {width for _, width in pair[0].calls[-5:]} == {narrowest}
        assert {step.width for step in decoder.costs.counts - before if step.part == "target"} == {narrowest}
        assert decoder._pace.prices.widths.narrowest == narrowest
        collect(decoder.decode([([1, 2], Settings(max_new_tokens=1))]), 1)  # greedy: by two again
        assert decoder._pace.prices.widths.narrowest == 2 and pair[0].calls[-1][1] == 2


class Faulty(ToyEngine):
    """Fails at its n-th step, once."""

    def __init__(self, twin, fault, at):
        super().__init__(twin.law, twin.spec.vocab_size, max_context=twin.spec.max_context)
        self.fault, self.countdown = fault, at

    def forward(self, tokens, past_lens, logit_index=None):
        logits = super().forward(tokens, past_lens, logit_index)
        self.countdown -= 1
        if self.countdown:
            return logits
        if self.fault == "raises":
            raise RuntimeError("device lost")
        return logits * np.nan if self.fault == "nan" else logits[:, :, :-1]


@pytest.mark.parametrize("fault", ["raises", "nan", "shape"])
@pytest.mark.parametrize("broken", [0, 1])
def test_after_any_fault_the_decoder_can_be_used_again(fault, broken):
    requests = [(prompt, Settings(max_new_tokens=8, draft_length=2)) for prompt in PROMPTS[:3]]
    expected = decode(requests)[0]
    for at in itertools.count(1):
        pair = list(toy_pair())
        pair[broken] = Faulty(pair[broken], fault, at)
        decoder = Decoder(*pair)
        try:
            texts, _ = collect(decoder.decode(requests, eos_token_ids=[EOS]), 3)
        except EngineError as error:
            assert "\n" not in str(error) and ("NaN" in str(error) or ("target", "draft")[broken] in str(error))
            pair[broken].countdown = 0
            texts, _ = collect(decoder.decode(requests, eos_token_ids=[EOS]), 3)
        assert texts == expected
        if pair[broken].countdown > 0:
            break
    assert at > 5


def test_closing_early_leaves_the_decoder_usable_and_a_later_decode_ends_an_earlier():
    decoder = Decoder(*toy_pair())
    request = [([1, 2], Settings(max_new_tokens=30, draft_length=3))]
    expected = decode(request, eos=())[0]
    first = decoder.decode(request)
    next(first)
    first.close()
    second = decoder.decode(request)
    next(second)
    assert collect(decoder.decode(request), 1)[0] == expected
    with pytest.raises(UsageError, match="ended by a later one"):
        next(second)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], Settings(), "at least one token"),
        ([23], Settings(), "from 0 to 22"),
        ([-1], Settings(), "from 0 to 22"),
        ([1], Settings(logit_bias={99: 1.0}), "logit_bias: token id 99 is outside the vocabulary"),
        ([1], Settings(stop_token_ids=(23,)), "stop_token_ids: token id 23 is outside the vocabulary .0 to 22."),
    ],
)
def test_requests_that_cannot_be_served_are_refused_before_anything_runs(prompt, settings, message):
    pair = toy_pair()
    with pytest.raises(LeadoutError, match=message):
        Decoder(*pair).decode([([1], Settings()), (prompt, settings)])
    assert not pair[0].calls
    with pytest.raises(UsageError, match="there is none"):
        Decoder(pair[0], None).decode([([1], Settings())])


def test_nothing_asked_nothing_done():
    assert list(Decoder(*toy_pair()).decode([])) == []


def test_a_draft_model_is_fed_what_it_lacks_in_one_call():
    """Prompt; then one token, or two after a fully accepted round; never a call that only catches up."""
    target, twin = toy_pair()[0], toy_pair()[0]
    list(Decoder(target, twin).decode([([1, 2, 3, 4], Settings(max_new_tokens=15, draft_length=4))], eos_token_ids=()))
    assert [width for _, width in twin.calls] == [3, *(1, 1, 1, 1), *(2, 1, 1, 1), *(2, 1, 1, 1)]


def test_a_row_nobody_drafts_for_is_fed_beside_the_others(monkeypatch):
    """Steps get no wider for it, and what its cache then holds is its text: a twin's drafts are all accepted."""
    recorded, round_of, rests = [], itertools.count(), 9
    monkeypatch.setattr(Pace, "lengths", lambda self, this, policies, limits, late: lengths(limits, next(round_of)))
    monkeypatch.setattr(Costs, "record_draft", lambda self, *given: recorded.append(given))

    def lengths(limits, number):
        if number == 2:
            decoder._model.keep(1, 3)  # it lacks more than one step takes in
        wanted = [2, 0 if number < rests else 3]
        return [min(each) for each in zip(wanted[-len(limits) :], limits, strict=True)]

    target, twin = toy_pair()[0], toy_pair()[0]
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]
    settings = Settings(max_new_tokens=40, draft="model", ignore_eos=True)
    decoder = Decoder(target, twin)
    found, last = collect(decoder.decode([(prompt, settings) for prompt in prompts]), 2)
    monkeypatch.undo()
    assert found == [decode([(prompt, settings)], eos=())[0][0] for prompt in prompts]
    assert all(event.stats.accepted == event.stats.drafted > 15 for event in last.values())
    assert [late for *_, late in recorded[:rests]] == [0] * rests
    assert recorded[rests][-1] == 0, "asked again, it lacks no more than the other"
    assert max(width for _, width in twin.calls[1:]) == 2


def test_a_row_beyond_the_draft_s_context_is_drafted_from_its_end(monkeypatch):
    target, draft = toy_pair()[0], toy_pair(context=40)[1]
    starts, forward = [], draft.forward

    def watched(tokens, past_lens, *more):
        starts.append(int(past_lens.max()))
        return forward(tokens, past_lens, *more)

    monkeypatch.setattr(draft, "forward", watched)
    requests = [([1, 2, 3], Settings(max_new_tokens=34, draft_length=3)), (list(range(20)), Settings(draft_length=3))]
    expected = [decode([request], eos=())[0][0] for request in requests]
    texts, last = collect(Decoder(target, draft).decode(requests), 2)
    assert texts == expected and len(requests[1][0]) + len(texts[1]) > 60
    assert all(last[i].stats.drafted >= 2 * last[i].stats.rounds for i in range(2)), "to the end"
    assert max(starts) < 40, "what stands behind its context is the padding of rows that begin anew"


def test_what_a_rested_draft_makes_up_for_is_not_its_price(monkeypatch):
    recorded, round_of = [], itertools.count()
    monkeypatch.setattr(
        Pace, "lengths", lambda self, this, policies, limits, late: [min(limits[0], 2 * (next(round_of) > 5))]
    )
    monkeypatch.setattr(Costs, "record_draft", lambda self, *given: recorded.append(given))
    target, draft = toy_pair()
    events = Decoder(target, draft).decode([([1, 2, 3], Settings(max_new_tokens=30, ignore_eos=True))])
    stats = [event.stats for event in events][-1]
    rests = stats.by_drafter["none"]["rounds"]
    late = [each for *_, each in recorded]
    assert rests >= 6 and len(recorded) == stats.by_drafter["model"]["rounds"]
    assert late[0] == rests - 2 and not any(late[1:]), "what it had missed, and then no more than a round leaves"
    monkeypatch.undo()
    costs = Costs()
    costs.record_draft(2, 4, 4.0)
    assert costs.catch_up(2, 10) == 0.0, "not known yet"
    costs.record_draft(2, 3, 3.0 + 10.0, 0, 10)
    assert costs.draft(2) == 1.0 and costs.price(costs.counts) == {
        "target": 0,
        "plain": 0,
        "draft": 7.0,
        "catch-up": 10.0,
        "host": 0,
        "quiet": 0,
    }
    assert [costs.catch_up(2, late) for late in (0, 1, 20)] == [0.0, 1.0, 20.0]
    assert costs.catch_up(8, 20) == 80.0, "a step is a rectangle"
