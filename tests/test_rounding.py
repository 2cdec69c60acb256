"""Which steps round alike is tried on the processor at hand: stand-ins for the kernels of others must be found out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_foreign import Form
from support_foreign import engine as open_foreign
from support_foreign import entry as foreign_entry
from support_graphs import Shape, fused_is_even, tokens, write

from leadout.bundle import Bundle, Model
from leadout.engines import open_engine
from leadout.engines.base import ANY, FROM_TWO, ONE_ROW, Widths
from leadout.engines.foreign import ForeignEngine
from leadout.engines.ort import SlotEngine
from leadout.engines.rounding import even_widths, rounded_alike
from leadout.engines.toy import ToyEngine
from leadout.errors import EngineError
from leadout.runtime import check
from leadout.runtime.steps import Stepper

VOCAB = 16
C = Shape()
GOLDEN = check.Golden(tokens(C, 1, 24), np.array([24]), np.zeros((1, 24, 1), np.int32), np.zeros((1, 24, 1)))
PAIRS = Widths(2, 2)
Rest = Callable[[int, int], int]  # (past, width) of a step: how many of its last tokens round in another way


def alone(past: int, width: int) -> int:
    """A kernel for one row."""
    return int(width == 1)


def of_four(past: int, width: int) -> int:
    """Sums over the slots in use, four at a time: ARM64's attention."""
    return min(width, (past + width) % 4)


def of_slots(past: int, width: int) -> int:
    """Sums over more than 64 slots are cut in two: heads of 256 on x86."""
    return width if past + width > 64 else 0


def of_rows(past: int, width: int) -> int:
    """Products four rows at a time."""
    return width % 4


def of_pairs(past: int, width: int) -> int:
    """Products two rows at a time: weights in blocks of 64 and more."""
    return width % 2


class Rounding(ToyEngine):
    """A toy on such a processor."""

    def __init__(self, rest: Rest, max_context: int = 256) -> None:
        super().__init__(lambda context: np.full(VOCAB, 1 / VOCAB), VOCAB, max_context=max_context)
        self.rest = rest

    def forward(self, tokens: Any, past_lens: Any, logit_index: Any = None) -> Any:
        logits = super().forward(tokens, past_lens, logit_index)
        others = self.rest(int(past_lens[0]), tokens.shape[1])
        logits[:, logits.shape[1] - others :] += np.float32(1e-3)
        return logits


@pytest.mark.parametrize("context", [32, 256])
@pytest.mark.parametrize(
    ("rest", "least", "widths"),
    [
        (lambda past, width: 0, 1, ANY),
        (lambda past, width: 0, 2, FROM_TWO),
        (alone, 1, FROM_TWO),
        (alone, 2, FROM_TWO),
        (of_pairs, 1, PAIRS),
        (of_pairs, 2, PAIRS),
        (of_four, 1, None),
        (of_four, 2, None),
        (of_rows, 2, None),
        (lambda past, width: width == 2, 2, None),
        (lambda past, width: width in (3, 8), 1, None),
    ],
)
def test_the_widths_are_found_or_that_there_are_none(
    rest: Rest, least: int, widths: Widths | None, context: int
) -> None:
    assert even_widths(Rounding(rest, context), least) == widths


@pytest.mark.parametrize("least", [1, 2])
def test_sums_that_are_cut_where_a_text_grows_long_are_found_out(least: int) -> None:
    assert even_widths(Rounding(of_slots), least) is None
    assert even_widths(Rounding(of_slots, max_context=64), least) == Widths(least), "no text grows so long"


def test_a_row_that_blocks_of_sixteen_leave_over_is_found_out() -> None:
    """Heads 8 wide on x86: a draft of 16 and a token before it are one step."""
    for least in (1, 2):
        assert even_widths(Rounding(lambda past, width: width % 16 == 1 and width > 1), least) == PAIRS


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_exact_steps_of_wide_heads_round_alike_wherever_a_text_stands(
    head_dim: int, precision: str, tmp_path: Path
) -> None:
    shape = Shape(head_dim=head_dim, context=400)
    engine = SlotEngine(write(shape, tmp_path, precision), exact=True)
    found = check.check_widths("widths", engine, tokens(shape, 1, 48), alike=engine.spec.widths)
    assert found.ok, (engine.variant, found.detail)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "int4", "int4-128"])
