"""Heads that read their target's features, from checkpoints in the forms there are to drafts and answers."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

import onnx_ir as ir
import torch
import transformers
from safetensors.torch import load_file, save_file
from support_blocks import heads, norm, rotary
from support_features import proposals
from test_export_drafts import PROMPTS, answers_are_the_target_s, draft_of
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import leadout
from leadout.bundle import MANIFEST, Bundle
from leadout.engines import open_engine
from leadout.engines.base import FeatureEngine, TreeEngine
from leadout.engines.memory import bucket
from leadout.engines.plan import Load, plan
from leadout.engines.tensorrt.buildable import require_buildable
from leadout.errors import BundleError, ExportError, UsageError
from leadout.export import parity
from leadout.export.build import export_pair
from leadout.export.capture.taps import tapped
from leadout.export.drafts.eagle import FeatureHead, behind_head
from leadout.export.drafts.head_checkpoint import read_head
from leadout.export.golden import Truth, head_truth
from leadout.runtime.drafters.feature_drafter import FeatureDrafter
from leadout.scripts.cli import main

pytestmark = pytest.mark.usefixtures("captures_once")

VOCAB, SIZE = 512, 64
LAYER = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
EAGLE = LAYER | {"join": "attention", "draft_vocab_size": VOCAB, "target_hidden_size": SIZE, "taps": [1, 1, 2]}


def weights(**settings: Any) -> dict[str, Any]:
    torch.manual_seed(4)
    return {name: value.contiguous() for name, value in FeatureHead(LlamaConfig(**settings)).state_dict().items()}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def eagle(folder: Path) -> Path:
    """As SpecForge writes it: its taps are the layers whose output is read; no embedding; every second token."""
    tensors = weights(**EAGLE | {"draft_vocab_size": 200})
    del tensors["embed_tokens.weight"]
    tensors |= {"d2t": torch.arange(200), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 200}
    return write(folder, LAYER | config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 1]}}, tensors)


def speculators(folder: Path) -> Path:
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": LAYER | {"model_type": "llama"},
        "draft_vocab_size": VOCAB,
        "eagle_aux_hidden_state_layer_ids": [1, 1, 2],
    }
    norms = {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True, "norm_output": True}
    tensors = weights(**EAGLE | norms)
    return write(
        folder, config | norms, {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    )


def ours(folder: Path) -> Path:
    config = EAGLE | {"join": "projection", "taps": [2], "fc": False, "model_type": "llama"}
    return write(folder, config, weights(**config))


def first(folder: Path) -> Path:
    """As the authors of EAGLE and EAGLE-2 write it."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    tensors = weights(**EAGLE | {"join": "bare", "taps": [3], "fc": False, "projection_bias": True})
    del tensors["lm_head.weight"]
    names = {"midlayer.eh_proj.": "fc.", "midlayer.": "layers.0."}
    for ours, theirs in names.items():
        tensors = {name.replace(ours, theirs): value for name, value in tensors.items()}
    return write(folder, LAYER | config, tensors)


FORMS: list[Callable[[Path], Path]] = [eagle, speculators, ours, first]


