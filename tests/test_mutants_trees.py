"""The tests of trees and lossy rules are tested: each of these bugs, put into the production source, must be found."""

from __future__ import annotations

import numpy as np
import pytest
from support_runtime import decode_law, distance, target_law
from test_lossy import MASSES
from test_lossy import test_lenient_greedy_keeps_near_bests_and_counts_them as lenient_greedy_counts
from test_lossy import test_lenient_greedy_runs_count_the_tokens_that_are_not_the_target_s as runs_count
from test_lossy import test_no_token_becomes_likelier_than_leniency_allows as leniency_bounds
from test_lossy import test_the_reported_distance_is_that_of_the_law_emitted as distance_is_exact
from test_lossy import test_typical_keeps_what_is_likely_enough as typical_keeps
from test_lossy import test_weights_are_p_over_its_largest as weights_have_no_temperature
from test_mutants import Mutant, must_die
from test_trees import LAWS, PROMPT
from test_trees import test_a_twin_s_tree_is_always_accepted as twins_agree
from test_trees import test_any_rows_with_zeros_ties_and_disjoint_supports as any_rows
from test_trees import test_descending_follows_the_target_s_own_choice as descending_follows
from test_trees import test_trees_change_nothing as trees_change_nothing
from test_trees import test_whole_runs_have_the_target_s_law as whole_runs

from leadout.runtime import decoder, judging
from leadout.runtime.drafters import tree_drafter
from leadout.runtime.rules import lossy, sampling, trees
from leadout.runtime.rules.sampling import Chain
from leadout.runtime.settings import Settings


def identity_holds(monkeypatch):
    trees_change_nothing((2, 1))


def laws_hold(monkeypatch):
    whole_runs({"branches": (2, 1)}, monkeypatch)


def narrow_laws_hold(monkeypatch):
    whole_runs({"branches": (3, 1), "top_k": 2}, monkeypatch)


def histories_are_those_of_the_branch(monkeypatch):
    """Penalties see the committed text and the branch, on both sides."""
    options = {"temperature": 0.8, "repetition_penalty": 1.6, "frequency_penalty": 0.7, "rule": "rejection"}

    def row(tokens):
        chain = Chain(Settings(**options), 3, PROMPT, ())
        chain.extend(tokens)
        return chain.distribution(np.log(LAWS[0](np.array([*PROMPT, *tokens]))))

    found = decode_law(LAWS, 3, 3, monkeypatch, PROMPT, branches=(2, 1), **options)
    assert distance(found, target_law(row, 3, 3)) < 1e-12


def twins_hold(monkeypatch):
    twins_agree()


def rows_hold(monkeypatch):
    any_rows()


def descending_holds(monkeypatch):
    descending_follows()


TREE_CHECKS = [  # those first that take least
    descending_holds,
    identity_holds,
    twins_hold,
    narrow_laws_hold,
    laws_hold,
    histories_are_those_of_the_branch,
    rows_hold,
]


def distances_hold(monkeypatch):
    for name in MASSES:
        distance_is_exact(name, True, None)
        distance_is_exact(name, False, (1, 0))


def the_bound_holds(monkeypatch):
    leniency_bounds(0.2)


def greedy_counts(monkeypatch):
    lenient_greedy_counts()
    runs_count()


def typical_holds(monkeypatch):
    typical_keeps()


def weights_hold(monkeypatch):
    weights_have_no_temperature()


LOSSY_CHECKS = [distances_hold, the_bound_holds, greedy_counts, typical_holds, weights_hold]

