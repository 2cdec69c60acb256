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
from leadout.engines.base import ONE_ROW
from leadout.engines.foreign import ForeignEngine
from leadout.engines.ort import SlotEngine
from leadout.engines.rounding import even_from
from leadout.engines.toy import ToyEngine
from leadout.errors import EngineError
from leadout.runtime import check
from leadout.runtime.steps import Stepper

VOCAB = 16
C = Shape()
GOLDEN = check.Golden(tokens(C, 1, 24), np.array([24]), np.zeros((1, 24, 1), np.int32), np.zeros((1, 24, 1)))
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
    ("rest", "least", "width"),
    [
        (lambda past, width: 0, 1, 1),
        (lambda past, width: 0, 2, 2),
        (alone, 1, 2),
        (alone, 2, 2),
        (of_four, 1, None),
        (of_four, 2, None),
        (of_rows, 2, None),
        (lambda past, width: width == 2, 2, None),
        (lambda past, width: width == 9, 1, None),
    ],
)
def test_the_least_width_is_found_or_that_there_is_none(
    rest: Rest, least: int, width: int | None, context: int
) -> None:
    assert even_from(Rounding(rest, context), least) == width


@pytest.mark.parametrize("least", [1, 2])
def test_sums_that_are_cut_where_a_text_grows_long_are_found_out(least: int) -> None:
    assert even_from(Rounding(of_slots), least) is None
    assert even_from(Rounding(of_slots, max_context=64), least) == least, "no text grows so long"


def test_a_row_that_blocks_of_sixteen_leave_over_is_found_out() -> None:
    """Heads 8 wide on x86: a draft of 16 and a token before it are one step."""
    for least in (1, 2):
        assert even_from(Rounding(lambda past, width: width % 16 == 1 and width > 1), least) is None


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_exact_steps_of_wide_heads_round_alike_wherever_a_text_stands(
    head_dim: int, precision: str, tmp_path: Path
) -> None:
    shape = Shape(head_dim=head_dim, context=400)
    engine = SlotEngine(write(shape, tmp_path, precision), exact=True)
    found = check.check_widths("widths", engine, tokens(shape, 1, 48), narrowest=engine.spec.narrowest)
    assert found.ok, (engine.variant, found.detail)


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
            stepper = Stepper(left_over, "target", narrowest=2)
            stepper.reset(1, even=even)
            text = [*range(10)] * 7
            logits = np.asarray(stepper.all_logits([text[:width]], [0]))[0, :width]
            assert not even or np.ptp(logits, axis=0).max() == 0
            assert left_over.calls[-1] == (1, width + (even and width in (33, 49, 65)))


def test_a_short_context_is_tried_as_far_as_it_goes() -> None:
    engine = Rounding(alone, max_context=7)
    assert even_from(engine, 1) == 2 and engine.calls[0] == (1, 7)


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
    assert (engine.spec.narrowest, engine.variant) == (2, taken), "wider steps need no graph of their own"
    pinned = "gqa_even" if taken == "gqa" else "grouped"
    assert SlotEngine(model, variant=pinned, exact=True).spec.narrowest == 2
    row = tokens(C, 1, 12)
    start = np.zeros(1, np.int64)
    wanted = SlotEngine(model, variant=taken).forward(row, start)
    assert np.array_equal(engine.forward(row, start), wanted), "and nothing of the trial is left"


def test_attention_that_rounds_by_what_is_left_over_is_not_taken(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, of_four, ONE_ROW)
    engine = SlotEngine(model, exact=True)
    assert (engine.spec.narrowest, engine.variant) == (1, "grouped")
    assert list(engine._sessions.kept) == [("grouped", False)], "the graph that is not taken takes no memory"
    engine.reset(2)
    assert engine.variant == "grouped"
    older = dataclasses.replace(
        model.entry, variants={name: model.entry.variants[name] for name in ("canonical", "gqa")}
    )
    plainest = SlotEngine(Model(model.folder, older), exact=True)
    assert (plainest.spec.narrowest, plainest.variant) == (2, "canonical")


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
    assert check.exact_graphs(model, 1) == {"grouped": 1}
    for role in ("target", "draft"):
        found = widths(role)
        assert all(each.ok for each in found.values())
        assert found[f"{role} grouped"].detail == "one bit pattern"
        assert found[f"{role} gqa"].detail.startswith("differ: ")
        assert found[f"{role} gqa"].detail.endswith("; no exact answer takes it here")
    monkeypatch.setattr(check.Golden, "of", lambda model: GOLDEN)
    monkeypatch.setattr(check, "allowed", lambda model, golden: 1e-9)
    assert not widths("draft")["draft gqa"].ok, "but rounding has to explain it"
    monkeypatch.setattr(check, "exact_graphs", lambda model, threads: {"gqa": 2, "grouped": 1})
    monkeypatch.setattr(check, "allowed", lambda model, golden: 1.0)
    assert [name for name, each in widths("target").items() if not each.ok] == ["target gqa"]


@pytest.mark.parametrize("form", [Form(), Form(gqa=True)], ids=["concat", "genai"])
def test_other_peoples_graphs_are_tried_too(form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ForeignEngine.forward
    open_foreign(tmp_path, form)
    model = Model(tmp_path, foreign_entry(tmp_path / "model.onnx", "genai" if form.gqa else "concat"))

    def off(engine: ForeignEngine, tokens: Any, past_lens: Any, logit_index: Any = None) -> Any:
        logits = right(engine, tokens, past_lens, logit_index)
        if others := of_four(int(past_lens[0]), tokens.shape[1]):
            logits[:, -others:] += np.float32(1e-3)
        return logits

    monkeypatch.setattr(ForeignEngine, "forward", off)
    with pytest.raises(EngineError, match="--no-exact"):
        open_engine(model, exact=True)
    open_engine(model)


def test_a_graph_that_cannot_be_had_exact_fails_no_check_of_batches(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, of_four, ("canonical",))
    bundle = Bundle.read(tiny_bundle)
    rows = {each.name: each for each in check.check_tokens(bundle, {"target": "cpu", "draft": "cpu"}, 1)}
    assert all(each.ok for each in rows.values())
    assert "--no-exact" in rows["greedy: batch against alone, canonical"].detail
    assert "tokens of 3 prompts" in rows["greedy: batch against alone, grouped"].detail
