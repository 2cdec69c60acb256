"""From checkpoints on disk to a bundle on disk: what is refused, what is stored how often, and nothing by halves."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import onnx_ir as ir  # noqa: E402
from huggingface_hub import errors  # noqa: E402
from huggingface_hub.utils import logging as hub_logging  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from support_captures import folder_of, said_of, shared  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from tokenizers.pre_tokenizers import Whitespace  # noqa: E402
from transformers import GenerationConfig  # noqa: E402

import leadout  # noqa: E402
from leadout.bundle import Bundle  # noqa: E402
from leadout.engines import sessions  # noqa: E402
from leadout.engines.base import RAGGED  # noqa: E402
from leadout.errors import ExportError, UsageError  # noqa: E402
from leadout.export import build, canonical  # noqa: E402
from leadout.export.build import export_pair, require_there  # noqa: E402
from leadout.export.capture import decoder_graph  # noqa: E402
from leadout.export.capture.refusals import context_length, refusal  # noqa: E402
from leadout.export.checkpoints import hub  # noqa: E402
from leadout.export.checkpoints.checkpoint import _is_further_layer, _sampling, load, quiet  # noqa: E402

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 128, "long_factor": [2.0] * 128}
LONGROPE |= {"original_max_position_embeddings": 64, "factor": 2.0}
Save = Callable[..., Path]


def nested(**rope: Any) -> dict[str, Any]:
    """``rope_parameters`` of the full layers of two kinds."""
    plain = {"rope_type": "default", "rope_theta": 1e4}
    return {"full_attention": {"rope_theta": 1e4, **rope}, "sliding_attention": plain}


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> Save:
    """Write a random one-layer Llama (or what is asked for) as a checkpoint directory."""

    def save(kind: str = "LlamaConfig", generation: dict[str, Any] | None = None, **changes: Any) -> Path:
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp("checkpoint")
        config = getattr(transformers, kind)(**SMALL | {"initializer_range": 0.2} | changes)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, value in (generation or {}).items():
            setattr(model.generation_config, name, value)
        model.save_pretrained(folder)
        shutil.copy(tokenizer_file, folder / "tokenizer.json")
        return folder

    return save


@pytest.fixture
def capture_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """``captures_once``, of a test alone: others here look at what is held while a model is captured."""
    with shared(folder_of(tmp_path_factory.getbasetemp())):
        yield


@pytest.fixture(scope="module")
def mixed(save: Save, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied int8 target that asks to be sampled, with a tied int4 draft whose vocabulary is padded to 560."""
    asks = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [0, 3]}
    out = tmp_path_factory.mktemp("bundles") / "mixed"
    out.mkdir()
    (out / "leadout.json").write_text("{}")  # an older bundle, to be replaced as a whole
    (out / "stale").mkdir()
    pair = (save(generation=asks), save(vocab_size=560, initializer_range=0.05))
    with shared(folder_of(tmp_path_factory.getbasetemp())):
        return export_pair(*pair, out, precision="int8", draft_precision="int4", max_context=96)


