"""What a draft begins as: the parts of its target that matter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from leadout.scripts import pruning  # noqa: E402

TEXT = torch.from_numpy(np.random.default_rng(0).integers(0, 64, (1, 1025)))
IDLE_LAYERS, IDLE_UNITS = (1, 2), slice(8, 24)


@pytest.fixture
def target() -> LlamaForCausalLM:
    """Four layers of 32 units; two layers, and half of the units of each MLP, do nothing."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, intermediate_size=32, initializer_range=0.3, **shape)).eval()
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            layer.mlp.down_proj.weight[:, IDLE_UNITS] = 0.0
            if number in IDLE_LAYERS:
                layer.mlp.down_proj.weight.zero_()
                layer.self_attn.o_proj.weight.zero_()
    return model


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return pruning.logits_of(model, TEXT[:, :40])


def test_what_does_nothing_is_left_out(target: LlamaForCausalLM, tmp_path: Path) -> None:
    before = logits(target)
    draft, kept = pruning.pruned(target, 2, 16, TEXT)
    assert kept == [0, 3]
    assert sum(p.numel() for p in draft.model.layers.parameters()) < 0.5 * sum(
        p.numel() for p in target.model.layers.parameters()
    )
    assert torch.allclose(logits(draft), before, atol=1e-5)
    assert torch.equal(logits(target), before), "the target is not touched"
    draft.save_pretrained(tmp_path)
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path).eval()), logits(draft))


def test_fewer_units_than_matter_are_the_ones_that_bring_most(target: LlamaForCausalLM) -> None:
    with torch.no_grad():
        for layer in target.model.layers:
            layer.mlp.down_proj.weight[:, 4:] *= 1e-3
    draft, _ = pruning.pruned(target, 4, 4, TEXT)
    for mine, all_of in zip(draft.model.layers, target.model.layers, strict=True):
        if all_of.mlp.down_proj.weight.any():
            assert torch.equal(mine.mlp.up_proj.weight, all_of.mlp.up_proj.weight[:4])
            assert torch.equal(mine.mlp.down_proj.weight, all_of.mlp.down_proj.weight[:, :4])
