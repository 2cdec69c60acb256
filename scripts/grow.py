"""Grow a checkpoint without changing its function, to measure realistic cost ratios with real acceptance.

Extra layers have zero output projections; extra intermediate units have zero columns in the down projection; extra
hidden units hold zeros, and norms, whose mean they lower, are scaled for it; experts are copies of a layer's MLP, among
which a random router chooses; state spaces (Mamba 2) take the place of attention in the extra layers. What the model
computes is the same up to rounding, what it costs is not: label every figure taken with it as "grown".

    python -m leadout.scripts.grow models/target grown --layers 20 --intermediate 4064
    python -m leadout.scripts.grow models/target grown --layers 20 --intermediate 4864 --hidden 1536
    python -m leadout.scripts.grow models/target mixture --layers 8 --intermediate 1024 --hidden 1536 --experts 16
    python -m leadout.scripts.grow models/target hybrid --layers 40 --intermediate 1536 --hidden 1536 --state-spaces
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GraniteMoeHybridConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def grow(source: Path, layers: int, intermediate: int, hidden: int | None = None) -> PreTrainedModel:
    """The checkpoint with ``layers`` layers, ``intermediate`` units in each MLP (both at least what it has) and
    ``hidden`` units between them: as many as it has, or 4, 16, 64 times that, so that the root by which the weights of
    norms change is a power of two and no bit of them is lost. Raises UsageError for less, or others."""
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = AutoConfig.from_pretrained(source)
    if layers < config.num_hidden_layers or intermediate < config.intermediate_size:
        have = f"{config.num_hidden_layers} layers and {config.intermediate_size} units"
        raise click.UsageError(f"can only grow: the checkpoint has {have}")
    hidden = config.hidden_size if hidden is None else hidden
    if hidden not in [config.hidden_size * 4**n for n in range(4)]:
        raise click.UsageError(f"hidden must be {config.hidden_size} or 4, 16 or 64 times that, not {hidden}")
    shrunk = config.hidden_size / hidden  # what zeros leave of a mean of squares
    config.num_hidden_layers, config.intermediate_size, config.hidden_size = layers, intermediate, hidden
    config.rms_norm_eps *= shrunk
    torch.manual_seed(0)
    large = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights, old = large.state_dict(), small.state_dict()
    with torch.no_grad():
        for name, value in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight")):
                value.zero_()
            if name in old:
                corner = tuple(slice(n) for n in old[name].shape)
                value[corner] = old[name] * (math.sqrt(shrunk) if name.endswith("norm.weight") else 1)
    return large


def mixture_of(model: PreTrainedModel, experts: int, per_token: int) -> PreTrainedModel:
    """The same with ``experts`` copies of the MLP in each layer, ``per_token`` of which take a token. Raises UsageError
    for fewer than 2, or for none or all of them a token."""
    if not 1 <= per_token < experts:
        raise click.UsageError(f"experts-per-token must be from 1 to less than experts ({experts}), not {per_token}")
    own = {key: value for key, value in model.config.to_dict().items() if key not in ("model_type", "architectures")}
    config = MixtralConfig(**own, num_local_experts=experts, num_experts_per_tok=per_token, sliding_window=None)

    def made(name: str, layer: str, old: dict[str, torch.Tensor]) -> torch.Tensor | None:
        if name.endswith("gate_up_proj"):
            return gate_and_up(layer, old)
        if name.endswith("experts.down_proj"):
            return old[f"{layer}.down_proj.weight"]
        return None if name in old else torch.randn(experts, config.hidden_size)  # a router's

    return refilled(model, config, made)


def hybrid_of(model: PreTrainedModel, attending: int) -> PreTrainedModel:
    """The same, of which only the first ``attending`` layers attend: the others, which say nothing, are state spaces in
    the form of Granite 4. Raises UsageError if there are no others."""
    own = {key: value for key, value in model.config.to_dict().items() if key not in ("model_type", "architectures")}
    layers, hidden, head = own["num_hidden_layers"], own["hidden_size"], own["head_dim"]
    if layers <= attending:
        raise click.UsageError(f"state-spaces are the layers beyond the checkpoint's {attending}; layers is {layers}")
    config = GraniteMoeHybridConfig(
        **own,
        layer_types=["attention"] * attending + ["mamba"] * (layers - attending),
        shared_intermediate_size=own["intermediate_size"],
        num_local_experts=0,
        position_embedding_type="rope",
        attention_multiplier=head**-0.5,
        mamba_n_heads=2 * hidden // 64,
        mamba_d_head=64,
        mamba_d_state=128,
    )

    def made(name: str, layer: str, old: dict[str, torch.Tensor]) -> torch.Tensor | None:
        if name.endswith("shared_mlp.input_linear.weight"):
            return gate_and_up(layer, old)
        if name.endswith("shared_mlp.output_linear.weight"):
            return old[f"{layer}.down_proj.weight"]
        return torch.zeros(hidden, 2 * hidden) if name.endswith("mamba.out_proj.weight") else None

    return refilled(model, config, made)


Made = Callable[[str, str, dict[str, torch.Tensor]], torch.Tensor | None]


def refilled(model: PreTrainedModel, config: PreTrainedConfig, made: Made) -> PreTrainedModel:
    """A model of another ``config`` with the weights of ``model``: what ``made`` makes of them, by its own name and
    that of the layer's MLP in ``model``, or those of the same name; all others are random."""
    torch.manual_seed(0)
    other, old = AutoModelForCausalLM.from_config(config, dtype=torch.float32), model.state_dict()
    with torch.no_grad():
        for name, value in other.state_dict().items():
            layer = ".".join(name.split(".")[:3]) + ".mlp"
            if (new := made(name, layer, old)) is not None or (new := old.get(name)) is not None:
                value.copy_(new)
    return other


