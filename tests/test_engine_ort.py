"""The ONNX Runtime engine: its cache is in place, addressed by length, and its rows know nothing of each other."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_graphs import BRANCHING, LOWERINGS, Shape, fused_is_even, reference, tokens, write

from leadout.bundle import CacheShape, Model, ModelEntry, Recurrence
from leadout.engines import memory, open_engine, ort, ort_step, providers, variants
from leadout.engines.base import ANY, EVEN, FROM_TWO, ONE_ROW, EvenEngine
from leadout.engines.memory import bucket
from leadout.engines.ort import SlotEngine
from leadout.engines.rounding import even_widths
from leadout.errors import BundleError, EngineError, UsageError

C = Shape(windows=(None, 8))
PRECISIONS = ("fp32", "int8", "int4")
START = np.zeros(1, np.int64)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {p: write(C, tmp_path_factory.mktemp(p), p) for p in (*PRECISIONS, "fp16")}


@pytest.fixture
def engine(models: dict[str, Model]) -> Iterator[SlotEngine]:
    made = SlotEngine(models["fp32"])
    yield made
    made.close()


def cache(engine: SlotEngine) -> list[np.ndarray]:
    return [buffer.array for buffer in engine._cache]


def at(*lengths: int) -> np.ndarray:
    return np.array(lengths, np.int64)


def test_it_computes_the_model_and_picks_its_variant(engine: SlotEngine) -> None:
    row = tokens(C, 1, 24)
    assert engine.variant == "gqa" and engine.spec.vocab_size == C.vocab
    assert np.abs(engine.forward(row, START)[0] - reference(C, row[0])).max() < 2e-5
    engine.reset(2)
    assert engine.variant == "ragged_4" and engine.batch == 2 and engine.spec.widths.narrowest == 2
    assert np.abs(engine.forward(np.repeat(row, 2, 0), at(0, 0))[1] - reference(C, row[0])).max() < 2e-5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda entry: {"cache": entry.cache[:-1]}, "it says nothing of past_key_values.1.key, which the graph has"),
        (lambda entry: {"cache": entry.cache * 2}, "it says there is past_key_values.2.key, the graph has none"),
        (
            lambda entry: {"cache": (CacheShape(7, 5, 5),) * 2},
            "it says past_key_values.0.key is of 7 x 5, the graph has",
        ),
        (lambda entry: {"features": 10}, "it says there is features, the graph has none"),
        (lambda entry: {"recurrence": Recurrence(9, 1, (4,))}, "it says there is past_trail.0, the graph has none"),
        (lambda entry: {"vocab_size": 5}, "it says logits is of 5, the graph has"),
    ],
    ids=["fewer layers", "more layers", "other heads", "features", "trails", "vocabulary"],
)
def test_a_graph_that_the_manifest_does_not_describe_is_refused(
    models: dict[str, Model], change: Callable[[ModelEntry], dict[str, Any]], said: str
) -> None:
    model = models["fp32"]
    other = dataclasses.replace(model, entry=dataclasses.replace(model.entry, **change(model.entry)))
    with pytest.raises(BundleError, match=r"leadout\.json does not describe .*model.*onnx") as error:
        SlotEngine(other)
    assert said in str(error.value)


@pytest.mark.parametrize("variant", ["canonical", *LOWERINGS])
def test_the_cache_is_written_in_place(models: dict[str, Model], variant: str) -> None:
    engine = SlotEngine(models["fp32"], variant=variant)
    buffers = cache(engine)
    addresses = [b.ctypes.data for b in buffers]
    engine.forward(tokens(C, 1, 20), START)
    kept = [b.copy() for b in buffers]
    engine.forward(tokens(C, 1, 5, seed=2), at(12))
    assert [b.ctypes.data for b in cache(engine)] == addresses
    for before, after in zip(kept, buffers, strict=True):
        changed = (before != after).any(axis=(0, 1, 3))
        assert np.flatnonzero(changed).tolist() == [12, 13, 14, 15, 16], "the new slots and no others"
    engine.close()


@pytest.mark.parametrize("variant", LOWERINGS)
def test_rolling_back_is_saying_less(models: dict[str, Model], variant: str) -> None:
    engine = SlotEngine(models["fp32"], variant=variant)
    row = tokens(C, 1, 24)
    engine.forward(row[:, :12], START)
    engine.forward(tokens(C, 1, 9, seed=3), at(12))
    again = engine.forward(row[:, 12:18], at(12))[0].copy()
    fresh = SlotEngine(models["fp32"], variant=variant)
    fresh.forward(row[:, :12], START)
    assert np.array_equal(fresh.forward(row[:, 12:18], at(12))[0], again)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("variant", ["canonical", *LOWERINGS])
def test_every_width_gives_the_same_bits(models: dict[str, Model], precision: str, variant: str) -> None:
    if variant in ONE_ROW and not fused_is_even(models[precision]):
        with pytest.raises(EngineError, match="round by their width"):
            SlotEngine(models[precision], variant=variant, exact=True)
        return
    engine = SlotEngine(models[precision], variant=variant, exact=True)
    row = tokens(C, 1, 40)
    wanted = engine.forward(row, START)[0].copy()
    # in int4 one token may round in a way of its own, by the processor: an engine looks, and says so
    narrowest = engine.spec.widths.narrowest
    assert narrowest == 2 if variant not in EVEN else precision == "int4" or narrowest == 1
    for width in range(narrowest, 10):
        for start in range(0, 40, width):
            piece = row[:, min(start, 40 - width) :][:, :width]
            first = min(start, 40 - width)
            assert np.array_equal(engine.forward(piece, at(first))[0], wanted[first : first + width]), (width, first)
    engine.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ragged_rows_equal_each_row_alone(models: dict[str, Model], precision: str) -> None:
    lengths, width = at(17, 3, 9), 4
    rows = tokens(C, 3, 32)
    alone = []
    for row, length in zip(rows, lengths, strict=True):
        single = SlotEngine(models[precision], variant="grouped")
        single.forward(row[None, :length], START)
        alone.append(single.forward(row[None, length : length + width], at(length))[0].copy())
    engine = SlotEngine(models[precision], variant="grouped")
    engine.reset(3)
    engine.forward(rows[:, :17], at(0, 0, 0), np.array([[16], [2], [8]]))
    new = np.stack([row[n : n + width] for row, n in zip(rows, lengths, strict=True)])
    assert np.array_equal(engine.forward(new, lengths), alone)


def test_exactness_asks_for_the_variants_that_round_alike(models: dict[str, Model], tmp_path: Path) -> None:
    engine, fused = open_engine(models["fp32"], exact=True), fused_is_even(models["fp32"])
    assert engine.variant == ("gqa_even" if fused else "grouped")  # type: ignore[attr-defined]
    assert engine.spec.widths.narrowest == 1
    engine.reset(2)
    assert engine.variant == ("ragged_4" if fused else "grouped")  # type: ignore[attr-defined]
    older = write(C, tmp_path)
    kept = {name: older.entry.variants[name] for name in ("canonical", "gqa", "nonpad")}
    old = SlotEngine(Model(older.folder, dataclasses.replace(older.entry, variants=kept)), exact=True)
    assert old.variant == ("gqa" if fused else "nonpad") and old.spec.widths.narrowest == 2


@pytest.mark.parametrize("precision", PRECISIONS)
def test_who_asks_for_no_even_rounding_gets_the_bits_of_the_graph_that_has_none(
    models: dict[str, Model], precision: str
) -> None:
    row = tokens(C, 1, 40)
    even, bare = SlotEngine(models[precision], exact=True), SlotEngine(models[precision])
    if not fused_is_even(models[precision]):
        assert even.variant == "grouped", "which has no other way to step by one"
        return
    if even.spec.widths != ANY:  # int4 on some processors: there is no even graph to choose, and none is paid for
        assert precision == "int4" and even.variant == bare.variant == "gqa" and even_widths(even, 1) == FROM_TWO
        return
    assert isinstance(even, EvenEngine) and even.even
    steps = {}
    for name, engine, wanted in (("even", even, True), ("sooner", even, False), ("bare", bare, True)):
        engine.reset(1)
        assert engine.even, "a reset is what it was"
        engine.even = wanted
        engine.forward(row[:, :30], START)
        steps[name] = np.concatenate([engine.forward(row[:, i : i + 1], at(i))[0].copy() for i in range(30, 40)])
    assert np.array_equal(steps["sooner"], steps["bare"])
    assert not np.array_equal(steps["sooner"], steps["even"]), "or there is nothing to choose"


def test_a_small_model_has_a_graph_of_its_own_for_steps_that_may_round_as_they_like(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fused_is_even(models["fp32"]):
        return
    row, engine, bare = tokens(C, 1, 300), SlotEngine(models["fp32"], exact=True), SlotEngine(models["fp32"])
    fresh = SlotEngine(models["fp32"], exact=True)

    def graph() -> str:
        return next(name for (name, _), session in engine._sessions.kept.items() if session is engine._session)

    def same_step(past: int) -> bool:
        steps = [each.forward(row[:, past : past + 1], at(past))[0].copy() for each in (engine, bare)]
        return np.array_equal(*steps)

    for each in (engine, bare):
        each.forward(row[:, :30], START)
    engine.even = False
    assert graph() == "gqa" and engine.variant == "gqa_even" and same_step(30)
    kept = dict(engine._steps)
    engine.even = True
    assert graph() == "gqa_even" and not same_step(30)
    engine.reset(1)
    engine.even = False
    assert engine._steps == kept, "to choose again binds nothing anew"
    engine.reserve(513)  # the cache moves, and no graph's steps may go on writing where it was
    for each in (engine, bare, fresh):
        each.forward(row[:, :200], START)
    assert same_step(200)
    engine.even = True
    assert not same_step(200)
    steps = [each.forward(row[:, 200:201], at(200)).copy() for each in (engine, fresh)]
    assert np.array_equal(*steps)
    pinned = SlotEngine(models["fp32"], variant="gqa_even")
    monkeypatch.setattr(variants, "_SMALL", models["fp32"].entry.parameters - 1)
    for each in (engine, pinned):
        each.even = False
        kept = each._sessions.kept
        assert set(kept) >= {("gqa_even", False)} and each._session is kept["gqa_even", False]


def test_a_step_of_one_token_has_a_slot_to_spare(models: dict[str, Model]) -> None:
    engine, wide = SlotEngine(models["fp32"], variant="gqa_even"), SlotEngine(models["fp32"], variant="gqa_even")
    row = tokens(C, 1, 320)
    wanted = wide.forward(row, START)[0, -1].copy()
    engine.forward(row[:, :319], START)
    engine._capacity = 320  # as if the bucket ended here
    assert all(b.shape[2] == wide.capacity + 1 for b in cache(engine))
    np.testing.assert_allclose(engine.forward(row[:, 319:], at(319))[0, 0], wanted, atol=1e-5)
    with pytest.raises(EngineError, match=r"320 \+ 1 tokens exceed the cache"):
        engine.forward(row[:, -1:], at(320))


def test_logits_are_gathered_where_asked(engine: SlotEngine) -> None:
    row = tokens(C, 1, 12)
    every = engine.forward(row, START)[0].copy()
    some = engine.forward(row, START, np.array([[11, 3]]))
    assert some.shape == (1, 2, C.vocab)
    assert np.array_equal(some[0], every[[11, 3]])
    assert np.array_equal(engine.forward(row, START)[0], every), "all positions again after some"


def test_reserve_keeps_rows_and_rounds_up(models: dict[str, Model]) -> None:
    engine, roomy = SlotEngine(models["fp32"], variant="nonpad"), SlotEngine(models["fp32"], variant="nonpad")
    row = tokens(C, 1, 140)
    roomy.reserve(140)
    for one in (engine, roomy):
        one.forward(row[:, :100], START)
    assert engine.capacity == 128
    engine.reserve(128)
    assert engine.capacity == 128
    engine.reserve(129)
    assert engine.capacity == 256
    engine.reserve(10)
    assert engine.capacity == 256
    assert np.array_equal(engine.forward(row[:, 100:], at(100)), roomy.forward(row[:, 100:], at(100)))


def test_buckets() -> None:
    sizes = (1, 128, 129, 2048, 2049, 2561)
    assert [bucket(n, coarse=False) for n in sizes] == [128, 128, 256, 2048, 2560, 3072]
    assert [bucket(n, coarse=True) for n in sizes] == [512, 512, 512, 2048, 2560, 3072]
    assert [bucket(n, coarse=True, gpu=True) for n in (1, 512, *sizes[3:])] == [512, 512, 2048, 4096, 4096]


def test_overflow_is_refused(models: dict[str, Model]) -> None:
    engine = SlotEngine(models["fp32"], variant="nonpad")
    with pytest.raises(EngineError, match="125 \\+ 4 tokens exceed the cache of 128 slots: call reserve first"):
        engine.forward(tokens(C, 1, 4), at(125))
    engine.forward(tokens(C, 1, 3), at(125))


def test_padding_beyond_the_context_is_harmless(engine: SlotEngine) -> None:
    engine.reserve(C.context + 4)
    row = tokens(C, 1, C.context)
    wanted = engine.forward(row, START, np.array([[C.context - 1]]))[0].copy()
    padded = np.concatenate([row[:, -2:], np.zeros((1, 3), np.int64)], axis=1)
    assert np.array_equal(engine.forward(padded, at(C.context - 2))[0, 1], wanted[0])


def test_a_context_that_is_never_used_takes_no_memory(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models["fp32"]
    endless = dataclasses.replace(model, entry=dataclasses.replace(model.entry, max_context=2**31 - 1))
    monkeypatch.setattr(ort, "_PLACES", 4)
    row = tokens(C, 1, 24)
    with contextlib.closing(SlotEngine(endless)) as engine:
        assert engine._places.size == 4
        engine.reserve(24)
        for at, width in (0, 3), (3, 2), (5, 19):
            found = engine.forward(row[:, at : at + width], np.array([at]))[0]
            assert np.abs(found - reference(C, row[0])[at : at + width]).max() < 2e-5


def test_a_cache_that_memory_has_no_room_for_is_an_engine_error(engine: SlotEngine) -> None:
    row = tokens(C, 1, 5)
    wanted = engine.forward(row, START).copy()
    for act in (lambda: engine.reserve(2**44), lambda: engine.reset(2**44)):
        with pytest.raises(EngineError, match=r"no memory for \d+ rows of cache, of which a part takes \d+ MB"):
            act()
        engine.reset(1)
        assert np.array_equal(engine.forward(row, START), wanted)


def test_fewer_rows_than_the_batch(models: dict[str, Model]) -> None:
    engine = SlotEngine(models["fp32"])
    engine.reset(4)
    rows = tokens(C, 4, 20)
    every = engine.forward(rows, at(0, 0, 0, 0))[:, -2:].copy()
    before = [b.copy() for b in cache(engine)]
    some = engine.forward(rows[:2, 18:], at(18, 18))
    assert np.array_equal(some, every[:2])
    assert all(np.array_equal(a[2:], b[2:]) for a, b in zip(before, cache(engine), strict=True))
    with pytest.raises(EngineError, match="5 rows given, the engine has 4"):
        engine.forward(tokens(C, 5, 2), at(0, 0, 0, 0, 0))


def test_copy_row_forks_a_sequence(models: dict[str, Model]) -> None:
    engine = SlotEngine(models["fp32"])
    engine.reset(3)
    rows = tokens(C, 3, 12)
    engine.forward(rows, at(0, 0, 0))
    middle = [b[1].copy() for b in cache(engine)]
    engine.copy_row(2, 0)
    logits = engine.forward(np.repeat(rows[2:, :2], 3, 0), at(12, 12, 12))
    assert np.array_equal(logits[0], logits[2]) and not np.array_equal(logits[0], logits[1])
    assert all(np.array_equal(a[:, :12], b[1][:, :12]) for a, b in zip(middle, cache(engine), strict=True))
    with pytest.raises(EngineError, match="row 3 is not one of the engine's 3"):
        engine.copy_row(3, 0)


def test_reset_shrinks_where_attention_costs_by_capacity(models: dict[str, Model]) -> None:
    engine = SlotEngine(models["fp32"], variant="nonpad")
    engine.reserve(200)
    engine.forward(tokens(C, 1, 20), START)
    engine.reset(1)
    assert engine.capacity == 128 and not any(b.any() for b in cache(engine))


def test_reset_keeps_what_costs_nothing(engine: SlotEngine) -> None:
    row = tokens(C, 1, 20)
    fresh = engine.forward(row, START).copy()
    engine.reserve(600)
    engine.forward(tokens(C, 1, 40, seed=5), START)
    buffers, steps = cache(engine), dict(engine._steps)
    engine.reset(1)
    assert all(a is b for a, b in zip(buffers, cache(engine), strict=True)) and engine._steps == steps
    assert engine.capacity >= 600
    assert np.array_equal(engine.forward(row, START), fresh), "what an earlier request left is never read"
    with pytest.raises(EngineError, match="batch must be at least 1, not 0"):
        engine.reset(0)


def test_half_precision_keeps_a_half_cache(models: dict[str, Model]) -> None:
    engine = SlotEngine(models["fp16"])
    assert {b.dtype for b in cache(engine)} == {np.dtype(np.float16)}
    assert engine.forward(tokens(C, 1, 4), START).dtype == np.float32


def test_many_shapes_are_forgotten_and_come_back(engine: SlotEngine) -> None:
    row = tokens(C, 1, 40)
    first = engine.forward(row[:, :2], START).copy()
    for width in range(3, 41):
        engine.forward(row[:, :width], START)
    assert len(engine._steps) <= 32
    assert np.array_equal(engine.forward(row[:, :2], START), first)


@pytest.mark.parametrize("step", ["forward", "row_logits"])
def test_what_a_signal_handler_raises_in_a_step_is_the_cause_of_what_is_raised(
    engine: SlotEngine, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def interrupted(_: ort_step.Step) -> int:
        raise TimeoutError("too slow")

    engine.reserve(4)
    monkeypatch.setattr(ort_step.Step, "run", interrupted)
    with pytest.raises(EngineError, match="too slow") as error:
        engine.forward(np.array([[1, 2]]), at(0)) if step == "forward" else engine.row_logits([1, 2], 0, False)
    assert isinstance(error.value.__cause__, TimeoutError)


def test_what_a_signal_handler_raises_as_a_graph_is_read_is_the_cause_of_what_is_raised(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise TimeoutError("too slow")

    monkeypatch.setattr("onnxruntime.InferenceSession", interrupted)
    with pytest.raises(EngineError, match="cannot load it: too slow") as error:
        SlotEngine(next(iter(models.values())))
    assert isinstance(error.value.__cause__, TimeoutError)


MOMENTS = [(ort_step.Step, "free"), (memory.HostBuffer, "grown"), (memory.HostBuffer, "__init__")]


@pytest.mark.parametrize(("place", "name"), MOMENTS)
@pytest.mark.parametrize("nth", [1, 2, 4])
def test_an_interrupt_leaves_an_engine_that_can_be_reset(
    engine: SlotEngine, place: type, name: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes: while steps are let go of, or the cache grows, or makes room for another batch's, which is
    there as a whole when it is asked for again."""
    row = tokens(C, 1, 5)
    wanted, original, calls = engine.forward(row, START).copy(), getattr(place, name), iter(range(1, 99))
    engine.reset(2)
    of_two = engine.forward(row.repeat(2, 0), at(0, 0)).copy()
    engine.reset(1)

    def interrupted(self: Any, *given: Any) -> Any:
        found = original(self, *given)
        if next(calls) == nth:
            raise KeyboardInterrupt
        return found

    for act in (lambda: engine.reserve(2000), lambda: engine.reset(2)):
        for width in (1, 2, 3, 4):
            engine.forward(row[:, :width], START)
        calls = iter(range(1, 99))
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(place, name, interrupted)
            act()
        if engine.variant in ONE_ROW and engine.resets is not None:
            assert engine.batch == 1, "what it holds is whole"
        engine.reset(2)
        assert np.array_equal(engine.forward(row.repeat(2, 0), at(0, 0)), of_two)
        engine.reset(1)
        for width in (1, 2, 3, 4):
            engine.forward(row[:, :width], START)
        assert np.array_equal(engine.forward(row, START), wanted)