@pytest.fixture(scope="module", params=FORMS, ids=lambda form: form.__name__)
def made(
    request: pytest.FixtureRequest, tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A head's checkpoint and the tiny target's bundle with it, in fp32."""
    folder = tmp_path_factory.mktemp("head")
    head = request.param(folder / "checkpoint")
    return head, export_pair(tiny_pair[0], head, folder / "bundle", draft_precision="fp32")


@torch.no_grad()
def drafted(target: Any, head: FeatureHead, ids: np.ndarray, text: list[int], count: int) -> list[int]:
    """What the head drafts greedily after ``text``, all of it read anew for each token."""
    with tapped(target, head.config.taps) as streams:
        target(input_ids=torch.tensor([text]), use_cache=False)
    features, tokens = head.feature(streams)[:, :-1], text[1:]
    for _ in range(count):
        out = head(torch.tensor([tokens]), features)
        tokens = [*tokens, int(ids[out.logits[0, -1].argmax()])]
        features = torch.cat([features, out.hidden_states[:, -1:]], 1)
    return tokens[len(text) - 1 :]


def test_it_drafts_what_transformers_says(
    made: tuple[Path, Path], tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, bundle = made
    target = AutoModelForCausalLM.from_pretrained(tiny_pair[0], dtype=torch.float32, attn_implementation="eager").eval()
    head = read_head(str(checkpoint), target.config)
    assert head is not None
    model = head.checkpoint(target, 128).model
    model.set_attn_implementation("eager")
    seen = proposals(FeatureDrafter, monkeypatch)
    with leadout.load(bundle) as pair:
        pair.generate(PROMPTS[0], max_new_tokens=12, draft="model", draft_length=3, ignore_eos=True)
        pair.generate(PROMPTS, max_new_tokens=8, draft="model", draft_length=2, ignore_eos=True)
    assert len(seen) > 8
    for text, tokens in seen:
        assert tokens == drafted(target, model, head.ids, text, len(tokens))


def test_taps_are_counted_as_transformers_counts_them(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """hidden_states[i] enters layer i; behind the last layer a norm comes first there."""
    target = AutoModelForCausalLM.from_pretrained(tiny_pair[0], dtype=torch.float32).eval()
    with torch.no_grad(), tapped(target, (1, 2)) as streams:
        found = target(input_ids=torch.arange(9)[None], output_hidden_states=True).hidden_states
        assert torch.equal(streams[0], found[1]) and torch.equal(target.model.norm(streams[1]), found[2])
    for form, taps in ((eagle, [1, 1, 2]), (speculators, [1, 1, 2]), (ours, [2])):
        head = read_head(str(form(tmp_path / form.__name__)), target.config)
        assert head is not None and head.config.taps == taps
    config = json.loads((tmp_path / "eagle" / "config.json").read_text())
    del config["eagle_config"]
    (tmp_path / "eagle" / "config.json").write_text(json.dumps(config))
    target.config.num_hidden_layers = 32
    head = read_head(str(tmp_path / "eagle"), target.config)
    assert head is not None and head.config.taps == [2, 16, 29], "as its authors' own program reads them"
    (tmp_path / "eagle" / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [3, 9]}))
    read = read_head(str(tmp_path / "eagle"), target.config)
    assert read is not None and read.config.taps == [3, 9], "as vLLM does"
    assert head.ids.tolist() == list(range(0, 400, 2))


def test_the_first_eagle_norms_nothing_but_what_its_mlp_reads(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Its authors' equations; its output is read by the target's own head, as behind the target's norm."""
    target = AutoModelForCausalLM.from_pretrained(tiny_pair[0], dtype=torch.float32).eval()
    source = first(tmp_path / "head")
    head, of = read_head(str(source), target.config), load_file(source / "model.safetensors")
    assert head is not None and head.config.taps == [3]
    tokens = torch.arange(3, 15)[None] * 7
    with torch.no_grad(), tapped(target, (3,)) as streams:
        read = target(input_ids=tokens, output_hidden_states=True).hidden_states[-1]
        assert torch.equal(streams[0], read)
        found = head.checkpoint(target, 128).model(tokens, read)
        both = torch.cat([torch.nn.functional.embedding(tokens, of["embed_tokens.weight"]), read], -1)
        mixed = both @ of["fc.weight"].T + of["fc.bias"]
        query, key, value = (heads(mixed @ of[f"layers.0.self_attn.{name}_proj.weight"].T) for name in "qkv")
        query, key = apply_rotary_pos_emb(query, key, *rotary(12))
        key, value = (each.repeat_interleave(2, 1) for each in (key, value))
        made = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out = mixed + made.transpose(1, 2).reshape(1, 12, -1) @ of["layers.0.self_attn.o_proj.weight"].T
        normed = norm(out, of["layers.0.post_attention_layernorm.weight"])
        gate, up = (normed @ of[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        out = out + (torch.nn.functional.silu(gate) * up) @ of["layers.0.mlp.down_proj.weight"].T
        assert torch.allclose(found.hidden_states, out, atol=1e-4)
        assert torch.allclose(found.logits, target.lm_head(out), atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Llama", {}),
        ("Granite", {"logits_scaling": 8.0}),
        ("HyperCLOVAX", {"logits_scaling": 8.0}),  # a factor, where Granite's is a divisor
        ("Cohere", {"logit_scale": 0.0625}),
        ("Gemma2", {"final_logit_softcapping": 3.0}),
        ("NanoChat", {"final_logit_softcapping": 2.0}),
        ("FalconH1", {"lm_head_multiplier": 0.3, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8}),
    ],
)
def test_a_borrowed_head_says_what_its_target_makes_of_it(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    """As if the head's output stood behind the target's last norm; a head of its own says what it says."""
    config = getattr(transformers, f"{kind}Config")(**LAYER | {"num_hidden_layers": 2} | settings)
    target, source = AutoModelForCausalLM.from_config(config).eval(), first(tmp_path / "head")
    tokens, read = torch.arange(3, 15)[None] * 7, torch.randn(1, 12, SIZE)

    def said() -> tuple[Any, Any, Any]:
        head = read_head(str(source), config)
        assert head is not None
        with torch.no_grad():
            found = head.checkpoint(target, 128).model(tokens, read)
            hook = target.lm_head.register_forward_pre_hook(lambda module, given: (found.hidden_states,))
            whole = target(input_ids=tokens, use_cache=False).logits
            hook.remove()
            return found.logits, whole, target.lm_head(found.hidden_states)

    logits, whole, raw = said()
    assert torch.allclose(logits, whole, rtol=1e-5, atol=1e-4)
    assert (logits - raw).abs().max() > 0.5 or not settings
    save_file(
        load_file(source / "model.safetensors") | {"lm_head.weight": target.lm_head.weight.detach().clone()},
        source / "model.safetensors",
    )
    logits, _, raw = said()
    assert torch.equal(logits, raw)


def test_a_target_of_one_token_tells_what_it_makes_of_its_head() -> None:
    settings = LAYER | {"vocab_size": 1, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    scaled = AutoModelForCausalLM.from_config(transformers.GraniteConfig(**settings, logits_scaling=8.0))
    capped = AutoModelForCausalLM.from_config(transformers.Gemma2Config(**settings, final_logit_softcapping=3.0))
    assert behind_head(scaled.eval()) == {"multiplier": 0.125, "softcap": 0.0}
    assert behind_head(capped.eval()) == pytest.approx({"multiplier": 1.0, "softcap": 3.0})


def test_the_norms_of_eagle_3_1(tmp_path: Path) -> None:
    """Of each stream, of all of them together, and of what stands for a feature of a token that was drafted."""
    target = LlamaForCausalLM(LlamaConfig(**LAYER | {"num_hidden_layers": 6}))
    norms, source = {"fc_norm": True, "norm_before_fc": True}, speculators(tmp_path / "head")
    of = weights(**EAGLE | norms)
    of |= {name: value + 0.3 * torch.randn(value.shape) for name, value in of.items() if "norm" in name}
    save_file(of, source / "model.safetensors")
    theirs, streams = json.loads((source / "config.json").read_text()), torch.randn(3, 1, 5, SIZE)

    def head(config: dict[str, Any]) -> Any:
        (source / "config.json").write_text(json.dumps(config))
        found = read_head(str(source), target.config)
        assert found is not None
        return found.checkpoint(target, 128).model

    of_authors = LAYER | {"architectures": ["LlamaForCausalLMEagle3"]}
    forms = [lambda more: theirs | norms | more, lambda more: of_authors | {"eagle_config": norms | more}]
    for form in forms:
        model, plain = head(form({"norm_output": True})), head(form({"norm_output": False}))
        each = [norm(stream, of[f"fc_norm.{i}.weight"]) for i, stream in enumerate(streams)]
        with torch.no_grad():
            read = norm(torch.cat(each, -1), of["input_norm.weight"]) @ of["fc.weight"].T
            assert torch.allclose(model.feature(streams), read, atol=1e-4)
            said, own = (head_(torch.arange(5)[None], read) for head_ in (model, plain))
            assert torch.allclose(said.hidden_states, norm(own.hidden_states, of["norm.weight"]), atol=1e-4)
            assert torch.equal(said.logits, own.logits)
    save_file({name: value for name, value in of.items() if name != "input_norm.weight"}, source / "model.safetensors")
    with pytest.raises(ExportError, match=r"its files lack input_norm\.weight"):
        head(theirs | norms)


def test_a_layer_with_a_window_sees_no_further(tmp_path: Path) -> None:
    source, target = eagle(tmp_path / "head"), LlamaForCausalLM(LlamaConfig(**LAYER | {"num_hidden_layers": 2}))
    config = json.loads((source / "config.json").read_text()) | {"sliding_window": 6}
    tokens, read = torch.arange(20)[None], torch.randn(2, 20, SIZE)
    read[1, :5] = read[0, :5]
    read[1, 6:] = read[0, 6:]
    for kind, last in (("sliding_attention", 10), ("full_attention", 19)):
        (source / "config.json").write_text(json.dumps(config | {"layer_types": [kind]}))
        head = read_head(str(source), target.config)
        assert head is not None
        with torch.no_grad():
            said = [head.checkpoint(target, 128).model(tokens, beside[None]).logits[0] for beside in read]
        assert (said[0] - said[1]).abs().amax(-1).gt(1e-5).nonzero().flatten().tolist() == list(range(5, last + 1))


def test_a_small_llama_is_no_head(tmp_path: Path) -> None:
    config = LlamaConfig(**LAYER)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    assert read_head(str(tmp_path / "llama"), config) is None
    (tmp_path / "llama" / "model.safetensors").unlink()
    assert read_head(str(tmp_path / "llama"), config) is None
    for text in ("[]", "{", "[" * 100_000):  # whoever reads it as a checkpoint says what is wrong
        (tmp_path / "llama" / "config.json").write_text(text)
        assert read_head(str(tmp_path / "llama"), config) is None


def test_answers_are_the_target_s(made: tuple[Path, Path]) -> None:
    answers_are_the_target_s(made[1])
    with leadout.load(made[1]) as pair:
        for rule in ("rejection", "block"):
            result = pair.generate("def f", temperature=0.7, rule=rule, draft="model", draft_length=3, seed=1)
            assert result.lossless and result.stats.drafted
        with pytest.raises(UsageError, match="branches: a head that reads its target's features proposes no trees"):
            pair.generate("def f", draft="model", branches=(2, 2))
    with pytest.raises(UsageError, match="draft_ahead: a head that reads its target's features cannot"):
        leadout.load(made[1], draft_ahead=True)


def test_its_bundle_stands_every_check(made: tuple[Path, Path]) -> None:
    result = CliRunner().invoke(main, ["check", str(made[1])])
    assert result.exit_code == 0, result.output
    assert "draft gqa: golden logits" in result.output
    models = Bundle.read(made[1]).manifest.models
    assert [models[role].features for role in ("target", "draft")] == [SIZE, SIZE]
    assert models["draft"].reads_features and not models["target"].reads_features
    assert not {"tree", "tree_gqa"} & set(models["draft"].variants)


def test_features_move_with_their_slots(made: tuple[Path, Path]) -> None:
    engine = open_engine(Bundle.read(made[1]).model("target"))
    assert isinstance(engine, FeatureEngine) and isinstance(engine, TreeEngine)
    tokens = np.arange(24).reshape(2, 12) * 5 % VOCAB
    engine.reset(2)
    engine.reserve(40)
    engine.forward(tokens, np.zeros(2, np.int64))
    first, second = (engine.features(row, 0, 12).copy() for row in (0, 1))
    assert first.shape == (12, SIZE) and not np.allclose(first, second)
    engine.forward(tokens[:, :2] + 1, np.array([3, 7]))
    for row, (before, past) in enumerate(zip((first, second), (3, 7), strict=True)):
        now, untouched = engine.features(row, 0, 12), [slot for slot in range(12) if slot not in (past, past + 1)]
        assert np.array_equal(now[untouched], before[untouched]) and not np.allclose(now[past], before[past])
    kept = engine.features(1, 0, 12).copy()
    engine.copy_row(1, 0)
    assert np.array_equal(engine.features(0, 0, 12), kept)
    engine.reserve(200)
    assert np.array_equal(engine.features(0, 0, 12), kept)
    engine.reset(1)
    engine.reserve(40)
    engine.forward(tokens[:1, :6], np.array([0]))
    sees = np.array([[[True, False, False], [False, True, False], [False, True, True]]])
    engine.forward_tree(tokens[1:, :3], np.array([6]), sees)
    branch = engine.features(0, 7, 9).copy()
    engine.compact(0, 6, [1, 2])
    assert np.array_equal(engine.features(0, 6, 8), branch)
    engine.forward(tokens[1:, 1:3], np.array([6]))
    assert np.allclose(engine.features(0, 6, 8), branch, atol=1e-4), "as a chain of the same tokens gives them"
    engine.close()


def test_its_features_are_planned_for_and_no_engine_s(made: tuple[Path, Path]) -> None:
    for role in ("target", "draft"):
        entry = Bundle.read(made[1]).manifest.models[role]
        load = Load(provider="cpu", batch=3, draft_length=4, context=100)
        without = plan(dataclasses.replace(entry, features=None), load)
        assert plan(entry, load).cache - without.cache == 3 * 4 * SIZE * bucket(104, coarse=False)
    with pytest.raises(ExportError, match="the target gives features, which engines do not"):
        require_buildable(Bundle.read(made[1]).manifest.models["target"], "fp16")


def test_its_golden_rows_are_no_longer_than_its_context(tmp_path: Path) -> None:
    """Behind it, what a head says on its own and by its graph would differ."""
    target = LlamaForCausalLM(LlamaConfig(**LAYER | {"num_hidden_layers": 2}))
    head = read_head(str(ours(tmp_path / "head")), target.config)
    assert head is not None
    truth = Truth(np.zeros((3, 32), np.int64), np.zeros((3, 32, VOCAB), np.float32), np.ones((3, 32, SIZE), np.float32))
    for context, length in ((12, 12), (128, 31)):
        said = head_truth(head.checkpoint(target, context), truth)
        assert said.beside is not None and said.tokens.shape == said.beside.shape[:2] == said.logits.shape[:2]
        assert said.tokens.shape == (3, length)


def test_another_target_cannot_use_it(made: tuple[Path, Path], tiny_bundle: Path) -> None:
    result = CliRunner().invoke(main, ["tune", str(tiny_bundle), "--draft", str(made[1]), "--no-save"])
    trimmed = draft_of(made[1]).vocab_size != VOCAB
    reason = (
        "its draft has 200 tokens" if trimmed else "its draft is a head, which reads the features of its own target"
    )
    assert result.exit_code == 2 and reason in result.output


@pytest.mark.parametrize("precision", ["int8", "int4", "fp16"])
def test_in_other_precisions(precision: str, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    head = ours(tmp_path / "head")
    bundle = export_pair(tiny_pair[0], head, tmp_path / "bundle", precision=precision, draft_precision=precision)
    answers_are_the_target_s(bundle)
    with np.load(bundle / "draft" / "golden.npz") as golden:
        assert golden["beside"].shape == (*golden["tokens"].shape, SIZE)


def test_streams_become_features_unrounded(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    head = eagle(tmp_path / "head")
    for precision, least in (("int8", 1), ("int4", 1), ("fp32", 9)):
        bundle = export_pair(tiny_pair[0], head, tmp_path / precision, precision=precision)
        graph = ir.load(bundle / "target" / "model.onnx")
        given = {str(value.name): value for value in graph.graph.outputs}["features"].producer()
        assert given is not None and given.op_type == "MatMul"
        assert sum(node.op_type == "MatMul" for node in graph.graph) >= least


def test_a_head_may_be_trimmed_like_any_draft(tiny_pair: tuple[Path, Path], tmp_path: Path, root: Path) -> None:
    asked: dict[str, Any] = {"draft_vocabulary": 200, "calibration": [root / "bundle.py"]}
    bundle = export_pair(tiny_pair[0], ours(tmp_path / "head"), tmp_path / "bundle", draft_precision="fp32", **asked)
    assert draft_of(bundle).vocab_size == 200
    answers_are_the_target_s(bundle)
    with pytest.raises(UsageError, match=r"draft-vocabulary: .* says 200 tokens alone already"):
        export_pair(tiny_pair[0], eagle(tmp_path / "eagle"), tmp_path / "other", **asked)
    with pytest.raises(UsageError, match=r"mask-token: .* is a head, which knows how it is asked"):
        export_pair(tiny_pair[0], tmp_path / "head", tmp_path / "other", mask_token=3)


def test_what_the_target_gives_is_checked(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Features that are a layer off are found before anything is written."""
    head = ours(tmp_path / "head")
    measure = parity._features_apart
    found: list[float] = []

    def off(truth: Any, engine: Any) -> float:
        found.append(measure(truth, engine))
        return 0.9 if engine.spec.reads_features else found[-1]

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ExportError, match="features differ from transformers'"):
        patch.setattr(parity, "_features_apart", off)
        export_pair(tiny_pair[0], head, tmp_path / "bundle")
    assert found and max(found) < 1e-5 and not (tmp_path / "bundle").exists()


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "another target's": ({"vocab_size": 500}, "is no head of this target: vocab_size is 500, the target's 512"),
    "of another width": ({"target_hidden_size": 32}, "target_hidden_size is 32, the target's 64"),
    "reads too far": ({"taps": [3]}, "the layers it reads must be from 1 to 2, its target's, not [3]"),
    "reads nothing": ({"taps": []}, "the layers it reads must be from 1 to 2"),
    "joins otherwise": ({"join": "sum"}, "join must be one of attention, projection, bare, not 'sum'"),
    "has two layers": ({"num_hidden_layers": 2}, "a head of 2 layers cannot be exported, only of 1"),
    "is no llama": ({"model_type": "qwen3"}, "a head whose layer is a qwen3's cannot be exported, only a llama's"),
    "reads two without fc": ({"taps": [1, 2]}, "without fc it must read one layer, and be 64 wide"),
    "says others": ({"draft_vocab_size": 100}, "it says 100 tokens, but has no d2t that names them"),
    "is wider": ({"intermediate_size": 80}, "midlayer.mlp.gate_proj.weight is [96, 64], by config.json [80, 64]"),
    "has fc": ({"fc": True}, "its files lack fc.weight"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_head_that_does_not_fit_is_refused(name: str, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    change, message = CHANGES[name]
    head = ours(tmp_path / "head")
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ExportError, match=re.escape(message)):
        export_pair(tiny_pair[0], head, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_files_that_are_no_head_s_are_refused(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    head = ours(tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    save_file(tensors | {"midlayer.self_attn.q_norm.weight": torch.ones(16)}, head / "model.safetensors")
    with pytest.raises(ExportError, match=r"q_norm.weight is no part of a head that Leadout knows"):
        export_pair(tiny_pair[0], head, tmp_path / "bundle")
    save_file(tensors | {"norm.weight": tensors["norm.weight"].to(torch.int8)}, head / "model.safetensors")
    with pytest.raises(ExportError, match=r"its files have integers \(int8\) for norm.weight$"):
        export_pair(tiny_pair[0], head, tmp_path / "bundle")
    (head / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(ExportError, match=r"cannot be loaded: model\.safetensors is incomplete, a git-lfs pointer or"):
        export_pair(tiny_pair[0], head, tmp_path / "bundle")
    (head / "model.safetensors").unlink()
    with pytest.raises(ExportError, match="has no weights"):
        export_pair(tiny_pair[0], head, tmp_path / "bundle")
    (head / "config.json").write_text(json.dumps({"speculators_model_type": "mlp"}))
    with pytest.raises(ExportError, match="is a speculator of kind 'mlp'; Leadout knows eagle3"):
        export_pair(tiny_pair[0], head, tmp_path / "bundle")
    torn = eagle(tmp_path / "eagle")
    tensors = load_file(torn / "model.safetensors")
    save_file(tensors | {"d2t": torch.arange(200) * 3}, torn / "model.safetensors")
    with pytest.raises(ExportError, match="d2t must name 200 different tokens of the target"):
        export_pair(tiny_pair[0], torn, tmp_path / "bundle")


def test_weights_in_pytorch_s_own_format(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    head = eagle(tmp_path / "head")
    torch.save(load_file(head / "model.safetensors"), head / "pytorch_model.bin")
    (head / "model.safetensors").unlink()
    answers_are_the_target_s(export_pair(tiny_pair[0], head, tmp_path / "bundle", draft_precision="fp32"))


@pytest.mark.parametrize("form", [eagle, first])
def test_weights_in_parts(form: Callable[[Path], Path], tmp_path: Path) -> None:
    target = LlamaConfig(**LAYER | {"num_hidden_layers": 2})
    source = form(tmp_path / "head")
    whole = read_head(str(source), target)
    tensors, named = load_file(source / "model.safetensors"), {}
    (source / "model.safetensors").unlink()
    for i, name in enumerate(tensors):
        named[name] = f"model-{i % 2}.safetensors"
        save_file({n: v for n, v in tensors.items() if named.get(n) == named[name]}, source / named[name])
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": named}))
    parts = read_head(str(source), target)
    assert whole is not None and parts is not None and whole.config.join == parts.config.join
    assert whole.weights.keys() == parts.weights.keys() and np.array_equal(whole.ids, parts.ids)
    assert all(torch.equal(parts.weights[name], value) for name, value in whole.weights.items())
    (source / "model-1.safetensors").unlink()
    with pytest.raises(ExportError, match=r"index.json names model-1.safetensors, which is not there"):
        read_head(str(source), target)


SAID: list[tuple[Callable[[Path], Path], dict[str, Any], str]] = [
    (eagle, {"eagle_config": "all"}, "the layers it reads must be from 1 to 2, its target's, not 'all'"),
    (eagle, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["1"]}}, "the layers it reads must be from 1 to 2"),
    (eagle, {"draft_vocab_size": "200"}, "draft_vocab_size must be from 1 to 512, not '200'"),
    (eagle, {"draft_vocab_size": None}, "d2t must name 512 different tokens of the target, not [200] of int64"),
    (ours, {"join": None}, "join must be one of attention, projection, bare, not None"),
    (ours, {"hidden_act": "none"}, "KeyError: 'none'"),
    (ours, {"rope_scaling": {"rope_type": "mrope"}}, "rope_type 'mrope' is none of those that transformers"),
    (ours, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic-NTK rope rescales every position"),
    (ours, {"num_key_value_heads": 0}, "cannot be exported: its code in transformers raises ZeroDivisionError"),
]


@pytest.mark.parametrize(("form", "change", "message"), SAID, ids=[next(iter(change)) for _, change, _ in SAID])
def test_what_its_config_says_in_another_way_is_refused(
    form: Callable[[Path], Path], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source, target = form(tmp_path / "head"), LlamaForCausalLM(LlamaConfig(**LAYER | {"num_hidden_layers": 2}))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ExportError, match=re.escape(message)):
        head = read_head(str(source), target.config)
        assert head is not None
        head.checkpoint(target, 128)


def test_sizes_that_its_config_leaves_open_are_its_target_s(tmp_path: Path) -> None:
    source = ours(tmp_path / "head")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps(config | {"vocab_size": None, "target_hidden_size": None, "architectures": 1})
    )
    head = read_head(str(source), LlamaConfig(**LAYER | {"num_hidden_layers": 2}))
    assert head is not None and (head.config.vocab_size, head.config.target_hidden_size) == (VOCAB, SIZE)


@pytest.mark.parametrize(
    "offsets", [torch.tensor(0), torch.arange(199), torch.arange(200)[:, None], torch.arange(200).bfloat16()]
)
def test_offsets_that_are_not_one_for_each_token(offsets: torch.Tensor, tmp_path: Path) -> None:
    """One for all would have been taken for each of them, and 16 bits do not hold ids."""
    source = eagle(tmp_path / "head")
    save_file(load_file(source / "model.safetensors") | {"d2t": offsets}, source / "model.safetensors")
    its = f"not {list(offsets.shape)} of {str(offsets.dtype).removeprefix('torch.')}"
    with pytest.raises(ExportError, match=re.escape(f"d2t must name 200 different tokens of the target, {its}")):
        read_head(str(source), LlamaConfig(**LAYER | {"num_hidden_layers": 2}))


@pytest.mark.parametrize(
    "role, change, message",
    [
        ("draft", {"features": 32}, "draft: reads 32 features a token, the target gives 64"),
        ("draft", {"features": None}, "draft: reads None features a token, the target gives 64"),
        ("target", {"features": None}, "draft: reads 64 features a token, the target gives none"),
        ("target", {"reads_features": True}, "target: reads 64 features a token"),
        ("target", {"features": 0}, "features must be from 1"),
    ],
)
def test_a_manifest_whose_features_do_not_match(
    role: str, change: dict[str, Any], message: str, made: tuple[Path, Path], tmp_path: Path
) -> None:
    bundle = shutil.copytree(made[1], tmp_path / "bundle")
    manifest = json.loads((bundle / MANIFEST).read_text())
    manifest["models"][role] |= change
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=re.escape(message)):
        Bundle.read(bundle)
