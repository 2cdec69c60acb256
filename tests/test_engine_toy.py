"""The toy engine keeps the Engine contract, and shows every breach of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from leadout.engines.toy import ToyEngine, table_law
from leadout.errors import EngineError

VOCAB = 5
LAW = table_law(VOCAB, seed=3)


def step(engine, row_tokens, past, index=None):
    index = None if index is None else np.array(index)
    return engine.forward(np.array(row_tokens), np.array(past), index)


def expected(*contexts):
    return np.log([LAW(np.array(context)) for context in contexts]).astype(np.float64)


def test_logits_are_those_of_the_context_in_the_cache():
    engine = ToyEngine(LAW, VOCAB)
    engine.reserve(4)
    assert np.array_equal(step(engine, [[1, 2, 3]], [0])[0], expected([1], [1, 2], [1, 2, 3]))
    assert np.array_equal(step(engine, [[4, 0]], [1], [[1]])[0], expected([1, 4, 0]))
    assert engine.calls == [(1, 3), (1, 2)]


def test_rows_are_apart_and_can_be_copied():
    engine = ToyEngine(LAW, VOCAB)
    engine.reset(3)
    engine.reserve(8)
    step(engine, [[1, 1], [2, 2], [3, 3]], [0, 0, 0])
    engine.copy_row(2, 0)
    logits = step(engine, [[4], [4]], [2, 1])
    assert np.array_equal(logits[:, 0], expected([3, 3, 4], [2, 4]))


def test_breaches_are_refused():
    engine = ToyEngine(LAW, VOCAB)
    engine.reserve(1)
    with pytest.raises(EngineError, match=r"slot 17 .* 16 slots"):
        step(engine, [[1, 2]], [15])
    with pytest.raises(EngineError, match="never written"):
        step(engine, [[1]], [3])
    with pytest.raises(EngineError, match="2 rows"):
        step(engine, [[1], [1]], [0, 0])
    step(engine, [[1, 2, 3, 4]], [0])
    engine.reset(1)
    with pytest.raises(EngineError, match="never written"):
        step(engine, [[1]], [3])


def test_positions_beyond_the_context_are_padding():
    engine = ToyEngine(LAW, VOCAB, max_context=3)
    engine.reserve(4)
    logits = step(engine, [[1, 2, 3, 4]], [0])
    assert np.isfinite(logits[0, :3]).all() and np.isnan(logits[0, 3]).all()


class Rollback(RuleBasedStateMachine):
    """Forward, rewind, fork and grow, against lists."""

    def __init__(self):
        super().__init__()
        self.engine = ToyEngine(LAW, VOCAB)
        self.engine.reset(2)
        self.rows = [[0], [0]]
        self.engine.reserve(1)
        step(self.engine, [[0], [0]], [0, 0])

    @rule(
        tokens=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4), keep=st.integers(0, 4)
    )
    def forward(self, tokens, keep):
        past = [len(row) for row in self.rows]
        self.engine.reserve(max(past) + len(tokens))
        step(self.engine, [[pair[b] for pair in tokens] for b in range(2)], past)
        for b in range(2):
            self.rows[b] += [pair[b] for pair in tokens][: keep + b]

    @rule(row=st.integers(0, 1), length=st.integers(1, 30))
    def rewind(self, row, length):
        del self.rows[row][length:]

    @rule(source=st.integers(0, 1))
    def fork(self, source):
        self.engine.copy_row(source, 1 - source)
        self.rows[1 - source] = list(self.rows[source])

    @invariant()
    def the_next_law_is_that_of_the_list(self):
        past = [len(row) for row in self.rows]
        self.engine.reserve(max(past) + 1)
        logits = step(self.engine, [[2], [2]], past)
        assert np.array_equal(logits[:, 0], expected(*([*row, 2] for row in self.rows)))


TestRollback = Rollback.TestCase
TestRollback.settings = hypothesis_settings(max_examples=25, stateful_step_count=15, deadline=None)