def test_a_closed_engine_says_so(engine: SlotEngine) -> None:
    engine.close()
    engine.close()
    asked: list[Callable[[], object]] = [
        lambda: engine.forward(tokens(C, 1, 2), START),
        lambda: engine.reset(1),
        lambda: setattr(engine, "even", False),
        lambda: engine.reserve(4),
        lambda: engine.copy_row(0, 0),
        lambda: engine.compact(0, 1, [0]),
        lambda: engine.beside(np.zeros((1, 1, 8), np.float32)),
        lambda: engine.features(0, 0, 1),
    ]
    for ask in asked:
        with pytest.raises(EngineError, match="closed"):
            ask()
    assert not engine._sessions.kept, "and nothing is opened anew"


def test_variants_that_cannot_be(models: dict[str, Model]) -> None:
    with pytest.raises(
        BundleError,
        match=r"no graph variant 'flat' \(it has: canonical, gqa, gqa_even, grouped, nonpad, ragged_16,"
        r" ragged_4, ragged_8, tree, tree_gqa\)",
    ):
        SlotEngine(models["fp32"], variant="flat")
    pinned = SlotEngine(models["fp32"], variant="gqa")
    with pytest.raises(EngineError, match="variant 'gqa' takes one row, not 2"):
        pinned.reset(2)


