"""Losslessness, exactly: the joint law of K+1 tokens under every rule, from the production functions, to 1e-12."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support_runtime import (
    Branches,
    Coin,
    FixedCosts,
    ScriptedNoise,
    collect,
    decode_law,
    distance,
    draw_with_coins,
    law,
    sharpened,
    target_law,
)

from leadout.engines.toy import ToyEngine, mixed_law, table_law
from leadout.runtime import admission
from leadout.runtime.decoder import Decoder
from leadout.runtime.rules import verify
from leadout.runtime.rules.law import Few, draw, draw_and_sum
from leadout.runtime.rules.noise import Noise, Purpose
from leadout.runtime.rules.sampling import Chain
from leadout.runtime.settings import Settings

TIGHT = 1e-12
RULES = ("rejection", "block")


def rows_by_context(rng, vocab, depth, *, zeros=False):
    """A random table: context (tuple shorter than depth) -> distribution; with ``zeros``, some tokens impossible."""
    table = {}
    for size in range(depth):
        for context in itertools.product(range(vocab), repeat=size):
            weights = rng.gamma(0.7, size=vocab) + 1e-3
            if zeros:
                weights[rng.permutation(vocab)[: rng.integers(0, vocab)]] = 0.0
            table[context] = weights / weights.sum()
    return table


def joint_law(rule, p, q, vocab, length, ends=lambda x: False):
    """Draft ``length`` tokens from q (or the fixed tokens q), fewer where a draft x ``ends``, verify with production
    code, go on with the target."""
    fixed = isinstance(q, tuple)
    rest = range(length + 1)

    def run(branches: Branches) -> tuple[int, ...]:
        x: list[int] = []
        while len(x) < length and not ends(x):
            x.append(q[len(x)] if fixed else Coin(branches).draw(q[tuple(x)]))
        rows = None if fixed else [q[tuple(x[:i])] for i in range(len(x))]
        coins = [Coin(branches) for _ in x]
        apply = verify.rejection if rule == "rejection" else verify.block
        verdict = apply(x, rows, lambda i: p[tuple(x[:i])], coins, lambda weights: Coin(branches).draw(weights))
        assert verdict.accepted <= verdict.tested <= length
        tokens = [*x[: verdict.accepted], verdict.token]
        while len(tokens) < len(rest):
            tokens.append(Coin(branches).draw(p[tuple(tokens)]))
        return tuple(tokens)

    return law(run)


def verdicts(rule, p, q, length):
    """The law of what one round came to."""

    def run(branches: Branches) -> verify.Verdict:
        x: list[int] = []
        for _ in range(length):
            x.append(Coin(branches).draw(q[tuple(x)]))
        rows = [q[tuple(x[:i])] for i in range(length)]
        coins = [Coin(branches) for _ in x]
        apply = verify.rejection if rule == "rejection" else verify.block
        found = apply(x, rows, lambda i: p[tuple(x[:i])], coins, lambda weights: Coin(branches).draw(weights))
        return found._replace(expected=tuple(found.expected))

    return law(run).items()


def expected_accepted(rule, p, q, length):
    return sum(verdict.accepted * chance for verdict, chance in verdicts(rule, p, q, length))


def few(table):
    """The same laws, held as those that leave few tokens are."""
    return {context: Few.of(range(row.size), row.tolist()) for context, row in table.items()}


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("vocab", "length"), [(3, 0), (4, 1), (3, 2), (4, 2), (3, 3)])
@pytest.mark.parametrize("rule", RULES)
def test_sampled_drafts_leave_the_law_alone(rule, vocab, length, zeros):
    rng = np.random.default_rng([vocab, length, zeros])
    p = rows_by_context(rng, vocab, length + 1, zeros=zeros)
    q = rows_by_context(rng, vocab, length + 1, zeros=zeros)
    truth = target_law(p.__getitem__, vocab, length + 1)
    assert distance(joint_law(rule, p, q, vocab, length), truth) < TIGHT


@pytest.mark.parametrize("of", ["p", "q", "pq"])
@pytest.mark.parametrize("rule", RULES)
def test_laws_of_few_tokens_leave_the_law_alone_beside_each_other_and_beside_arrays(rule, of):
    rng = np.random.default_rng(17)
    p, q = (rows_by_context(rng, 4, 3, zeros=True) for _ in "pq")
    truth = target_law(p.__getitem__, 4, 3)
    found = joint_law(rule, few(p) if "p" in of else p, few(q) if "q" in of else q, 4, 2)
    assert distance(found, truth) < TIGHT
    if of == "p":
        assert distance(joint_law("rejection", few(p), (2, 2), 4, 2), truth) < TIGHT, "and beside a fixed draft"


@pytest.mark.parametrize("rule", RULES)
def test_drafts_that_are_almost_the_target_s_leave_the_law_alone(rule):
    """Whose weights come as close to 1 as they like."""
    rng = np.random.default_rng(17)
    p, others = rows_by_context(rng, 3, 4), rows_by_context(rng, 3, 4)
    for share in (0.01, 0.1, 0.3):
        q = {text: (1 - share) * p[text] + share * others[text] for text in p}
        assert distance(joint_law(rule, p, q, 3, 3), target_law(p.__getitem__, 3, 4)) < TIGHT


@pytest.mark.parametrize("rule", RULES)
def test_laws_in_float32_leave_the_law_alone_to_their_own_precision(rule):
    """As those of every engine are but the toy's."""
    rng = np.random.default_rng(11)
    p, q = ({text: law.astype(np.float32) for text, law in rows_by_context(rng, 4, 3).items()} for _ in "pq")
    assert distance(joint_law(rule, p, q, 4, 2), target_law(p.__getitem__, 4, 3)) < 1e-6


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("drafted", [(0,), (2, 2), (1, 0, 2)])
def test_fixed_drafts_leave_the_law_alone(drafted, zeros):
    rng = np.random.default_rng([len(drafted), zeros])
    p = rows_by_context(rng, 3, len(drafted) + 1, zeros=zeros)
    truth = target_law(p.__getitem__, 3, len(drafted) + 1)
    assert distance(joint_law("rejection", p, drafted, 3, len(drafted)), truth) < TIGHT


