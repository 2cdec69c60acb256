"""The chain against a plain reference that sorts everything, and the settings that govern it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from leadout.errors import EngineError, UsageError
from leadout.runtime.drafters.base import Draft
from leadout.runtime.judging import judge
from leadout.runtime.ranges import shown
from leadout.runtime.rules import law as law_module
from leadout.runtime.rules.law import draw
from leadout.runtime.rules.noise import Noise, Purpose
from leadout.runtime.rules.sampling import Chain, Sampler
from leadout.runtime.rules.tally import Tally
from leadout.runtime.settings import Settings

VOCAB = 12
FLOAT32 = 3e-7  # what a law of logits in float32 may be off
TIE = 1e-5  # numbers less far apart than this part of them may come out in another order in float32


def reference(logits, settings, prompt, output, ends):
    """The documented chain, one token at a time; and how close to another outcome its closest decision was."""
    margins = [1.0]

    def cut(edge):
        apart = [*sorted(abs(weight - edge) for weight in weights if weight > 0), math.inf]
        margins.append(apart[edge in weights] / edge if edge > 0 else math.inf)
        weights[weights < edge] = 0.0

    scores = [float(x) for x in logits]
    for token in range(len(scores)):
        if token in ends and len(output) < settings.min_new_tokens:
            scores[token] = -math.inf
        scores[token] += settings.logit_bias.get(token, 0.0)
        if token in (*prompt, *output):
            penalty = settings.repetition_penalty
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        count = output.count(token)
        scores[token] -= settings.frequency_penalty * count + settings.presence_penalty * (count > 0)
    top = max(scores)
    if settings.temperature == 0:
        return scores.index(top), top - sorted(scores)[-2]
    weights = np.array([math.exp((score - top) / settings.temperature) for score in scores])
    if 0 < settings.top_k < len(weights):
        cut(sorted(weights)[-settings.top_k])
    if settings.top_p < 1:
        mass, edge = 0.0, 0.0
        for edge in sorted(weights, reverse=True):
            mass += edge
            margins.append(abs(mass / (settings.top_p * weights.sum()) - 1))
            if mass >= settings.top_p * weights.sum():
                break
        cut(edge)
    cut(settings.min_p * weights.max())
    return weights / weights.sum(), min(margins)


FINITE = st.integers(-40, 40).map(lambda n: n / 7)


@st.composite
def cases(draw):
    options = {
        "temperature": draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        "top_k": draw(st.sampled_from([0, 1, 3, 11, 12, 40])),
        "top_p": draw(st.sampled_from([1.0, 0.95, 0.5, 0.01])),
        "min_p": draw(st.sampled_from([0.0, 0.05, 1.0])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3, 0.5])),
        "presence_penalty": draw(st.sampled_from([0.0, 0.6, -1.0])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.25])),
        "min_new_tokens": draw(st.integers(0, 6)),
        "logit_bias": draw(
            st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-math.inf, -2.0, 5.0]), max_size=3)
        ),
    }
    tokens = st.lists(st.integers(0, VOCAB - 1), max_size=4)
    logits = draw(st.lists(FINITE, min_size=VOCAB, max_size=VOCAB, unique=True))
    return np.array(logits, np.float32), Settings(**options), draw(tokens), draw(tokens), draw(tokens)


@hypothesis_settings(max_examples=300, deadline=None)
@given(cases())
def test_the_chain_equals_its_documentation(case):
    logits, settings, prompt, committed, drafted = case
    ends = {1, 5}
    chain = Chain(settings, VOCAB, prompt, ends)
    chain.extend(committed)
    kept = logits.copy()
    expected, margin = reference(logits, settings, prompt, [*committed, *drafted], ends)
    greedy = settings.temperature == 0
    found = chain.best(logits, drafted) if greedy else chain.distribution(logits, drafted)
    support = None if greedy else chain.scores(logits, drafted) > -math.inf
    if margin < TIE:
        event("a near-tie")
        assert greedy or abs(found.sum() - 1) < FLOAT32
    elif greedy:
        assert found == expected
    else:
        np.testing.assert_allclose(found, expected, atol=4 * FLOAT32)  # of logits up to 11, divided by 0.3
        assert np.array_equal(support, expected > 0)
    assert np.array_equal(kept, logits)


def test_what_was_drafted_is_penalised_as_what_was_written() -> None:
    """To the bit, in whatever pieces it came; and forks do not hear of each other."""
    settings = Settings(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.1)
    logits = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)
    text = [3, 1, 3, 7, 7, 3, 9]
    whole = Chain(settings, VOCAB, [0, 3], ())
    whole.extend(text)
    wanted = whole.distribution(logits)
    for written in range(len(text)):
        chain = Chain(settings, VOCAB, [0, 3], ())
        chain.extend(text[: written // 2])
        chain.distribution(logits)
        other = chain.fork()
        other.extend([5, 5, 8])
        chain.extend(text[written // 2 : written])
        assert np.array_equal(chain.distribution(logits, text[written:]), wanted)
        assert not np.array_equal(other.distribution(logits, text[written:]), wanted)


def test_a_tally_counts_the_text_and_what_is_drafted_behind_it() -> None:
    """Of more tokens than it has places for at first; and what was drafted leaves no trace."""
    rng, text = np.random.default_rng(5), [3, 1, 3]
    tally = Tally(text)
    for size in (0, 1, 40, 100, 7):
        new = rng.integers(0, 300, size).tolist()
        tally.extend(new)
        text += new
        other = tally.fork()
        other.extend([3, 298, 299])
        for drafted in ([], [299, 3, 299], [], rng.integers(0, 300, 16).tolist()):
            for asked, more in ((tally, []), (other, [3, 298, 299])):
                ids, counts = asked.behind(drafted)
                assert len(set(ids.tolist())) == len(ids)
                assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == Counter([*text, *more, *drafted])


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9999}, {"min_new_tokens": 1}], ids=str)
@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 3.0])
@pytest.mark.parametrize("size", [300, 40_000])
@pytest.mark.parametrize(("dtype", "tight"), [(np.float32, FLOAT32), (np.float64, 1e-12)], ids=["32", "64"])
def test_a_law_is_as_exact_as_its_logits(dtype, tight, size, temperature, options):
    """Whether temperature is all that happens to a row, or not."""
    logits = (25 + 5 * np.random.default_rng(size).normal(size=size)).astype(dtype)
    found = Chain(Settings(temperature=temperature, **options), size, [], {5}).distribution(logits)
    scores = (logits.astype(np.longdouble) - logits.max()) / temperature
    scores[[5] if "min_new_tokens" in options else []] = -math.inf
    law = np.exp(scores)
    law[found == 0] = 0.0
    law /= law.sum()
    assert found.dtype == dtype or "top_p" in options
    assert 0.5 * np.abs(found - law).sum() < tight and abs(found.sum(dtype=np.float64) - 1) < tight
    if temperature >= 0.7 and "top_p" not in options:
        assert (found > 0).sum() > 0.99 * size


@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.999, 0.9999999])
def test_the_nucleus_is_exact_on_long_rows(top_p):
    logits = (4 * np.random.default_rng(1).normal(size=5000)).astype(np.float32)
    probs = Chain(Settings(temperature=1.0), 5000, [], ()).distribution(logits)
    kept = Chain(Settings(temperature=1.0, top_p=top_p), 5000, [], ()).distribution(logits) > 0
    least = probs[kept].min()
    mass = probs[kept].sum(dtype=np.float64)
    assert mass >= top_p - FLOAT32 and top_p > mass - least - FLOAT32
    assert probs[~kept].max() <= least


def test_a_token_as_likely_as_the_last_one_kept_is_kept_too():
    logits = np.array([1.0, 3.0, 1.0, 1.0, 0.0], np.float32)
    for options in ({"top_k": 2}, {"top_p": 0.75}, {"min_p": math.exp(-2) - 1e-9}):
        probs = Chain(Settings(temperature=1.0, **options), 5, [], ()).distribution(logits)
        assert (probs > 0).tolist() == [True, True, True, True, False]
    for factor, kept in ((0.9999, True), (1.0001, False)):
        chain = Chain(Settings(temperature=1.0, min_p=factor * math.exp(-2)), 5, [], ())
        assert (chain.distribution(logits)[0] > 0) == kept


def test_greedy_ties_go_to_the_lowest_id():
    logits = np.array([0.0, 2.0, 2.0, 1.0], np.float32)
    assert Chain(Settings(), 4, [], ()).best(logits) == 1
    assert Chain(Settings(logit_bias={3: 1.0}), 4, [], ()).best(logits) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_engine_error(bad, temperature):
    logits = np.array([0.0, bad, 1.0], np.float32)
    for options in ({}, {"logit_bias": {0: 1.0}}):
        chain = Chain(Settings(temperature=temperature, **options), 3, [], ())
        with pytest.raises(EngineError, match="NaN"):
            Sampler("coupled" if temperature else "greedy", chain, Noise(0)).choose(logits, [], 0)


def test_impossible_tokens_are_never_chosen():
    logits = np.array([-math.inf, 0.0, -math.inf], np.float32)
    sampler = Sampler("coupled", Chain(Settings(temperature=2.0), 3, [], ()), Noise(4))
    assert {sampler.choose(logits, [], position) for position in range(50)} == {1}


BAD = [
    ({"temperature": -0.1}, "temperature must be 0 or a number from 1e-06 to 1000000, not -0.1"),
    ({"temperature": math.nan}, "temperature"),
    ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, not 0"),
    ({"max_new_tokens": 1.5}, "max_new_tokens"),
    ({"min_new_tokens": -1}, "min_new_tokens"),
    ({"top_k": True}, "top_k"),
    ({"top_p": 0}, "top_p must be above 0"),
    ({"top_p": 1.01}, "top_p must be above 0 and at most 1, not 1.01"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be a number from 1e-06 to 1000000, not 0.0"),
    ({"frequency_penalty": math.inf}, "frequency_penalty must be a number from -1000000 to 1000000, not inf"),
    ({"logit_bias": {-1: 1.0}}, "token id"),
    ({"logit_bias": {1: math.nan}}, "logit_bias of token 1"),
    ({"stop": ("",)}, "stop must be"),
    ({"stop": "text"}, "stop must be"),
    ({"stop_token_ids": (-4,)}, "token id"),
    ({"seed": -1}, "seed must be an integer from 0"),
    (
        {"draft": "medusa"},
        r"draft 'medusa' is unknown \(one of: auto, model, suffix, siblings, recycling, ngram, none\)",
    ),
    ({"draft_length": 17}, "draft_length must be an integer from 0 to 16 or 'auto', not 17"),
    ({"draft_length": "long"}, "draft_length"),
    ({"rule": "beam"}, "rule 'beam' is unknown"),
    ({"rule": "greedy", "temperature": 1.0}, "rule 'greedy' needs temperature 0, not 1"),
    ({"temperature": 1e-7}, "temperature must be 0 or a number from 1e-06 to 1000000, not 1e-07"),
    ({"temperature": 10**400}, "temperature must be 0 or a number from 1e-06 to 1000000, not 1000"),
    ({"temperature": True}, "temperature must be .*, not True"),
    ({"temperature": np.array([1.0, 2.0])}, r"temperature must be .*, not array\(\[1., 2.\]\)$"),
    ({"repetition_penalty": 1e-320}, "repetition_penalty must be a number from 1e-06 to 1000000, not 1e-320"),
    ({"presence_penalty": 1e308}, r"presence_penalty must be a number from -1000000 to 1000000, not 1e\+308"),
    ({"max_new_tokens": -(10**5000)}, "max_new_tokens must be an integer of at least 1, not int"),
    ({"max_new_tokens": None}, "max_new_tokens must be an integer of at least 1, not None"),
    ({"seed": 2**63}, "seed must be an integer from 0 to 9223372036854775807, not 9223372036854775808"),
    ({"logit_bias": None}, "logit_bias must be a mapping of token ids to numbers, not None"),
    ({"logit_bias": [1, 2]}, "logit_bias must be a mapping"),
    ({"logit_bias": {5: "x"}}, "logit_bias of token 5 must be -inf or a number from -1000000000000 to .*, not 'x'"),
    ({"logit_bias": {5: None}}, "logit_bias of token 5 must be"),
    ({"logit_bias": {5: 10**400}}, "logit_bias of token 5 must be"),
    ({"logit_bias": {5: math.inf}}, "logit_bias of token 5 must be .*, not inf"),
    ({"logit_bias": {"5": 1.0}}, "a token id in logit_bias must be an integer from 0 to 2147483647, not '5'"),
    ({"stop_token_ids": 5}, "stop_token_ids must be a list or tuple of token ids, not 5"),
    ({"stop_token_ids": None}, "stop_token_ids must be a list or tuple"),
    ({"stop_token_ids": [1.5]}, "a token id in stop_token_ids must be an integer from 0 to 2147483647, not 1.5"),
    ({"stop": ["a", 5]}, "stop must be non-empty strings, not 5"),
    ({"stop": None}, "stop must be a list or tuple of non-empty strings, not None"),
    ({"stop": ["a", "b\ud800"]}, r"stop must be text of whole characters, not with a lone surrogate \(U\+D800 at 1\)"),
    ({"branches": 5}, "branches must be a list or tuple of at most 16 integers, not 5"),
    ({"branches": np.array([[2, 2]])}, "branches must be a list or tuple"),
    ({"ignore_eos": "no"}, "ignore_eos must be True or False, not 'no'"),
    ({"ignore_eos": 1}, "ignore_eos must be True or False, not 1"),
    ({"draft": ["model"]}, r"draft \['model'\] is unknown"),
    ({"draft": np.array(["a", "b"])}, "draft .* is unknown"),
    ({"rule": "a\nb"}, r"rule 'a\\nb' is unknown"),
    ({"draft_length": np.array([1, 2])}, "draft_length must be an integer from 0 to 16 or 'auto', not array"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda value: shown(value)[:40])
def test_settings_outside_their_range_are_refused_by_name(options, message):
    with pytest.raises(UsageError, match=message):
        Settings(**options)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"max_new_tokens": np.int64(3)}, 3),
        ({"max_new_tokens": 10**400}, 10**400),
        ({"top_k": np.uint8(200)}, 200),
        ({"temperature": np.float32(0.5)}, 0.5),
        ({"temperature": Fraction(1, 2)}, 0.5),
        ({"temperature": 1e-6}, 1e-6),
        ({"seed": np.uint64(2**63 - 1)}, 2**63 - 1),
        ({"ignore_eos": np.bool_(True)}, True),
        ({"logit_bias": {np.int64(5): np.float32(-2)}}, {5: -2.0}),
        ({"stop": ["a", "b"]}, ("a", "b")),
        ({"stop_token_ids": np.array([3, 4], np.int32)}, (3, 4)),
        ({"branches": np.array([2, 2])}, (2, 2)),
        ({"draft_length": np.int64(3)}, 3),
    ],
    ids=lambda value: shown(value)[:40],
)
def test_numbers_of_any_kind_are_taken_and_kept_as_python_s(options, kept):
    (name,) = options
    settings = Settings(**options)
    assert getattr(settings, name) == kept and type(getattr(settings, name)) is type(kept)
    assert replace(settings) == settings


@pytest.mark.parametrize("temperature", [1e-6, 1e6])
@pytest.mark.parametrize("penalty", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("bias", [-1e12, 0.0, 1e12])
def test_at_the_ends_of_the_ranges_a_law_is_still_one(temperature, penalty, bias):
    options = {"repetition_penalty": penalty, "frequency_penalty": 1e6, "logit_bias": {1: bias} if bias else {}}
    logits = np.random.default_rng(1).normal(size=VOCAB).astype(np.float32) * 20
    chain = Chain(Settings(temperature=temperature, top_p=0.9, **options), VOCAB, [1, 2], ())
    chain.extend([1, 3])
    law = chain.distribution(logits, [4])
    assert np.isfinite(law).all() and abs(law.sum() - 1) < FLOAT32


def test_the_rule_in_force():
    assert Settings(rule="block").acceptance_rule == "greedy"
    assert Settings(temperature=1.0).acceptance_rule == "block"
    assert Settings(temperature=1.0, seed=0).acceptance_rule == "coupled"
    assert Settings(temperature=1.0, draft="ngram").acceptance_rule == "coupled"
    assert Settings(temperature=1.0, seed=0, rule="rejection").acceptance_rule == "rejection"


@pytest.mark.parametrize(("drafts", "rule", "tossed"), [(0, "block", 1), (2, "rejection", 2), (2, "block", 3)])
def test_a_round_tosses_for_what_it_asks(monkeypatch: pytest.MonkeyPatch, drafts: int, rule: str, tossed: int) -> None:
    """Ten microseconds of Python each: one without drafts, two to verify a guess, three to make a draft, too."""
    asked = []
    block = Noise._block
    monkeypatch.setattr(Noise, "_block", lambda self, *counter: asked.append(counter) or block(self, *counter))
    settings, noise = Settings(temperature=1.0, rule=rule), Noise(1)
    sampler = Sampler(settings.acceptance_rule, Chain(settings, VOCAB, [1], []), noise)
    q = [np.full(VOCAB, 1 / VOCAB)] * drafts if tossed == 3 else None
    if q is not None:
        noise.uniforms(4, Purpose.DRAFT, drafts)
    row = SimpleNamespace(sampler=sampler, sequence=SimpleNamespace(length=4), settings=settings)
    judge(row, Draft([1] * drafts, q), np.zeros((drafts + 1, VOCAB), np.float32))
    assert len(asked) == len(set(asked)) == tossed


@pytest.mark.parametrize("short", [0, 64], ids=["in blocks", "one by one"])
def test_no_token_is_drawn_for_what_float32_rounds_off(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a block's sum and that of its numbers one by one lies a ten-millionth, and no token."""
    monkeypatch.setattr(law_module, "_SHORT", short)
    rng, drawn = np.random.default_rng(2), set[int]()
    law = np.exp(rng.normal(size=64)).astype(np.float32)
    law[63] = 1e-40
    ends = law.cumsum(dtype=np.float64) / np.add.reduceat(law, [0])[0]
    for edge in (ends[-2], 1.0 - 1e-9):
        drawn |= {draw(law, uniform) for uniform in np.linspace(edge - 1e-6, min(edge + 1e-6, 1.0 - 1e-9), 2001)}
    assert drawn == {62}
    assert draw(law, 1.0) == 63


@pytest.mark.parametrize("short", [0, 4097], ids=["in blocks", "one by one"])
@pytest.mark.parametrize("size", [1, 7, 64, 65, 200, 4097])
def test_a_draw_is_the_inverse_of_the_cumulative_law(size: int, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(law_module, "_SHORT", short)
    rng = np.random.default_rng(size)
    law = rng.integers(0, 4, size).astype(float)  # whole numbers: every order of summing gives the same
    law[rng.integers(size)] = 2.0
    total = int(law.sum())
    drawn = [draw(law, (i + 0.5) / total) for i in range(total)]
    assert drawn == np.repeat(np.arange(size), law.astype(int)).tolist()
    assert draw(law, 0.0) == np.flatnonzero(law)[0]
    assert draw(law, np.nextafter(1.0, 0.0)) == draw(law, 1.0) == np.flatnonzero(law)[-1], "and rounding never beyond"