def test_a_bundle_without_variants_runs_canonically(models: dict[str, Model], tmp_path: Path) -> None:
    model = write(Shape(), tmp_path)
    for name in LOWERINGS | BRANCHING:
        del model.entry.variants[name]  # type: ignore[attr-defined]
    engine = SlotEngine(model, exact=True)
    assert engine.variant == "canonical" and engine.spec.widths.narrowest == 2
    engine.reset(3)
    assert engine.variant == "canonical"


def test_a_damaged_graph_is_one_line(tmp_path: Path) -> None:
    model = write(Shape(), tmp_path)
    (tmp_path / "model.gqa.onnx").write_bytes(b"not a graph")
    with pytest.raises(EngineError, match=r"model\.gqa\.onnx: onnxruntime cannot load it: [^\n]+$"):
        SlotEngine(model)


def test_a_token_outside_the_vocabulary_is_an_engine_error(engine: SlotEngine) -> None:
    with pytest.raises(EngineError, match="gqa"):
        engine.forward(np.array([[C.vocab, 0]]), START)


def test_open_engine_checks_its_options(models: dict[str, Model]) -> None:
    with pytest.raises(UsageError, match="'tpu' is unknown"):
        open_engine(models["fp32"], provider="tpu")
    with pytest.raises(UsageError, match="threads must be at least 1"):
        open_engine(models["fp32"], threads=0)
    assert isinstance(open_engine(models["fp32"], threads=2), SlotEngine)


