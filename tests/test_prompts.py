"""How prompts go in: in pieces that a device has memory for, however many there are, and nobody can tell."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
from support_graphs import Shape, tokens, without_ragged, write
from test_mutants import Mutant, must_die

from leadout.bundle import Model
from leadout.engines import alone, base, ort, sessions
from leadout.engines.base import MAX_STEP, MAX_TOGETHER, READ_ALONE, ModelSpec, ReadingEngine, Tokens
from leadout.engines.ort import SlotEngine
from leadout.engines.toy import ToyEngine, table_law
from leadout.engines.wrapped import Wrapped
from leadout.errors import EngineError
from leadout.runtime import prefill as prefilling
from leadout.runtime import steps
from leadout.runtime.decoder import Decoder
from leadout.runtime.settings import Settings
from leadout.runtime.steps import Stepper

VOCAB = 11
C = Shape()


class Watched(Wrapped):
    """Notes the shape of each step, and what was read alone: row, tokens, what stood before."""

    def __init__(self, engine: SlotEngine) -> None:
        super().__init__(engine)
        self.steps: list[tuple[int, int]] = []
        self.reads: list[tuple[int, int, int]] = []

    def step(self, rows: int, width: int, past: int) -> AbstractContextManager[object]:
        self.steps.append((rows, width))
        return nullcontext()

    def read(self, row: int, tokens: Tokens, past_len: int) -> None:
        self.reads.append((row, len(tokens), past_len))
        super().read(row, tokens, past_len)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return without_ragged(write(C, tmp_path_factory.mktemp("model")))


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


def a_row_of_many_is_read_as_if_it_were_the_only_one(model: Model) -> None:
    """In two pieces, behind nothing and behind what is there; no slot of another row changes."""
    text = tokens(C, 1, 77)[0]
    one, many = SlotEngine(model), SlotEngine(model)
    many.reset(3)
    assert isinstance(many, ReadingEngine) and many.reads_alone and not one.reads_alone
    many.forward(tokens(C, 3, 99, seed=5), np.zeros(3, np.int64))
    before = [buffer.array.copy() for buffer in many._cache]
    for past, piece in ((0, text[:40]), (40, text[40:])):
        one.forward(piece[None], np.array([past]), np.zeros((1, 1), np.int64))
        many.read(1, piece, past)
    for mine, theirs, old in zip(many._cache, one._cache, before, strict=True):
        assert np.array_equal(mine.array[1, :, :77], theirs.array[0, :, :77])
        assert np.array_equal(mine.array[1, :, 78:], old[1, :, 78:]), "one slot behind them at most"
        assert np.array_equal(mine.array[[0, 2]], old[[0, 2]])
    with pytest.raises(EngineError, match=r"77 \+ 60 tokens exceed the cache"):
        many.read(1, np.zeros(60, np.int64), 77)
    many.close()
    with pytest.raises(EngineError, match="closed"):
        many.read(1, text, 0)
    one.close()


def who_reads_alone(model: Model) -> None:
    """Rows beside others where another graph takes one row sooner; no pinned one."""
    for variant, rows, wanted in (("auto", 1, False), ("auto", 2, True), ("grouped", 2, False), ("nonpad", 3, False)):
        engine = SlotEngine(model, variant=variant)
        engine.reset(rows)
        assert engine.reads_alone == wanted, (variant, rows)
        engine.close()


def long_prompts_of_a_batch_are_read_alone(model: Model) -> None:
    """Each in pieces that a step may have, whatever stands beside it; short ones together; equal ones once. What the
    rows then hold is what each would hold alone, in the slots that count."""
    rng = np.random.default_rng(1)
    lengths = [5, READ_ALONE, 131, 0, READ_ALONE - 1, 256]
    prompts = [rng.integers(0, C.vocab, n).tolist() for n in lengths]
    prompts.append(prompts[2])
    engine = Watched(SlotEngine(model))
    engine.engine._spec = dataclasses.replace(engine.spec, max_step=100)
    stepper = Stepper(engine, "target")
    stepper.reset(len(prompts))
    prefilling.prefill(stepper, prompts)
    assert engine.reads == [(1, READ_ALONE, 0), (2, 100, 0), (2, 31, 100), (5, 100, 0), (5, 100, 100), (5, 56, 200)]
    assert engine.steps == [(6, READ_ALONE - 1), *((1, width) for _, width, _ in engine.reads)]
    assert engine.capacity > 256, "a token alone may take two slots"
    one = SlotEngine(model)
    for row, prompt in enumerate(prompts):
        if prompt:
            one.reset(1)
            one.reserve(len(prompt))
            one.forward(np.array([prompt]), np.zeros(1, np.int64), np.zeros((1, 1), np.int64))
        for mine, theirs in zip(engine.engine._cache, one._cache, strict=True):
            held, wanted = mine.array[row, :, : len(prompt)], theirs.array[0, :, : len(prompt)]
            assert np.allclose(held, wanted, atol=1e-4), row
            assert len(prompt) < READ_ALONE or np.abs(held - wanted).max() < 1e-5, row
    one.close()
    engine.close()


def a_batch_of_long_prompts_writes_what_it_writes_plainly(model: Model) -> None:
    draft = SlotEngine(model)
    decoder = Decoder(SlotEngine(model, exact=True), draft)
    prompts = [tokens(C, 1, n, seed=n)[0].tolist() for n in (40, 3, 70, 40)]
    texts = []
    for how in ("model", "none", "auto"):
        settings = Settings(max_new_tokens=24, temperature=0.0, draft=how)
        written: dict[int, list[int]] = {}
        for event in decoder.decode([(prompt, settings) for prompt in prompts]):
            written.setdefault(event.index, []).extend(token for token, _ in event.tokens)
        texts.append(written)
    assert texts[0] == texts[1] == texts[2]
    draft.close()


def memory_of_a_prompt_is_taken_once(model: Model) -> None:
    """A plan of memory for each shape would stand beside the memory that the shape's first step took."""
    engine = SlotEngine(model)
    assert not engine._session.get_session_options().enable_mem_pattern
    engine.close()