def test_what_a_stepper_asks_an_exact_target_for_rounds_alike(rows: int, precision: str, tmp_path: Path) -> None:
    """However a text is cut, and of how many of its tokens logits are asked for. In int4-128 one row of an odd number
    is multiplied in another way, in the head, too."""
    shape = Shape(hidden=256, ffn=384)
    engine = SlotEngine(write(shape, tmp_path, precision), exact=True)
    stepper, texts = Stepper(engine, "target", exact=True), tokens(shape, rows, 40).tolist()
    stepper.reset(rows)
    wanted = np.array(stepper.all_logits(texts, [0] * rows))
    rng, past = np.random.default_rng(0), [0] * rows
    while min(past) < 30:
        counts = [int(n) for n in rng.integers(1, 10, rows)] if rng.random() < 0.7 else [1] * rows
        pieces = [text[start : start + n] for text, start, n in zip(texts, past, counts, strict=True)]
        ends = [start + len(piece) for start, piece in zip(past, pieces, strict=True)]
        last = np.array(stepper.last_logits(pieces, past))
        assert np.array_equal(last, [row[end - 1] for row, end in zip(wanted, ends, strict=True)])
        every = [np.array(each) for each in stepper.all_logits(pieces, past)]
        for row, start, end, found in zip(wanted, past, ends, every, strict=True):
            assert np.array_equal(found[: end - start], row[start:end])
        if rows == 1:
            assert np.array_equal(stepper.last_row(pieces[0], past[0]), wanted[0, ends[0] - 1])
        past = [min(end, 39) for end in ends]


@pytest.mark.parametrize("rest", [of_slots, lambda past, width: width * (past + width > 192)])
def test_check_looks_where_a_text_grows_long(rest: Rest) -> None:
    row = np.arange(48)[None] % VOCAB
    assert not check.check_widths("widths", Rounding(rest, 512), row).ok
    assert check.check_widths("widths", Rounding(lambda past, width: 0, 512), row).ok


def test_no_exact_step_leaves_a_row_over() -> None:
    """Attention takes 32 rows and more at once, always a multiple of 16: what is left over is never one."""
    left_over = Rounding(lambda past, width: width % 32 == 1)
    for width in range(2, 70):
        for even in (True, False):
            left_over.calls.clear()
            stepper = Stepper(left_over, "target", exact=True)
            stepper.reset(1, even=even)
            text = [*range(10)] * 7
            logits = np.asarray(stepper.all_logits([text[:width]], [0]))[0, :width]
            assert not even or np.ptp(logits, axis=0).max() == 0
            assert left_over.calls[-1] == (1, width + (even and width in (33, 49, 65)))


class InPairs(Rounding):
    """A toy all of whose products take rows in pairs, that of the head, too."""

    def __init__(self, max_context: int = 256, **limits: int) -> None:
        super().__init__(of_pairs, max_context)
        self.spec = dataclasses.replace(self.spec, trees=True, **limits)
        self.asked: list[int] = []

    def forward(self, tokens: Any, past_lens: Any, logit_index: Any = None) -> Any:
        logits = super().forward(tokens, past_lens, logit_index)
        asked = logits.shape[0] * logits.shape[1]
        self.asked.append(asked)
        logits[-1, -1] += np.float32(1e-3) * (asked % 2)
        return logits


def in_pairs(**limits: int) -> tuple[InPairs, Stepper]:
    engine = InPairs(**limits)
    engine.spec = rounded_alike(engine, PAIRS)
    engine.calls.clear()
    engine.asked.clear()
    return engine, Stepper(engine, "target", exact=True)


def test_whether_one_token_s_logits_may_be_asked_for_alone_is_found() -> None:
    assert rounded_alike(Rounding(lambda past, width: 0), ANY).fewest_logits == 1
    assert in_pairs()[0].spec.fewest_logits == 2


