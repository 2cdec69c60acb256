"""A row that is alone: its steps have ``forward``'s bits, its drafts are those of a row among others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support_graphs import Shape, tokens, write
from support_runtime import toy_pair
from test_mutants import Mutant, must_die

from leadout.bundle import Model
from leadout.engines import ort
from leadout.engines.base import Logits, RowEngine
from leadout.engines.ort import SlotEngine
from leadout.errors import EngineError
from leadout.runtime import steps
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters import model_drafter
from leadout.runtime.drafters.confidence import Watch
from leadout.runtime.samples import Sample
from leadout.runtime.settings import Settings
from leadout.runtime.steps import Stepper

C = Shape(windows=(None, 8))
PRECISIONS = ("fp32", "int4")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {precision: write(C, tmp_path_factory.mktemp(precision), precision) for precision in PRECISIONS}


def at(*lengths: int) -> np.ndarray:
    return np.array(lengths, np.int64)


def rows_have_the_bits_of_forward(model: Model) -> None:
    """Of steps of one, two and three tokens, forwards and after roll-backs, beside other steps of the same shapes."""
    row, one, other = tokens(C, 1, 40), SlotEngine(model), SlotEngine(model)
    assert isinstance(one, RowEngine)
    for engine in (one, other):
        engine.forward(row[:, :20], at(0))
    for start, width in ((20, 1), (21, 2), (23, 1), (22, 1), (18, 2), (20, 3), (23, 2), (7, 1)):
        piece = row[:, start : start + width]
        wanted = other.forward(piece, at(start), at(width - 1)[None])[0, 0].copy()
        one.forward(piece[:, ::-1], at(start), at(0)[None])
        assert np.array_equal(one.row_logits(piece[0].tolist(), start, True)[0, 0], wanted), (start, width)
        every = other.forward(piece, at(start)).copy()
        one.forward(piece[:, ::-1], at(start))
        assert np.array_equal(one.row_logits(piece[0].tolist(), start, False), every), (start, width)
        used = start + width
        for mine, theirs in zip(one._cache, other._cache, strict=True):
            assert np.array_equal(mine.array[:, :, :used], theirs.array[:, :, :used])
    for engine in (one, other):
        engine.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_s_step_has_the_bits_of_forward(models: dict[str, Model], precision: str) -> None:
    rows_have_the_bits_of_forward(models[precision])


def test_a_row_s_step_at_the_edges(models: dict[str, Model]) -> None:
    """The last position, padding beyond it, too few slots, a token that is none, and a closed engine."""
    engine, last = SlotEngine(models["fp32"]), C.context - 1
    engine.reserve(C.context + 2)
    row = tokens(C, 1, C.context)
    engine.forward(row[:, :-1], at(0))
    wanted = engine.forward(row[:, -1:], at(last))[0, 0].copy()
    assert np.array_equal(engine.row_logits([int(row[0, -1])], last, True)[0, 0], wanted)
    for wanted_last in (True, False):
        assert np.isfinite(engine.row_logits([1, 2], last, wanted_last)).all(), "padding may hold anything"
    with pytest.raises(EngineError, match="exceed the cache"):
        engine.row_logits([1, 2], engine.capacity - 1, False)
    with pytest.raises(EngineError, match="gqa"):
        engine.row_logits([C.vocab + 5], 3, True)
    engine.close()
    with pytest.raises(EngineError):
        engine.row_logits([1], 0, True)


class Wrapped:
    """An engine that says something else, and passes on what it does not know."""

    def __init__(self, engine: SlotEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def forward(self, *step: Any) -> Logits:
        return -np.asarray(self._engine.forward(*step))


def wrappers_are_asked(model: Model) -> None:
    engine = SlotEngine(model)
    own = np.array(Stepper(engine, "draft").last_row([1], 0))
    assert np.array_equal(Stepper(Wrapped(engine), "draft").last_row([1], 0), -own)
    assert np.array_equal(Stepper(Wrapped(engine), "target").all_logits([[1]], [0])[0, 0], -own)
    engine.close()


def room_is_made(model: Model) -> None:
    """Pieces of any length, into a cache that is too small for them; what an engine raises is an EngineError."""
    engine, stepper = SlotEngine(model, variant="grouped"), Stepper(SlotEngine(model, variant="grouped"), "draft")
    row = tokens(C, 1, 3)[0].tolist()
    for length in (1, 2, 3):
        wanted = np.array(Stepper(engine, "draft").last_logits([row[:length]], [engine.capacity - 1])[0])
        for found in (
            lambda: stepper.last_row(row[:length], stepper.engine.capacity - 1),  # noqa: B023
            lambda: stepper.all_logits([row[:length]], [stepper.engine.capacity - 1])[0, -1],  # noqa: B023
        ):
            assert found().shape == wanted.shape
            assert engine.capacity == stepper.engine.capacity == 128 * (1 + (length > 1))
            stepper.engine.reset(1)
        engine.reset(1)

    class Broken(SlotEngine):
        def row_logits(self, tokens: Any, past_len: int, last: bool) -> Any:
            raise RuntimeError("device lost")

    with pytest.raises(EngineError, match="the draft failed in a step of 1 x 1 tokens: device lost"):
        Stepper(Broken(model), "draft").last_row([1], 0)
    with pytest.raises(EngineError, match="the target failed in a step of 1 x 3 tokens: device lost"):
        Stepper(Broken(model), "target").all_logits([[1, 2, 3]], [0])

    class Crowded(SlotEngine):
        def _run_by(self, *graphs: Any) -> None:
            if not self.even:
                raise OSError(24, "Too many open files")
            super()._run_by(*graphs)

    with pytest.raises(EngineError, match=r"the target failed choosing its graph: .*Too many open files"):
        Stepper(Crowded(model), "target").resume([1], even=False)


def test_wrappers_are_asked(models: dict[str, Model]) -> None:
    wrappers_are_asked(models["fp32"])


def test_room_is_made(models: dict[str, Model]) -> None:
    room_is_made(models["fp32"])


def drafter_of(settings: Settings, prompts: list[list[int]]) -> Any:
    decoder = Decoder(*toy_pair(11))
    drafter = decoder._model
    assert isinstance(drafter, model_drafter.ModelDrafter)
    rows = [decoder._admission.row(i, prompt, settings, Sample(seed=i), (), None) for i, prompt in enumerate(prompts)]
    drafter.reset(rows)
    drafter.prefill(rows)
    return drafter, rows


def drafts_are_a_batch_s(change: dict[str, Any], price: float | None) -> None:
    """Round after round, with every number of accepted tokens: tokens, laws, classes, steps, what was read late
    and what is cached."""
    settings = Settings(draft="model", max_new_tokens=60, **change)
    (alone, [one]), (many, two) = drafter_of(settings, [[1, 2, 3]]), drafter_of(settings, [[1, 2, 3], [4, 5]])
    for length, accepted in ((3, 3), (2, 2), (4, 1), (1, 0), (1, 1), (0, 0), (3, 0)):
        watches = [
            None if price is None else Watch([[0.8] * 10] * n, [0.8] * n, [8] * n, [1.0 + k for k in range(17)], price)
            for n in (1, 2)
        ]
        (mine,) = alone.propose([one], [length], watches[0])
        theirs = many.propose(two, [length, 0], watches[1])[0]
        assert (mine.tokens, mine.classes) == (theirs.tokens, theirs.classes)
        assert all(map(np.array_equal, mine.q or [], theirs.q or [])) and (mine.q is None) == (theirs.q is None)
        assert (alone.steps, alone.late, alone._valid) == (many.steps, many.late, many._valid[:1])
        kept = min(accepted, len(mine.tokens))
        for drafter, row in ((alone, one), (many, two[0])):
            drafter.observe(0, kept)
            row.sequence.extend([*mine.tokens[:kept], 6])
            row.sampler.chain.extend([*mine.tokens[:kept], 6])


CASES: list[tuple[dict[str, Any], float | None]] = [
    ({}, None),
    ({}, 0.3),
    ({"temperature": 1.0}, None),
    ({"temperature": 0.8, "rule": "coupled"}, None),
    ({"repetition_penalty": 1.4, "min_new_tokens": 9}, None),
]


@pytest.mark.parametrize(("change", "price"), CASES)
def test_a_row_alone_drafts_as_among_others(change: dict[str, Any], price: float | None) -> None:
    drafts_are_a_batch_s(change, price)


def all_hold(model: Model) -> None:
    rows_have_the_bits_of_forward(model)
    wrappers_are_asked(model)
    room_is_made(model)
    for case in CASES:
        drafts_are_a_batch_s(*case)


MUTANTS = [
    Mutant("the first token's logits", ort.SlotEngine, "row_logits", "[0, 0] = width - 1", "[0, 0] = 0"),
    Mutant("every token at one position", ort.SlotEngine, "row_logits", "token, past_len + i", "token, past_len"),
    Mutant("a wrapper is gone round", steps, "row_step", 'hasattr(type(engine), "row_logits")', "True"),
    Mutant("no room is made", steps.Stepper, "last_row", "or past + len(piece) > engine.capacity", ""),
    Mutant("no room for drafts", steps.Stepper, "all_logits", "and past[0] + width <= self.engine.capacity", ""),
    Mutant("what was fed is fed again", model_drafter.ModelDrafter, "resume", "+= len(pending)", "+= 1"),
    Mutant(
        "what it makes up for is not told",
        model_drafter.ModelDrafter,
        "resume",
        "self._begin([row], [pending])",
        "pass",
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant: Mutant, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    must_die(mutant, [lambda _: all_hold(models["fp32"])], monkeypatch)