@pytest.mark.parametrize("ends", [lambda x: x[-1:] == [0], lambda x: sum(x) > 2], ids=["after a token", "by its sum"])
@pytest.mark.parametrize("rule", RULES)
def test_where_a_draft_ends_may_depend_on_its_tokens(rule, ends):
    rng = np.random.default_rng(9)
    p, q = (rows_by_context(rng, 3, 4) for _ in "pq")
    assert distance(joint_law(rule, p, q, 3, 3, ends), target_law(p.__getitem__, 3, 4)) < TIGHT


@pytest.mark.parametrize("rule", RULES)
def test_a_perfect_draft_is_always_accepted(rule):
    p = rows_by_context(np.random.default_rng(5), 3, 3)
    assert expected_accepted(rule, p, p, 2) == pytest.approx(2, abs=TIGHT)


def test_block_accepts_more_than_rejection_and_rejection_accepts_the_overlap():
    rng = np.random.default_rng(11)
    p, q = rows_by_context(rng, 3, 4), rows_by_context(rng, 3, 4)
    by_token, by_block = (expected_accepted(rule, p, q, 3) for rule in RULES)
    assert by_block > by_token + 0.01
    overlap = float(np.minimum(p[()], q[()]).sum())
    assert expected_accepted("rejection", p, q, 1) == pytest.approx(overlap, abs=TIGHT)


def test_block_works_out_no_law_and_no_threshold_that_decides_nothing(monkeypatch):
    """Prefixes are tried from the longest on, and the row behind the drafts is asked for if all of them are kept."""
    asked, compared, laws_ = [], [], [np.array([0.5, 0.5]), np.array([0.2, 0.8]), np.array([0.6, 0.4])]
    excess = verify.excess
    monkeypatch.setattr(verify, "excess", lambda p, q, weight=1.0: (compared.append(weight), excess(p, q, weight))[1])

    def round_of(q, coins):
        asked.clear(), compared.clear()
        found = verify.block([1, 1], q, lambda i: (asked.append(i), laws_[i])[1], coins, lambda law: int(law.argmax()))
        return found.accepted, found.token, list(asked), list(compared)

    assert round_of(laws_[:2], [0.9, 0.9]) == (2, 0, [0, 1, 2], [])
    unlikely = [np.array([0.0, 1.0]), np.array([0.05, 0.95])]
    assert round_of(unlikely, [0.99, 0.4]) == (2, 0, [0, 1, 2], [])
    kept, token, rows, weights = round_of(unlikely, [0.05, 0.5])
    assert (kept, token, rows, weights) == (1, 0, [0, 1], [0.5, 0.5]), "its threshold, then what is left"