def refuse_config(tmp_path: Path, **config: Any) -> pytest.ExceptionInfo[ExportError]:
    """Export a directory that holds nothing but this config.json; it must be refused and leave nothing."""
    source, place = tmp_path / "source", tmp_path / "place"
    source.mkdir()
    place.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError) as caught:
        export_pair(source, None, place / "out")
    assert not list(place.iterdir())
    assert "\n" not in str(caught.value)
    return caught


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration.*decoder"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "ViTModel.*no causal language model"),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "ministral3"}},
            r"mistral3.*wraps a language model \(ministral3\) in more than text; save that as a checkpoint",
        ),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*recurrent"),
        ({"model_type": "jamba"}, "jamba.*recurrent state in a way of its own"),
        ({"model_type": "minimax"}, "minimax.*recurrent state in a way of its own"),  # whose class says nothing of it
        ({"model_type": "deepseek_v32"}, "deepseek_v32: layer 0 keeps a DynamicIndexedLayer, with more"),
        ({"model_type": "no_such_thing"}, "no_such_thing"),
        (
            {"model_type": "musicgen", "text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}}
            | {"decoder": {"model_type": "musicgen_decoder"}},
            "musicgen.*raises ValueError: Multiple valid text configs",
        ),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "awq"}},
            r"llama.*quantised \(awq\); export the",
        ),
        ({"model_type": "gpt_neox", "quantization_config": {"bits": 4}}, r"quantised \(by an unknown method\)"),
        ({"model_type": "llama", "hidden_size": "64"}, r"source' is wrong: Field 'hidden_size' expected int, got str"),
        ({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 5}, "source' is wrong: .*not a multiple"),
        ({"model_type": "llama", "max_position_embeddings": None}, "wrong: Field 'max_position_embeddings'"),
        ({"model_type": "llama", "bos_token_id": [0, 1]}, "wrong: Field 'bos_token_id'"),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "llama.*dynamic-NTK",
        ),
        ({"model_type": "gemma3_text", "rope_parameters": nested(rope_type="dynamic", factor=2.0)}, "dynamic-NTK"),
        (
            {"model_type": "llama", "rope_scaling": {"type": "su", "factor": 2.0}},
            r"llama.*: rope_type 'su' is none of those .* \(default, linear, yarn, longrope, llama3, proportional\)$",
        ),
        ({"model_type": "gemma3_text", "rope_parameters": nested(rope_type="none")}, "rope_type 'none' is none of"),
        (
            {"model_type": "gemma3_text", "rope_parameters": nested(**LONGROPE)},
            r"gemma3_text.*longrope in one kind of its layers \(full_attention\)",
        ),
        ({"model_type": "doge", "keep_window_size": 63}, "doge.*keep_window_size.* must be at least 64, not 63"),
        ({"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "conv"]}, "lfm2.*all of its layers"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "BertModel.*an encoder"),
        ({"model_type": "llama4", "text_config": {}}, "llama4.*by what it believes its cache holds"),
        ({"model_type": "llama4_text", "no_rope_layers": [0] * 48}, "llama4_text.*by what it believes its cache holds"),
        ({"model_type": "longcat_flash"}, "longcat_flash.*experts has some that compute nothing"),
        ({"model_type": "xlm"}, "xlm.*masks of its own"),
        ({"model_type": "gpt_neo"}, "gpt_neo.*local attention depends on the cache's capacity"),
        ({"model_type": "falcon", "alibi": True}, r"falcon.*counts positions \(ALiBi\) by a mask of padding"),
    ],
)
def test_an_architecture_that_cannot_be_exported_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    assert refuse_config(tmp_path, **config).match(reason)


@pytest.mark.parametrize(
    "name", ["BertConfig", "GPTNeoXConfig", "Gemma3TextConfig", "DogeConfig", "Lfm2Config", "FalconConfig"]
)
def test_those_beside_them_are_not(name: str) -> None:
    """Of the same classes, or with the same settings otherwise."""
    config = getattr(transformers, name)()
    config.is_decoder = name == "BertConfig"
    assert refusal(config) is None


def test_a_context_ends_where_tokens_would_be_dropped() -> None:
    config = transformers.DogeConfig(max_position_embeddings=512, keep_window_size=100)
    assert context_length(config) == 100 and context_length(config, 80) == 80
    with pytest.raises(UsageError, match="between 2 and 100 for doge, not 101"):
        context_length(config, 101)
    assert context_length(transformers.DogeConfig(max_position_embeddings=512)) == 512
    assert context_length(transformers.WhisperConfig()) == 448, "its decoder's table of positions"
    assert context_length(transformers.LlamaConfig(max_position_embeddings=10**12)) == 2**31 - 1
    for none, config in ((1, transformers.LlamaConfig(max_position_embeddings=1)), (-1, transformers.XLNetConfig())):
        reason = rf"max_position_embeddings in its config\.json, .*, must be 2 or more, not {none}$"
        with pytest.raises(ExportError, match=f"{config.model_type} cannot be exported: {reason}"):
            context_length(config)


