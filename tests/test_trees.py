"""Draft trees: the geometry, the exact laws of both rules, whole runs on the toy, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support_runtime import Branches, Coin, distance, law, target_law
from test_laws import rows_by_context

from leadout.runtime import trees, verify

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


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("shape", [(2,), (3,), (1, 1), (2, 1), (1, 2), (2, 2)])
def test_recursive_rejection_leaves_the_law_alone(shape, zeros):
    rng = np.random.default_rng([*shape, zeros])
    depth = len(shape)
    p, q = (rows_by_context(rng, 3, depth + 1, zeros=zeros) for _ in range(2))
    found = joint_law(shape, p, q, depth + 1)
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
    assert trees.descend(parents, x, {-1: 6}.__getitem__) == verify.Verdict(0, 6, 1, path=())
    assert trees.descend([], [], {-1: 6}.__getitem__) == verify.Verdict(0, 6, 0, path=())


@pytest.mark.parametrize("shape", SHAPES)
def test_every_node_sees_its_branch_and_nothing_else(shape):
    parents = full(shape)
    assert trees.levels(shape) == [int(np.prod(shape[: i + 1])) for i in range(len(shape))]
    assert len(parents) == sum(trees.levels(shape))
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