def gate_and_up(layer: str, old: dict[str, torch.Tensor]) -> torch.Tensor:
    """Both of an MLP's first products as one."""
    return torch.cat([old[f"{layer}.{part}_proj.weight"] for part in ("gate", "up")])


@click.command()
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--layers", type=int, required=True, help="Layers of the grown model.")
@click.option("--intermediate", type=int, required=True, help="Units in each of its MLPs.")
@click.option("--hidden", type=int, help="Units between its layers: 4, 16 or 64 times as many. [default: as many]")
@click.option("--experts", type=int, default=0, help="Copies of each MLP. [default: no mixture]")
@click.option("--experts-per-token", type=int, default=2, show_default=True, help="How many of them take a token.")
@click.option("--state-spaces", is_flag=True, help="The extra layers keep a state instead of attending.")
def main(source: Path, destination: Path, **shape: Any) -> None:
    """Grow SOURCE (a Llama-like checkpoint) into DESTINATION."""
    click.echo(f"{write_grown(source, destination, **shape):,} parameters")


def write_grown(
    source: Path,
    destination: Path,
    layers: int,
    intermediate: int,
    hidden: int | None = None,
    experts: int = 0,
    experts_per_token: int = 2,
    state_spaces: bool = False,
) -> int:
    """Save the grown checkpoint with its tokenizer, in bfloat16. Returns how many parameters it has."""
    model = grow(source, layers, intermediate, hidden)
    if experts and state_spaces:
        raise click.UsageError("experts and state-spaces are two kinds of grown models: choose one")
    if state_spaces:
        model = hybrid_of(model, AutoConfig.from_pretrained(source).num_hidden_layers)
    if experts:
        model = mixture_of(model, experts, experts_per_token)
    count = int(sum(p.numel() for p in model.parameters()))
    model.to(torch.bfloat16).save_pretrained(destination)
    for name in COPIED:
        if (source / name).exists():
            shutil.copyfile(source / name, destination / name)
    note = f"The same function as `{source.name}` at {count:,} parameters: for measuring costs only."
    (destination / "README.md").write_text(f"# Grown from {source.name}\n\n{note}\n", encoding="utf-8")
    return count


if __name__ == "__main__":
    main()
