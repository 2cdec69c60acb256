"""Mutants of the shortcuts that long rows take: each must be found."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import test_long_rows as whole
from test_mutants import Mutant, must_die

from leadout.runtime.rules import noise, nucleus, sampling
from leadout.runtime.rules.sampling import Chain
from leadout.runtime.settings import Settings


def noise_lifts_the_same(monkeypatch):
    for spread, temperature in ((1.0, 0.2), (1.0, 1.7), (4.0, 1.0)):
        try:
            whole.test_the_loudest_of_few_is_the_loudest_of_all(spread, temperature)
        except ValueError:  # of an array without numbers
            raise AssertionError("no token is left") from None


def what_is_left_is_the_same(monkeypatch):
    try:
        for options in whole.CUT:
            whole.test_the_loudest_that_settings_leave_is_found_among_few(options, monkeypatch)
            whole.test_a_trimmed_head_drafts_what_its_law_says_for_the_seed(options)
        whole.test_the_k_largest_are_those_that_reach_the_kth(5000)
    except (ValueError, ZeroDivisionError):  # there are not so many, or none of any weight
        raise AssertionError("of too few") from None


def the_nucleus_is_the_same(monkeypatch):
    for spread in (0.5, 3.0, 6.0):
        with monkeypatch.context() as patch:
            whole.test_a_nucleus_that_was_looked_for_is_the_sorted_one(spread, np.float32, patch)
    for spread, top_p in ((1.0, 0.3), (10.0, 0.9)):
        whole.test_the_nucleus_of_a_flat_row_is_exact(spread, top_p)


def large_logits_are_a_law(monkeypatch):
    logits = whole.row(3.0)
    chain = Chain(Settings(temperature=1.0), whole.VOCAB, [], ())
    for shift in (-900.0, -95.0, -35.0, 45.0, 250.0, 900.0):
        law = chain.distribution((logits + np.float32(shift)).astype(np.float32))
        assert abs(law.sum() - 1.0) < 1e-6
        np.testing.assert_allclose(law, chain.distribution(logits), rtol=1e-3)


def few_are_the_same(monkeypatch):
    for options, top_k in itertools.product(({}, {"top_p": 0.8}, {"min_p": 0.1}), (60, 700)):
        with monkeypatch.context() as patch:
            whole.test_few_tokens_have_the_masses_that_they_have_in_a_row(4.0, top_k, options, patch)


CHECKS = [
    few_are_the_same,
    noise_lifts_the_same,
    what_is_left_is_the_same,
    the_nucleus_is_the_same,
    large_logits_are_a_law,
]

MUTANTS = [
    Mutant("a bound without the temperature", sampling, "loudest", "temperature * (reach", "(reach"),
    Mutant("noise that would do is passed over", sampling, "loudest", "math.exp(-reach)", "math.exp(-reach - 1.0)"),
    Mutant("logits that would do are passed over", sampling, "loudest", "lowest - _SLACK", "lowest + 3.0 - _SLACK"),
    Mutant("the last among the few", sampling, "loudest", "(row[ids] - top) / temperature +", ""),
    Mutant("nothing is left out", sampling.Sampler, "_loudest", "chain.is_bare(drafted)", "True"),
    Mutant(
        "the temperature twice", sampling.Sampler, "_heard", "scores, 1.0", "scores, self.chain.settings.temperature"
    ),
    Mutant("another's noise", sampling.Sampler, "_heard", "few if ids is None else ids[few]", "few"),
    Mutant("another's noise, of many", sampling.Sampler, "_heard", "uniforms[ids]", "uniforms[: ids.size]"),
    Mutant("a place for a token", sampling.Sampler, "_heard", "int(ids[place])", "place"),
    Mutant("its block is the one before", noise.Noise, "gumbel_of", "token // 4 + 1", "token // 4"),
    Mutant("more than there are groups", nucleus, "largest", "groups < k", "not groups"),
    Mutant(
        "the k-th of the groups",
        nucleus,
        "largest",
        "few >= np.partition(few, -k)[-k]",
        "few >= few.min()",
    ),
    Mutant("places among those that top-k left", sampling.Chain, "masses", "else ids[kept]", "else kept.nonzero()[0]"),
    Mutant(
        "few tokens' nucleus is wide",
        sampling,
        "nucleus_end",
        "bisect_left(upto, top_p",
        "bisect_left(upto, 1.2 * top_p",
    ),
    Mutant("few tokens' nucleus of scores", sampling, "nucleus_end", "map(math.exp, ordered)", "ordered"),
    Mutant("few tokens at another temperature", sampling.Chain, "_few", "/ settings.temperature", "/ 1.0"),
    Mutant("few tokens without min-p", sampling.Chain, "_few", "settings.min_p > 0.0", "False"),
    Mutant("few tokens by min-p alone", sampling.Chain, "_few", "settings.top_p < 1.0", "False"),
    Mutant("the mass above is lost", nucleus, "_edge", "wanted -= weight_above", "wanted -= 0.0"),
    Mutant("the mass between is lost", nucleus, "_edge", "wanted -= weight_between", "wanted -= 0.0"),
    Mutant("it is where the sample says", nucleus, "_edge", "weight_between < wanted", "False"),
    Mutant("it is not above", nucleus, "_edge", "weight_above >= wanted", "False"),
    Mutant("lightest first", nucleus, "_edge", "np.sort(weights)[::-1]", "np.sort(weights)"),
    Mutant("the faintest are raised as they are", sampling.Chain, "masses", "_LOW <", "-90.0 <"),
    Mutant("the loudest are raised as they are", sampling.Chain, "masses", "< _HIGH", "< 1000.0"),
    Mutant("the light are told from a part", nucleus, "nucleus_edge", "/ weights.size", ""),
    Mutant("an exponential too small", sampling, "below", "subtract(row, top,", "subtract(row, top + 99,"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_healthy_code_passes(check, monkeypatch):
    check(monkeypatch)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, CHECKS, monkeypatch)
