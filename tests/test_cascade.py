"""Who drafts: the choice itself from given costs, and whole runs in which it changes from round to round."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support_runtime import FixedCosts, collect, decode_law, distance, sharpened, target_law, toy_pair

from leadout.engines.base import ANY, FROM_TWO
from leadout.engines.toy import ToyEngine, mixed_law, table_law
from leadout.errors import UsageError
from leadout.runtime import decoder as decoder_module
from leadout.runtime.controller import joint
from leadout.runtime.controller.cascade import Cascade, Commons
from leadout.runtime.controller.costs import Costs
from leadout.runtime.controller.joint import NOBODY, Plan
from leadout.runtime.controller.kinds import Kind
from leadout.runtime.controller.policy import AutoLength, Pace
from leadout.runtime.controller.prices import Prices, at
from leadout.runtime.controller.rounds import Round
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters.free import Calibrated, Record
from leadout.runtime.pair import load
from leadout.runtime.rules.verify import happened
from leadout.runtime.settings import DRAFTS, Settings

FREE = ("suffix", "recycling", "ngram", "auto")
REPEATS = [4, 5, 6, 4, 5, 6, 4, 5]


def cascade(steps=None, *, costs=None, model=False, length="auto", rate=0.8, widths=ANY):
    """The cascade of an ``auto`` row; with ``steps``, of one free drafter that guesses those tokens at ``rate``."""
    costs = costs or FixedCosts()
    pace = Pace(costs, widths)
    policy = AutoLength(pace) if model else None
    made = Cascade(Settings(draft="auto", draft_length=length), Commons(), pace, policy)
    if steps is not None:
        made._drafters = [Calibrated(Fixed(steps), Record((rate,)))]
    return made, policy


def choose(chooser, limit, of_model):
    """The plan of a new round for a row that is alone."""
    pace, model = chooser._pace, chooser._model
    this = pace.tick()
    allotted = pace.lengths(this, [model], [of_model])[0] if model else 0
    return chooser.choose(this, [1], limit, of_model, allotted)


class Fixed:
    name, prior = "fixed", (0.5,)

    def __init__(self, tokens):
        self.tokens = tokens

    def take(self, tokens):
        pass

    def candidates(self):
        return ((token, 0) for token in self.tokens)


def speed(length, rate, per_token=0.02):
    """Tokens a second of a guess of ``length`` tokens, each right with probability ``rate`` when it is reached."""
    return sum(rate**i for i in range(length + 1)) / (1 + per_token * length)


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("per_token", [0.01, 0.1, 0.5])
def test_a_guess_is_cut_where_a_verified_token_costs_more_than_it_brings(rate, per_token):
    chooser, _ = cascade(range(16), costs=FixedCosts(per_token=per_token), rate=rate)
    plan = choose(chooser, 99, 0)
    longer = {length: 1 + per_token * length for length in range(17)}
    worth_it = [n for n in longer if n == 0 or speed(n, rate, per_token) * longer[n] > 1 + 1.1 * (longer[n] - 1)]
    best = max(speed(length, rate, per_token) for length in worth_it)
    assert speed(len(plan.tokens), rate, per_token) > 0.99 * best, "but for the floor, below which nobody looks"
    assert plan.by == ("fixed" if plan.tokens else "none") and plan.length == 0


def test_a_guess_that_promises_hardly_more_than_it_costs_is_left_alone():
    assert not choose(cascade(range(16), costs=FixedCosts(per_token=0.5), rate=0.53)[0], 99, 0).tokens, "1.53 in 1.5"
    assert choose(cascade(range(16), costs=FixedCosts(per_token=0.5), rate=0.58)[0], 99, 0).tokens


def test_a_first_draft_that_only_fills_the_least_width_is_worth_any_chance():
    assert len(choose(cascade([5, 5], rate=0.01, widths=FROM_TWO)[0], 9, 0).tokens) == 1
    assert len(choose(cascade([5, 5], rate=0.01, widths=ANY)[0], 9, 0).tokens) == 0


def test_limits_and_fixed_lengths_hold():
    for limit in (-1, 0, 1, 3):
        assert len(choose(cascade(range(16))[0], limit, limit).tokens) == max(limit, 0)
        for model in (False, True):
            fixed, _ = cascade(range(9), length=2, model=model, rate=0.99)
            plan = choose(fixed, limit, limit)
            assert (plan.by, list(plan.tokens)) == ("fixed" if limit > 0 else "none", [0, 1][: max(0, limit)])
    assert len(choose(cascade(range(9), length=5, rate=0.01)[0], 16, 0).tokens) == 5, "a fixed length is fixed"
    assert [choose(cascade([], length=5, model=True)[0], 16, room).length for room in (9, 2, 0)] == [5, 2, 0]


def test_the_most_promising_of_free_drafters_and_model_drafts():
    """The model promises (0.7 and its powers) at 0.1 seconds a token; a guess must beat that per second."""
    chosen = {}
    for rate in (0.1, 0.5, 0.66, 0.8, 0.95):
        chooser, policy = cascade(range(16), model=True, rate=rate)
        plan = choose(chooser, 16, 16)
        speeds = [policy.speed(length, 1) for length in range(17)]
        free = max(speed(length, rate) for length in range(17))
        assert plan.by == ("model" if max(speeds) > free else "fixed")
        assert (plan.length == speeds.index(max(speeds))) if plan.by == "model" else plan.tokens
        chosen[rate] = plan.by
    assert list(chosen.values()) == ["model", "model", "fixed", "fixed", "fixed"]
    assert choose(cascade([], model=True)[0], 16, 16).by == "model", "a miss is the model's"
    assert choose(cascade([], model=True)[0], 16, 0) == Plan(), "unless it has no room"


def test_a_draft_model_that_rests_is_tried_again_although_a_guess_is_better():
    costs = FixedCosts(per_draft=0.9)
    chooser, policy = cascade([5, 5, 5], costs=costs, model=True, rate=0.5)
    for _ in range(60):
        policy.observe(happened(1, 0))
    plans = [choose(chooser, 16, 16) for _ in range(250)]
    tries = [i for i, plan in enumerate(plans) if plan.by == "model"]
    assert {plan.by for plan in plans} == {"fixed", "model"} and plans[tries[0]].length == 2
    assert len(tries) == 2 and tries[1] - tries[0] > 1.9 * tries[0], "each failed try doubles the rest"


@pytest.mark.parametrize("model", [True, False])
def test_the_start_up_measurement_is_the_draft_model_s(model):
    costs = Costs()
    chooser, _ = cascade(range(16), costs=costs, model=model, rate=0.01)
    lengths = []
    for _ in range(12):
        plan = choose(chooser, 16, 16)
        lengths.append(plan.drafts)
        assert plan.by == ("model" if lengths[-1] else "none")
        costs.record_target(1, lengths[-1] + 1, 1.0 + 0.1 * lengths[-1])
        costs.record_draft(1, plan.length, 0.2 * plan.length)
    if model:
        assert lengths[:5] == [4, 4, 0, 0, 2] and 8 not in lengths
    else:
        assert not any(lengths), "what free drafters verify they measure"


def test_every_free_drafter_is_scored_whoever_proposed():
    chooser, _ = cascade([5, 6, 7], model=True, rate=0.3)
    proposers = []
    for _ in range(60):
        proposers.append(choose(chooser, 16, 16).by)
        chooser.observe([1, 5, 8, 8], [5, 6], np.zeros((4, 12), np.float32))
    assert proposers[0] == "model" and proposers[-1] == "fixed"
    assert chooser._drafters[0]._own.rates[0] > 0.85


def decode(requests, *, pair=None, eos=(3,), exact=True, decoder=None):
    decoder = decoder or Decoder(*(pair or toy_pair(order=2)), exact=exact)
    texts, last = collect(decoder.decode(requests, eos_token_ids=eos), len(requests))
    return texts, [last[i].finish_reason for i in range(len(requests))], [last[i].stats for i in range(len(requests))]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 7, "top_p": 0.9, "repetition_penalty": 1.2}])
@pytest.mark.parametrize("draft", FREE)
def test_no_drafter_changes_a_text(draft, sampling):
    prompts = ([1], REPEATS, list(range(20)), [7] * 41)
    plain = decode([(prompt, Settings(draft="none", **sampling)) for prompt in prompts])
    for length in (0, 1, 3, 16, "auto"):
        decoder = Decoder(*toy_pair(order=2))
        batch = [(prompt, Settings(draft=draft, draft_length=length, **sampling)) for prompt in prompts]
        for _ in range(2):  # the second time out of the pool
            assert decode(batch, decoder=decoder)[:2] == plain[:2]
        for request, text in zip(batch, plain[0], strict=True):
            assert decode([request], decoder=decoder)[0] == [text]


@hypothesis_settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 22), min_size=1, max_size=30),
            st.fixed_dictionaries(
                {
                    "max_new_tokens": st.integers(1, 30),
                    "draft": st.sampled_from(DRAFTS),
                    "draft_length": st.sampled_from([1, 4, "auto"]),
                    "temperature": st.sampled_from([0.0, 0.9]),
                    "seed": st.integers(0, 9),
                }
            ),
        ),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)
def test_any_batch_of_any_drafters_equals_plain_decoding(requests, exact):
    batch = [(prompt, Settings(**options)) for prompt, options in requests]
    plain = [(prompt, Settings(**(options | {"draft": "none"}))) for prompt, options in requests]
    decoder = Decoder(*toy_pair(order=1), exact=exact)
    expected = [decode([request], pair=toy_pair(order=1), exact=exact)[0][0] for request in plain]
    for _ in range(2):
        assert decode(batch, decoder=decoder)[0] == expected


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("draft", FREE)
def test_rounds_with_and_without_a_draft_s_law_leave_the_target_s_alone(draft, rule, monkeypatch):
    """Every branch, drafts of two: under auto some sequences mix one-hot rounds with the model's."""
    target, prompt, mixed = table_law(3, seed=4), [1, 2, 1, 2, 1], Counter()
    laws = target, mixed_law(target, table_law(3, seed=5), 0.8)
    monkeypatch.setattr(decoder_module, "Costs", lambda: FixedCosts(per_draft=0.05))

    def watch(event):
        if event.stats is not None:
            mixed[tuple(sorted(event.stats.by_drafter))] += 1

    count = 4 if draft == "auto" else 3
    options = {"temperature": 0.5, "draft_length": 2, "rule": rule, "draft": draft}
    found = decode_law(laws, 3, count, monkeypatch, prompt, watch, **options)
    assert distance(found, target_law(sharpened(target, prompt, power=2.0), 3, count)) < 1e-12
    if draft == "auto":
        assert any({"model", "suffix"} <= set(names) for names in mixed)
    else:
        assert all(set(names) <= {draft, "none"} for names in mixed) and any(draft in names for names in mixed)