@pytest.mark.parametrize("rule", RULES)
def test_expected_outcomes_have_the_mean_of_what_happens_and_less_noise(rule):
    rng = np.random.default_rng(11)
    p, q = rows_by_context(rng, 3, 4), rows_by_context(rng, 3, 4)
    found = list(verdicts(rule, p, q, 3))
    for position in range(3):
        kept = [dict(enumerate(verdict.outcomes)).get(position, (0.0, 0.0))[1] for verdict, _ in found]
        happened = [float(verdict.accepted > position) for verdict, _ in found]
        chances = np.array([chance for _, chance in found])
        assert chances @ kept == pytest.approx(chances @ happened, abs=TIGHT)
        assert chances @ np.square(kept) < chances @ np.square(happened) - 0.01
        reached = [dict(enumerate(verdict.outcomes)).get(position, (0.0, 0.0))[0] for verdict, _ in found]
        before = [float(verdict.accepted >= position) for verdict, _ in found]
        assert chances @ reached == pytest.approx(chances @ before, abs=TIGHT)


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.0, 0.25, 1.0, 3.0]), min_size=3, max_size=3), min_size=8, max_size=8),
    st.sampled_from(RULES),
)
def test_any_rows_with_zeros_ties_and_disjoint_supports(weights, rule):
    rows = [np.array(w) / sum(w) if sum(w) else np.array([0.0, 1.0, 0.0]) for w in weights]
    p = {(): rows[0], (0,): rows[1], (1,): rows[2], (2,): rows[3]}
    q = {(): rows[4], (0,): rows[5], (1,): rows[6], (2,): rows[7]}
    assert distance(joint_law(rule, p, q, 3, 1), target_law(p.__getitem__, 3, 2)) < TIGHT


@pytest.mark.parametrize("held", [dict, few], ids=["arrays", "few"])
def test_where_rounding_leaves_nothing_the_law_itself_is_left(held):
    """As where a token with all the mass is rejected by a coin that rounds to 1."""
    p = held({(): np.array([0.0, 1.0, 0.0])})[()]
    for rest in (verify.without(p, 1), verify.residual(p, p), verify.residual(p, np.array([0.0, 1.0, 0.0]), 0.5)):
        assert draw(rest, 0.3) == 1
    assert draw(verify.without(held({(): np.array([0.5, 0.5, 0.0])})[()], 1), 0.9) == 0


def test_draw_has_exactly_its_law():
    """Each token's share of [0, 1), found by bisecting the production function itself."""
    for weights in ([0.1, 0.0, 0.6, 0.3], [2.0, 1.0], [0.0, 0.0, 5.0, 0.0]):
        law_, edges = np.array(weights), [0.0]
        for token in range(len(weights)):
            low, high = 0.0, 1.0
            for _ in range(60):
                middle = (low + high) / 2
                low, high = (middle, high) if draw(law_, middle) <= token else (low, middle)
            edges.append(low)
        assert np.abs(np.diff(edges) - law_ / law_.sum()).max() < TIGHT
        some = Few.of(range(law_.size), weights)
        for uniform in (0.0, *(abs(edge + beside) for edge in edges[:-1] for beside in (-1e-9, 1e-9)), 1.0 - 1e-16):
            assert law_[draw(law_, uniform)] > 0
            assert draw(some, uniform) == draw(law_, uniform) and draw_and_sum(some, uniform)[1] == law_.sum()


def test_gumbel_noise_is_the_double_logarithm_of_its_own_uniforms():
    noise = Noise(3)
    expected = -np.log(-np.log(noise.uniforms(17, Purpose.GUMBEL, 50)))
    assert np.array_equal(noise.gumbel(17, 50), expected)
    assert np.array_equal(Noise(3).gumbel(17, 20), expected[:20])


def test_gumbel_argmax_draws_from_the_law():
    """20,000 positions at a fixed seed: chi-square over 5 tokens below the 1e-4 quantile (23.5 at 4 degrees)."""
    p, noise = np.array([0.05, 0.15, 0.2, 0.25, 0.35]), Noise(2)
    counts = np.zeros(5)
    for position in range(20_000):
        counts[int((np.log(p) + noise.gumbel(position, 5)).argmax())] += 1
    assert (((counts - 20_000 * p) ** 2) / (20_000 * p)).sum() < 23.5


def test_streams_do_not_share_numbers():
    noise = Noise(1)
    streams = [tuple(noise.uniforms(position, purpose, 8)) for position in range(5) for purpose in Purpose]
    assert len(set(itertools.chain(*streams))) == 8 * len(streams)
    assert tuple(Noise(2).uniforms(0, Purpose.DRAFT, 8)) not in streams
    assert np.array_equal(noise.uniforms(4, Purpose.ACCEPT, 3), Noise(1).uniforms(4, Purpose.ACCEPT, 8)[:3])


