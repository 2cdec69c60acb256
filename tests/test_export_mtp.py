"""A model's own layers for multi-token prediction, from its checkpoint to drafts and answers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file
from support_features import proposals
from support_mtp import KINDS, VOCAB, published
from test_export_drafts import PROMPTS, answers_are_the_target_s, draft_of
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.modeling_layers import MtpModel

import leadout
from leadout.bundle import Bundle
from leadout.errors import ExportError, UsageError
from leadout.export import build
from leadout.export.build import export_pair
from leadout.export.checkpoints.checkpoint import load, read_config
from leadout.export.drafts.choice import choose_draft
from leadout.export.drafts.mtp import has_own_layers, own_layers
from leadout.runtime.drafters.feature_drafter import FeatureDrafter
from leadout.scripts.cli import main

pytestmark = pytest.mark.usefixtures("captures_once")

GREEDY: dict[str, Any] = {"draft": "model", "draft_length": 3, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module", params=["mellum", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def made(
    request: pytest.FixtureRequest, tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A checkpoint with such a layer and its bundle, in fp32."""
    folder = tmp_path_factory.mktemp("mtp")
    checkpoint = published(folder / "checkpoint", request.param, tokenizer_file)
    return checkpoint, export_pair(checkpoint, "mtp", folder / "bundle", draft_precision="fp32")