def test_limits_are_widths_where_rows_go_in_pairs() -> None:
    assert in_pairs(max_verify=17, max_step=65)[0].spec.max_verify == 16
    assert in_pairs(max_verify=17, max_step=65)[0].spec.max_step == 64
    assert rounded_alike(InPairs(max_verify=17), ANY).max_verify == 17


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_where_rows_go_in_pairs_no_step_has_an_odd_width_or_number_of_logits(rows: int) -> None:
    engine, stepper = in_pairs(max_step=10)
    text = [*range(10)] * 7
    for width in range(1, 40):
        for even in (True, False):
            stepper.reset(rows, even=even)
            every = [text[: max(1, width - row)] for row in range(rows)]
            counts = [min(3, len(piece)) for piece in every]
            found = [
                np.asarray(stepper.all_logits(every, [0] * rows))[0, :width],
                np.asarray(stepper.last_logits(every, [0] * rows)),
                np.asarray(stepper.ending_logits(every, [0] * rows, counts))[0, : counts[0]],
            ]
            if rows == 1:
                found.append(np.asarray(stepper.last_row(text[:width], 0))[None])
                assert found[-1].shape == (1, VOCAB)
            assert [len(each) for each in found[:3]] == [width, rows, counts[0]]
            if even:
                assert max(np.ptp(each, axis=0).max() for each in found) == 0
                assert all(step % 2 == 0 for _, step in engine.calls) and not any(n % 2 for n in engine.asked)
            engine.calls.clear()
            engine.asked.clear()


def test_a_tree_of_an_odd_number_of_tokens_is_filled_up() -> None:
    engine, stepper = in_pairs()
    told: list[Any] = []
    engine.forward_tree = lambda tokens, past, sees: (  # type: ignore[attr-defined]
        told.append((tokens, sees)) or np.zeros((*tokens.shape, VOCAB), np.float32)
    )
    engine.compact = lambda *args: None  # type: ignore[attr-defined]
    stepper.reset(1)
    sees = np.tri(3, 4, 1, dtype=bool)[None]
    assert np.asarray(stepper.tree_logits([[1, 2, 3]], [5], sees)).shape == (1, 3, VOCAB)
    ((tokens, seen),) = told
    assert tokens.tolist() == [[1, 2, 3, 0]]
    assert seen[:, :3, :4].tolist() == sees.tolist() and not seen[:, :3, 4].any()
    assert seen[0, 3].tolist() == [False] * 4 + [True]


