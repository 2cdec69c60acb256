"""Many rows: a token in each has the same bits whether it comes alone or in a step of several."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support_graphs import Shape, fused_is_even, op_counts, tokens, without_ragged, write
from test_mutants import Mutant, must_die
from test_passes import lowered

from leadout.bundle import Model
from leadout.engines import ort, variants
from leadout.engines import strides as striding
from leadout.engines.base import ANY
from leadout.engines.ort import SlotEngine
from leadout.engines.strides import STRIDE, STRIDE_PARAMETERS, STRIDE_ROWS, STRIDES
from leadout.errors import UsageError
from leadout.export.graphs import strides as stride_graphs
from leadout.export.graphs.variants import suits
from leadout.runtime.decoder import Decoder
from leadout.runtime.settings import Settings

C = Shape(windows=(None, 8))
ROWS = STRIDE_ROWS + 1


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {p: write(C, tmp_path_factory.mktemp(p), p) for p in ("fp32", "int8", "int4")}


def many(model: Model, rows: int = ROWS) -> SlotEngine:
    """An engine whose many rows take strides, whether or not exact answers take them on this processor."""
    engine = SlotEngine(model, variant=STRIDES)
    engine.reset(rows)
    engine.reserve(64)
    return engine


def read(engine: SlotEngine, lengths: np.ndarray) -> None:
    """Give row b its first lengths[b] tokens; what follows is behind them."""
    engine.forward(tokens(C, ROWS, int(lengths.max())), np.zeros(ROWS, np.int64))


def tokens_have_their_bits(model: Model) -> None:
    """Ragged rows, in steps of every width: the logits, those asked for, and what is kept."""
    lengths, new = 3 + np.arange(ROWS), tokens(C, ROWS, 13, seed=4)
    one = many(model)
    read(one, lengths)
    wanted = np.concatenate([np.array(one.forward(new[:, i : i + 1], lengths + i)) for i in range(13)], axis=1)
    for width in (2, 3, 4, 5, 8, 13):
        engine = many(model)
        read(engine, lengths)
        before = [buffer.array.copy() for buffer in engine._cache]
        assert np.array_equal(engine.forward(new[:, :width], lengths), wanted[:, :width]), width
        for row, length in enumerate(lengths):
            for mine, old, theirs in zip(engine._cache, before, one._cache, strict=True):
                end = length + width
                assert np.array_equal(mine.array[row, :, length:end], theirs.array[row, :, length:end]), width
                assert np.array_equal(mine.array[row, :, end:], old[row, :, end:]), "no slot behind them"
        index = np.stack([np.arange(ROWS) % width, np.full(ROWS, width - 1)], axis=1)
        some = engine.forward(new[:, :width], lengths, index)
        assert np.array_equal(some, np.take_along_axis(wanted, index[..., None], axis=1)), width
        engine.close()
    one.close()


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_tokens_have_their_bits(models: dict[str, Model], precision: str) -> None:
    exact = SlotEngine(models[precision], exact=True)
    exact.reset(ROWS)
    if exact.variant != STRIDES:  # on some processors one token rounds otherwise, in int4 in any graph
        assert exact.variant == "grouped" and not (fused_is_even(models[precision]) and exact.spec.widths == ANY)
    if exact.variant == STRIDES or precision != "int4":
        tokens_have_their_bits(models[precision])
    exact.close()


def a_row_that_is_left_goes_on_as_it_was(model: Model) -> None:
    """Fewer rows than there were, to the last one, whose steps have a short way of their own."""
    more, few = many(model), many(model)
    lengths = np.full(ROWS, 6)
    read(more, lengths)
    read(few, lengths)
    new = tokens(C, ROWS, 6, seed=9)
    wanted = np.array(more.forward(new, lengths))
    for rows in (2, 1):
        assert np.array_equal(few.forward(new[:rows], lengths[:rows]), wanted[:rows])
    for width in (1, 3, 4, 6):
        assert np.array_equal(few.row_logits(new[0, :width].tolist(), 6, False)[0], wanted[0, :width])
        assert np.array_equal(few.row_logits(new[0, :width].tolist(), 6, True)[0, 0], wanted[0, width - 1])
    more.close()
    few.close()


def test_a_row_that_is_left_goes_on_as_it_was(models: dict[str, Model]) -> None:
    a_row_that_is_left_goes_on_as_it_was(models["fp32"])


def who_takes_strides(model: Model) -> None:
    """An engine that must round alike, with many rows; whoever need not takes a token in each row the same way, and
    wider steps at once."""
    larger = dataclasses.replace(model.entry, parameters=STRIDE_PARAMETERS + 1)
    for rows, variant in ((1, "gqa_even"), (STRIDE_ROWS - 1, "ragged_8"), (STRIDE_ROWS, STRIDES)):
        assert variants.choose(model.entry, rows, "cpu", variants.ROUNDING_ALIKE) == variant, rows
        assert variants.choose(larger, rows, "cpu", variants.ROUNDING_ALIKE) != STRIDES
        assert variants.choose(model.entry, rows, "cpu", variants.SOONEST) != STRIDES
    engine = many(model)
    kept = engine._sessions.kept
    assert taken(engine) == {1: kept["gqa_even", False], STRIDE: kept[STRIDES, False]}
    model = without_ragged(model)
    bare = SlotEngine(model)
    bare.reset(ROWS)
    kept = bare._sessions.kept
    assert taken(bare) == {1: kept["gqa", False], 5: kept["grouped", False]}
    bare._spec = dataclasses.replace(bare.spec, widths=ANY)  # as if a token in a graph for one row rounded alike
    bare.reset(3)
    assert taken(bare, 3) == {1: kept["grouped", False], 5: kept["grouped", False]}
    bare.even = False
    assert taken(bare, 3) == {1: kept["gqa", False], 5: kept["grouped", False]}
    pinned = SlotEngine(model, variant="grouped")
    pinned.reset(ROWS)
    assert len(set(taken(pinned).values())) == 1
    for each in (engine, bare, pinned):
        each.close()


def taken(engine: SlotEngine, rows: int = STRIDE_ROWS) -> dict:
    """The sessions by width that a step of five tokens and one of one token take."""
    for width in (5, 1):  # the first makes room for both
        engine.forward(tokens(C, rows, width), np.zeros(rows, np.int64))
    return {width: step.session for (_, width, *_), step in engine._steps.items()}


def test_who_takes_strides(models: dict[str, Model]) -> None:
    who_takes_strides(models["fp32"])


def test_a_token_in_each_of_many_rows_is_what_a_wider_step_makes_of_it(models: dict[str, Model]) -> None:
    """But for its last bits, where these need not be the same."""
    lengths, new = 3 + np.arange(ROWS), tokens(C, ROWS, 1, seed=4)
    sooner, grouped = SlotEngine(models["fp32"]), SlotEngine(models["fp32"], variant="grouped")
    for engine in (sooner, grouped):
        engine.reset(ROWS)
        read(engine, lengths)
    assert np.abs(sooner.forward(new, lengths) - grouped.forward(new, lengths)).max() < 2e-5
    for engine in (sooner, grouped):
        engine.close()


def test_strides_alone_cannot_be_pinned(models: dict[str, Model]) -> None:
    model = models["fp32"]
    few = {name: model.entry.variants[name] for name in ("canonical", "grouped", STRIDES)}
    alone = Model(model.folder, dataclasses.replace(model.entry, variants=few))
    with pytest.raises(UsageError, match=r"leaves steps of one row to a graph that .* does not have"):
        SlotEngine(alone, variant=STRIDES)
    engine = SlotEngine(alone, exact=True)
    engine.reset(ROWS)
    assert engine.variant == "grouped"
    engine.close()


def texts_of_many_rows_are_those_of_plain_decoding(model: Model) -> None:
    decoder = Decoder(SlotEngine(model, exact=True), SlotEngine(model))
    prompts = [tokens(C, 1, n, seed=n)[0].tolist() for n in (40, 3, 9, 40, 2, 12, 33, 5, 7, 4)]
    written = []
    for how, length in (("none", "auto"), ("model", 3), ("model", 7), ("auto", "auto")):
        settings = Settings(max_new_tokens=20, temperature=0.0, draft=how, draft_length=length)
        texts: dict[int, list[int]] = {}
        for event in decoder.decode([(prompt, settings) for prompt in prompts]):
            texts.setdefault(event.index, []).extend(token for token, _ in event.tokens)
        written.append(texts)
    assert all(texts == written[0] for texts in written) and len(written[0]) == len(prompts)


def test_texts_of_many_rows_are_those_of_plain_decoding(models: dict[str, Model]) -> None:
    texts_of_many_rows_are_those_of_plain_decoding(models["int8"])


def test_each_token_has_its_own_node_and_finds_what_the_one_before_has_kept() -> None:
    model = lowered(C, lambda each: stride_graphs.to_strides(each, 3))
    assert op_counts(model)["GroupQueryAttention"] == 3 * C.layers and "Attention" not in op_counts(model)
    nodes = [n for n in model.graph if n.op_type == "GroupQueryAttention"]
    for first, second in pairwise(nodes[:3]):
        assert second.inputs[3:5] == first.outputs[1:3]
    names = [value.name for value in model.graph.outputs if str(value.name).startswith("present.0.key")]
    assert sorted(map(str, names)) == ["present.0.key", "present.0.key.1", "present.0.key.2"]


def test_strides_are_for_small_targets(models: dict[str, Model]) -> None:
    entry = dataclasses.replace(models["fp32"].entry, directory="target", parameters=STRIDE_PARAMETERS)
    assert suits(STRIDES, entry) and suits("tree", entry) and suits("gqa", entry)
    for change in ({"directory": "draft"}, {"parameters": STRIDE_PARAMETERS + 1}):
        assert not suits(STRIDES, dataclasses.replace(entry, **change))


def test_a_step_is_cut_into_what_there_is() -> None:
    assert [striding.strides(width, (1, 4)) for width in (1, 3, 4, 6, 9)] == [
        [1],
        [1, 1, 1],
        [4],
        [4, 1, 1],
        [4, 4, 1],
    ]


MUTANTS = [
    Mutant("wide steps at once", ort.SlotEngine, "_run_by", "if self._variant == STRIDES else ()", "if False else ()"),
    Mutant("all pieces where the first stands", ort, "in_strides", "past_lens + begin", "past_lens"),
    Mutant("logits of the first pieces", ort, "in_strides", "here - begin", "here"),
    Mutant("a token is shown twice", ort.SlotEngine, "_prepare", "np.array([1]) if special else", ""),
    Mutant("few rows take them", variants, "choose", "rows >= STRIDE_ROWS", "rows > 1"),
    Mutant("who need not round alike takes them", variants, "choose", "and alone == ROUNDING_ALIKE", ""),
    Mutant("a token among even ones", variants.Choice, "graphs", "uneven and self", "self"),
    Mutant("a row's short way", ort.SlotEngine, "row_logits", "or (self._native and width not in self._native)", ""),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant: Mutant, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    model = models["fp32"]
    checks = [who_takes_strides, tokens_have_their_bits, a_row_that_is_left_goes_on_as_it_was]
    must_die(mutant, [lambda _: [check(model) for check in checks]], monkeypatch)


def test_a_bundle_has_them(tiny_bundle: Path) -> None:
    assert (tiny_bundle / "target" / f"model.{STRIDES}.onnx").exists()
    assert not (tiny_bundle / "draft" / f"model.{STRIDES}.onnx").exists()
