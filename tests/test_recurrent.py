"""Layers that keep a state a row are rolled back by length, to the last bit: however a text was stepped, drafted beside
and taken back, its logits are those of reading it once."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from test_export_architectures import GROUPED, build, tiny  # noqa: E402

from leadout.bundle import CacheShape, Model, Recurrence  # noqa: E402
from leadout.engines import open_engine, ort  # noqa: E402
from leadout.engines.base import CommittingEngine  # noqa: E402
from leadout.engines.ort import SlotEngine  # noqa: E402
from leadout.engines.plan import Load, plan  # noqa: E402
from leadout.engines.tensorrt.buildable import require_buildable  # noqa: E402
from leadout.engines.trails import Trails  # noqa: E402
from leadout.engines.wrapped import Wrapped  # noqa: E402
from leadout.errors import EngineError, ExportError, UsageError  # noqa: E402
from leadout.export.build import export_pair  # noqa: E402
from leadout.export.capture.kept import kept  # noqa: E402
from leadout.runtime import check  # noqa: E402
from leadout.runtime.decoder import Decoder  # noqa: E402
from leadout.runtime.settings import Settings  # noqa: E402
from leadout.scripts.cmd_inspect import describe  # noqa: E402

pytestmark = pytest.mark.usefixtures("captures_once")

# A short convolution; the gated delta rule; a state space beside attention in one layer; a state space of its own.
NAMES = ("lfm2", "qwen3_5", "falcon_h1", "granite_4_h")
LONG = 300  # tokens: more than twice around every trail


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    found = {}
    for name in NAMES:
        folder = tmp_path_factory.mktemp(name) / "target"
        found[name] = Model(folder, build(tiny(name), folder))
    return found


@pytest.fixture(params=NAMES)
def model(models: dict[str, Model], request: pytest.FixtureRequest) -> Model:
    return models[request.param]


@pytest.fixture
def engine(model: Model) -> Iterator[SlotEngine]:
    made = SlotEngine(model, exact=True)
    yield made
    made.close()


def at(*lengths: int) -> np.ndarray:
    return np.array(lengths, np.int64)


def texts(rows: int, length: int = LONG, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 256, (rows, length))


def read(model: Model, text: np.ndarray, variant: str = "auto") -> np.ndarray:
    """Logits after each token of one text, read in steps of 64."""
    engine = SlotEngine(model, variant=variant, exact=True)
    engine.reserve(len(text))
    parts = [np.array(engine.forward(text[None, i : i + 64], at(i))[0]) for i in range(0, len(text), 64)]
    engine.close()
    return np.concatenate(parts)


def test_the_manifest_says_what_is_kept(models: dict[str, Model]) -> None:
    lfm2, qwen = models["lfm2"].entry.recurrence, models["qwen3_5"].entry.recurrence
    assert lfm2 is not None and lfm2 == Recurrence(slots=130, context=2, trails=(64, 64))
    assert qwen is not None and qwen.context == 3 and qwen.widest == 64
    assert [(state.heads, state.key_dim, state.value_dim) for state in qwen.states] == [(4, 16, 24)]
    assert qwen.trails == (2 * 2 * 16 + 4 * 24, 2 * 16 + 4 * 24 + 2 * 4)  # q, k, v; k, v, decay and rate
    falcon = models["falcon_h1"].entry.recurrence
    assert falcon is not None and len(falcon.states) == 2 and len(falcon.trails) == 4, "of two layers"
    assert not {"tree", "tree_gqa"} & set(models["qwen3_5"].entry.variants)


def test_a_layer_may_have_several_convolutions() -> None:
    """Inkling's have four, beside attention with a bias that no graph can hold: that is what it is refused for."""
    heads = {"head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = transformers.InklingTextConfig(**GROUPED | {"num_hidden_layers": 1} | heads | experts)
    _, recurrence = kept(transformers.AutoModelForCausalLM.from_config(config))
    assert recurrence == Recurrence(slots=131, context=3, trails=(32, 32, 64, 64))


@pytest.mark.parametrize("seed", range(3))
def test_rounds_give_the_bits_of_reading_the_text_once(model: Model, engine: SlotEngine, seed: int) -> None:
    """Some drafts are right, some wrong; what is accepted is committed in the next round."""
    (text,), rng = texts(1, seed=seed), np.random.default_rng(seed)
    wanted, past = read(model, text), int(rng.integers(1, 33))
    engine.reserve(LONG + 64)
    engine.forward(text[None, :past], at(0))
    while past < LONG - 20:
        width, right = int(rng.integers(1, 18)), int(rng.integers(0, 18))
        fed = text[past : past + width].copy()
        fed[1 + right :] = (fed[1 + right :] + 1) % 256
        engine.commit([past])
        logits = engine.forward(fed[None], at(past))[0]
        same = min(width, 1 + right)
        assert np.array_equal(logits[:same], wanted[past : past + same]), past
        past += int(rng.integers(1, same + 1))


@pytest.mark.parametrize("seed", range(2))
def test_a_draft_model_s_steps_are_taken_back_whole(model: Model, engine: SlotEngine, seed: int) -> None:
    """Token by token ahead of what is committed, then back to some place in between."""
    (text,), rng = texts(1, seed=seed), np.random.default_rng(seed)
    wanted, past, fed = read(model, text), 1, 0
    engine.reserve(LONG + 64)
    engine.forward(text[None, :1], at(0))
    while past < LONG - 40:
        engine.commit([past])
        right, drafted = int(rng.integers(0, 17)), text[past : past + 16].copy()
        drafted[right:] = (drafted[right:] + 1) % 256
        for i, token in enumerate(drafted):
            logits = engine.forward(at(token)[None], at(past + i))[0]
            if i < right:
                assert np.array_equal(logits[0], wanted[past + i]), (past, i)
        past, fed = past + int(rng.integers(0, right + 1)) + (right == 0), fed + 16
        if right == 0:
            engine.forward(text[None, past - 1 : past], at(past - 1))
    assert fed > 300


def test_rows_go_their_own_ways(model: Model) -> None:
    """Ragged, begun anew at will, copied: a row's bits are its own."""
    rows, rng = texts(3), np.random.default_rng(0)
    wanted = [read(model, row, "grouped") for row in rows]
    engine = SlotEngine(model, exact=True)
    engine.reset(3)
    engine.reserve(LONG + 64)
    of, past = [0, 1, 2], [0, 0, 0]
    for turn in range(60):
        width = int(rng.integers(1, 12))
        fed = np.stack([rows[t][p : p + width] for t, p in zip(of, past, strict=True)])
        engine.commit(past)
        logits = np.array(engine.forward(fed, at(*past)))
        for b in range(3):
            assert np.array_equal(logits[b], wanted[of[b]][past[b] : past[b] + width]), (turn, b)
        past = [p + int(rng.integers(1, width + 1)) for p in past]
        if turn % 7 == 3:
            past[turn % 3] = 0
        if turn % 11 == 5:
            source, destination = turn % 3, (turn + 1) % 3
            engine.copy_row(source, destination)
            of[destination], past[destination] = of[source], past[source]
    engine.close()


def test_rows_that_a_step_leaves_out_stay_as_they_are(model: Model) -> None:
    rows = texts(2, 64)
    wanted = read(model, rows[1], "grouped")
    engine = SlotEngine(model, exact=True)
    engine.reset(2)
    engine.forward(rows[:, :10], at(0, 0))
    engine.commit([10, 10])
    engine.forward(rows[:, 10:20], at(10, 10))
    for past in range(20, 29):
        engine.commit([past])
        engine.forward(rows[:1, past : past + 1], at(past))
    engine.commit([29, 20])
    assert np.array_equal(engine.forward(rows[:, 20:24], at(29, 20))[1], wanted[20:24])
    engine.close()


def test_rows_that_are_finished_are_not_copied() -> None:
    """A batch's last row does not carry the states of all others from step to step; who comes back has its own."""
    trails, rows = Trails(Recurrence(slots=20, context=0, trails=(1,), states=(CacheShape(1, 2, 2),)), 3), range(3)
    (one,), (other,) = trails._states

    def step(past: list[int], mark: float) -> None:
        _, side = trails.turn(past, 1)
        read, written = (one, other) if side == 0 else (other, one)
        seen.append(read.array[: len(past), 0, 0, 0].tolist())
        written.array[: len(past)] = mark
        trails.commit(past)
        trails.took(past, 1)

    seen: list[list[float]] = []
    step([1, 1, 1], 1.0)
    left = [buffer.array[1:].copy() for buffer in (one, other)]
    for past in range(2, 5):
        step([past], float(past))
    assert all(np.array_equal(buffer.array[1:], was) for buffer, was in zip((one, other), left, strict=True))
    trails.copy_row(1, 2)
    assert trails.anchors == (4, 1, 1)
    step([5, 2, 0], 5.0)
    assert seen == [[0.0] * len(rows), [1.0], [2.0], [3.0], [4.0, 1.0, 0.0]]


def test_uncommitted_tokens_can_be_taken_back_for_a_widest_step(model: Model, engine: SlotEngine) -> None:
    (text,) = texts(1)
    wanted = read(model, text)
    engine.reserve(LONG)
    for past in range(0, 256, 64):
        engine.forward(text[None, past : past + 64], at(past))
    assert engine.earliest(0) <= 192 and np.array_equal(
        engine.forward(text[None, 192:200], at(192))[0], wanted[192:200]
    )
    engine.commit([200])
    with pytest.raises(EngineError, match=r"row 0 cannot go back to 3 tokens: 192 are committed"):
        engine.forward(text[None, 3:4], at(3))
    assert np.array_equal(engine.forward(text[None, :8], at(0))[0], wanted[:8]), "but to its beginning"
    for past in (8, 10, 5):
        assert np.array_equal(engine.forward(text[None, past : past + 2], at(past))[0], wanted[past : past + 2])
    with pytest.raises(EngineError, match="a step of 65 tokens exceeds the 64 that recurrent layers take"):
        engine.forward(text[None, :65], at(0))


@pytest.mark.parametrize("fault", [RuntimeError("no"), KeyboardInterrupt()])
def test_a_step_that_fails_or_is_interrupted_changes_nothing(
    model: Model, engine: SlotEngine, fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text,) = texts(1, 64)
    wanted = read(model, text)
    engine.forward(text[None, :20], at(0))
    engine.commit([20])
    run = ort.Step.run

    def fails(step: Any) -> None:
        run(step)
        raise fault

    with monkeypatch.context() as patch, pytest.raises((EngineError, KeyboardInterrupt)):
        patch.setattr(ort.Step, "run", fails)
        engine.forward((text[None, 20:30] + 1) % 256, at(20))
    assert np.array_equal(engine.forward(text[None, 20:30], at(20))[0], wanted[20:30])


def test_a_row_whose_copy_is_interrupted_begins_anew(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = texts(2, 64)
    engine = SlotEngine(model, exact=True)
    engine.reset(2)
    for past in (0, 8):
        engine.commit([past, past])
        engine.forward(rows[:, past : past + 8], at(past, past))

    def stops(source: int, destination: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine._trails._trails[-1], "copy_row", stops)
        engine.copy_row(0, 1)
    with pytest.raises(EngineError, match="row 1 cannot go back to 16 tokens"):
        engine.forward(rows[:, 16:18], at(16, 16))
    wanted = read(model, rows[1], "grouped")
    engine.reset(2)
    assert np.array_equal(engine.forward(rows[:, :8], at(0, 0))[1], wanted[:8])
    engine.close()


def test_an_engine_around_another_passes_it_on(model: Model, engine: SlotEngine) -> None:
    around = Wrapped(engine)
    assert isinstance(around, CommittingEngine) and around.spec.recurrent
    (text,) = texts(1, 64)
    around.forward(text[None, :20], at(0))
    around.commit([12])
    around.forward(text[None, 12:20], at(12))
    assert around.earliest(0) == engine.earliest(0) == 12


def settings(**options: Any) -> Settings:
    return Settings(**{"max_new_tokens": 40, "seed": 3, "ignore_eos": True} | options)


def written(decoder: Decoder, requests: list[tuple[list[int], Settings]]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in requests]
    for event in decoder.decode(requests):
        found[event.index] += [token for token, _ in event.tokens]
    return found


PROMPTS = [[5, 9, 7, 7, 5, 9, 7, 5, 9], [11], list(range(20, 120)), [*range(20, 60), 5]]


def conversations(decoder: Decoder, draft: str, temperature: float) -> list[list[list[int]]]:
    """What is written alone, in a batch, as several answers, and where a text goes on."""

    def ask(prompts: list[list[int]], **options: Any) -> list[list[int]]:
        asked = settings(draft=draft, temperature=temperature, **options)
        return written(decoder, [(prompt, asked) for prompt in prompts])

    found = []
    for _ in range(2):  # the second time the caches hold what went before
        for prompt in PROMPTS:
            (answer,) = ask([prompt])
            found += [[answer], ask([[*prompt, *answer]], max_new_tokens=12)]
    return [*found, ask([*PROMPTS, PROMPTS[2]])]


@pytest.fixture(scope="module")
def unaided() -> dict[tuple[Path, float], Any]:
    """What targets write alone, by model and temperature."""
    return {}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", ["auto", "model", "suffix", "recycling"])
def test_speculation_changes_nothing(
    models: dict[str, Model], model: Model, unaided: dict[tuple[Path, float], Any], draft: str, temperature: float
) -> None:
    """Recurrent targets with recurrent drafts."""
    if (key := (model.folder, temperature)) not in unaided:
        plain = open_engine(model, exact=True)
        unaided[key] = conversations(Decoder(plain, None), "none", temperature)
        plain.close()
    target, other = open_engine(model, exact=True), open_engine(models["granite_4_h"])
    assert conversations(Decoder(target, other), draft, temperature) == unaided[key]
    for engine in (target, other):
        engine.close()


def test_its_target_drafting_for_itself_is_always_right(model: Model) -> None:
    target, draft = open_engine(model, exact=True), open_engine(model, exact=True)
    decoder = Decoder(target, draft)
    for event in decoder.decode([(PROMPTS[0], settings(draft="model", draft_length=6, max_new_tokens=60))]):
        if event.stats is not None:
            assert event.stats.accepted == event.stats.tested > 40
    target.close()
    draft.close()


def test_what_was_committed_is_what_is_read_again(models: dict[str, Model]) -> None:
    """Each round carries both models' states on to where it began, the draft's to where it began to draft: the next
    reads no more than its own tokens again, and no step of a draft more than the draft."""
    target, draft = (open_engine(models["qwen3_5"], exact=exact) for exact in (True, False))
    text, turn, behind = PROMPTS[0], Trails.turn, []

    def watched(trails: Trails, past: Any, width: int) -> Any:
        if trails is draft._trails and trails.anchors[0]:
            behind.append(past[0] - trails.anchors[0])
        return turn(trails, past, width)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trails, "turn", watched)
        for event in Decoder(target, draft).decode([(text, settings(draft="model", draft_length=4))]):
            for engine, lag in ((target, 0), (draft, 1)):
                assert isinstance(engine, CommittingEngine)
                assert len(text) - 2 - lag <= engine.earliest(0) <= len(text) - 1 + lag
            text = [*text, *(token for token, _ in event.tokens)]
    assert len(behind) > 9 and max(behind) <= 4
    target.close()
    draft.close()


def forgets(states: list[np.ndarray]) -> None:
    states[-1][...] = 0


def has_another_layer_s(states: list[np.ndarray]) -> None:
    states[0][...] = states[1]


def has_another_row_s(states: list[np.ndarray]) -> None:
    states[0][1:] = states[0][:1]


def rounds(states: list[np.ndarray]) -> None:
    states[0][...] = states[0].astype(np.float16)


@pytest.mark.parametrize("fault", [forgets, has_another_layer_s, has_another_row_s, rounds], ids=lambda f: f.__name__)
def test_check_tells_a_state_that_is_not_the_text_s(
    models: dict[str, Model], fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even of a model that may be far from transformers' logits, as a draft in int4 is."""
    entry = models["falcon_h1"].entry
    variants = {graph: entry.variants[graph] for graph in ("gqa", "grouped")}
    entry = dataclasses.replace(entry, precision="int4", parity={"int4": 1.0}, variants=variants)
    faulty, took = Model(models["falcon_h1"].folder, entry), Trails.took

    def told() -> list[str]:
        names = [each.name for each in check.check_model("draft", faulty, "cpu", 1) if not each.ok]
        return [name.removeprefix("draft ") for name in names]

    def takes(trails: Trails, past: Any, width: int) -> None:
        before = trails.anchors
        took(trails, past, width)
        if trails.anchors != before:
            fault([state.array for state in trails._states[trails._at[0]]])

    assert told() == []
    monkeypatch.setattr(Trails, "took", takes)
    assert told() == ["gqa: states", "grouped: states"][fault is has_another_row_s :]


@pytest.mark.parametrize("rows", [1, 3])
def test_its_memory_is_planned(model: Model, rows: int) -> None:
    engine = SlotEngine(model)
    engine.reset(rows)
    engine.reserve(204)
    held = [*engine._cache, *(buffer for side in (0, 1) for *_, buffer in engine._trails.bindings(side))]
    found = {id(buffer): buffer.array.nbytes for buffer in held}  # type: ignore[union-attr]
    load = Load(provider="cpu", batch=rows, draft_length=4, context=200)
    assert plan(model.entry, load).cache == sum(found.values())
    engine.close()


def test_inspect_tells_what_is_kept(models: dict[str, Model]) -> None:
    assert describe(models["qwen3_5"].entry)["cache"] == (
        "1 layers of 2 x 16; 1 states of 4 x 16 x 24, 2 trails of 131 tokens"
    )
    assert describe(models["lfm2"].entry)["cache"] == "1 layers of 2 x 16; 2 trails of 130 tokens"


@pytest.mark.parametrize("option", ["precision", "draft_precision"])
@pytest.mark.parametrize("kind", ["qwen3_5", "lfm2"])
def test_half_precision_is_refused_before_anything_is_read(
    tiny_pair: tuple[Path, Path], tmp_path: Path, option: str, kind: str
) -> None:
    hybrid = tmp_path / "hybrid"
    shutil.copytree(tiny_pair[0], hybrid)
    config = tiny(kind, vocab_size=512).model.config
    config.save_pretrained(hybrid)
    target, draft = (hybrid, None) if option == "precision" else (tiny_pair[0], hybrid)
    wanted = f"{option.replace('_', '-')} fp16: {config.model_type} has recurrent layers; they take fp32, int8 or int4"
    with pytest.raises(UsageError, match=wanted):
        export_pair(target, draft, tmp_path / "out", **{option: "fp16"})
    assert not (tmp_path / "out").exists()


def test_what_it_cannot_do_is_refused_by_name(models: dict[str, Model]) -> None:
    model = models["qwen3_5"]
    with pytest.raises(UsageError, match="target has recurrent layers, which run with provider cpu, not 'cuda'"):
        SlotEngine(model, provider="cuda")
    with pytest.raises(ExportError, match="the target has recurrent layers, which ONNX Runtime alone computes"):
        require_buildable(model.entry, "fp16")
    target, draft = open_engine(model, exact=True), open_engine(models["lfm2"])
    with pytest.raises(UsageError, match="draft_ahead: a draft model with recurrent layers cannot"):
        Decoder(target, draft, draft_ahead=True)
    assert Decoder(target, draft, draft_ahead="auto").ahead is None
    with pytest.raises(UsageError, match="branches: the target has recurrent layers"):
        next(Decoder(target, draft).decode([([5], settings(branches=(2, 1)))]))
    target.close()
    draft.close()
