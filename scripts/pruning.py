"""Decides what a draft keeps of its target before it is distilled: layers and MLP units that matter most, by what they
do on a little text (Muralidharan et al. 2407.14679)."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from transformers import LlamaForCausalLM


def pruned(model: LlamaForCausalLM, layers: int, units: int, text: torch.Tensor) -> tuple[LlamaForCausalLM, list[int]]:
    """A copy of ``model`` with its best ``layers`` layers and the busiest ``units`` units of each of their MLPs, and
    which layers these are. ``text``: token ids [B, S] to judge by."""
    kept = best_layers(model, layers, text)
    draft = with_layers(model, kept)
    keep_units(draft, units, text)
    return draft, list(kept)


def with_layers(model: LlamaForCausalLM, kept: Sequence[int]) -> LlamaForCausalLM:
    """A copy of ``model`` with only the layers that are ``kept``."""
    copied = copy.deepcopy(model)
    copied.model.layers = torch.nn.ModuleList(copied.model.layers[layer] for layer in kept)
    for place, layer in enumerate(copied.model.layers):
        layer.self_attn.layer_idx = place
    copied.config.num_hidden_layers = len(kept)
    return copied


@torch.no_grad()
def best_layers(model: LlamaForCausalLM, count: int, text: torch.Tensor) -> tuple[int, ...]:
    """The ``count`` layers of ``model`` that alone agree best with all of it: the highest 1 - TV on ``text``."""
    p = logits_of(model, text).softmax(-1)

    def agreement(kept: tuple[int, ...]) -> float:
        q = logits_of(with_layers(model, kept), text).softmax(-1)
        return float(torch.minimum(p, q).sum(-1).mean())

    return max(itertools.combinations(range(model.config.num_hidden_layers), count), key=agreement)


@torch.no_grad()
def keep_units(model: LlamaForCausalLM, units: int, text: torch.Tensor) -> None:
    """Leave in every MLP the units that bring most: the root mean square of their activation on ``text`` times the
    length of their column in the down projection."""
    mlps = [layer.mlp for layer in model.model.layers]
    busy: list[torch.Tensor] = []
    with contextlib.ExitStack() as stack:
        for mlp in mlps:
            hook = mlp.down_proj.register_forward_pre_hook(lambda _, given: busy.append(given[0].square().mean((0, 1))))
            stack.callback(hook.remove)
        logits_of(model, text)
    for mlp, square in zip(mlps, busy, strict=True):
        kept = (square.sqrt() * mlp.down_proj.weight.norm(dim=0)).topk(units).indices.sort().values
        for linear, columns in ((mlp.gate_proj, False), (mlp.up_proj, False), (mlp.down_proj, True)):
            weight = linear.weight[:, kept] if columns else linear.weight[kept]
            linear.weight = torch.nn.Parameter(weight.clone())
            linear.out_features, linear.in_features = weight.shape
    model.config.intermediate_size = units


def logits_of(model: Callable[..., Any], tokens: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, V] in float32, whatever ``model`` computes in."""
    return cast(torch.Tensor, model(input_ids=tokens, use_cache=False).logits.float())