def versions(monkeypatch: pytest.MonkeyPatch, found: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name in found:
            return found[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_no_onnxruntime_says_which_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, {})
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        EngineError, match=r"no onnxruntime installed: pip install 'leadout\[cpu\]' or 'leadout\[cuda\]'"
    ):
        providers.onnxruntime()


def test_both_onnxruntimes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.31.1"})
    assert list(providers.installed()) == ["onnxruntime", "onnxruntime-gpu"]
    with pytest.raises(EngineError, match=r"both installed.*pip uninstall -y onnxruntime onnxruntime-gpu"):
        providers.onnxruntime()


def test_cuda_that_is_not_there_is_an_error(models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    ort = providers.onnxruntime()
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    helps = r"provider 'cuda' is not in this onnxruntime .*: {}pip install 'leadout\[cuda\]'$"
    first = {"onnxruntime": "pip uninstall -y onnxruntime, then ", "onnxruntime-gpu": ""}
    for installed, instead in first.items():  # beside the one for CPUs neither would work
        versions(monkeypatch, {installed: "1.31.1"})
        with pytest.raises(EngineError, match=helps.format(instead)):
            SlotEngine(models["fp32"], provider="cuda")


def test_cuda_that_falls_back_is_an_error(models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    ort = providers.onnxruntime()
    session = ort.InferenceSession

    def fallen(path: str, options: object, providers: list[str], **how: object) -> object:
        return session(path, options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(ort, "InferenceSession", fallen)
    with pytest.raises(EngineError, match="provider 'cuda' fell back to CPUExecutionProvider"):
        SlotEngine(models["fp32"], provider="cuda")


def test_a_prompt_s_binding_makes_room_not_a_draft_s(engine: SlotEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leadout.engines.kept._KEPT_STEPS", 4)
    row, fresh = tokens(C, 1, 40), []
    engine.forward(row, START)  # all share its logits
    for width in (1, 2, 3, 20, 30, 40):
        fresh.append(engine.forward(row[:, :width], START)[0, -1].copy())
    assert sorted(width for _, width, *_ in engine._steps) == [1, 2, 3, 40]
    kept = dict(engine._steps)
    for width, wanted in zip((1, 2, 3, 20), fresh, strict=False):
        assert np.array_equal(engine.forward(row[:, :width], START)[0, -1], wanted)
    assert all(engine._steps[shape] is kept[shape] for shape in kept if shape[1] < 4)
