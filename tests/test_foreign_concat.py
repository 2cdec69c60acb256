"""Concatenating caches (optimum, onnx-community): handwritten two-layer decoders against a numpy reference."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest
from support_foreign import CONTEXT, NEAR, VOCAB, Form, decoder, engine, entry, reference, renamed, weights
from support_graphs import rounds_alike

from leadout.bundle import Model
from leadout.engines.foreign import ForeignEngine
from leadout.engines.foreign_cache import ConcatCache
from leadout.errors import EngineError

FORMS = {
    "plain": Form(),
    "no position_ids": Form(positions=False),
    "merged": Form(merged=True),
    "merged, no position_ids": Form(merged=True, positions=False),
    "num_logits_to_keep": Form(keep=True),
    "sliding window": Form(window=5),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_ragged_batch_with_roll_backs_equals_a_full_recompute(tmp_path: Path, form: Form) -> None:
    runner = engine(tmp_path, form)
    runner.reset(3)
    rng, w = np.random.default_rng(1), weights()
    text = rng.integers(0, VOCAB, (3, CONTEXT))
    truth = np.stack([reference(w, row, form.window) for row in text])
    lens = np.zeros(3, np.int64)
    for width in (7, 5, 2, 5, 1, 4):
        tokens = np.stack([text[b, n : n + width] for b, n in enumerate(lens)])
        want = np.stack([truth[b, n : n + width] for b, n in enumerate(lens)])
        np.testing.assert_allclose(runner.forward(tokens, lens), want, atol=NEAR)
        lens += rng.integers(0, width + 1, 3)  # some of each row's tokens are rolled back, none in common
    assert len(set(lens)) == 3


def test_a_row_has_the_same_bits_alone_and_in_a_batch_and_at_every_width(tmp_path: Path) -> None:
    runner = engine(tmp_path)
    even = rounds_alike(runner)
    text = np.random.default_rng(2).integers(0, VOCAB, (3, 12))
    alone = runner.forward(text[1:2], np.zeros(1, np.int64)).copy()
    runner.reset(3)
    lens = np.zeros(3, np.int64)
    for start in range(0, 12, 2):
        together = runner.forward(text[:, start : start + 2], lens)
        np.testing.assert_allclose(together[1], alone[0, start : start + 2], rtol=0, atol=0 if even else NEAR)
        lens += 2


@pytest.mark.parametrize("form", [Form(), Form(keep=True)], ids=["gathered here", "num_logits_to_keep"])
def test_logit_index_gathers_the_same_bits(tmp_path: Path, form: Form) -> None:
    runner = engine(tmp_path, form)
    tokens = np.arange(6)[None]
    whole = runner.forward(tokens, np.zeros(1, np.int64)).copy()
    for index in ([5], [4, 5], [2, 0, 5], [0]):
        some = runner.forward(tokens, np.zeros(1, np.int64), np.array([index]))
        np.testing.assert_array_equal(some[0], whole[0, index])


def test_padding_beyond_the_context_is_not_run(tmp_path: Path) -> None:
    runner, w = engine(tmp_path), weights()
    assert runner.spec.max_context == CONTEXT - 1
    text = np.random.default_rng(3).integers(0, VOCAB, CONTEXT)
    runner.forward(text[None, : CONTEXT - 2], np.zeros(1, np.int64))
    tail = np.concatenate([text[CONTEXT - 2 :], [1, 2, 3]])[None]
    out = runner.forward(tail, np.array([CONTEXT - 2]))
    np.testing.assert_allclose(out[0, :2], reference(w, text)[-2:], atol=NEAR)
    assert out.shape == (1, 5, VOCAB) and not out[0, 2:].any()
    assert not runner.forward(tail, np.array([CONTEXT])).any()


def test_rows_survive_growth_and_are_copied_whole(tmp_path: Path) -> None:
    runner, w = engine(tmp_path), weights()
    runner.reset(2)
    text = np.random.default_rng(4).integers(0, VOCAB, 9)
    runner.forward(np.stack([text[:6], text[:6][::-1]]), np.zeros(2, np.int64))
    with pytest.raises(EngineError, match="capacity 128"):
        runner.forward(text[None, 6:], np.array([126]))
    runner.reserve(129)
    assert runner.capacity == 256
    runner.copy_row(0, 1)
    out = runner.forward(np.stack([text[5:8], text[6:9]]), np.array([5, 6]))
    truth = reference(w, text)
    np.testing.assert_allclose(out, [truth[5:8], truth[6:9]], atol=NEAR)
    with pytest.raises(EngineError, match="holds 8"):
        runner.forward(text[None, :2], np.array([9]))
    runner.reset(1)
    assert runner.batch == 1
    with pytest.raises(EngineError, match="holds 0"):
        runner.forward(text[None, :2], np.array([1]))
    runner.close()
    runner.close()
    for late in (
        lambda: runner.forward(text[None, :2], np.array([0])),
        lambda: runner.reserve(1),
        lambda: runner.reset(1),
        lambda: runner.copy_row(0, 0),
    ):
        with pytest.raises(EngineError, match=f"the engine of {tmp_path.name} is closed"):
            late()


@pytest.mark.parametrize("form", [Form(), Form(gqa=True)], ids=["concat", "genai"])
def test_growth_that_is_interrupted_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    """The rows outlast it, so no row may be shorter than the engine says it is."""
    runner = engine(tmp_path, form)
    runner._limit = 200
    with monkeypatch.context() as broken:
        broken.setattr(type(runner._rows[0]), "reserve", lambda self, slots: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            runner.reserve(129)
    assert runner.capacity == 128


def test_an_accepted_round_copies_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, crops = engine(tmp_path), []
    monkeypatch.setattr(ConcatCache, "_crop", lambda self, past: crops.append(past))
    runner.forward(np.array([[1, 2, 3]]), np.array([0]))
    runner.forward(np.array([[4, 5]]), np.array([3]))
    assert not crops
    runner.forward(np.array([[6, 7]]), np.array([4]))
    assert crops == [4]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (decoder(Form(last_only=True)), "one position only|cannot take this step"),
        (decoder(Form(window=1, trimmed=True)), "cannot take"),
        (decoder(Form(square=True)), "cannot take several tokens behind others, as verifying a draft needs: "),
        (renamed(decoder(), "past_key_values.1.key", "past_conv.1"), "past_conv.1.*rewound"),
        (renamed(decoder(), "past_key_values", "past_ssm"), "past_ssm.*rewound"),
        (renamed(decoder(), "present.1.key", "present.1.conv"), "a layer of present has a key without a value"),
        (renamed(decoder(), "input_ids", "inputs_embeds"), "has no 'input_ids'"),
        (renamed(decoder(), "attention_mask", "token_type_ids"), "'token_type_ids' is neither"),
    ],
    ids=[
        "last logits only",
        "windowed cache",
        "square mask",
        "convolution",
        "state space",
        "no present",
        "embeddings",
        "unknown",
    ],
)
def test_what_cannot_be_rewound_is_refused_by_name_when_loaded(
    tmp_path: Path, model: onnx.ModelProto, reason: str
) -> None:
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(EngineError, match=reason) as caught:
        ForeignEngine(Model(tmp_path, entry(tmp_path / "model.onnx")))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_other_shapes_than_the_manifest_and_other_providers_are_refused(tmp_path: Path) -> None:
    onnx.save(decoder(), tmp_path / "model.onnx")
    right = entry(tmp_path / "model.onnx")
    for wrong, options, reason in (
        (dataclasses.replace(right, cache=right.cache[:1]), {}, "manifest"),
        (dataclasses.replace(right, vocab_size=VOCAB + 1), {}, "logits"),
        (dataclasses.replace(right, dialect="mobius"), {}, "dialect 'mobius'"),
        (right, {"provider": "cuda"}, "runs on provider cpu"),
    ):
        with pytest.raises(EngineError, match=reason):
            ForeignEngine(Model(tmp_path, wrong), **options)
