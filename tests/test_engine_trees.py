"""Steps that branch, on ONNX Runtime: each token's numbers are its branch's, and a kept branch is a continuation."""

from __future__ import annotations

import numpy as np
import pytest
from support_graphs import Shape, graph, reference, tokens, write

from leadout.bundle import Model
from leadout.engines.base import TreeEngine
from leadout.engines.ort import SlotEngine
from leadout.errors import EngineError
from leadout.export.graphs.passes import pack, simplify
from leadout.export.graphs.tree import to_tree, to_tree_gqa
from leadout.runtime.rules.trees import ancestry, path

C = Shape(windows=(None, 8))
WHOLE = Shape()
PARENTS = [-1, -1, 0, 0, 1, 3, 3, 5]  # a fork at once, another below, and a chain of four
CLOSE = 2e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    made = {name: write(shape, tmp_path_factory.mktemp(name)) for name, shape in (("windows", C), ("fp32", WHOLE))}
    return made | {p: write(WHOLE, tmp_path_factory.mktemp(p), p) for p in ("int8", "int4")}


def at(*lengths: int) -> np.ndarray:
    return np.array(lengths, np.int64)


def branches(fed: np.ndarray) -> list[list[int]]:
    """For each token of a step [last, nodes...]: the tokens of its branch."""
    return [[fed[0], *(fed[n + 1] for n in path(PARENTS, node))] for node in range(-1, len(PARENTS))]


@pytest.mark.parametrize("variant", ["auto", "gqa", "tree_gqa", "nonpad", "tree"])
@pytest.mark.parametrize("name", ["fp32", "windows"])
def test_every_token_sees_its_branch(models: dict[str, Model], name: str, variant: str) -> None:
    shape, engine = C if name == "windows" else WHOLE, SlotEngine(models[name], variant=variant)
    assert isinstance(engine, TreeEngine) and engine.spec.trees
    row, fed = tokens(shape, 1, 20)[0], tokens(shape, 1, 1 + len(PARENTS), seed=2)[0]
    engine.forward(row[None], at(0))
    kept = [buffer.array.copy() for buffer in engine._cache]
    logits = engine.forward_tree(fed[None], at(20), ancestry(PARENTS, len(fed))[None])[0]
    for found, branch in zip(logits, branches(fed), strict=True):
        assert np.abs(found - reference(shape, np.array([*row, *branch]))[-1]).max() < CLOSE
    for before, buffer in zip(kept, engine._cache, strict=True):
        changed = np.flatnonzero((before != buffer.array).any(axis=(0, 1, 3)))
        assert changed.tolist() == list(range(20, 20 + len(fed))), "the new slots and no others"
    engine.close()


@pytest.mark.parametrize("variant", ["auto", "tree_gqa", "tree"])
@pytest.mark.parametrize("name", ["fp32", "windows"])
def test_a_tree_may_begin_a_text(models: dict[str, Model], name: str, variant: str) -> None:
    """Behind a prompt of one token nothing is in the cache: no slot tells siblings' positions."""
    shape, engine = C if name == "windows" else WHOLE, SlotEngine(models[name], variant=variant)
    fed = tokens(shape, 1, 1 + len(PARENTS), seed=2)[0]
    logits = engine.forward_tree(fed[None], at(0), ancestry(PARENTS, len(fed))[None])[0].copy()
    for found, branch in zip(logits, branches(fed), strict=True):
        assert np.abs(found - reference(shape, np.array(branch))[-1]).max() < CLOSE
    kept = path(PARENTS, 7)
    engine.compact(0, 1, kept)
    text = np.array([*branches(fed)[8], 7, 11])
    assert np.abs(engine.forward(text[None, -2:], at(5))[0] - reference(shape, text)[-2:]).max() < CLOSE
    engine.close()