@pytest.fixture(scope="module")
def qwen(tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a small Qwen 3.5. Read-only: copy it to change it."""
    return published(tmp_path_factory.mktemp("qwen") / "checkpoint", "qwen3_5", tokenizer_file)


def head_of(checkpoint: Path) -> Any:
    """The head as Leadout makes it."""
    model = load(checkpoint)
    return own_layers(str(checkpoint), model.model.config).checkpoint(model.model, 64).model


def by_transformers(checkpoint: Path) -> tuple[Any, Any]:
    """The model and its layers for multi-token prediction, as transformers reads them."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    found = own_layers(str(checkpoint), model.config)
    model.config.num_mtp_layers = found.count
    if getattr(model.config, "layer_types", None) and not getattr(model.config, "mtp_layer_types", None):
        model.config.mtp_layer_types = ["full_attention"] * found.count
    model._keys_to_ignore_on_load_unexpected = found.patterns
    return model, MtpModel.from_pretrained(model).eval()


@torch.no_grad()
def drafted(model: Any, own: Any, text: list[int], count: int) -> list[int]:
    """What the first layer drafts greedily after ``text``, all of it read anew for each token."""
    hidden = model(input_ids=torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states[-1]
    features, tokens = hidden[:, :-1], text[1:]
    for _ in range(count):
        places = torch.arange(1, len(tokens) + 1)[None]
        said = own.forward_layer(0, features, places, None, input_ids=torch.tensor([tokens]))
        tokens = [*tokens, int(own._project_to_logits(said)[0, -1].argmax())]
        features = torch.cat([features, said[:, -1:]], 1)
    return tokens[len(text) - 1 :]


def test_it_drafts_what_transformers_says(made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = proposals(FeatureDrafter, monkeypatch)
    with leadout.load(made[1]) as pair:
        pair.generate(PROMPTS[0], **GREEDY)
        pair.generate(PROMPTS, **GREEDY | {"max_new_tokens": 5, "draft_length": 2})
    assert len(seen) > 8
    model, own = by_transformers(made[0])
    for text, tokens in seen:
        assert tokens == drafted(model, own, text, len(tokens))


def test_it_reads_what_the_model_s_own_head_reads(made: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every token of a text, whatever was accepted and taken back on the way, hybrids' states among it."""
    read, given = list[tuple[int, Any]](), FeatureDrafter._of

    def watched(self: Any, place: int, start: int, count: int) -> Any:
        found = given(self, place, start, count)
        if start < self._base[place]:
            read.append((start, found.copy()))
        return found

    monkeypatch.setattr(FeatureDrafter, "_of", watched)
    asked: dict[str, Any] = {"rule": "rejection", "temperature": 1.0, "seed": 5, "draft": "model", "draft_length": 3}
    with leadout.load(made[1]) as pair:
        result = pair.generate("def f(x):\n    return", max_new_tokens=40, ignore_eos=True, **asked)
        text = [*pair.token_ids("def f(x):\n    return"), *result.token_ids]
    assert result.stats.accepted > 3 and len(read) > 10
    model, _ = by_transformers(made[0])
    with torch.no_grad():
        hidden = model(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states[-1][0].numpy()
    for start, found in read:
        assert np.allclose(found, hidden[start : start + len(found)], atol=2e-4)


def test_answers_are_the_target_s(made: tuple[Path, Path]) -> None:
    answers_are_the_target_s(made[1])


def test_its_bundle_stands_every_check(made: tuple[Path, Path]) -> None:
    result = CliRunner().invoke(main, ["check", str(made[1])])
    assert result.exit_code == 0, result.output
    draft = draft_of(made[1])
    assert draft.reads_features and draft.features == 64 and "reads 64 features" in draft.note
    assert "the target's own layer for multi-token prediction" in draft.note
    assert draft.recurrence is None and len(draft.cache) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_is_read(kind: str, tokenizer_file: Path, tmp_path: Path) -> None:
    checkpoint = published(tmp_path / kind, kind, tokenizer_file)
    model, own = by_transformers(checkpoint)
    head = head_of(checkpoint)
    assert not head.state_dict().keys() ^ {f"own.{name}" for name in own.state_dict()}
    told, tokens = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(3)), torch.arange(9)[None] * 7
    with torch.no_grad():
        said = own.forward_layer(0, told, torch.arange(9)[None], None, input_ids=tokens)
        found = head(tokens, told)
    assert torch.equal(found.hidden_states, said) and torch.equal(found.logits, model.lm_head(said))


def test_a_checkpoint_that_sees_keeps_them_beside_its_text_model(qwen: Path, tmp_path: Path) -> None:
    """As Qwen 3.5 is published: what it writes text with is a part of it, its tower is left out."""
    name = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": 0}
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config=KINDS["qwen3_5"][1] | name, vision_config=tower | {"patch_size": 4})
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path / "seeing")
    tensors, text = load_file(tmp_path / "seeing" / "model.safetensors"), load_file(qwen / "model.safetensors")
    for key, value in text.items():
        tensors[re.sub("^model[.]", "model.language_model.", key)] = value
    save_file(tensors, tmp_path / "seeing" / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((tmp_path / "seeing" / "config.json").read_text())
    said["text_config"]["mtp_num_hidden_layers"] = 1
    (tmp_path / "seeing" / "config.json").write_text(json.dumps(said))
    seeing, plain = head_of(tmp_path / "seeing"), head_of(qwen)
    assert seeing.config.taps == plain.config.taps == [3]
    for mine, other in zip(seeing.state_dict().items(), plain.state_dict().items(), strict=True):
        assert mine[0] == other[0] and torch.equal(mine[1], other[1])


def test_of_several_layers_the_first_drafts(tokenizer_file: Path, tmp_path: Path) -> None:
    checkpoint = published(tmp_path / "checkpoint", "glm4_moe", tokenizer_file, count=2)
    assert own_layers(str(checkpoint), read_config(checkpoint)).count == 2
    bundle = export_pair(checkpoint, "mtp:fp32", tmp_path / "bundle")
    assert len(draft_of(bundle).cache) == 1
    _, own = by_transformers(checkpoint)
    with leadout.load(bundle) as pair:
        assert pair.generate(PROMPTS[0], **GREEDY).stats.drafted
    golden = np.load(bundle / "draft" / "golden.npz")
    with torch.no_grad():
        told = torch.from_numpy(golden["beside"][:1])
        tokens = torch.from_numpy(golden["tokens"][:1])
        said = own.forward_layer(0, told, torch.arange(tokens.shape[1])[None], None, input_ids=tokens)
        assert np.allclose(own._project_to_logits(said)[0].amax(-1), golden["logits"][0, :, 0], atol=1e-5)


def test_in_fewer_bits_and_trimmed(tokenizer_file: Path, tmp_path: Path, root: Path) -> None:
    """From a checkpoint in bfloat16, as such models are published."""
    narrow = published(tmp_path / "narrow", "mellum", tokenizer_file)
    tensors = {key: value.bfloat16() for key, value in load_file(narrow / "model.safetensors").items()}
    save_file(tensors, narrow / "model.safetensors", metadata={"format": "pt"})
    arguments = ["export", narrow, "--draft", "mtp", "--precision", "int8", "-o", tmp_path / "bundle"]
    arguments += ["--draft-vocabulary", 200, "--calibration", root / "bundle.py"]
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    manifest = Bundle.read(tmp_path / "bundle").manifest
    assert (manifest.models["draft"].vocab_size, manifest.models["draft"].precision) == (200, "int4")
    assert manifest.provenance["target"] == manifest.provenance["draft"] == "narrow"
    answers_are_the_target_s(tmp_path / "bundle")


def test_the_head_s_tables_outlive_the_model(qwen: Path) -> None:
    """The model lets go of its weights before its head is captured."""
    checkpoint = load(qwen)
    head = own_layers(str(qwen), checkpoint.model.config).checkpoint(checkpoint.model, 64).model
    before = [table.weight.detach().clone() for table in (head.get_input_embeddings(), head.get_output_embeddings())]
    checkpoint.release()
    for table, kept in zip((head.get_input_embeddings(), head.get_output_embeddings()), before, strict=True):
        assert torch.equal(table.weight, kept)


def test_a_model_without_them_is_refused(tiny_pair: tuple[Path, Path], qwen: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"has no layers for multi-token prediction among its weights: draft 'mtp'"):
        export_pair(tiny_pair[0], "mtp", tmp_path / "bundle")
    torn = shutil.copytree(qwen, tmp_path / "torn")
    tensors = load_file(torn / "model.safetensors")
    del tensors["mtp.fc.weight"]
    save_file(tensors, torn / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match=r"its layers for multi-token prediction: .*eh_proj"):
        export_pair(torn, "mtp", tmp_path / "bundle")
    with pytest.raises(UsageError, match=r"mask-token: the draft .* is a head, which knows how it is asked"):
        export_pair(qwen, "mtp", tmp_path / "bundle", mask_token=3)
    assert not (tmp_path / "bundle").exists()


def test_an_export_without_a_draft_tells_of_them(
    qwen: Path, tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise ExportError("far enough")

    monkeypatch.setattr(build, "load", stop)
    for checkpoint, has in ((qwen, True), (tiny_pair[0], False)):
        told = list[str]()
        with pytest.raises(ExportError, match="far enough"):
            export_pair(checkpoint, None, tmp_path / "bundle", progress=told.append)
        assert any("--draft mtp" in line for line in told) == has
    pointer = shutil.copytree(qwen, tmp_path / "pointer")
    (pointer / "model.safetensors").write_bytes(b"version https://git-lfs")
    assert not has_own_layers(str(pointer), read_config(pointer))


@pytest.mark.parametrize(
    "name, has",
    [
        ("model.layers.2.eh_proj.weight", True),
        ("language_model.model.layers.3.mlp.up_proj.weight", True),
        ("mtp.fc.weight", True),
        ("model.mtp_layers.0.enorm.weight", True),
        ("model.layers.1.mlp.up_proj.weight", False),
        ("vision_tower.encoder.layers.9.mlp.up_proj.weight", False),
        ("model.visual.mtp.weight", False),
    ],
)
def test_layers_of_a_tower_are_none(name: str, has: bool, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(1), name: torch.ones(1)}, tmp_path / "model.safetensors")
    assert has_own_layers(str(tmp_path), read_config(tiny_pair[0])) == has


def test_how_it_is_asked_for() -> None:
    choice = choose_draft("target", "mtp", "int8", None)
    assert choice is not None and (choice.made, choice.source, choice.precisions) == ("mtp", "target", ("int4", "int8"))
    choice = choose_draft("target", "mtp:fp32", "int8", None)
    assert choice is not None and choice.precisions == ("fp32",)
    assert choose_draft("target", "mtp", "int8", "int8").precisions == ("int8",)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="already says its precision"):
        choose_draft("target", "mtp:fp32", "int8", "int4")
    with pytest.raises(UsageError, match="precision 'int2' is unknown"):
        choose_draft("target", "mtp:int2", "int8", None)
