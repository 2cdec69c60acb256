"""Heads that draft blocks (DFlash), from checkpoints as they are published to drafts and answers."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file
from support_blocks import heads, norm, rotary
from support_features import proposals
from test_export_drafts import PROMPTS, answers_are_the_target_s, draft_of
from test_mutants import Mutant, must_die
from torch.nn import functional
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

import leadout
from leadout.bundle import Bundle
from leadout.engines import open_engine
from leadout.engines.golden import Golden
from leadout.errors import ExportError, UsageError
from leadout.export import golden
from leadout.export.build import export_pair
from leadout.export.canonical import capture_to, simplify_and_pack
from leadout.export.capture.taps import tapped
from leadout.export.checkpoints.checkpoint import load
from leadout.export.drafts import dflash
from leadout.export.drafts.dflash import BlockHead
from leadout.export.drafts.head_checkpoint import read_head
from leadout.export.golden import compute_truth, head_truth
from leadout.export.graphs import quantize
from leadout.runtime import check
from leadout.runtime.drafters.block_drafter import BlockDrafter
from leadout.scripts.cli import main

pytestmark = pytest.mark.usefixtures("captures_once")

VOCAB, SIZE, MASK = 512, 64, 509
LAYER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "initializer_range": 0.2,
}
OWN = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
# As their authors write them: what says how a block is made stands apart, or not; a layer with a window is causal.
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"dflash_config": OWN},
    "windowed": SLIDING | {"dflash_config": OWN | {"block_size": 8}},
    "scaled": {"dflash_config": OWN | {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}}
    | SLIDING
    | {"is_causal": False, "input_embedding_scale": 2.0},
}


def published(folder: Path, form: str = "plain", **changes: Any) -> Path:
    """A random head of FORMS; its tables are its target's."""
    raw = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16, "num_target_layers": 2}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw | LAYER | FORMS[form] | changes))
    config = Qwen3Config(**LAYER)
    config.update({"taps": [1, 2], "target_hidden_size": SIZE, "draft_vocab_size": VOCAB})
    config.update({"causal": [False] * 2, "scale": 1.0, "multiplier": 1.0, "softcap": 0.0, "mask_token_id": MASK})
    torch.manual_seed(4)
    tensors = BlockHead(config).state_dict()
    for weight in tensors.values():
        if weight.dim() == 1:
            weight += 0.1 * torch.randn(weight.shape)
    kept = {name: value.contiguous() for name, value in tensors.items() if not name.startswith(("embed_", "lm_head"))}
    save_file(kept, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def made(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A head's checkpoint and the tiny target's bundle with it, in fp32."""
    folder = tmp_path_factory.mktemp("blocks")
    head = published(folder / "checkpoint", "windowed")
    return head, export_pair(tiny_pair[0], head, folder / "bundle", draft_precision="fp32")


@torch.no_grad()
def drafted(target: Any, checkpoint: Path, text: list[int], count: int) -> list[int]:
    """What the head's layers say, as their authors compute them: queries of the block alone, keys and values of the
    features of all text but its last token, and of the block."""
    raw = json.loads((checkpoint / "config.json").read_text())
    said = raw | raw["dflash_config"]
    weights = load_file(checkpoint / "model.safetensors")
    with tapped(target, (1, 2)) as streams:
        target(torch.tensor([text[:-1]]), use_cache=False)
    told = norm(torch.cat(streams, -1) @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    block = torch.tensor([[text[-1], *[MASK] * count]])
    own = target.model.embed_tokens(block) * said.get("input_embedding_scale", 1.0)
    cos, sin = rotary(len(text) + count)
    for index in range(2):
        of = {
            name.split(f"layers.{index}.")[1]: w for name, w in weights.items() if name.startswith(f"layers.{index}.")
        }
        window = said.get("sliding_window") if said.get("layer_types", [""] * 2)[index] == "sliding_attention" else None
        causal = said.get("is_causal", window is not None)
        read = norm(own, of["input_layernorm.weight"])
        query = norm(heads(read @ of["self_attn.q_proj.weight"].T), of["self_attn.q_norm.weight"])
        both = torch.cat([told, read], 1)
        key = norm(heads(both @ of["self_attn.k_proj.weight"].T), of["self_attn.k_norm.weight"])
        value = heads(both @ of["self_attn.v_proj.weight"].T)
        query = apply_rotary_pos_emb(query, query, cos[:, -count - 1 :], sin[:, -count - 1 :])[0]
        key = apply_rotary_pos_emb(key, key, cos, sin)[0]
        at, slot = torch.arange(len(text) - 1, len(text) + count)[:, None], torch.arange(len(text) + count)[None]
        sees = torch.ones(count + 1, len(text) + count, dtype=torch.bool)
        sees &= (slot <= at) if causal else sees
        sees &= ((at - slot).abs() < window) if window is not None else sees
        key, value = (each.repeat_interleave(2, 1) for each in (key, value))
        made = functional.scaled_dot_product_attention(query, key, value, attn_mask=sees)
        own = own + made.transpose(1, 2).reshape(1, count + 1, -1) @ of["self_attn.o_proj.weight"].T
        read = norm(own, of["post_attention_layernorm.weight"])
        gate, up = (read @ of[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        own = own + (functional.silu(gate) * up) @ of["mlp.down_proj.weight"].T
    logits = target.lm_head(norm(own, weights["norm.weight"])) * said.get("output_multiplier", 1.0)
    if cap := said.get("final_logit_softcapping"):
        logits = torch.tanh(logits / cap) * cap
    return logits[0, 1:].argmax(-1).tolist()


def test_it_drafts_what_its_authors_code_says(
    made: tuple[Path, Path], tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = proposals(BlockDrafter, monkeypatch)
    asked: dict[str, Any] = {"draft": "model", "ignore_eos": True}
    with leadout.load(made[1]) as pair:
        pair.generate(PROMPTS[0], max_new_tokens=12, draft_length=6, **asked)
        pair.generate(PROMPTS, max_new_tokens=6, draft_length=4, **asked)
    target = AutoModelForCausalLM.from_pretrained(tiny_pair[0], dtype=torch.float32, attn_implementation="eager").eval()
    assert len(seen) > 8
    for text, tokens in seen:
        assert tokens == drafted(target, made[0], text, len(tokens))


def test_answers_are_the_target_s(made: tuple[Path, Path]) -> None:
    answers_are_the_target_s(made[1])
    with leadout.load(made[1]) as pair:
        for rule in ("rejection", "block"):
            result = pair.generate("def f", temperature=0.7, rule=rule, draft="model", draft_length=3, seed=1)
            assert result.lossless and result.stats.drafted
        with pytest.raises(UsageError, match="branches: a head that reads its target's features proposes no trees"):
            pair.generate("def f", draft="model", branches=(2, 2))


def test_its_bundle_stands_every_check(made: tuple[Path, Path]) -> None:
    result = CliRunner().invoke(main, ["check", str(made[1])])
    assert result.exit_code == 0, result.output
    models, own = Bundle.read(made[1]).manifest.models, json.loads((made[0] / "config.json").read_text())
    assert [models[role].features for role in ("target", "draft")] == [SIZE + 1, SIZE + 1]
    most = (own | own["dflash_config"])["block_size"] - 1
    assert (models["draft"].mask_token, models["draft"].block) == (MASK, most)
    with leadout.load(made[1]) as pair:
        assert pair.draft is not None and pair.draft.spec.block == most, "drafts are no longer than it was taught"
    assert "says a whole draft of" in models["draft"].note
    assert not {"tree", "tree_gqa", "nonpad"} & set(models["draft"].variants)
    shown = Golden.of(Bundle.read(made[1]).model("draft"))
    assert shown is not None and shown.texts is not None and shown.beside is not None
    assert shown.texts.tolist() == [27, 20, 13] and shown.lengths.tolist() == [32, 25, 18]
    for row, (text, length) in enumerate(zip(shown.texts, shown.lengths, strict=True)):
        assert shown.beside[row, :length, -1].tolist() == [1] * text + [0] * (length - text)
        assert shown.tokens[row, text + 1 : length].tolist() == [MASK] * 4 and shown.logits[row, length - 1].any()


def test_a_device_that_takes_blocks_for_text_is_found_out(made: tuple[Path, Path]) -> None:
    """``leadout check`` looks at a block of each golden row."""
    model = Bundle.read(made[1]).model("draft")
    shown = Golden.of(model)
    assert shown is not None and shown.beside is not None
    engine = open_engine(model)
    assert check.check_parity("draft", engine, shown, 1e-3).ok
    engine.beside = lambda features, tell=engine.beside: tell(np.abs(features) + (features[..., -1:] == 0))  # type: ignore[attr-defined]
    assert not check.check_parity("draft", engine, shown, 1e-3).ok
    engine.close()


def test_a_block_is_as_long_as_it_was_taught(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    target = load(tiny_pair[0]).model.config
    for form, most in (("plain", 15), ("windowed", 7)):
        head = read_head(str(published(tmp_path / form, form, input_embedding_scale=None)), target)
        assert head is not None and (head.mask, head.block) == (MASK, most)


def test_in_fewer_bits_and_trimmed(tiny_pair: tuple[Path, Path], tmp_path: Path, root: Path) -> None:
    asked: dict[str, Any] = {"draft_vocabulary": 200, "calibration": [root / "bundle.py"], "precision": "int8"}
    bundle = export_pair(tiny_pair[0], published(tmp_path / "head"), tmp_path / "bundle", **asked)
    assert (draft_of(bundle).precision, draft_of(bundle).vocab_size) == ("int8", 200)
    answers_are_the_target_s(bundle)
    graph = ir.load(bundle / "target" / "model.onnx")
    kept = [n for n in graph.graph if n.op_type == "MatMul" and quantize._gives_features(n)]
    assert len(kept) == 1, "what makes features of streams is not rounded"


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "of another kind": ({"architectures": ["DFlash2DraftModel"]}, "a head of kind 'DFlash2DraftModel' cannot be"),
    "of another kind within": ({"dflash_config": OWN | {"projector_type": "dspark"}}, "a head of kind 'dspark' cannot"),
    "another target's": ({"vocab_size": 500}, "is no head of this target: vocab_size is 500, the target's 512"),
    "of a deeper target": ({"num_target_layers": 9}, "num_target_layers is 9, the target's 2"),
    "reads too far": ({"dflash_config": OWN | {"target_layer_ids": [0, 2]}}, "target_layer_ids[1] must be from 0 to 1"),
    "reads nothing": ({"dflash_config": OWN | {"target_layer_ids": []}}, "target_layer_ids[0] must be from 0 to 1"),
    "reads one layer": ({"dflash_config": OWN | {"target_layer_ids": 1}}, "target_layer_ids[0] must be from 0 to 1"),
    "scales by a word": ({"output_multiplier": "1"}, "config.json: output_multiplier must be a number, not '1'"),
    "turns dynamically": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic-NTK rope rescales"),
    "has no mask": ({"dflash_config": {"target_layer_ids": [0, 1]}}, "mask_token_id must be from 0 to 511, not None"),
    "is no block": ({"block_size": 1}, "block_size must be from 2"),
    "is no qwen3": ({"model_type": "llama"}, "a head whose layer is a llama's cannot be exported, only a qwen3's"),
    "is wider": ({"intermediate_size": 80}, "layers.0.mlp.gate_proj.weight is [96, 64], by config.json [80, 64]"),
    "is not as wide as its target": ({"hidden_size": 32}, "embed_tokens.weight is [512, 64], by config.json [512, 32]"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_head_that_does_not_fit_is_refused(name: str, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    change, message = CHANGES[name]
    head = published(tmp_path / "head", **change)
    with pytest.raises(ExportError, match=re.escape(message)):
        export_pair(tiny_pair[0], head, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_files_that_are_no_head_s_are_refused(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    head = published(tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    save_file(tensors | {"candidate_selector.hidden_projection.weight": torch.ones(4)}, head / "model.safetensors")
    with pytest.raises(ExportError, match=r"candidate_selector.hidden_projection.weight is no part of a head"):
        export_pair(tiny_pair[0], head, tmp_path / "bundle")
    with pytest.raises(UsageError, match=r"mask-token: the draft .* is a head, which knows how it is asked"):
        export_pair(tiny_pair[0], head, tmp_path / "other", mask_token=3)


def told_by(tiny_pair: tuple[Path, Path], source: Path) -> tuple[Any, Any]:
    """What a head says of its target's rows and of blocks behind them; and the head's checkpoint."""
    target = load(tiny_pair[0])
    head = read_head(str(source), target.model.config)
    assert head is not None
    checkpoint = head.checkpoint(target.model, 128)
    return head_truth(checkpoint, compute_truth(target, checkpoint.model)), checkpoint


def blocks_are_their_authors_code_s(tiny_pair: tuple[Path, Path], folder: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(tiny_pair[0], dtype=torch.float32, attn_implementation="eager").eval()
    for form in FORMS:
        source = published(folder / form, form)
        said, _ = told_by(tiny_pair, source)
        for row, block, logits, start in zip(said.tokens, said.block, said.said, said.starts(), strict=True):
            text = [*row[:start].tolist(), int(row[start])]
            assert logits[1:].argmax(-1).tolist() == drafted(target, source, text, block.size - 1)


def graphs_say_the_same(tiny_pair: tuple[Path, Path], folder: Path) -> None:
    """And what they said of blocks otherwise would not get by."""
    said, checkpoint = told_by(tiny_pair, published(folder / "captured", "windowed"))
    assert said.said is not None and said.said.shape == (3, golden.STEP, VOCAB)
    assert len(set(said.starts().tolist())) == 3
    packed = simplify_and_pack(capture_to(folder / "draft", checkpoint, said, lambda line: None), lambda line: None)
    assert max(packed.entry.parity.values()) <= 1e-4
    for wrong in (said.said[::-1], np.roll(said.said, 1, axis=1)):
        off = dataclasses.replace(packed, truth=dataclasses.replace(said, said=wrong))
        with pytest.raises(ExportError, match="logits differ from transformers"):
            off.checked("pack", packed.graph, lambda line: None)


MUTANTS = [
    Mutant("text is read as it comes", dflash.BlockLayer, "forward", "torch.where(is_text, told, ", "("),
    Mutant("blocks are causal", BlockHead, "_mask", "if not causal:", "if False:"),
    Mutant("all see all of a block", BlockHead, "_mask", "if not causal:", "if True:"),
    Mutant("all layers are as wide", BlockHead, "_sights", "window if kind == SLIDING else None", "window"),
    Mutant("windows see one token more", BlockHead, "_mask", "< window", "<= window"),
    Mutant("padding is seen", BlockHead, "_mask", "kinds > PADDING", "kinds >= PADDING"),
    Mutant("old slots are seen", BlockHead, "_mask", "(slot <= ends)", "(slot >= 0)"),
    Mutant("features are not normed", BlockHead, "feature", "self.hidden_norm(", "("),
    Mutant("a block begins with a mask", golden, "_with_blocks", "block[:, 0] = ", "_ = "),
]


CHECKS = [blocks_are_their_authors_code_s, graphs_say_the_same]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_healthy_code_passes(check: Any, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    check(tiny_pair, tmp_path)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(
    mutant: Mutant, tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    must_die(mutant, [lambda *_, check=check: check(tiny_pair, tmp_path) for check in CHECKS], monkeypatch)
