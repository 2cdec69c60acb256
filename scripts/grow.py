"""Grow a checkpoint without changing its function, to measure realistic cost ratios with real acceptance.

Extra layers have zero output projections; extra intermediate units have zero columns in the down projection. What
the model computes is the same up to rounding, what it costs is not: label every figure taken with it as "grown".

    python -m leadout.scripts.grow models/target grown --layers 20 --intermediate 4064
"""

from __future__ import annotations

import shutil
from pathlib import Path

import click
import torch
from transformers import AutoConfig, AutoModelForCausalLM

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def grow(source: Path, layers: int, intermediate: int) -> torch.nn.Module:
    """The checkpoint with ``layers`` layers and ``intermediate`` units in each MLP (both at least what it has)."""
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = AutoConfig.from_pretrained(source)
    if layers < config.num_hidden_layers or intermediate < config.intermediate_size:
        have = f"{config.num_hidden_layers} layers and {config.intermediate_size} units"
        raise click.UsageError(f"can only grow: the checkpoint has {have}")
    config.num_hidden_layers, config.intermediate_size = layers, intermediate
    torch.manual_seed(0)
    large = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights, old = large.state_dict(), small.state_dict()
    with torch.no_grad():
        for name, value in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                value.zero_()
            if name in old:
                value[tuple(slice(n) for n in old[name].shape)] = old[name]
    return large


@click.command()
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option("--layers", type=int, required=True, help="Layers of the grown model.")
@click.option("--intermediate", type=int, required=True, help="Units in each of its MLPs.")
def main(source: Path, destination: Path, layers: int, intermediate: int) -> None:
    """Grow SOURCE (a Llama-like checkpoint) into DESTINATION."""
    click.echo(f"{write_grown(source, destination, layers, intermediate):,} parameters")


def write_grown(source: Path, destination: Path, layers: int, intermediate: int) -> int:
    """Save the grown checkpoint with its tokenizer, in bfloat16. Returns how many parameters it has."""
    model = grow(source, layers, intermediate)
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
