"""How the demo pair learns: what a stage changes, and how well a copy is written."""

from __future__ import annotations

import dataclasses
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from tokenizers import Tokenizer  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from leadout.scripts import pair_parallel, train_pair  # noqa: E402
from leadout.scripts.pair_recipes import COPYING, Recipe  # noqa: E402

RECIPE = Recipe(
    hidden=32, layers=2, heads=2, kv_heads=1, intermediate=32, steps=30, shallow=2, tokens=512, long_share=0.0
)


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, intermediate_size=32, **shape))


@pytest.mark.parametrize("bfloat16", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stage_learns_with_and_without_bfloat16(
    model: LlamaForCausalLM, bfloat16: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(train_pair, "BFLOAT16", bfloat16)
    stream = np.tile(np.arange(100), 100)
    loss_of = train_pair.next_token_loss(model)
    batch = next(train_pair.batches(stream, RECIPE))
    before, matrices = loss_of(batch).item(), [p.clone() for p in model.model.layers.parameters() if p.ndim == 2]
    train_pair.fit(model, stream, loss_of, RECIPE, tmp_path)
    assert loss_of(batch).item() < before - 0.5
    after = [p for p in model.model.layers.parameters() if p.ndim == 2]
    assert not any(torch.equal(old, new) for old, new in zip(matrices, after, strict=True)), "they learn, too"


def test_weights_go_back_along_a_line(model: LlamaForCausalLM) -> None:
    before = deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 1.0
    train_pair.move_back(model, before, 0.25)
    for weight, old in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.allclose(weight, old + 0.75)


def test_copying_counts_the_last_quarter_of_texts_that_fit(
    model: LlamaForCausalLM, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    texts = ["import os\n" * 12, "x" * 5 * train_pair.CONTEXT]
    ids = [0, *tokenizer.encode(texts[0]).ids]
    wrong = len(ids) // 4 - 1  # of the tokens before the last: one is right

    def logits_of(_: object, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.tolist() == [ids[:-1]], "the other is too long"
        likeliest = torch.tensor([(token + 1) % 512 for token in ids[1:-1]] + ids[-1:])
        return torch.nn.functional.one_hot(likeliest, 512)[None].float()

    monkeypatch.setattr(train_pair, "logits_of", logits_of)
    assert train_pair.copying(model, tokenizer, texts) == pytest.approx(1 / (wrong + 1))


def test_copies_are_learnt_in_windows_of_the_whole_context() -> None:
    assert {COPYING.length(step) for step in range(COPYING.steps)} == {train_pair.CONTEXT}
    assert {COPYING.depth(step) for step in range(COPYING.steps)} == {COPYING.layers}


def test_masks_see_in_training_what_a_drafter_shows_them(model: LlamaForCausalLM) -> None:
    """Each mask of a packed text gives the logits that it gives behind the text alone, as it is asked in use."""
    text, anchors, mask = torch.arange(40)[None] * 7 % 300, torch.tensor([3, 9, 30]), 511
    with torch.no_grad():
        packed = model(**pair_parallel.with_masks(text, anchors, mask)).logits[0]
        plain = model(input_ids=text).logits[0]
        assert torch.allclose(packed[:40], plain, atol=1e-5), "masks behind it change nothing of a text"
        for block, anchor in enumerate(anchors.tolist()):
            masks = torch.full((1, pair_parallel.DEPTH - 1), mask)
            alone = model(input_ids=torch.cat([text[:, : anchor + 1], masks], 1)).logits[0, anchor + 1 :]
            start = 40 + block * (pair_parallel.DEPTH - 1)
            assert torch.allclose(packed[start : start + pair_parallel.DEPTH - 1], alone, atol=1e-5)


@pytest.mark.slow
def test_a_draft_learns_to_say_whole_drafts(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(train_pair, "BFLOAT16", False)
    stream, recipe = np.tile(np.arange(100), 100), dataclasses.replace(RECIPE, steps=100, vector_rate=0.02)
    train_pair.fit(model, stream, train_pair.next_token_loss(model), recipe, tmp_path)
    draft, rows = deepcopy(model), torch.from_numpy(stream[:512].reshape(4, 128))
    before = pair_parallel.acceptance_by_depth(draft, model, 511, rows)
    assert before[1][0] == 1.0 and before[1][2] < 0.1, "it says what the target does, and knows nothing behind a mask"
    loss = pair_parallel.parallel_loss(draft, model, 511, train_pair.divergence, 0)
    train_pair.fit(draft, stream, loss, recipe, tmp_path)
    sampled, greedy = pair_parallel.acceptance_by_depth(draft, model, 511, rows)
    assert greedy[2] > 0.9 and sampled[2] > before[0][2] + 0.3