def test_a_context_reaches_as_far_as_yarn_stretches_positions() -> None:
    """Qwen's authors have their users add yarn to a config.json and leave what it says of positions as it was."""

    def context(most: int, **rope: Any) -> int:
        rope |= {"rope_type": "yarn", "rope_theta": 1e4}
        return context_length(transformers.Qwen2Config(max_position_embeddings=most, rope_parameters=rope))

    assert context(32768, factor=4.0, original_max_position_embeddings=32768) == 131072
    assert context(40960, factor=4.0, original_max_position_embeddings=32768) == 131072
    assert context(262144, factor=4.0, original_max_position_embeddings=32768) == 262144
    assert context(32768, factor=4.0) == 131072, "transformers takes one for the other, too"
    assert context(32768, factor="4", original_max_position_embeddings=32768) == 32768
    assert context(32768, factor=None, original_max_position_embeddings=4096) == 32768
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}
        | {"original_max_position_embeddings": 1024},
    }
    assert context_length(transformers.Gemma3TextConfig(max_position_embeddings=1024, rope_parameters=ropes)) == 8192


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anybody asked whether it may be."""
    ran = tmp_path / "ran"
    source = tmp_path / "source"
    source.mkdir()
    (source / "own.py").write_text(f"open({str(ran)!r}, 'w')")
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (source / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": own}))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with pytest.raises(ExportError, match=r"code of its own .auto_map in config\.json., which is not run"):
        export_pair(source, None, tmp_path / "out")
    assert not ran.exists()


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (None, None),
        (errors.RepositoryNotFoundError, "no repository on the hub that can be read from here"),
        (errors.GatedRepoError, None),
        (errors.RemoteEntryNotFoundError, None),
        (ConnectionError("no network\nat all"), r"the hub could not be asked .no network.$"),
        (errors.OfflineModeIsEnabled("HF_HUB_OFFLINE is set"), r"could not be asked .HF_HUB_OFFLINE is set"),
    ],
)
def test_a_name_that_no_directory_has_is_asked_about_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, fault: str | None
) -> None:
    asked: list[str] = []

    def ask(url: str) -> None:
        asked.append(url)
        if isinstance(answer, type):
            raise answer("what the hub says", response=SimpleNamespace(headers={}, request=None))
        if answer is not None:
            raise answer

    monkeypatch.setattr(hub, "get_hf_file_metadata", ask)
    if fault is None:
        assert require_there("owner/name") == "owner/name", "who reads it says more"
    else:
        for call in (lambda: require_there("owner/name"), lambda: export_pair("owner/name", None, tmp_path / "out")):
            with pytest.raises(ExportError, match=rf"^no checkpoint 'owner/name': there is no directory .* {fault}"):
                call()
    assert len(asked) == (1 if fault is None else 2) and asked[0].endswith("/owner/name/resolve/main/config.json")
    with pytest.raises(ExportError, match=r"no checkpoint 'an id': no such directory .nor is it a hub id"):
        require_there("an id")
    with pytest.raises(ExportError, match=r"no checkpoint '': no such directory"):
        require_there("")  # as a shell gives a variable that is not set


def test_what_the_hub_s_library_logs_is_not_printed_in_between() -> None:
    before = hub_logging.get_verbosity()
    with quiet():
        assert hub_logging.get_verbosity() == logging.ERROR
    assert hub_logging.get_verbosity() == before


def test_sources_that_are_not_checkpoints(tmp_path: Path) -> None:
    for name, there, hint in (
        ("empty", "", r"missing$"),
        ("adapter", "adapter_config.json", "an adapter .LoRA.: merge it"),
        ("gguf", "model.Q4_0.gguf", "GGUF files are not read"),
        ("graphs", "model.onnx", "leadout export --from-onnx [^ ]*graphs "),
        ("bundle", "leadout.json", "a bundle already"),
    ):  # who publishes an adapter may leave its model's config.json beside it
        (tmp_path / name).mkdir()
        if there:
            (tmp_path / name / there).touch()
        with pytest.raises(ExportError, match=rf"config\.json is missing.*{hint}" if there else hint):
            export_pair(tmp_path / name, None, tmp_path / "out")
    (tmp_path / "graphs" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ExportError, match=r"its weights are missing; ONNX graphs are taken with"):
        export_pair(tmp_path / "graphs", None, tmp_path / "out")
    (tmp_path / "adapter" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "adapter" / "adapter_model.safetensors").touch()
    with pytest.raises(ExportError, match=r"its weights are missing; it is an adapter .LoRA.: merge it"):
        export_pair(tmp_path / "adapter", None, tmp_path / "out")
    (tmp_path / "adapter" / "model.safetensors").touch()
    with pytest.raises(ExportError, match=r"adapter' has an adapter .LoRA. beside its weights: merge it into them"):
        export_pair(tmp_path / "adapter", None, tmp_path / "out")
    for path in (tmp_path / "nowhere", "./nowhere", "~/nowhere", "no/such/model"):
        with pytest.raises(ExportError, match=f"no checkpoint '{path}': no such directory"):
            export_pair(path, None, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "adapter", "gguf", "graphs", "bundle"}


@pytest.mark.parametrize(
    ("saved", "without", "config", "fault"),
    [
        ({"tie_word_embeddings": False}, "lm_head.weight", {}, r"its files lack lm_head\.weight$"),
        ({}, "model.layers.0.mlp.down_proj.weight", {}, r"its files lack model\.layers\.0\.mlp\.down_proj\.weight$"),
        ({}, None, {"num_hidden_layers": 2}, r"lack model\.layers\.1\.input_layernorm\.weight and 8 more tensors$"),
        ({"num_hidden_layers": 3}, None, {"num_hidden_layers": 1}, r"more layers .*: model\.layers\.1\..* and 17 more"),
        ({}, None, {"vocab_size": 500}, r"embed_tokens\.weight is \[512, 64\], by its config\.json \[500, 64\]$"),
        ({}, None, {"intermediate_size": 96}, r"down_proj\.weight is .* \(and 2 more\)$"),
        ({"attention_bias": True}, None, {"attention_bias": False}, r"out: model\.layers\.0.*k_proj\.bias and 3 more"),
    ],
)
def test_weights_that_are_not_those_of_the_configuration(
    save: Save, saved: dict[str, Any], without: str | None, config: dict[str, Any], fault: str
) -> None:
    source = save(**saved)
    rewrite(source, lambda weights: weights.pop(without, None))
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(ExportError, match=fault) as caught:
        load(source)
    assert "\n" not in str(caught.value)


def test_tensors_that_a_model_does_not_need_do_no_harm(save: Save) -> None:
    """Buffers of older versions, another head, a tower of layers that is no part of the model."""
    for kind in ({}, {"kind": "GPTNeoXConfig"}):
        source = save(**kind)
        prefix = next(name for name in load(source).model.state_dict() if ".0." in name).split("0.")[0]
        noted = f"{prefix}0.input_layernorm._extra_state"
        names = (f"{prefix}0.attn.masked_bias", "score.weight", noted, "norm.weight")
        names += ("tower.layers.7.weight", "mtp.layers.0.weight", "tower.layers.0.mlp.up_proj.bias")
        rewrite(source, lambda weights, names=names: weights.update({name: torch.zeros(1) for name in names}))
        assert load(source).vocab_size == 512
        scale = "embed_in.weight_scale" if kind else f"{prefix}0.mlp.up_proj.weight_scale_inv"
        rewrite(source, lambda weights, scale=scale: weights.update({scale: torch.ones(1)}))
        with pytest.raises(ExportError, match=rf"its config\.json leaves out: {scale}$"):
            load(source)
        rewrite(source, lambda weights, scale=scale: weights.pop(scale))
        rewrite(source, lambda weights, prefix=prefix: weights.update({f"{prefix}1.attn.bias": torch.zeros(1)}))
        with pytest.raises(ExportError, match=rf"more layers than its config.json counts: {prefix}1\.attn\.bias$"):
            load(source)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_in_float8_are_the_numbers_that_transformers_takes_them_for(save: Save, kind: torch.dtype) -> None:
    """Without a scale they are numbers like any other; with one, of which config.json says nothing, they are not."""
    source, tokens = save(), torch.arange(9)[None]
    rewrite(source, lambda weights: weights.update({n: w.to(kind) for n, w in weights.items() if w.dim() > 1}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(load(source).model(tokens).logits, theirs(tokens).logits)
    scale = "model.layers.0.mlp.up_proj.weight_scale"
    rewrite(source, lambda weights: weights.update({scale: torch.ones(1)}))
    with pytest.raises(ExportError, match=rf"its config\.json leaves out: {scale}$"):
        load(source)


def test_a_vocabulary_of_two_tokens_is_one(save: Save, tmp_path: Path) -> None:
    source = save(vocab_size=2, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    letters = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    letters.pre_tokenizer = Whitespace()
    letters.save(str(source / "tokenizer.json"))
    bundle = export_pair(source, "self:int8", tmp_path / "bundle")
    with leadout.load(bundle) as pair:
        alone, drafted = (
            pair.generate("a b a", seed=1, temperature=20.0, max_new_tokens=30, draft=draft)
            for draft in ("none", "model")
        )
    assert alone.token_ids == drafted.token_ids and set(alone.token_ids) == {0, 1} and drafted.stats.drafted


@pytest.mark.parametrize(
    ("name", "further"),
    [
        ("model.layers.1.mlp.experts.7.weight", False),
        ("model.layers.2.eh_proj.weight", False),
        ("model.layers.3.mlp.experts.0.weight", True),
        ("layers.3.mlp.weight", True),  # saved without its head
        ("vision.layers.3.mlp.weight", False),
        ("model.rotary.inv_freq", False),
    ],
)
def test_layers_that_predict_ahead_are_counted_apart(name: str, further: bool) -> None:
    own = [f"model.layers.{layer}.mlp.experts.{expert}.weight" for layer in range(2) for expert in range(8)]
    config = transformers.DeepseekV3Config(num_nextn_predict_layers=1)
    assert _is_further_layer(name, own, config) == further


def rewrite(source: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    weights = load_file(source / "model.safetensors")
    change(weights)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})


def test_the_index_of_an_older_save_is_not_read(save: Save) -> None:
    """transformers reads the file that is whole; what the parts beside it are in says nothing of it."""
    source = save(hidden_size=1024, num_attention_heads=16)
    stale = {"model.embed_tokens.weight": torch.zeros(512, 1024, dtype=torch.bfloat16)}
    save_file(stale, source / "part.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(stale, "part.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    table = load(source).model.get_input_embeddings().weight
    assert torch.equal(table, load_file(source / "model.safetensors")["model.embed_tokens.weight"])


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-5000], lambda data: data[:5], lambda data: b"", lambda _: POINTER]
)
def test_weights_that_did_not_arrive_whole(save: Save, damage: Callable[[bytes], bytes]) -> None:
    source = save()
    path = source / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ExportError, match=r"incomplete or a git-lfs pointer \(.*\); download them again") as caught:
        load(source)
    assert str(source) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:5000], lambda data: data[:-10], lambda data: b"", lambda _: POINTER]
)
def test_pickled_weights_that_did_not_arrive_whole(save: Save, damage: Callable[[bytes], bytes]) -> None:
    """torch's own advice is to run them."""
    source = save()
    torch.save(load_file(source / "model.safetensors"), path := source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    path.write_bytes(damage(path.read_bytes()))
    reason = r"pytorch_model\.bin is incomplete, a git-lfs pointer or more than tensors; download it again$"
    with pytest.raises(ExportError, match=rf"cannot be loaded: {reason}"):
        load(source)


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", "{", '{"weight_map": 1}', '{"weight_map": {"a": 1}}', pytest.param("[" * 100_000, id="deep")],
)
def test_an_index_of_weights_that_is_none(save: Save, tmp_path: Path, text: str) -> None:
    source = save()
    (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
    (source / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ExportError, match=r"cannot be loaded: model\.safetensors\.index\.json is no index: it must"):
        export_pair(source, None, tmp_path / "out")


@pytest.mark.parametrize("ends", [[[0]], "0", [0.0], [None], True])
def test_ends_of_text_that_are_no_ids_are_named(save: Save, ends: Any) -> None:
    source = save()
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(ExportError, match=r"generation_config\.json: eos_token_id must be a token id or a list"):
        load(source)


def test_a_configuration_need_name_no_ends(save: Save) -> None:
    """CPM-Ant's has neither beginning nor end."""
    source = save("CpmAntConfig", dim_head=16, dim_ff=64, prompt_length=2, prompt_types=2, segment_types=2)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({k: v for k, v in config.items() if not k.endswith("os_token_id")}))
    (source / "generation_config.json").unlink(missing_ok=True)
    found = load(source)
    assert found.bos_token_id is None and found.eos_token_ids == ()


@pytest.mark.parametrize(("bos", "found"), [(0, 0), (511, 511), (512, None), (50256, None), (-1, None), (None, None)])
def test_a_beginning_of_text_that_is_no_token_is_none(save: Save, bos: int | None, found: int | None) -> None:
    assert load(save(bos_token_id=bos)).bos_token_id == found


def test_no_weight_of_a_bundle_is_not_finite(save: Save, tmp_path: Path) -> None:
    source = save()
    rewrite(source, lambda weights: weights["model.embed_tokens.weight"][77].fill_(torch.nan))
    with pytest.raises(ExportError, match=r"model\.embed_tokens\.weight has NaN or infinity among its numbers$"):
        export_pair(source, None, tmp_path / "out")


def test_options_outside_their_range(save: Save, tmp_path: Path) -> None:
    source = save()
    with pytest.raises(UsageError, match=r"int3.*fp32, fp16, int8, int4, int4-128"):
        export_pair(source, None, tmp_path / "out", precision="int3")
    with pytest.raises(UsageError, match="int3"):
        export_pair(source, source, tmp_path / "out", draft_precision="int3")
    with pytest.raises(UsageError, match=r"between 2 and 128.*not 129"):
        export_pair(source, None, tmp_path / "out", max_context=129)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_no_bundle_is_left_alone(save: Save, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ExportError, match="not a bundle"):
        export_pair(save(), None, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_checkpoint_needs_a_tokenizer(save: Save, tmp_path: Path) -> None:
    source = save()
    (source / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match=r"no tokenizer\.json"):
        export_pair(source, None, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_draft_of_another_vocabulary(save: Save, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"400 logits, too few for the vocabulary of its tokenizer: token .* is 400;"):
        export_pair(save(), save(vocab_size=400), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("moment", ["reading", "capture"])
def test_an_interrupted_export_leaves_what_was_there(save: Save, tmp_path: Path, moment: str) -> None:
    def interrupt(message: str) -> None:
        if moment in message:
            assert any(path.name.endswith(".partial") for path in tmp_path.iterdir())
            raise KeyboardInterrupt

    out = tmp_path / "out"
    for old in (False, True):
        if old:
            out.mkdir()
            (out / "leadout.json").write_text("an older bundle")
        with pytest.raises(KeyboardInterrupt):
            export_pair(save(), None, out, progress=interrupt)
        assert [path.name for path in tmp_path.rglob("*")] == (["out", "leadout.json"] if old else [])


def test_captures_are_shared_by_equal_models_wherever_they_lie(save: Save) -> None:
    """Or the tests would capture the same model again for every copy of its checkpoint."""
    one, copy, other = (load(save(vocab_size=512, **changes)).model for changes in ({}, {}, {"initializer_range": 0.1}))
    assert one.config.name_or_path != copy.config.name_or_path
    assert said_of(one) == said_of(copy) and said_of(one, copy) == said_of(copy, one)
    assert len({said_of(one), said_of(other), said_of(one, one)}) == 3


@pytest.mark.usefixtures("capture_once")
def test_a_graph_that_is_not_the_model_is_never_written(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(graph: ir.Model, max_context: int) -> None:
        weight = next(v for k, v in graph.graph.initializers.items() if k.endswith("o_proj.weight"))
        weight.const_value = ir.tensor(weight.const_value.numpy() * 1.01)

    monkeypatch.setattr(canonical, "simplify", damage)
    with pytest.raises(ExportError, match="LlamaForCausalLM, simplify: logits differ from transformers by"):
        export_pair(save(), None, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("capture_once")
def test_a_full_disk_is_told_with_what_an_export_takes(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(reason: int) -> Callable[..., None]:
        def write(*_: Any, **__: Any) -> None:
            raise OSError(reason, os.strerror(reason))

        return write

    source = save()
    monkeypatch.setattr(ir, "save", fails(errno.ENOSPC))
    with pytest.raises(ExportError, match=r"^cannot write beside '.*out': No space left .*; an export takes 8 bytes a"):
        export_pair(source, None, tmp_path / "out")
    monkeypatch.setattr(ir, "save", fails(errno.EIO))
    with pytest.raises(OSError, match="error"):
        export_pair(source, None, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def held_bytes() -> int:
    """What tensors that were made since ``gc.freeze`` hold in memory, torch's and graphs'."""
    kinds = (torch.Tensor, torch.nn.Parameter, ir.Tensor)
    found = [o for o in gc.get_objects() if type(o) in kinds]  # its own idea of its class may import half of torch
    storages = [o.untyped_storage() for o in found if type(o) is not ir.Tensor]
    torch_s = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return torch_s + sum(o.nbytes for o in found if type(o) is ir.Tensor)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_nobody_holds_the_weights_while_a_graph_is_checked(
    precision: str, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def watched(*args: Any, **kwargs: Any) -> float:
        held.append(held_bytes())
        return check(*args, **kwargs)

    held, check, checkpoint = list[int](), canonical.check_graph, save(tie_word_embeddings=False)
    weights = (checkpoint / "model.safetensors").stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(canonical, "check_graph", watched)
        patch.setattr(build, "check_graph", watched)
        gc.collect()
        gc.freeze()  # a million objects of other tests, which would take most of the time
        gc.disable()
        try:
            export_pair(checkpoint, None, tmp_path / "out", precision=precision)
        finally:
            gc.enable()
            gc.unfreeze()
    assert len(held) == (12 if precision == "fp32" else 13) and max(held) < weights / 5


@pytest.mark.usefixtures("capture_once")
def test_graphs_that_nobody_will_run_are_checked_with_their_weights_in_the_file(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that will be run are opened as they will be."""

    def opened(path: Path, **how: Any) -> Any:
        session = open_session(path, **how)
        options, found = session.get_session_options(), list[str]()
        for key in ("session.disable_prepacking", "optimization.constant_folding_max_output_size_in_bytes"):
            with contextlib.suppress(RuntimeError):  # it has no such entry
                found.append(options.get_session_config_entry(key))
        assert found in ([], ["1", str(1 << 20)])
        lean[path.name] = bool(found)
        return session

    lean, open_session = dict[str, bool](), sessions.open_session
    monkeypatch.setattr(sessions, "open_session", opened)
    bundle = export_pair(save(), None, tmp_path / "out", precision="int8")
    scratch = {"capture.onnx", "simplify.onnx", "pack.onnx"}
    assert {name for name, is_lean in lean.items() if is_lean} == scratch
    assert {*lean} - scratch == {path.name for path in (bundle / "target").glob("*.onnx")}


def test_a_target_that_drafts_for_itself_is_captured_once(save: Save, tmp_path: Path) -> None:
    said = list[str]()
    bundle = export_pair(save(), "self:int8", tmp_path / "out", progress=said.append)
    assert sum(line.endswith(": capture") for line in said) == sum("reading" in line for line in said) == 1
    target, draft = (Bundle.read(bundle).manifest.models[role] for role in ("target", "draft"))
    assert set(draft.parity) - set(target.parity) == {"int8"}
    assert not list(bundle.rglob("*scratch*")) and not list(bundle.rglob("capture*"))


def test_the_bundle_says_what_the_checkpoints_said(mixed: Path) -> None:
    bundle = Bundle.read(mixed)
    target, draft = (bundle.manifest.models[role] for role in ("target", "draft"))
    assert bundle.manifest.sampling == {"temperature": 0.6, "top_p": 0.9}
    assert target.eos_token_ids == (0, 3) and draft.eos_token_ids == (0,)
    assert (target.precision, draft.precision, target.dtype) == ("int8", "int4", "float32")
    assert target.max_context == draft.max_context == 96
    assert (target.vocab_size, draft.vocab_size) == (512, 560)
    assert "560" in draft.note and not target.note
    variants = {"gqa", "gqa_even", "grouped", "nonpad", "tree", "tree_gqa", *RAGGED}
    assert set(target.parity) == {"capture", "simplify", "pack", "int8"} | variants
    assert max(target.parity[step] for step in ("capture", "simplify", "pack")) <= 1e-4 < target.parity["int8"]
    assert {"tokenizer.json", "generation_config.json"} <= set(bundle.manifest.files)
    assert not (mixed / "stale").exists()
    assert str(mixed.parent) not in (mixed / "leadout.json").read_text()


def test_variants_share_one_blob_and_nothing_else_is_left(tiny_bundle: Path) -> None:
    for role in ("target", "draft"):
        entry, folder = Bundle.read(tiny_bundle).manifest.models[role], tiny_bundle / role
        graphs = {file.file for file in entry.variants.values()}
        assert len(graphs) == (10 if role == "target" else 7), "ragged rows are a target's"
        assert {path.name for path in folder.iterdir()} == graphs | {"model.onnx.data", "golden.npz"}
        for name in graphs:
            assert (folder / name).stat().st_size < 50_000
            stored = [v.const_value for v in ir.load(folder / name).graph.initializers.values()]
            assert {str(t.location) for t in stored if isinstance(t, ir.ExternalTensor)} == {"model.onnx.data"}


def blob_bytes(bundle: Path, role: str) -> int:
    return (bundle / role / "model.onnx.data").stat().st_size


@pytest.mark.usefixtures("capture_once")
def test_tied_embeddings_are_stored_once(mixed: Path, save: Save, tmp_path: Path) -> None:
    half = export_pair(save(), None, tmp_path / "half", precision="fp16")
    parameters = Bundle.read(half).manifest.models["target"].parameters
    table = 512 * 64  # a second copy of it would be as much again as all that is allowed below
    assert Bundle.read(half).manifest.models["target"].dtype == "float16"
    assert 2 * parameters <= blob_bytes(half, "target") < 2 * parameters + 2 * table
    assert parameters <= blob_bytes(mixed, "target") < 1.1 * parameters + table
    assert parameters / 2 <= blob_bytes(mixed, "draft") < 1.1 * (parameters + 48 * 64) * 5 / 8 + table / 2


def test_golden_rows_are_what_transformers_says(tiny_bundle: Path, tiny_pair: tuple[Path, Path]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_pair[0], attn_implementation="eager")
    golden = np.load(tiny_bundle / "target" / "golden.npz", allow_pickle=False)
    tokens, lengths, ids, logits = (golden[name] for name in ("tokens", "lengths", "ids", "logits"))
    assert tokens.dtype == lengths.dtype == np.int64 and ids.dtype == np.int32 and logits.dtype == np.float32
    assert ids.shape == logits.shape == (*tokens.shape, 64) and lengths.tolist() == [tokens.shape[1]] * len(tokens)
    with torch.no_grad():
        whole = model(input_ids=torch.tensor(tokens), use_cache=False).logits.numpy()
    assert np.abs(np.sort(whole, -1)[..., ::-1][..., :64] - logits).max() < 1e-5
    assert np.abs(np.take_along_axis(whole, ids.astype(np.int64), -1) - logits).max() < 1e-5
    assert len({tuple(row) for row in tokens.tolist()}) == len(tokens)


def test_padding_of_the_draft_s_vocabulary_is_never_drafted(mixed: Path) -> None:
    with np.load(mixed / "draft" / "vocabulary.npz") as stored:
        assert stored.files == ["outputs"] and stored["outputs"].tolist() == [*range(512), *[-1] * 48]


def test_sampling_without_a_temperature_is_at_temperature_1():
    assert _sampling(GenerationConfig(do_sample=True, top_k=20)) == {"temperature": 1.0, "top_k": 20.0}
    assert _sampling(GenerationConfig(do_sample=True, temperature=0.6))["temperature"] == 0.6
    assert _sampling(GenerationConfig()) == {}


@pytest.mark.slow
@pytest.mark.usefixtures("capture_once")
def test_a_draft_takes_the_fewest_bytes_that_keep_it_close(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    said: list[str] = []
    bundle = Bundle.read(export_pair(*tiny_pair, tmp_path / "tiny", progress=said.append))
    assert "draft: int4 is too far from the checkpoint; trying fp32" in said
    assert [bundle.manifest.models[role].precision for role in ("target", "draft")] == ["fp32", "fp32"]
    with pytest.raises(ExportError, match="take a higher precision"):
        export_pair(*tiny_pair, tmp_path / "asked", draft_precision="int4")
    assert not (tmp_path / "asked").exists()


def test_graphs_hold_nothing_that_no_node_reads(tiny_bundle: Path) -> None:
    graphs = [*tiny_bundle.glob("*/*.onnx")]
    assert len(graphs) >= 10
    for path in graphs:
        assert [name for name, value in ir.load(path).graph.initializers.items() if not value.uses()] == [], path.name


@pytest.mark.parametrize("before", [logging.NOTSET, logging.CRITICAL])
def test_what_a_program_logs_is_its_own_affair_again_after_an_export(
    before: int, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.disable(before)
    try:
        with decoder_graph._quiet():
            assert logging.root.manager.disable == max(before, logging.WARNING)
            print("def forward(self, arg0_1): ...", file=sys.stderr)
        assert logging.root.manager.disable == before
        assert capsys.readouterr().err == "", "graphs that torch gave up are printed"
    finally:
        logging.disable(logging.NOTSET)