def test_rows_of_a_batch_have_trees_of_their_own(models: dict[str, Model]) -> None:
    engine = SlotEngine(models["windows"])
    engine.reset(3)
    lengths, rows = at(17, 3, 9), tokens(C, 3, 17)
    engine.forward(rows, at(0, 0, 0))
    fed = tokens(C, 3, 9, seed=3)
    chain = np.tri(9, dtype=np.bool_)
    sees = np.stack([ancestry(PARENTS, 9), chain, ancestry(PARENTS[:4], 9)])
    logits = np.array(engine.forward_tree(fed, lengths, sees))
    for row in range(3):
        for token in range(9 if row < 2 else 5):
            text = [*rows[row, : lengths[row]], *fed[row][sees[row, token]]]
            assert np.abs(logits[row, token] - reference(C, np.array(text))[-1]).max() < CLOSE


@pytest.mark.parametrize("variant", ["gqa", "nonpad"])
def test_a_kept_branch_is_a_continuation(models: dict[str, Model], variant: str) -> None:
    """Level by level (as a draft model grows its tree), then compacted: the next step reads the branch's text."""
    engine = SlotEngine(models["windows"], variant=variant)
    row, fed = tokens(C, 1, 20)[0], tokens(C, 1, 1 + len(PARENTS), seed=2)[0]
    engine.forward(row[None], at(0))
    sees = ancestry(PARENTS, len(fed))
    for start, stop in ((0, 3), (3, 6), (6, 9)):
        logits = engine.forward_tree(fed[None, start:stop], at(20 + start), sees[None, start:stop, :stop])[0]
        for found, branch in zip(logits, branches(fed)[start:stop], strict=True):
            assert np.abs(found - reference(C, np.array([*row, *branch]))[-1]).max() < CLOSE
    kept = path(PARENTS, 7)
    assert kept == [0, 3, 5, 7]
    engine.compact(0, 21, kept)
    text = np.array([*row, *branches(fed)[8], 7, 11])
    logits = engine.forward(text[None, -2:], at(25))[0]
    assert np.abs(logits - reference(C, text)[-2:]).max() < CLOSE
    engine.close()


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_a_chain_in_the_graph_of_one_row_has_the_bits_of_gqa(models: dict[str, Model], precision: str) -> None:
    row = tokens(WHOLE, 1, 26)
    for past in (0, 20):
        chain, tree = SlotEngine(models[precision]), SlotEngine(models[precision])
        for engine in (chain, tree):
            engine.forward(row[:, : max(1, past)], at(0))
        piece = row[:, past : past + 6]
        wanted = chain.forward(piece, at(past))
        assert np.array_equal(tree.forward_tree(piece, at(past), np.tri(6, dtype=np.bool_)[None]), wanted)


def test_growing_and_the_end_of_the_cache(models: dict[str, Model]) -> None:
    engine = SlotEngine(models["fp32"], variant="nonpad")
    fed, sees = tokens(WHOLE, 1, 9), ancestry(PARENTS, 9)[None]
    row = tokens(WHOLE, 1, 124, seed=5)
    engine.forward(row, at(0))
    with pytest.raises(EngineError, match=r"124 \+ 9 tokens exceed the cache of 128 slots: call reserve first"):
        engine.forward_tree(fed, at(124), sees)
    engine.reserve(133)
    found = engine.forward_tree(fed, at(124), sees)[0, 8]
    assert np.abs(found - reference(WHOLE, np.array([*row[0], *branches(fed[0])[8]]))[-1]).max() < CLOSE


def test_a_graph_for_trees_takes_chains_too_and_one_row_where_it_must(models: dict[str, Model]) -> None:
    row = tokens(C, 2, 24)
    engine = SlotEngine(models["windows"], variant="tree")
    engine.reset(2)
    logits = engine.forward(row, at(0, 0))
    assert max(np.abs(logits[i] - reference(C, row[i])).max() for i in range(2)) < CLOSE
    with pytest.raises(EngineError, match="variant 'tree_gqa' takes one row, not 2"):
        SlotEngine(models["windows"], variant="tree_gqa").reset(2)


def test_layers_that_are_not_understood_keep_a_model_from_trees() -> None:
    model = graph(C)
    simplify(model, C.context)
    pack(model)
    attention = [n for n in model.graph if n.op_type == "Attention"]
    attention[1].replace_input_with(3, None)
    assert to_tree(model) == to_tree_gqa(model) == 0
    assert "tree_mask" not in [value.name for value in model.graph.inputs]