CHECKS = [
    pieces_are_bounded_and_change_nothing,
    an_engine_says_what_it_has_memory_for,
    a_row_of_many_is_read_as_if_it_were_the_only_one,
    who_reads_alone,
    long_prompts_of_a_batch_are_read_alone,
    a_batch_of_long_prompts_writes_what_it_writes_plainly,
    memory_of_a_prompt_is_taken_once,
]


@pytest.mark.parametrize("check", CHECKS)
def test_prompts(check, model: Model) -> None:
    check(model)


MUTANTS = [
    Mutant("as much of each row as of one", steps.Stepper, "_widest", "spec.chunk(len(past))", "spec.max_step"),
    Mutant("one row takes what many do", base.ModelSpec, "chunk", "self.max_step,", "self.max_together,"),
    Mutant("nothing of too many", base.ModelSpec, "chunk", "max(1, ", "max(0, "),
    Mutant("the first row is read", alone, "_row", "row : row + 1", ":1"),
    Mutant("behind nothing", ort.SlotEngine, "read", "tokens, past_len, self", "tokens, 0, self"),
    Mutant("one row is read alone", ort.SlotEngine, "reads_alone", "self._batch > 1", "self._batch > 0"),
    Mutant("by a graph of all rows", ort.SlotEngine, "reads_alone", " and self._choice.of(1) in ONE_ROW", ""),
    Mutant("each piece anew", steps.Stepper, "read", "leaves_one(len(piece)))), past)", "leaves_one(len(piece)))), 0)"),
    Mutant("at once", steps.Stepper, "read", "chunk(1)", "max_context"),
    Mutant("without room for one slot more", steps.Stepper, "read", ") + 1) >", ") - 1) >"),
    Mutant("short ones, too", prefilling, "prefill", ">= enough", ">= 1"),
    Mutant("together as well", prefilling, "prefill", "[] if row in alone else prompt", "prompt"),
    Mutant(
        "each of equal prompts",
        prefilling,
        "prefill",
        "first.setdefault(tuple(prompt), len(first))",
        "first.setdefault((len(first), *prompt), len(first))",
    ),
    Mutant("memory is planned", sessions, "open_session", "options.enable_mem_pattern = False", "pass"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant: Mutant, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    must_die(mutant, [lambda _: [check(model) for check in CHECKS]], monkeypatch)