def test_the_draft_model_s_cache_is_right_after_rounds_it_had_no_part_in(monkeypatch):
    """Its twin as the target accepts all it ever drafts: between free rounds, in rows that move, after each other."""
    monkeypatch.setattr(decoder_module, "Costs", lambda: FixedCosts(per_draft=0.35))
    law = mixed_law(table_law(9, order=1, sharpness=4.0), table_law(9, seed=1, sharpness=4.0), 0.3)
    target, twin = (ToyEngine(law, 9, max_context=256) for _ in range(2))  # it repeats, yet depends on the whole text
    lengths = (90, 20, 60, 35, 120)
    sampling = {"draft": "auto", "temperature": 0.4}
    batch = [([1, 2, 3, i], Settings(max_new_tokens=n, seed=i, **sampling)) for i, n in enumerate(lengths)]
    _, _, stats = decode(batch, pair=(target, twin), eos=())
    shares = [each.by_drafter for each in stats]
    for share in shares:
        assert share["model"]["accepted"] == share["model"]["tested"] > 0
    assert sum("suffix" in share for share in shares) >= 3


def test_the_draft_model_is_not_asked_for_rows_that_guess(monkeypatch):
    """What it costs is counted: no step of the draft in a round in which every row has a better guess."""
    monkeypatch.setattr(decoder_module, "Costs", lambda: FixedCosts(per_draft=5.0))
    target, draft = toy_pair(9, order=1)
    _, _, stats = decode([([1, 2, 3], Settings(draft="auto", max_new_tokens=80))], pair=(target, draft), eos=())
    share = stats[0].by_drafter
    assert sum(width for _, width in draft.calls) <= 2 + 80 + share.get("model", {"drafted": 0})["drafted"]
    assert share.get("model", {"rounds": 0})["rounds"] <= 3 < share["suffix"]["rounds"]
    assert share["none"]["rounds"] < 10, "guesses go on while the model rests"


