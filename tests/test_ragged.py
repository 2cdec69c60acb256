"""Many rows: each brings as many tokens as it has, and its bits are those that it has alone."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from support_graphs import Shape, fused_is_even, graph, op_counts, tokens, write
from test_mutants import Mutant, must_die
from test_passes import lowered

from leadout.bundle import Bundle, Model
from leadout.engines import ort, ragged, rounding, variants
from leadout.engines.base import ANY, RAGGED, RaggedEngine, Widths
from leadout.engines.ort import SlotEngine
from leadout.engines.wrapped import Wrapped
from leadout.errors import EngineError
from leadout.export.graphs.ragged import to_ragged
from leadout.export.graphs.variants import suits
from leadout.runtime import check, steps
from leadout.runtime.decoder import Decoder
from leadout.runtime.prefill import prefill
from leadout.runtime.settings import Settings
from leadout.runtime.steps import Stepper

C = Shape(windows=(None, 8), context=1400)
PAST, TEXT = 9, 70


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {p: write(C, tmp_path_factory.mktemp(p), p) for p in ("fp32", "int8", "int4")}


def many(model: Model, rows: int) -> SlotEngine:
    """An engine whose rows hold texts of different lengths, PAST and more tokens each."""
    engine = SlotEngine(model, variant="ragged_8" if rows > 4 else "ragged_4")
    engine.reset(rows)
    engine.reserve(80)
    for row, text in reversed([*enumerate(texts(rows))]):  # with it all before it, which get their own later
        engine.forward(np.tile(text[: PAST + row], (row + 1, 1)), np.zeros(row + 1, np.int64))
    return engine


def texts(rows: int) -> np.ndarray:
    return tokens(C, rows, TEXT, seed=3)


def alone(model: Model, rows: int) -> list[np.ndarray]:
    """The logits of all tokens of each text, as the graph for one row has them in one step behind PAST and more."""
    engine, found = SlotEngine(model, variant="gqa_even"), []
    for row, text in enumerate(texts(rows)):
        engine.reset(1)
        engine.reserve(80)
        engine.forward(text[None, : PAST + row], np.zeros(1, np.int64))
        found.append(np.array(engine.forward(text[None, PAST + row :], np.array([PAST + row])))[0])
    engine.close()
    return found


def rows_have_their_bits(model: Model, rows: int) -> None:
    """Whatever stands beside a row: in few rows and many, in rows that are left, in all widths."""
    wanted, past = alone(model, rows), [PAST + row for row in range(rows)]
    for seed in range(3):
        widths = np.random.default_rng(seed).integers(1, 12, rows).tolist()
        widths[seed % rows], widths[(seed + 1) % rows] = 1, 33
        for left in (rows, rows - 1, 2):
            engine = many(model, rows)
            before = [buffer.array.copy() for buffer in engine._cache]
            pieces = [text[at : at + width].tolist() for text, at, width in zip(texts(rows), past, widths, strict=True)]
            found = engine.forward_ragged(pieces[:left], past[:left])
            assert [len(each) for each in found] == widths[:left]
            for row, (each, width) in enumerate(zip(found, widths, strict=False)):
                assert np.array_equal(each, wanted[row][:width]), (row, width, left)
            for buffer, old in zip(engine._cache, before, strict=True):
                for row, width in enumerate(widths[:left]):
                    end = past[row] + rounding.shown(width)
                    assert np.array_equal(buffer.array[row, :, : past[row]], old[row, :, : past[row]])
                    assert np.array_equal(buffer.array[row, :, end:], old[row, :, end:]), "one slot more at most"
            engine.close()


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("rows", [3, 7, 10])
def test_rows_have_their_bits(models: dict[str, Model], precision: str, rows: int) -> None:
    if fused_is_even(models[precision]):
        rows_have_their_bits(models[precision], rows)
    else:
        exact = SlotEngine(models[precision], exact=True)
        exact.reset(rows)
        assert not exact.ragged
        exact.close()


def steps_of_one_width_are_the_same(model: Model) -> None:
    """``forward``: all logits, and some. What cannot be taken is refused."""
    for rows in (4, 10):
        wanted, past = alone(model, rows), PAST + np.arange(rows)
        engine = many(model, rows)
        for width in (1, 2, 7):
            new = np.stack([text[at : at + width] for text, at in zip(texts(rows), past, strict=True)])
            found = np.array(engine.forward(new, past))
            assert np.array_equal(found, np.stack([row[:width] for row in wanted]))
            index = np.stack([np.arange(rows) % width, np.full(rows, width - 1)], axis=1)
            some = engine.forward(new, past, index)
            assert np.array_equal(some, np.take_along_axis(found, index[..., None], axis=1))
        with pytest.raises(EngineError, match=r"\d+ \+ 70 tokens exceed the cache of \d+ slots"):
            engine.forward_ragged([[1]] * (rows - 1) + [[1] * 70], [engine.capacity - 60] * rows)
        with pytest.raises(EngineError, match="out of data bounds"):
            engine.forward_ragged([[1]] * (rows - 1) + [[10**9]], [PAST] * rows)
        engine.close()


def test_steps_of_one_width_are_the_same(models: dict[str, Model]) -> None:
    steps_of_one_width_are_the_same(models["fp32"])


def who_takes_ragged_steps(model: Model) -> None:
    """Exact or not, from two rows on, by the smallest graph that has room, or the largest again and again. Who need not
    round alike takes a token in each of many rows by the graph for one."""
    for rows, variant in ((2, "ragged_4"), (4, "ragged_4"), (5, "ragged_8"), (9, "ragged_16"), (40, "ragged_16")):
        for alone in (variants.ROUNDING_ALIKE, variants.SOONEST):
            assert variants.choose(model.entry, rows, "cpu", alone) == variant, rows
        assert variants.choose(model.entry, rows, "cpu", variants.WITHOUT_REST) == "grouped"
        assert variants.choose(model.entry, rows, "cuda", variants.SOONEST) == "nonpad"
    engine = SlotEngine(model)
    assert isinstance(engine, RaggedEngine) and not engine.ragged
    engine.reset(3)
    assert engine.ragged and engine.variant == "ragged_4" and Wrapped(engine).ragged
    engine.forward(tokens(C, 3, 5), np.zeros(3, np.int64))
    engine.forward(tokens(C, 3, 1), np.full(3, 5))
    assert [session for session, _ in engine._sessions.kept] == ["gqa", "ragged_4"]
    assert [shape[:2] for shape in engine._steps] == [(3, 1)], "the token by the graph for one row"
    engine._spec = dataclasses.replace(engine.spec, widths=ANY)  # as if a token in that graph rounded alike
    engine.reset(3)
    engine.forward(tokens(C, 3, 1), np.zeros(3, np.int64))
    assert not engine._steps, "no more than wider steps do"
    engine.even = False
    engine.forward(tokens(C, 3, 1), np.zeros(3, np.int64))
    assert [shape[:2] for shape in engine._steps] == [(3, 1)]
    engine.close()
    larger = SlotEngine(Model(model.folder, dataclasses.replace(model.entry, parameters=1 << 40)))
    larger._choice.alone = variants.ROUNDING_ALIKE
    larger.reset(3)
    larger.forward(tokens(C, 3, 5), np.zeros(3, np.int64))
    assert larger.forward(tokens(C, 3, 1), np.full(3, 5)).shape == (3, 1, C.vocab), "shown once"
    larger.close()


def test_a_token_in_each_of_many_rows_is_what_a_wider_step_makes_of_it(models: dict[str, Model]) -> None:
    """But for its last bits, where these need not be the same."""
    sooner, grouped = SlotEngine(models["fp32"]), SlotEngine(models["fp32"], variant="grouped")
    for engine in (sooner, grouped):
        engine.reset(3)
        engine.forward(texts(3)[:, :20], np.zeros(3, np.int64))
    new = texts(3)[:, 20:21], np.array([20, 7, 13])
    assert np.abs(sooner.forward(*new) - grouped.forward(*new)).max() < 2e-5
    for engine in (sooner, grouped):
        engine.close()


def test_who_takes_ragged_steps(models: dict[str, Model]) -> None:
    who_takes_ragged_steps(models["fp32"])


def a_pinned_one_takes_a_row_alone(model: Model) -> None:
    """No other graph has to be there."""
    few = {name: model.entry.variants[name] for name in ("canonical", "ragged_4")}
    engine = SlotEngine(Model(model.folder, dataclasses.replace(model.entry, variants=few)), variant="ragged_4")
    text, wanted = texts(1)[0], alone(model, 1)[0]
    for left in (1, 3):
        engine.reset(left)
        engine.forward(np.tile(text[:PAST], (left, 1)), np.zeros(left, np.int64))
        for width in (1, 2, 7):
            piece = text[PAST : PAST + width]
            assert np.array_equal(engine.forward(piece[None], np.array([PAST]))[0], wanted[:width])
            assert np.array_equal(engine.row_logits(piece.tolist(), PAST, True)[0, 0], wanted[width - 1])
    assert len(engine._sessions.kept) == 1 and not engine.reads_alone
    engine.close()


def test_a_pinned_one_takes_a_row_alone(models: dict[str, Model]) -> None:
    a_pinned_one_takes_a_row_alone(models["fp32"])


def the_stepper_pads_nothing(model: Model) -> None:
    """Each row's own logits, of a cache that grows; a step that must be of two tokens and more is of one all the same,
    for the graph shows it twice."""
    engine = SlotEngine(model)
    stepper = Stepper(engine, "target")
    stepper.reset(3)
    long = tokens(C, 1, 1100)[0].tolist()
    pieces = [[1, 2, 3], long, [5]]
    stepper.all_logits(pieces[:1] * 3, [0, 0, 0])
    seen, take = [], engine.forward_ragged
    engine.forward_ragged = lambda given, past: (seen.append([len(piece) for piece in given]), take(given, past))[1]  # type: ignore[method-assign]
    assert stepper.ragged
    found, last = stepper.all_logits(pieces, [0, 0, 0]), np.array([[1099]])
    assert [len(each) for each in found] == [3, 1100, 1] and engine.capacity >= 1100
    stepper._keep_to(Widths(2), 1)
    after = stepper.all_logits([[1], long[:1], [3]], [3, 1100, 1])[1][0].copy()
    assert seen == [[3, 1100, 1], [1, 1, 1]]
    one = SlotEngine(model)
    one.reserve(1101)
    one.forward(np.array([long]), np.zeros(1, np.int64), last)
    assert np.abs(after - one.forward(np.array([[long[0]]]), np.array([1100]))[0, 0]).max() < 2e-5
    one.close()
    engine.forward_ragged = lambda given, past: [][1]  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="the target failed in a step of 4 tokens in 2 rows: list index"):
        stepper.all_logits([[1, 2, 3], [4]], [0, 0])
    engine.close()


def test_the_stepper_pads_nothing(models: dict[str, Model]) -> None:
    the_stepper_pads_nothing(models["fp32"])


def a_batch_writes_what_each_row_writes_alone(model: Model) -> None:
    prompts = [tokens(C, 1, n, seed=n)[0].tolist() for n in (40, 3, 34, 40, 2, 12, 33, 50, 7, 4)]
    target, draft = SlotEngine(model, exact=True), SlotEngine(model)
    decoder = Decoder(target, draft)
    ways = [("none", "auto"), ("model", 3), ("suffix", "auto"), ("auto", "auto")]
    sampled = {"temperature": 1.0, "seed": 7, "rule": "coupled"}
    for count, (how, length), sampling in itertools.product((3, 10), ways, ({"temperature": 0.0}, sampled)):
        settings = Settings(max_new_tokens=20, draft=how, draft_length=length, **sampling)
        together = written(decoder, prompts[:count], settings)
        single = [written(decoder, [prompt], settings)[0] for prompt in prompts[:count]]
        assert decoder._pace.prices.ragged is False, "of one row"
        assert [together[i] for i in range(count)] == single, (count, how, sampling)
    written(decoder, prompts[:3], settings)
    assert decoder._pace.prices.ragged, "a batch is priced by its tokens"
    target.close()
    draft.close()


def written(decoder: Decoder, prompts: list[list[int]], settings: Settings) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for event in decoder.decode([(prompt, settings) for prompt in prompts]):
        found.setdefault(event.index, []).extend(token for token, _ in event.tokens)
    return found


def test_a_batch_writes_what_each_row_writes_alone(models: dict[str, Model]) -> None:
    exact = SlotEngine(models["int8"], exact=True)
    exact.reset(2)
    taken = exact.ragged
    exact.close()
    assert taken or not fused_is_even(models["int8"])
    if taken:
        a_batch_writes_what_each_row_writes_alone(models["int8"])


def test_prompts_that_are_read_alone_have_their_bits(models: dict[str, Model]) -> None:
    """Of a token that blocks leave over, too: it is the 33rd."""
    prompts = [texts(3)[row, :length].tolist() for row, length in enumerate((33, 40, 34))]
    engine, one = SlotEngine(models["fp32"], exact=True), SlotEngine(models["fp32"], exact=True)
    together, alone = (Stepper(each, "target", exact=True) for each in (engine, one))
    together.reset(3)
    if not together.ragged:  # what many rows take then need not round as one row does
        assert not fused_is_even(models["fp32"])
        return
    prefill(together, prompts)
    for row, prompt in enumerate(prompts):
        alone.reset(1)
        prefill(alone, [prompt])
        for mine, theirs in zip(engine._cache, one._cache, strict=True):
            assert np.array_equal(mine.array[row, :, : len(prompt)], theirs.array[0, :, : len(prompt)]), row
    engine.close()
    one.close()


def test_leadout_check_says_that_rows_have_their_bits(models: dict[str, Model]) -> None:
    engine, row = SlotEngine(models["int8"], variant="ragged_4"), texts(1)[0]
    one = SlotEngine(models["int8"], variant="gqa_even")
    alone = check.stepped(one, row[None], 2)
    found = check.check_rows("rows", engine, row, alone)
    assert found.ok and found.detail == "the bits of one row alone"
    alone[len(row) // 3] += 1e-3
    found = check.check_rows("rows", engine, row, alone)
    assert not found.ok and found.detail == "differ by 1.0e-03 from one row alone"
    said = [each for each in check.check_model("target", models["int8"], "cpu", 1) if each.name.endswith(": rows")]
    exact = check.exact_graphs(models["int8"], 1)
    assert [each.name for each in said if each.ok] == [f"target {name}: rows" for name in RAGGED if name in exact]
    assert bool(said) == fused_is_even(models["int8"])
    engine.close()
    one.close()


def test_each_row_has_its_own_node_and_cache() -> None:
    model = lowered(C, lambda each: to_ragged(each, 3))
    assert op_counts(model)["GroupQueryAttention"] == 3 * C.layers and "Attention" not in op_counts(model)
    names = [value.name for value in model.graph.inputs]
    assert "past_lens" not in names and "past_key_values.0.key" not in names
    assert [name for name in names if "1.key" in str(name)] == [f"past_key_values.1.key.{row}" for row in range(3)]
    outputs = [str(value.name) for value in model.graph.outputs]
    assert sorted(name for name in outputs if "0.value" in name) == [f"present.0.value.{row}" for row in range(3)]
    assert len(set(names)) == len(names) and len(set(outputs)) == len(outputs)


def test_a_model_whose_attention_is_not_one_node_has_no_such_graph() -> None:
    left = graph(dataclasses.replace(C, head_dim=20, rotary=20))
    assert to_ragged(left, 2) == 0


def test_they_are_for_targets_that_keep_slots_alone(models: dict[str, Model]) -> None:
    entry = models["fp32"].entry
    assert suits("ragged_4", entry) and not suits("ragged_4", dataclasses.replace(entry, directory="draft"))
    assert not suits("ragged_8", dataclasses.replace(entry, features=8))


def test_a_bundle_has_them(tiny_bundle: Path) -> None:
    target, draft = (Bundle.read(tiny_bundle).manifest.models[role].variants for role in ("target", "draft"))
    assert target.keys() >= RAGGED.keys() and draft.keys().isdisjoint(RAGGED)


MUTANTS = [
    Mutant("a token is shown once", ragged._Group, "_show", "(shown(len(own)) - len(own))", "0"),
    Mutant("rows stand where the first does", ragged._Group, "_show", "range(begin, begin + width)", "range(width)"),
    Mutant("what a row's second token gives", ragged._Group, "_show", "given + tokens.length", "given + width"),
    Mutant("all positions count from 0", ragged._Group, "take", "min(past + i, last)", "min(i, last)"),
    Mutant("a slot less in use", ragged._Group, "take", "end, end - 1", "end, end - 2"),
    Mutant("what was shown once is shown for ever", ragged._Group, "take", "!= self._widths", "and not self._counts"),
    Mutant("one group", ragged.RaggedSteps, "_grouped", "range(0, count, self._at_once)", "[0]"),
    Mutant("logits of the first row", ragged.RaggedSteps, "take_alike", "wanted + width * np", "wanted + 0 * np"),
    Mutant("who must round alike takes it elsewhere", variants, "choose", "alone != WITHOUT_REST and", ""),
    Mutant("few rows take many", variants, "choose", "if rows <= most", "if rows > most"),
    Mutant("a token among even ones", variants.Choice, "graphs", "uneven and self", "self"),
    Mutant("a token is shown twice", ort.SlotEngine, "_prepare", "np.array([1]) if special else", ""),
    Mutant("never by the graph for one row", variants, "graphs_of", "apart and many", "False"),
    Mutant("padded", steps.Stepper, "all_logits", "if self.ragged and", "if False and"),
    Mutant("a step of one token is padded", steps.Stepper, "all_logits", "or not self._fits(1)", ""),
    Mutant("no room is made", steps.Stepper, "_apart", "engine.reserve(need)", "pass"),
    Mutant(
        "a row without tokens writes where it stood", ragged._Group, "_seat", "if seated else mine", "if 0 else mine"
    ),
    Mutant("a token that blocks leave over", rounding, "shown", "or leaves_one(width)", "or False"),
    Mutant("steps outlive their cache", ort.SlotEngine, "reserve", "self._kept_steps.forget()", "pass"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant: Mutant, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    model = models["fp32"]
    checks = [
        who_takes_ragged_steps,
        steps_of_one_width_are_the_same,
        lambda each: rows_have_their_bits(each, 10),
        the_stepper_pads_nothing,
        a_pinned_one_takes_a_row_alone,
    ]
    must_die(mutant, [lambda _: [check(model) for check in checks]], monkeypatch)
