"""How prompts go in: in pieces that a device has memory for, however many there are, and nobody can tell."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support_graphs import Shape, write
from test_mutants import Mutant, must_die

from leadout.bundle import Model
from leadout.engines import base, sessions
from leadout.engines.base import MAX_STEP, MAX_TOGETHER, ModelSpec
from leadout.engines.ort import SlotEngine
from leadout.engines.toy import ToyEngine, table_law
from leadout.runtime import steps
from leadout.runtime.steps import Stepper

VOCAB = 11


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write(Shape(), tmp_path_factory.mktemp("model"))


def pieces_are_bounded_and_change_nothing(model: Model) -> None:
    """Ragged prompts of many rows: no step holds more than a bounded number of tokens, and each row's logits are those
    that it has alone."""
    rng = np.random.default_rng(0)
    for rows, longest in ((1, 1200), (2, 1200), (5, 700), (16, 200), (40, 90)):
        prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, longest, rows)]
        prompts[-1] = prompts[-1][:1] * longest
        engine = ToyEngine(table_law(VOCAB), VOCAB, max_context=2048)
        engine.reset(rows)
        together = np.array(Stepper(engine, "target").last_logits(prompts, [0] * rows))
        assert max(width for _, width in engine.calls) <= MAX_STEP
        assert max(count * width for count, width in engine.calls) <= MAX_TOGETHER
        assert len(engine.calls) <= -(-longest // engine.spec.chunk(rows)) + 1, "and no more steps than that takes"
        for prompt, row in zip(prompts, together, strict=True):
            alone = ToyEngine(table_law(VOCAB), VOCAB, max_context=2048)
            assert np.array_equal(Stepper(alone, "target").last_logits([prompt], [0])[0], row)


def an_engine_says_what_it_has_memory_for(model: Model) -> None:
    spec = ModelSpec(VOCAB, 2048)
    assert [spec.chunk(rows) for rows in (1, 2, 3, 16, 5000)] == [512, 512, 341, 64, 1]
    built = dataclasses.replace(spec, max_step=128, max_together=4 * 128)
    assert [built.chunk(rows) for rows in (1, 4, 8)] == [128, 128, 64]


def memory_of_a_prompt_is_taken_once(model: Model) -> None:
    """A plan of memory for each shape would stand beside the memory that the shape's first step took."""
    engine = SlotEngine(model)
    assert not engine._session.get_session_options().enable_mem_pattern
    engine.close()


CHECKS = [
    pieces_are_bounded_and_change_nothing,
    an_engine_says_what_it_has_memory_for,
    memory_of_a_prompt_is_taken_once,
]


@pytest.mark.parametrize("check", CHECKS)
def test_prompts(check, model: Model) -> None:
    check(model)


MUTANTS = [
    Mutant("as much of each row as of one", steps.Stepper, "_widest", "spec.chunk(len(past))", "spec.max_step"),
    Mutant("one row takes what many do", base.ModelSpec, "chunk", "self.max_step,", "self.max_together,"),
    Mutant("nothing of too many", base.ModelSpec, "chunk", "max(1, ", "max(0, "),
    Mutant("memory is planned", sessions, "open_session", "options.enable_mem_pattern = False", "pass"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant: Mutant, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    must_die(mutant, [lambda _: [check(model) for check in CHECKS]], monkeypatch)
