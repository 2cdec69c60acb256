"""Draft trees: the geometry, the exact laws of both rules, whole runs on the toy, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support_runtime import Branches, Coin, collect, decode_law, distance, law, sharpened, target_law, toy_pair
from test_laws import few, rows_by_context

from leadout.engines.toy import mixed_law, table_law
from leadout.errors import UsageError
from leadout.runtime.decoder import Decoder
from leadout.runtime.rules import trees, verify
from leadout.runtime.settings import Settings

TIGHT = 1e-12
SHAPES = [(2,), (3,), (1, 1), (2, 1), (2, 2), (3, 2), (1, 2, 1)]


def full(branches):
    """The parents of the full tree of ``branches``."""
    parents, above = [], [trees.ROOT]
    for width in branches:
        level = range(len(parents), len(parents) + len(above) * width)
        parents += [parent for parent in above for _ in range(width)]
        above = list(level)
    return parents


def drawn_tree(branches, shape, q):
    """A tree of ``shape`` whose children are drawn from q(tokens of the path) without replacement: (parents, x)."""
    parents, x, above = [], [], [((), trees.ROOT)]
    for width in shape:
        level = []
        for context, node in above:
            coins = [Coin(branches) for _ in range(width)]
            for token in trees.draw_children(q[context], width, coins, lambda weights, coin: coin.draw(weights)):
                level.append(((*context, token), len(parents)))
                parents.append(node)
                x.append(token)
        above = level
    return parents, x


def joint_law(shape, p, q, count):
    def run(branches: Branches):
        parents, x = drawn_tree(branches, shape, q)

        def after(table):
            return lambda node: table[tuple(x[n] for n in trees.path(parents, node))]

        coins = [Coin(branches) for _ in x]
        verdict = trees.recursive_rejection(
            parents, x, after(q), after(p), coins, lambda weights: Coin(branches).draw(weights)
        )
        assert verdict.accepted == len(verdict.path) <= verdict.tested <= len(shape)
        tokens = [*(x[n] for n in verdict.path), verdict.token]
        while len(tokens) < count:
            tokens.append(Coin(branches).draw(p[tuple(tokens)]))
        return tuple(tokens)

    return law(run)


@pytest.mark.parametrize("held", [dict, few], ids=["arrays", "few"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("shape", [(2,), (3,), (1, 1), (2, 1), (1, 2), (2, 2)])
def test_recursive_rejection_leaves_the_law_alone(shape, zeros, held):
    rng = np.random.default_rng([*shape, zeros])
    depth = len(shape)
    p, q = (rows_by_context(rng, 3, depth + 1, zeros=zeros) for _ in range(2))
    found = joint_law(shape, held(p), q, depth + 1)
    assert distance(found, target_law(p.__getitem__, 3, depth + 1)) < TIGHT


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.0, 0.25, 1.0, 3.0]), min_size=4, max_size=4), min_size=2, max_size=2),
    st.integers(1, 4),
)
def test_any_rows_with_zeros_ties_and_disjoint_supports(weights, width):
    p, q = (np.array(w) / sum(w) if sum(w) else np.array([0.0, 1.0, 0.0, 0.0]) for w in weights)
    p = {(): p} | {(token,): p for token in range(4)}
    assert distance(joint_law((width,), p, {(): q}, 2), target_law(p.__getitem__, 4, 2)) < TIGHT


def test_more_children_are_accepted_more_often_and_one_is_a_chain():
    p, q = (rows_by_context(np.random.default_rng(seed), 5, 2) for seed in (3, 4))

    def acceptance(width):
        parts = {}

        def run(branches: Branches):
            parents, x = drawn_tree(branches, (width,), q)
            coins = [Coin(branches) for _ in x]
            verdict = trees.recursive_rejection(
                parents, x, lambda node: q[()], lambda node: p[()], coins, lambda weights: Coin(branches).draw(weights)
            )
            return verdict.accepted

        parts = law(run)
        return parts.get(1, 0.0)

    rates = [acceptance(width) for width in (1, 2, 3, 5)]
    assert rates[0] == pytest.approx(float(np.minimum(p[()], q[()]).sum()), abs=TIGHT)
    assert rates == sorted(rates) and rates[1] > rates[0] + 0.05 and rates[3] == pytest.approx(1.0, abs=TIGHT)


def test_a_chain_is_verified_as_a_chain():
    """Without branches both rules are those of ``verify``, coin for coin."""
    rng = np.random.default_rng(9)
    p, q = rows_by_context(rng, 3, 4), rows_by_context(rng, 3, 4)
    for x in itertools.product(range(3), repeat=3):
        coins = rng.random(3)
        wanted = verify.rejection(
            x, [q[x[:i]] for i in range(3)], lambda i, x=x: p[x[:i]], coins, lambda weights: int(weights.argmax())
        )
        found = trees.recursive_rejection(
            [-1, 0, 1],
            x,
            lambda n, x=x: q[x[: n + 1]],
            lambda n, x=x: p[x[: n + 1]],
            coins,
            lambda weights: int(weights.argmax()),
        )
        assert (found.accepted, found.token, found.tested) == (wanted.accepted, wanted.token, wanted.tested)
        choose = [int(row.argmax()) for row in (p[x[:i]] for i in range(4))]
        wanted = verify.match(x, choose.__getitem__)
        found = trees.descend([-1, 0, 1], x, lambda n, choose=choose: choose[n + 1])
        assert (found.accepted, found.token, found.tested) == (wanted.accepted, wanted.token, wanted.tested)


def test_descending_follows_the_target_s_own_choice():
    #   ROOT -> 0 (token 5), 1 (token 7);  0 -> 2 (8);  1 -> 3 (8), 4 (9);  4 -> 5 (absent)
    parents, x = [-1, -1, 0, 1, 1, trees.ABSENT], [5, 7, 8, 8, 9, 0]
    choices = {-1: 7, 0: 8, 1: 9, 4: 0}
    assert trees.descend(parents, x, choices.__getitem__) == verify.Verdict(2, 0, 2, path=(1, 4))
    assert trees.descend(parents, x, {-1: 7, 1: 3}.__getitem__) == verify.Verdict(1, 3, 2, path=(1,))
    assert trees.descend(parents, x, {-1: 0}.__getitem__) == verify.Verdict(0, 0, 1, path=()), "nobody's child"
    assert trees.descend(parents, x, {-1: 6}.__getitem__) == verify.Verdict(0, 6, 1, path=())
    assert trees.descend([], [], {-1: 6}.__getitem__) == verify.Verdict(0, 6, 0, path=())


@pytest.mark.parametrize("shape", SHAPES)
def test_every_node_sees_its_branch_and_nothing_else(shape):
    parents = full(shape)
    sees = trees.ancestry([*parents, trees.ABSENT], len(parents) + 3)
    for node in range(len(parents)):
        assert np.flatnonzero(sees[node + 1]).tolist() == [0, *(n + 1 for n in trees.path(parents, node))]
    for padding in (len(parents) + 1, len(parents) + 2):
        assert np.flatnonzero(sees[padding]).tolist() == [padding]
    assert np.flatnonzero(sees[0]).tolist() == [0]


def test_best_children_are_the_highest_in_order():
    scores = np.array([0.5, 2.0, -np.inf, 2.0, 1.0])
    assert trees.best_children(scores, 3) == [1, 3, 4]
    assert trees.best_children(scores, 9) == [1, 3, 4, 0]
    assert trees.best_children(np.full(3, -np.inf), 2) == []


LAWS = table_law(3, seed=4), mixed_law(table_law(3, seed=4), table_law(3, seed=5), 0.8)
PROMPT = [1, 2, 1, 2, 1]


@pytest.mark.parametrize(
    "options", [{"branches": (2, 1)}, {"branches": (2,)}, {"branches": (3, 1), "top_k": 2}], ids=lambda o: str(o)
)
def test_whole_runs_have_the_target_s_law(options, monkeypatch):
    """Decoder, tree drafter, both caches and their compaction over several rounds: three tokens, every branch."""
    found = decode_law(LAWS, 3, 3, monkeypatch, PROMPT, temperature=0.5, rule="rejection", **options)
    truth = sharpened(LAWS[0], PROMPT, power=2.0)

    def row(tokens):
        law_ = truth(tokens)
        if "top_k" in options:
            law_ = np.where(law_ < np.sort(law_)[-2], 0.0, law_)
        return law_ / law_.sum()

    assert distance(found, target_law(row, 3, 3)) < TIGHT


REQUESTS = [
    ([1, 2, 3], {"max_new_tokens": 25}),
    ([4] * 30, {"max_new_tokens": 33}),
    ([5, 6], {"max_new_tokens": 11, "repetition_penalty": 1.5, "frequency_penalty": 0.4}),
    ([3, 1, 3], {"max_new_tokens": 30, "min_new_tokens": 14}),
    ([7, 8, 9, 1], {"max_new_tokens": 30, "temperature": 1.0, "seed": 3, "min_new_tokens": 9, "top_k": 3}),
    ([2], {"max_new_tokens": 2}),
]


def texts(requests, eos=(0, 3, 7, 9), **change):
    target, draft = toy_pair(11)
    decoder = Decoder(target, draft)
    batch = [(prompt, Settings(**(options | change))) for prompt, options in requests]
    found, last = collect(decoder.decode(batch, eos_token_ids=eos), len(batch))
    return found, [last[i] for i in range(len(batch))]


@pytest.mark.parametrize("shape", SHAPES)
def test_trees_change_nothing(shape):
    """Greedy and coupled: the tokens of plain decoding, alone and in a ragged batch that shrinks."""
    plain = [texts([request], draft="none")[0][0] for request in REQUESTS]
    assert [texts([request], branches=shape)[0][0] for request in REQUESTS] == plain
    together, last = texts(REQUESTS, branches=shape)
    assert together == plain
    assert all(event.stats.drafted > event.stats.tested or shape == (1, 1) for event in last[:5])


def test_a_twin_s_tree_is_always_accepted():
    """Draft and target of one law: every level accepted, so both caches are right after every compaction."""
    target, _ = toy_pair(11)
    twin, _ = toy_pair(11)
    for options in ({}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "rule": "rejection"}):
        settings = Settings(max_new_tokens=40, branches=(2, 2, 1), **options)
        _, last = collect(Decoder(target, twin).decode([([1, 2], settings)]), 1)
        stats = last[0].stats
        assert stats.acceptance_rate == 1.0 and stats.rounds == 10
        assert len(stats.tested_per_position) == 3 and stats.drafted == 10 * (2 + 4 + 4)


def test_more_branches_bring_more_tokens_a_round():
    chain, wide = (
        sum(event.stats.rounds for event in texts(REQUESTS, eos=(), branches=shape)[1]) for shape in ((1, 1), (3, 2))
    )
    assert wide < 0.95 * chain


def test_the_draft_takes_a_step_a_level():
    target, draft = toy_pair(11)
    collect(Decoder(target, draft).decode([([1, 2, 3], Settings(max_new_tokens=4, branches=(3, 2, 1)))]), 1)
    assert draft.calls[1:4] == [(1, 1), (1, 3), (1, 6)] and target.calls[1] == (1, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"branches": (0, 2)}, "each of branches must be an integer from 1 to 64"),
        ({"branches": (4, 4, 3)}, "branches 4,4,3: 68 nodes, a tree has 1 to 64"),
        ({"branches": (1,) * 17}, "branches must be a list or tuple of at most 16 integers, not of 17"),
        ({"branches": "3,2"}, "branches must be a list or tuple"),
        ({"branches": (2, 2), "draft": "ngram"}, r"draft 'ngram' proposes no trees \(with branches: draft model\)"),
        ({"branches": (2, 2), "draft": "auto"}, "draft 'auto' proposes no trees"),
        ({"branches": (2, 2), "draft_length": 3}, "draft_length and branches exclude each other"),
        (
            {"branches": (2,), "rule": "block"},
            r"rule 'block' verifies no trees \(with branches: auto, greedy, coupled, r",
        ),
        ({"branches": (2,), "rule": "lenient"}, "rule 'lenient' verifies no trees"),
    ],
)
def test_what_cannot_branch_is_refused_by_name(options, message):
    with pytest.raises(UsageError, match=message):
        Settings(**options)


def test_engines_and_batches_that_cannot_branch_are_refused():
    target, draft = toy_pair(11)
    wanted = ([1, 2], Settings(branches=(2, 2)))
    with pytest.raises(UsageError, match="branches must be the same for all requests of a batch"):
        Decoder(target, draft).decode([wanted, ([1], Settings())])
    with pytest.raises(UsageError, match="draft 'model' needs a draft model"):
        Decoder(target, None).decode([wanted])
    for engine, name in ((draft, "draft"), (target, "target")):
        engine.spec = dataclasses.replace(engine.spec, trees=False)
        with pytest.raises(UsageError, match=f"branches: the {name} has no graph for trees: .*export it again"):
            Decoder(target, draft).decode([wanted])
    target.spec = dataclasses.replace(target.spec, trees=True, max_verify=6)
    draft.spec = dataclasses.replace(draft.spec, trees=True)
    with pytest.raises(UsageError, match="branches: 6 nodes; this target verifies 1 to 5"):
        Decoder(target, draft).decode([wanted])


def test_auto_means_a_rule_that_verifies_trees():
    for options, rule in (
        ({}, "greedy"),
        ({"temperature": 1.0}, "rejection"),
        ({"temperature": 1.0, "seed": 1}, "coupled"),
    ):
        assert Settings(branches=(2, 1), **options).acceptance_rule == rule