def test_a_model_that_rests_for_one_row_drafts_for_another_that_asks_for_a_length(monkeypatch):
    monkeypatch.setattr(decoder_module, "Costs", lambda: FixedCosts(per_draft=5.0))
    batch = [([1, 2, 3], Settings(draft="model", draft_length=length, max_new_tokens=40)) for length in ("auto", 2)]
    resting, fixed = (stats.by_drafter for stats in decode(batch, pair=toy_pair(9, order=1), eos=())[2])
    assert set(resting) == {"none"} and set(fixed) <= {"model", "none"}
    assert fixed.get("none", {"rounds": 0})["rounds"] <= 1, "but for the last token"


def test_shares_add_up_and_drafted_tokens_are_marked():
    decoder = Decoder(*toy_pair(order=2))
    for draft in DRAFTS:
        events = list(decoder.decode([(REPEATS, Settings(draft=draft, max_new_tokens=60))]))
        stats = events[-1].stats
        for name in ("rounds", "drafted", "tested", "accepted"):
            assert sum(share[name] for share in stats.by_drafter.values()) == getattr(stats, name)
        allowed = {"model", "suffix"} if draft == "auto" else {draft}
        assert set(stats.by_drafter) <= allowed | {"none"}
        assert sum(from_draft for event in events for _, from_draft in event.tokens) == stats.accepted
        assert stats.to_dict()["by_drafter"] == stats.by_drafter
        assert stats.by_drafter.get("none", {"drafted": 0})["drafted"] == 0


