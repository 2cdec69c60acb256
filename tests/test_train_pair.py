"""How the demo pair learns: what a stage changes, and how well a copy is written."""

from __future__ import annotations

import dataclasses
from copy import deepcopy
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from tokenizers import Tokenizer  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from leadout.export.capture.taps import tapped  # noqa: E402
from leadout.export.drafts.eagle import FeatureHead  # noqa: E402
from leadout.scripts import pair_eagle, pair_parallel, train_pair  # noqa: E402
from leadout.scripts.pair_recipes import BACK, COPYING, REFINED, SETTLED, Recipe  # noqa: E402

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


def test_of_what_a_draft_learnt_a_share_is_kept_and_then_rounded(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shares: list[float] = []

    def learn(learner: LlamaForCausalLM, _stream: object, _loss: object, recipe: Recipe, _folder: Path) -> None:
        shares.append(recipe.int4_share)
        with torch.no_grad():
            for weight in learner.parameters():
                weight += recipe.steps

    before = deepcopy(model)
    for name in ("fit", "half_edits", "measure"):
        monkeypatch.setattr(train_pair, name, learn if name == "fit" else lambda *_: None)
    for back, learnt, rounding in ((0.0, 30.0, [0.0]), (0.25, 22.5 + SETTLED.steps, [0.0, 1.0])):
        draft = deepcopy(before)
        shares.clear()
        train_pair.distil(draft, model, None, RECIPE, tmp_path, "", False, back=back)
        assert shares == rounding
        for weight, old in zip(draft.parameters(), before.parameters(), strict=True):
            assert torch.allclose(weight, old + learnt, atol=1e-4)


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


def test_a_draft_is_refined_on_batches_of_another_seed(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    learnt: list[Any] = []
    for name in ("target", "small"):
        model.save_pretrained(tmp_path / name)
    monkeypatch.setattr(train_pair, "read_corpus", lambda tokenizer: tokenizer)
    monkeypatch.setattr(train_pair, "distil", lambda *passed: learnt.append(passed))
    for more in ((), ("--seed", "5", "--back", "0.25")):
        train_pair.refine(["--out", str(tmp_path), "--name", "small", "--steps", "7", *more], standalone_mode=False)
    (_, _, corpus, usual, folder, *_, back), (_, _, _, other, _, card, *_, less) = learnt
    assert (corpus, folder) == (tmp_path / "target" / "tokenizer.json", tmp_path / "small")
    assert (back, less) == (BACK, 0.25) and "75% is kept" in card
    assert usual == dataclasses.replace(REFINED, layers=2, shallow=2, intermediate=32, steps=7)
    assert other == dataclasses.replace(usual, seed=5)
    with pytest.raises(click.BadParameter, match="0<=x<1"):
        train_pair.refine(["--out", str(tmp_path), "--back", "1"], standalone_mode=False)
    stream = np.arange(5000)
    first, second = (next(iter(train_pair.batches(stream, recipe))) for recipe in (usual, other))
    assert not torch.equal(first, second)


def untrained_head(model: LlamaForCausalLM, taps: tuple[int, ...]) -> FeatureHead:
    """One whose features matter."""
    head, _ = pair_eagle.head_for(model, taps, torch.arange(60)[None])
    with torch.no_grad():
        head.midlayer.eh_proj.weight += 0.3 * torch.randn_like(head.midlayer.eh_proj.weight)
    return head.eval()


def test_a_head_begins_as_the_best_layer_alone(model: LlamaForCausalLM) -> None:
    text = torch.arange(60)[None] * 7 % 300
    for taps in ((2,), (1, 2)):
        head, layer = pair_eagle.head_for(model, taps, text)
        alone = pair_eagle.with_layers(model, [layer])
        assert (head.fc is None) == (len(taps) == 1)
        with torch.no_grad():
            other = torch.randn(1, 60, 32)
            assert torch.equal(head(text).logits, head(text, other).logits), "it reads no feature yet"
            # Tokens are normed as they are read, which the layer alone does not do.
            mixed = model.model.embed_tokens.weight
            mixed.div_(mixed.square().mean(-1, keepdim=True).sqrt())
            head, again = pair_eagle.head_for(model, taps, text)
            assert again in (0, 1)
            alone = pair_eagle.with_layers(model, [again])
            assert torch.allclose(head(text).logits, alone(input_ids=text).logits, atol=1e-4)


def test_drafts_see_in_training_what_a_drafter_shows_them(model: LlamaForCausalLM) -> None:
    """Each step of each draft gives the law that it gives behind the text alone, as it is asked in use."""
    head, text, anchors = untrained_head(model, (1, 2)), torch.arange(40)[None] * 7 % 300, torch.tensor([3, 9, 30])
    with torch.no_grad():
        _, streams = pair_eagle.read(model, text, (1, 2))
        (places, own), *steps = pair_eagle.drafts(head, text, streams, anchors)
        features = head.feature(streams)
        alone = head(text[:, 1:], features[:, :-1]).logits.log_softmax(-1)
        assert places.tolist() == list(range(1, 40)) and torch.allclose(own, alone, atol=1e-5)
        for block, anchor in enumerate(anchors.tolist()):
            tokens, read = text[:, 1 : anchor + 2], features[:, : anchor + 1]
            for ahead, (at, log_q) in enumerate(steps, 1):
                out = head(tokens, read)
                tokens = torch.cat([tokens, text[:, anchor + 1 + ahead, None]], 1)
                read = torch.cat([read, out.hidden_states[:, -1:]], 1)
                assert at[block] == anchor + 1 + ahead
                expected = head(tokens, read).logits[0, -1].log_softmax(-1)
                assert torch.allclose(log_q[0, block], expected, atol=1e-5)


def test_what_is_learnt_from_is_the_target_s_law_at_the_next_token(model: LlamaForCausalLM) -> None:
    """p at a place is the law of the token behind that place, which is what log q there is of."""
    text = torch.arange(40)[None] * 7 % 300
    p, streams = pair_eagle.read(model, text, (2,))
    with torch.no_grad(), tapped(model, (2,)) as again:
        assert torch.equal(p, model(input_ids=text).logits.softmax(-1))
    assert torch.equal(streams[0], again[0])
    seen = []

    def divergence(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
        seen.append((p, log_q))
        return (p * log_q).sum(-1)

    batch = torch.arange(41)[None] * 7 % 300
    loss = pair_eagle.head_loss(untrained_head(model, (2,)), model, divergence, 0)(batch)
    assert loss.requires_grad and len(seen) == pair_eagle.DEPTH
    assert torch.equal(seen[0][0], p[:, 1:]) and all(p.shape == log_q.shape for p, log_q in seen)


@pytest.mark.slow
def test_a_head_learns_to_draft(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(train_pair, "BFLOAT16", False)
    stream, recipe = np.tile(np.arange(100), 100), dataclasses.replace(RECIPE, steps=100, vector_rate=0.02)
    train_pair.fit(model, stream, train_pair.next_token_loss(model), recipe, tmp_path)
    rows = torch.from_numpy(stream[:512].reshape(4, 128))
    head, _ = pair_eagle.head_for(model, (2,), rows)
    before = pair_eagle.acceptance_by_depth(head, model, rows)
    train_pair.fit(head, stream, pair_eagle.head_loss(head, model, train_pair.divergence, 0), recipe, tmp_path)
    sampled, greedy = pair_eagle.acceptance_by_depth(head, model, rows)
    assert greedy[-1] > 0.9 and sampled[-1] > before[0][-1] + 0.03