RRS = (trees, "recursive_rejection")
TREE_MUTANTS = [
    Mutant("every child against the whole of p", *RRS, "left = residual(left, law)", "pass"),
    Mutant("what is left of p is not normalised", *RRS, "left = left / left.sum()", "pass"),
    Mutant("a rejected child stays in q", *RRS, "law = without(law, x[n])", "pass"),
    Mutant("what is left of q is not normalised", *RRS, "law = law / law.sum()", "pass"),
    Mutant("the correction is drawn from p", *RRS, "draw(left)", "draw(p(node))"),
    Mutant("siblings share a coin", *RRS, "uniforms[n]", "uniforms[below[0]]"),
    Mutant("the bonus comes from the first row", *RRS, "draw(p(node))", "draw(p(ROOT))"),
    Mutant("children are drawn with replacement", trees, "draw_children", "left[token] = 0.0", "pass"),
    Mutant("down to any child", trees, "descend", "x[n] == chosen", "x[n] >= chosen"),
    Mutant("a node sees its elder sibling", trees, "ancestry", "sees[parent + 1]", "sees[n]"),
    Mutant(
        "absent nodes are children of the root", trees, "children", "if parent == node", "if max(parent, -1) == node"
    ),
    Mutant("noise by round, not by depth", judging, "judge_tree", "start + len(drafted)", "start"),
    Mutant("coins used again for the final draw", judging, "judge_tree", "Purpose.FINAL", "Purpose.ACCEPT"),
    Mutant("draft's noise used again for the coins", judging, "judge_tree", "Purpose.ACCEPT", "Purpose.DRAFT"),
    Mutant(
        "penalties do not see the branch",
        judging,
        "judge_tree",
        "logits[node + 1], before(node)",
        "logits[node + 1], []",
    ),
    Mutant("a node's logits are its parent's", judging, "judge_tree", "logits[node + 1]", "logits[max(node, 0)]"),
    Mutant(
        "the target's cache keeps the first branch",
        decoder.Decoder,
        "_extend",
        "self._target.compact(place, row.sequence.cached + 1, verdict.path)",
        "pass",
    ),
    Mutant(
        "the draft's cache keeps the first branch",
        tree_drafter.TreeDrafter,
        "observe",
        "self._stepper.compact(place, self._base[place], kept)",
        "pass",
    ),
    Mutant(
        "the draft's cache counts what was never fed", tree_drafter.TreeDrafter, "observe", "if node < self._fed", ""
    ),
    Mutant(
        "a level is written over the one before",
        tree_drafter.TreeDrafter,
        "_feed_level",
        "valid + level.start",
        "valid",
    ),
    Mutant(
        "children after the wrong branch",
        tree_drafter.TreeDrafter,
        "_grow",
        "path(draft.parents, node)]",
        "[node] if node >= 0]",
    ),
    Mutant("one coin for all children", tree_drafter, "branch", "nodes.stop)[nodes.start :]", "1) * 99"),
]
LOSSY_MUTANTS = [
    Mutant("distance the other way round", lossy, "relaxed", "excess(kept, row)", "excess(row, kept)"),
    Mutant("the residual ignores what was kept", lossy, "relaxed", "residual(row, kept)", "row"),
    Mutant("no coin", lossy, "relaxed", "uniforms[i] * proposal.item(drafted) <", "0 <"),
    Mutant("typical of the unlikely", lossy, "typical", "p > min", "p <= min"),
    Mutant("typical without entropy", lossy, "typical", "delta * math.exp(-entropy)", "delta"),
    Mutant("leniency the wrong way", lossy, "lenient", "p / leniency", "p * leniency"),
    Mutant("greedy: foreign tokens are not counted", lossy, "lenient_greedy", "float(drafted != best(i))", "0.0"),
    Mutant("greedy: leniency ignored", lossy, "lenient_greedy", "< leniency", "< 1.0"),
    Mutant(
        "p / max p has a temperature",
        sampling.Chain,
        "weights",
        "powers(below",
        "powers(9 * below",
    ),
]


@pytest.mark.parametrize("check", [*TREE_CHECKS, *LOSSY_CHECKS], ids=lambda check: check.__name__)
def test_healthy_code_passes(check, monkeypatch):
    check(monkeypatch)


@pytest.mark.parametrize("mutant", TREE_MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_of_trees_is_killed(mutant, monkeypatch):
    must_die(mutant, TREE_CHECKS, monkeypatch)


@pytest.mark.parametrize("mutant", LOSSY_MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_of_lossy_rules_is_killed(mutant, monkeypatch):
    must_die(mutant, LOSSY_CHECKS, monkeypatch)