def test_a_short_context_is_tried_as_far_as_it_goes() -> None:
    engine = Rounding(alone, max_context=7)
    assert even_widths(engine, 1) == Widths(2) and engine.calls[0] == (1, 6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write(C, tmp_path_factory.mktemp("fp32"), "fp32")


def install(monkeypatch: pytest.MonkeyPatch, rest: Rest, variants: tuple[str, ...]) -> None:
    """Have those graphs round one bit off in the rest of a step."""
    right = SlotEngine._run

    def off(engine: SlotEngine, step: Any, again: Any) -> Any:
        logits = right(engine, step, again)
        if engine.variant not in variants or not (others := rest(int(step.past_lens[0]), step.tokens.shape[1])):
            return logits
        logits = logits.copy()
        logits[:, -others:] = np.nextafter(logits[:, -others:], np.float32(np.inf))
        return logits

    monkeypatch.setattr(SlotEngine, "_run", off)


def test_one_token_in_a_way_of_its_own_is_found_out(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, alone, (*ONE_ROW, "grouped"))
    engine, taken = SlotEngine(model, exact=True), "gqa" if fused_is_even(model) else "grouped"
    assert (engine.spec.widths.narrowest, engine.variant) == (2, taken), "wider steps need no graph of their own"
    pinned = "gqa_even" if taken == "gqa" else "grouped"
    assert SlotEngine(model, variant=pinned, exact=True).spec.widths.narrowest == 2
    row = tokens(C, 1, 12)
    start = np.zeros(1, np.int64)
    wanted = SlotEngine(model, variant=taken).forward(row, start)
    assert np.array_equal(engine.forward(row, start), wanted), "and nothing of the trial is left"


def test_attention_that_rounds_by_what_is_left_over_is_not_taken(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, of_four, ONE_ROW)
    engine = SlotEngine(model, exact=True)
    assert (engine.spec.widths.narrowest, engine.variant) == (1, "grouped")
    assert list(engine._sessions.kept) == [("grouped", False)], "the graph that is not taken takes no memory"
    engine.reset(2)
    assert engine.variant == "grouped"
    older = dataclasses.replace(
        model.entry, variants={name: model.entry.variants[name] for name in ("canonical", "gqa")}
    )
    plainest = SlotEngine(Model(model.folder, older), exact=True)
    assert (plainest.spec.widths.narrowest, plainest.variant) == (2, "canonical")


@pytest.mark.parametrize("variant", ["gqa", "gqa_even"])
def test_who_pins_such_a_graph_is_told(model: Model, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    install(monkeypatch, of_four, ONE_ROW)
    with pytest.raises(EngineError, match=rf"\({variant}\): .* take variant auto, or .*--no-exact, exact=False"):
        SlotEngine(model, variant=variant, exact=True)
    assert SlotEngine(model, variant=variant).variant == variant


def test_a_processor_where_nothing_rounds_alike_is_no_place_for_exact_answers(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, of_rows, tuple(model.entry.variants))
    with pytest.raises(EngineError, match="would be the target's own"):
        SlotEngine(model, exact=True)
    assert SlotEngine(model).variant == "gqa"
    rows = list(check.check_model("target", model, "cpu", 1))
    assert [each.name for each in rows if not each.ok] == ["target: exact answers"]
    assert {f"target {variant}: widths" for variant in model.entry.variants} == {
        each.name.partition(" 1 to")[0].partition(" 2 to")[0] for each in rows if "widths" in each.name
    }, "and the rest is told"


def test_what_no_exact_answer_takes_may_round_by_width(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """``leadout check`` tells it, and fails where an exact answer would take it."""

    def widths(role: str) -> dict[str, check.Check]:
        rows = [each for each in check.check_model(role, model, "cpu", 1) if "widths" in each.name]
        return {each.name.split(":")[0]: each for each in rows}

    install(monkeypatch, of_four, ONE_ROW)
    assert check.exact_graphs(model, 1) == {"grouped": ANY}
    for role in ("target", "draft"):
        found = widths(role)
        assert all(each.ok for each in found.values())
        assert found[f"{role} grouped"].detail == "one bit pattern"
        assert found[f"{role} gqa"].detail.startswith("differ: ")
        assert found[f"{role} gqa"].detail.endswith("; no exact answer takes it here")
    monkeypatch.setattr(check.Golden, "of", lambda model: GOLDEN)
    monkeypatch.setattr(check, "allowed", lambda model, golden: 1e-9)
    assert not widths("draft")["draft gqa"].ok, "but rounding has to explain it"
    monkeypatch.setattr(check, "exact_graphs", lambda model, threads: {"gqa": FROM_TWO, "grouped": ANY})
    monkeypatch.setattr(check, "allowed", lambda model, golden: 1.0)
    assert [name for name, each in widths("target").items() if not each.ok] == ["target gqa"]


@pytest.mark.parametrize("form", [Form(), Form(gqa=True), Form(keep=True)], ids=["concat", "genai", "few logits"])
def test_other_peoples_graphs_are_tried_too(form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rows of all products, those of the head, too."""
    rest, asked = of_four, list[tuple[int, int]]()
    right = ForeignEngine.forward
    open_foreign(tmp_path, form)
    model = Model(tmp_path, foreign_entry(tmp_path / "model.onnx", "genai" if form.gqa else "concat"))

    def off(engine: ForeignEngine, tokens: Any, past_lens: Any, logit_index: Any = None) -> Any:
        logits = right(engine, tokens, past_lens, logit_index)
        if others := rest(int(past_lens[0]), tokens.shape[1]):
            logits[:, -others:] += np.float32(1e-3)
        return logits

    def run(engine: ForeignEngine, row: Any, ids: Any, past: int, keep: int) -> Any:
        asked.append((len(ids), keep))
        return runs(engine, row, ids, past, keep)

    runs = ForeignEngine._run
    monkeypatch.setattr(ForeignEngine, "forward", off)
    with pytest.raises(EngineError, match="--no-exact"):
        open_engine(model, exact=True)
    open_engine(model)
    rest = of_pairs
    engine = open_engine(model, exact=True)
    assert engine.spec.widths == PAIRS and engine.spec.fewest_logits == 1
    monkeypatch.setattr(ForeignEngine, "_run", run)
    stepper = Stepper(engine, "target", exact=True)
    for length in range(1, 8):
        stepper.reset(1)
        for count in range(1, length + 1):
            stepper.ending_logits([[*range(3, 3 + length)]], [0], [count])
    assert len(asked) == 28 and not any(n % 2 for step in asked for n in step)


def test_a_graph_that_cannot_be_had_exact_fails_no_check_of_batches(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, of_four, ("canonical",))
    bundle = Bundle.read(tiny_bundle)
    rows = {each.name: each for each in check.check_tokens(bundle, {"target": "cpu", "draft": "cpu"}, 1)}
    assert all(each.ok for each in rows.values())
    assert "--no-exact" in rows["greedy: batch against alone, canonical"].detail
    assert "tokens of 3 prompts" in rows["greedy: batch against alone, grouped"].detail
