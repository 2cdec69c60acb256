"""Checkpoints with layers for multi-token prediction, as such models are published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from test_export_architectures import DELTA, GROUPED, spread
from transformers.modeling_layers import MtpModel

VOCAB = 512
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SINGLE = {"num_hidden_layers": 1}  # captures take time
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        DELTA | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        GROUPED | EXPERTS | SINGLE | {"n_routed_experts": 4, "head_dim": 16, "first_k_dense_replace": 0},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        GROUPED
        | EXPERTS
        | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
        | {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    ),
    "mellum": (
        "MellumConfig",
        GROUPED
        | EXPERTS
        | SINGLE
        | {"num_experts": 4, "head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention"]},
    ),
}
# Where the parts of a layer for multi-token prediction stand that are not its block's.
BESIDE = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}


def published(folder: Path, kind: str, tokenizer: Path, count: int = 1) -> Path:
    """A random model of KINDS with ``count`` such layers, where its checkpoints have them: apart (``mtp.``), or behind
    its last layer, as DeepSeek and GLM."""
    name, arguments = KINDS[kind]
    behind = kind in ("glm4_moe", "deepseek_v3")
    its = {"num_mtp_layers": count} if behind or kind == "mellum" else {}
    config = getattr(transformers, name)(
        **arguments | its | {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": 0}
    )
    model = spread(kind, config).model
    model.save_pretrained(folder)
    shutil.copy(tokenizer, folder / "tokenizer.json")
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said if its else said | {"mtp_num_hidden_layers": count}))
    config.num_mtp_layers = count
    if not its:
        config.mtp_layer_types = ["full_attention"] * count
    noise, tensors = torch.Generator().manual_seed(7), load_file(folder / "model.safetensors")
    for key, weight in MtpModel(model, count).layers.state_dict().items():
        drawn = torch.randn(weight.shape, generator=noise)
        for where, part in _as_experts(key, 0.1 * drawn if weight.dim() > 1 else weight + 0.1 * drawn):
            tensors[_behind(where, config.num_hidden_layers) if behind else _apart(where)] = part.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _as_experts(key: str, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Experts stand one by one in files."""
    before, _, last = key.rpartition(".experts.")
    if last == "gate_up_proj":
        halves = [(expert, *weight.chunk(2)) for expert, weight in enumerate(value)]
        return [
            (f"{before}.experts.{expert}.{name}_proj.weight", half)
            for expert, gate, up in halves
            for name, half in (("gate", gate), ("up", up))
        ]
    if last == "down_proj":
        return [(f"{before}.experts.{expert}.down_proj.weight", weight) for expert, weight in enumerate(value)]
    return [(key, value)]


def _apart(key: str) -> str:
    layer, _, rest = key.partition(".")
    name, _, kind = rest.partition(".")
    return f"mtp.{BESIDE[name]}.{kind}" if name in BESIDE else f"mtp.layers.{layer}.{rest.removeprefix('mtp_block.')}"


def _behind(key: str, layers: int) -> str:
    layer, _, rest = key.partition(".")
    rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
    return f"model.layers.{layers + int(layer)}.{rest}"
