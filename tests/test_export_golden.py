"""The rows a checkpoint writes to be held to: whatever its files ask for, and nothing from one that cannot write."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from leadout.engines.base import ModelSpec  # noqa: E402
from leadout.errors import ExportError  # noqa: E402
from leadout.export.capture.kept import kept  # noqa: E402
from leadout.export.checkpoints.checkpoint import Checkpoint, load  # noqa: E402
from leadout.export.golden import LENGTH, ROWS, Truth, compute_truth  # noqa: E402
from leadout.export.parity import measure  # noqa: E402


class Said:
    """An engine that says what is to be said, but for one token."""

    spec = ModelSpec(9, 64)

    def __init__(self, truth: Truth, row: int, place: int) -> None:
        self.tokens, self.logits = truth.tokens, truth.logits.copy()
        self.logits[row, place, 3] += 1.0

    def reset(self, batch: int) -> None:
        pass

    def reserve(self, capacity: int) -> None:
        pass

    def forward(self, tokens: np.ndarray, past: np.ndarray, index: np.ndarray | None = None) -> np.ndarray:
        columns = np.arange(tokens.shape[1])[None].repeat(len(tokens), 0) if index is None else index
        return self.logits[np.arange(len(tokens))[:, None], past[:, None] + columns]


def test_what_a_device_is_held_to_is_measured_token_by_token() -> None:
    """``leadout check`` allows what the exporter measured, and looks at every token of the golden rows."""
    rng = np.random.default_rng(0)
    truth = Truth(rng.integers(0, 9, (ROWS, LENGTH)), rng.standard_normal((ROWS, LENGTH, 9), np.float32))
    for row, place in np.ndindex(ROWS, LENGTH):
        assert measure(truth, Said(truth, row, place)).difference == pytest.approx(1.0), (row, place)  # type: ignore[arg-type]


@pytest.fixture
def checkpoint(tiny_pair: tuple[Path, Path]) -> Checkpoint:
    return load(tiny_pair[0])


@pytest.mark.parametrize(
    "asked",
    [
        {"max_new_tokens": 1000},
        {"max_length": 20, "max_time": 1e-4},
        {"return_dict_in_generate": True},
        {"stop_strings": ["a"]},
        {"prompt_lookup_num_tokens": 3},
        {"dola_layers": "low"},
        {"cache_implementation": "quantized"},
        {"do_sample": True, "temperature": 0.0},
        {"do_sample": True, "repetition_penalty": 0.0},
        {"num_return_sequences": 2, "do_sample": True},
        {"num_beams": 4},
    ],
)
def test_rows_are_drawn_from_the_model_whatever_its_generation_config_asks(
    checkpoint: Checkpoint, asked: dict[str, Any]
) -> None:
    plain = compute_truth(checkpoint)
    own = checkpoint.model.generation_config
    for name, value in asked.items():
        setattr(own, name, value)
    truth = compute_truth(checkpoint)
    assert truth.tokens.shape == (ROWS, LENGTH)
    assert np.array_equal(truth.tokens, plain.tokens) and np.array_equal(truth.logits, plain.logits)
    assert checkpoint.model.generation_config is own


@pytest.mark.parametrize("asked", [{"return_dict": False}, {"return_dict": None}, {"output_attentions": True}])
def test_the_form_of_outputs_that_a_config_asks_for_is_passed_over(
    checkpoint: Checkpoint, tmp_path: Path, asked: dict[str, Any]
) -> None:
    source = Path(shutil.copytree(checkpoint.source, tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | asked))
    found = load(source)
    assert kept(found.model) == kept(checkpoint.model)
    assert np.array_equal(compute_truth(found).logits, compute_truth(checkpoint).logits)
    assert outputs(found) == {"logits", "cache"}


def outputs(checkpoint: Checkpoint) -> set[str]:
    """What a model gives; until transformers 5.24 its cache was called ``past_key_values``."""
    names = checkpoint.model(torch.tensor([[1, 2]])).keys()
    return {"cache" if name == "past_key_values" else name for name in names}


def test_what_routers_say_is_not_asked_for(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.MixtralConfig(
        **sizes, num_hidden_layers=1, intermediate_size=32, num_local_experts=2, output_router_logits=True
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert outputs(load(tmp_path)) == {"logits", "cache"}


@pytest.mark.parametrize("context", [2, LENGTH])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(checkpoint: Checkpoint, context: int, value: float) -> None:
    with torch.no_grad():
        checkpoint.model.model.layers[0].mlp.down_proj.weight[0, 0] = value
    with pytest.raises(ExportError, match=rf"'{checkpoint.source}': its logits are not finite"):
        compute_truth(dataclasses.replace(checkpoint, max_context=context))


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, narrow: Any) -> None:
    """That of a token which no text says that graphs are compared by is met by the first prompt that has it."""
    sizes = {"vocab_size": 4096, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, intermediate_size=32)
    model = transformers.AutoModelForCausalLM.from_config(config).to(narrow)
    model.save_pretrained(tmp_path)
    load(tmp_path).require_finite()
    for value in (torch.nan, torch.inf, -torch.inf):
        with torch.no_grad():
            model.get_input_embeddings().weight[77, 3] = value
        model.save_pretrained(tmp_path)
        with pytest.raises(ExportError, match=r"cannot be exported: model\.embed_tokens\.weight has NaN or infinity"):
            load(tmp_path).require_finite()


def test_an_architecture_whose_own_code_fails_is_named(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("one\ntwo")

    rows = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    reason = r"^LlamaForCausalLM cannot be exported: its code in transformers raises KeyError: 'one"
    monkeypatch.setattr(checkpoint.model.model, "forward", fail)
    for generate in (checkpoint.model.generate, lambda *_, **__: rows):
        monkeypatch.setattr(checkpoint.model, "generate", generate)
        with pytest.raises(ExportError, match=reason):
            compute_truth(checkpoint)
    with pytest.raises(ExportError, match=reason):
        kept(checkpoint.model)


@pytest.mark.parametrize("first", [-1, 512])
def test_a_bos_that_is_no_token_begins_no_row(checkpoint: Checkpoint, first: int) -> None:
    plain = compute_truth(dataclasses.replace(checkpoint, bos_token_id=None))
    truth = compute_truth(dataclasses.replace(checkpoint, bos_token_id=first))
    assert np.array_equal(truth.tokens, plain.tokens)