@pytest.mark.parametrize("draft", ["suffix", "auto"])
def test_an_earlier_answer_speeds_up_a_later_one_until_it_is_forgotten(draft):
    """A target without any repetition of its own: only the pool can know what comes."""
    pair = toy_pair(200, order=None, context=128)
    request = [([1, 2, 3], Settings(draft=draft, max_new_tokens=60, draft_length=8, temperature=1.0, seed=3))]
    decoder = Decoder(pair[0], None)
    first, again = (decode(request, decoder=decoder, eos=())[2][0] for _ in range(2))
    assert again.rounds < first.rounds / 3 and again.by_drafter["suffix"]["accepted"] > 40
    decoder.forget()
    assert decode(request, decoder=decoder, eos=())[2][0].rounds == first.rounds


def test_recycling_learns_from_rows_the_answer_never_used():
    """Rows behind a rejection: what they say is drafted later, by rows that never wrote it."""
    pair = toy_pair(30, order=1, context=128)
    decoder = Decoder(pair[0], None)
    settings = Settings(draft="recycling", draft_length=4, max_new_tokens=40)
    decode([([1, 2, 3], settings)], decoder=decoder, eos=())
    known = decoder._admission.commons.successors
    assert 0 < len(known) <= 30
    stats = decode([([1, 2, 3], settings)], decoder=decoder, eos=())[2][0]
    assert stats.acceptance_rate > 0.9, "the law depends on one token: its chain is known by now"


def test_auto_without_a_draft_model_uses_what_is_free_and_model_is_refused():
    target = toy_pair(order=1)[0]
    stats = decode([(REPEATS, Settings(draft="auto", max_new_tokens=60))], decoder=Decoder(target, None), eos=())[2][0]
    assert {"suffix", "recycling"} <= set(stats.by_drafter) <= {"suffix", "recycling", "none"} and stats.accepted > 20
    with pytest.raises(UsageError, match="draft 'model' needs a draft model"):
        Decoder(target, None).decode([([1], Settings(draft="model"))])


def test_which_rule_goes_with_which_drafter():
    rules = {draft: Settings(temperature=1.0, draft=draft).acceptance_rule for draft in DRAFTS}
    assert rules == dict.fromkeys(DRAFTS, "coupled") | {"auto": "block", "model": "block"}
    assert {Settings(temperature=1.0, draft=draft, seed=1).acceptance_rule for draft in DRAFTS} == {"coupled"}
    assert {Settings(draft=draft).acceptance_rule for draft in DRAFTS} == {"greedy"}


def test_a_real_pair_writes_the_same_with_every_drafter(tiny_bundle):
    prompts = ["def f(x):\n    return x\n\n\ndef g(x):\n", "class A:\n", "import os\nimport sys\nimport os\n"]
    with load(tiny_bundle) as pair:
        for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7, "rule": "coupled"}):
            wanted = {"max_new_tokens": 40, "ignore_eos": True, **sampling}
            alone = [pair.generate(prompt, draft="none", **wanted).token_ids for prompt in prompts]
            batch = [result.token_ids for result in pair.generate(prompts, draft="none", **wanted)]
            for draft, length in itertools.product(FREE, (3, "auto")):
                drafting = wanted | {"draft": draft, "draft_length": length}
                assert [pair.generate(prompt, **drafting).token_ids for prompt in prompts] == alone, draft
                assert [result.token_ids for result in pair.generate(prompts, **drafting)] == batch, draft
        pair.forget()
        assert len(pair.decoder._admission.commons.successors) == 0