@pytest.mark.parametrize("rule", RULES)
def test_processors_with_a_history_keep_the_law(rule, monkeypatch):
    """Penalties, bias, top-k, min-p and a ban on end tokens: the law of sampling plainly through the same chain."""
    laws, prompt = (table_law(4, seed=4), table_law(4, seed=6)), [1, 2, 1]
    options = {"temperature": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 0.7, "top_k": 3, "min_p": 0.02}
    options |= {"rule": rule, "logit_bias": {2: 0.5}, "min_new_tokens": 2, "stop_token_ids": (3,), "draft_length": 2}

    def row(tokens):
        chain = Chain(Settings(**options), 4, prompt, {3})
        chain.extend(tokens)
        return chain.distribution(np.log(laws[0](np.array([*prompt, *tokens]))))

    found = decode_law(laws, 4, 3, monkeypatch, prompt, **options)
    assert distance(found, target_law(row, 4, 3)) < TIGHT


WHOLE_RUNS = [
    {"rule": "rejection", "draft_length": 2},
    {"rule": "block", "draft_length": 2},
    {"rule": "rejection", "draft": "ngram", "draft_length": 2},
    {"rule": "block", "draft": "ngram", "draft_length": 2},
    {"rule": "rejection", "draft": "none"},
]


@pytest.mark.parametrize("options", WHOLE_RUNS, ids=lambda o: "-".join(map(str, o.values())))
def test_whole_runs_have_the_target_s_law(options, monkeypatch):
    """Decoder, drafter, caches and rule together, over several rounds: three tokens, every branch."""
    target, other = table_law(3, seed=4), table_law(3, seed=5)
    prompt = [1, 2, 1, 2, 1]
    laws = target, mixed_law(target, other, 0.8)
    found = decode_law(laws, 3, 3, monkeypatch, prompt, temperature=0.5, **options)
    assert distance(found, target_law(sharpened(target, prompt, power=2.0), 3, 3)) < TIGHT


@pytest.mark.parametrize(
    ("draft", "prompt"), [("suffix", [1, 2, 0]), ("recycling", [1, 2, 0]), ("auto", [1, 2, 1, 2, 1])]
)
@pytest.mark.parametrize("rule", RULES)
def test_a_seed_that_is_used_again_leaves_the_law_alone(rule, draft, prompt, monkeypatch):
    """Over all seeds: what is remembered of the first answer was drawn with the seed's numbers, and the second one must
    not be tested with these."""
    laws = target, _ = table_law(3, seed=4), mixed_law(table_law(3, seed=4), table_law(3, seed=5), 0.8)
    request = prompt, Settings(max_new_tokens=2, temperature=0.5, seed=7, rule=rule, draft=draft, draft_length=1)

    def run(branches: Branches) -> tuple[tuple[int, ...], ...]:
        noises: dict[tuple[int, int], ScriptedNoise] = {}
        with monkeypatch.context() as patch:
            patch.setattr(admission, "Noise", lambda *key: noises.setdefault(key, ScriptedNoise(branches)))
            draw_with_coins(patch)
            decoder = Decoder(*(ToyEngine(each, 3) for each in laws), costs=FixedCosts(per_draft=0.05))
            return tuple(tuple(collect(decoder.decode([request]), 1)[0][0]) for _ in range(2))

    one = target_law(sharpened(target, prompt, power=2.0), 3, 2)
    assert distance(law(run), {(a, b): one[a] * one[b] for a in one for b in one}) < TIGHT


@pytest.mark.parametrize(
    ("repeats", "options"),
    [
        (True, {"rule": "rejection", "draft": "model", "draft_length": 3}),
        (True, {"rule": "block", "draft": "ngram", "draft_length": 2}),
        (True, {"rule": "rejection", "draft": "model", "branches": (2, 1)}),
        (True, {"rule": "block", "draft": "none"}),
        (True, {"rule": "coupled", "draft": "auto"}),
        (False, {"rule": "block", "draft": "model"}),
        (False, {"rule": "rejection", "draft": "ngram"}),
        (False, {"rule": "rejection", "draft": "suffix", "draft_length": 3}),
        (False, {"rule": "typical", "draft": "recycling", "draft_length": 3}),
        (False, {"rule": "lenient", "draft": "auto"}),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else "-".join(map(str, value.values())),
)
def test_a_seed_repeats_a_text_where_drafts_depend_on_nothing_else(repeats, options, monkeypatch):
    keys = []
    monkeypatch.setattr(admission, "Noise", lambda *key: keys.append(key) or Noise(*key))
    decoder = Decoder(*(ToyEngine(table_law(5, seed=seed), 5) for seed in (1, 2)))
    request = [1, 2, 1, 2], Settings(max_new_tokens=20, temperature=1.0, seed=7, **options)
    texts = [collect(decoder.decode([request]), 1)[0] for _ in range(2)]
    assert (len(set(keys)) == 1) == repeats and {seed for seed, _ in keys} == {7}
    assert texts[0] == texts[1] or not repeats