def test_fixed_drafts_of_a_batch_are_never_cut(monkeypatch):
    monkeypatch.setattr(decoder_module, "Costs", lambda: FixedCosts(per_token=3.0))
    fixed = [(REPEATS, Settings(draft="ngram", draft_length=7, max_new_tokens=20))]
    others = [(list(range(20)), Settings(draft="suffix", max_new_tokens=20)) for _ in range(3)]
    alone, beside = (decode(batch, eos=())[2][0] for batch in (fixed, fixed + others))
    assert alone.by_drafter == beside.by_drafter


def test_a_row_that_repeats_does_not_make_the_others_steps_wide(monkeypatch):
    """A long sure guess costs six rows that only wait what it costs its own: alone it is drafted whole, here not."""
    monkeypatch.setattr(decoder_module, "Costs", lambda: FixedCosts(per_token=0.2))
    widths = {}
    for others in (0, 6):
        target = ToyEngine(table_law(9, order=1, sharpness=9.0), 9, max_context=256)
        waiting = [([1, 2, 3], Settings(draft="none", max_new_tokens=60)) for _ in range(others)]
        decode([([4, 5, 6] * 8, Settings(draft="suffix", max_new_tokens=60)), *waiting], pair=(target, None), eos=())
        widths[others] = max(width for _, width in target.calls[1:])
    assert widths[6] < widths[0]


def test_a_kind_of_text_says_nothing_of_others(monkeypatch):
    """A text that repeats makes greedy guesses sure; the first sampled row begins with what its own kind showed, and so
    does the first row that repeats nothing."""
    monkeypatch.setattr(decoder_module, "Costs", lambda: FixedCosts(per_draft=0.2))
    decoder = Decoder(*toy_pair())
    for settings in (Settings(draft="auto", max_new_tokens=60), Settings(draft="model", max_new_tokens=60)):
        collect(decoder.decode([(6 * REPEATS, settings)]), 1)
    kinds = [Kind(repeats=True), Kind(sampled=True, repeats=True), Kind()]
    greedy, sampled, new = map(decoder._admission.commons.experience, kinds)
    assert any(each.calibration.rates != list(each.calibration._prior) for each in greedy.records.values())
    assert not sampled.records and not new.records and sampled.habit.price == 0.0 < greedy.habit.price
    rates = [decoder._pace.seen(kind).acceptance for kind in kinds]
    assert rates[0].rate() != 0.7 == rates[1].rate() == rates[2].rate()
    collect(decoder.decode([(6 * REPEATS, Settings(draft="auto", temperature=1.0, max_new_tokens=60))]), 1)
    assert sampled.records.keys() == greedy.records.keys() and rates[1].rate() != 0.7 == rates[2].rate()
    collect(decoder.decode([(list(range(20)), Settings(draft="auto", max_new_tokens=60))]), 1)
    assert new.records.keys() == greedy.records.keys() and rates[2].rate() != 0.7


def test_who_must_ask_the_model_does_whatever_he_could_guess():
    """A length that is measured is the width of the step: guesses beside it would make it another's."""
    guess = Plan("suffix", (1, 2, 3, 4, 5, 6), expected=(1.0, 1.9, 2.7, 3.4, 4.0, 4.5, 4.9))
    free = Plan(length=1, expected=(1.0, 1.5), instead=guess)
    assert free.beside_model() == guess and free._replace(instead=Plan()).beside_model().by == "model"
    assert free._replace(length=0).by == guess.cut(0).by == NOBODY.by == "none", "who drafts nothing does not draft"
    forced = free._replace(whole=True)
    assert forced.beside_model() == forced.without_model() == forced
    plans = joint.together([forced, forced._replace(instead=None)], Round(2), Prices(FixedCosts(per_draft=0.5)))
    assert [(plan.by, plan.drafts) for plan in plans] == [("model", 1), ("model", 1)]


def reading(price, **options):
    """Costs where the draft model takes so long for a token that it lacks."""
    table = FixedCosts(**options)
    table.catch_up = lambda rows, late, guess=0.0: price * rows * late
    return table


def test_a_guess_pays_for_what_the_draft_model_then_lacks():
    """A guess that promises a little more than the model does is not worth it where the model has to read it all."""
    missed, beside = Prices(reading(0.1)).missed, joint.beside
    assert beside(2.0, 3.0, missed(1, 3.0)) == pytest.approx(3.0 / (1.5 + 2 * 0.1))
    assert beside(2.0, 1.0, missed(1, 1.0)) == 2.0, "one token goes in with the draft's first step"
    assert beside(0.0, 1.0, missed(1, 1.0)) == 0.0
    chosen = {}
    for length, price in itertools.product(("auto", 3), (0.0, 0.1, 1.0)):
        costs = reading(price, per_draft=0.2)
        chooser, _ = cascade([7, 8, 9], costs=costs, model=True, rate=0.75, length=length)
        plan = choose(chooser, 8, 8)
        chosen[length, price] = plan.by
        assert plan.instead is not None and {plan.by, plan.instead.by} == {"fixed", "model"}
        assert plan.whole == (length == 3) and plan.promises > 2.0
    assert all(chosen[length, 0.0] == "fixed" and chosen[length, 1.0] == "model" for length in ("auto", 3))


def test_rows_of_a_batch_pay_for_what_the_draft_model_then_lacks():
    guess = Plan("suffix", (1, 2, 3), expected=(1.0, 1.9, 2.7, 3.4))
    model = Plan(length=3, expected=(1.0, 1.9, 2.7, 3.4), instead=guess)
    chosen = {}
    for price in (0.0, 0.04, 0.2):
        prices = Prices(reading(price, per_draft=0.1))
        chosen[price] = [plan.by for plan in joint.together([model, model], Round(2), prices)]
    assert chosen[0.0] == chosen[0.04] == ["suffix"] * 2 and chosen[0.2] == ["model"] * 2


def test_ragged_rows_pay_for_the_tokens_that_there_are():
    """Four rows of which one guesses six tokens: a rectangle is seven wide for all, ragged rows bring ten in all."""
    guess = Plan("suffix", (1, 2, 3, 4, 5, 6), expected=(1.0, 1.6, 2.1, 2.5, 2.8, 3.0, 3.1))
    prices = Prices(FixedCosts(per_token=0.1, per_draft=0.5))
    alone = [guess, NOBODY, NOBODY, NOBODY]
    assert [plan.drafts for plan in joint.together(alone, Round(4), prices)] == [0, 0, 0, 0]
    assert prices.together([6, 0, 0, 0], None) == pytest.approx(1.6)
    assert prices.step_width([6, 0, 0, 0]) == 7
    prices.begin(ANY, ragged=True)
    this = Round(4)
    assert [plan.drafts for plan in joint.together(alone, this, prices)] == [4, 0, 0, 0], "the last two are unlikely"
    assert prices.together([6, 0, 0, 0], None) == pytest.approx(1.15) and prices.drafted([6, 0, 0, 0]) == 1.5
    assert prices.together([6, 0, 0, 2], 2) == pytest.approx(1.2 + 2 * 0.5)
    assert this.otherwise == pytest.approx((4 + 0.5 * 1.8) / 1.1)
    assert prices.step_width([6, 0, 0, 0]) == 3 and prices.step_width([0, 0]) == 1, "the next whole width"
    prices.begin(FROM_TWO, ragged=True)
    assert prices.step_width([0, 0]) == 2 and prices.step_width([4, 0]) == 3
    assert at([1.0, 2.0, 5.0], 1.25) == 2.75 and at([1.0, 2.0], 1) == at([1.0, 2.0], 0.25) == 2.0
    assert at([1.0, 2.0], 0) == 1.0, "a step without drafts may be another graph's"


def test_a_ragged_row_pays_for_what_it_drafted_itself():
    chooser, _ = cascade([7, 8], costs=FixedCosts(per_token=0.2), rate=0.99)
    choose(chooser, 8, 0)
    assert chooser._savings([6, 0, 0, 2], 3, 6) == pytest.approx(0.5 * 2.0 / 4 - 1.2 / 2)
    chooser._pace.prices.begin(ANY, ragged=True)
    assert chooser._savings([6, 0, 0, 2], 3, 6) == pytest.approx(0.5 * 2.0 / 4 - 0.4 * 6 / 8)
    assert chooser._savings([6, 0, 0, 2], 3, 2) == pytest.approx(0.5 * 2.0 / 4 - 0.4 * 2 / 8)
