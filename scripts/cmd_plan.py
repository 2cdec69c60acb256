"""`leadout plan`: the memory a bundle will take on a device, before it is copied there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from ..engines import BUILT
from ..engines.tensorrt.buildable import PRECISIONS
from .options import BUNDLE

if TYPE_CHECKING:
    from ..engines.plan import Load, Memory

MEGABYTE = 1e6


@click.command("plan")
@click.argument("bundle", type=BUNDLE)
@click.option("--batch", type=int, default=1, show_default=True, metavar="B", help="Rows at once, 1 to 4096.")
@click.option(
    "--draft-length",
    type=int,
    default=8,
    show_default=True,
    metavar="K",
    help="Drafted tokens a round, 0 to 64; where text repeats, auto drafts up to 63.",
)
@click.option(
    "--context", type=int, metavar="N", help="Tokens of prompt and answer, 1 or more. [default: all the target takes]"
)
@click.option(
    "--provider",
    type=click.Choice(("cpu", "cuda", *BUILT)),
    default="cpu",
    show_default=True,
    help="Where it will run.",
)
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="Of an engine; ONNX Runtime runs the bundle's own. [default: fp16]",
)
@click.option("--capacity", type=int, metavar="M", help="An engine's slots a row, N + K or more. [default: N + K]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, in bytes.")
def command(
    bundle: str,
    batch: int,
    draft_length: int,
    context: int | None,
    provider: str,
    precision: str | None,
    capacity: int | None,
    as_json: bool,
) -> None:
    """Show what memory the models of BUNDLE take: weights, caches, logits, and an estimate for the steps themselves.

    Reads leadout.json and nothing else. The runtime's own memory comes on top.
    """
    from ..bundle import read_manifest
    from ..engines.plan import Load, describe, fitting, plan

    models = read_manifest(bundle).models
    load = Load(
        provider=provider,
        batch=batch,
        draft_length=draft_length,
        context=models["target"].max_context if context is None else context,
        precision=precision,
        capacity=capacity,
    )
    memories = {role: plan(model, load if role == "target" else fitting(load, model)) for role, model in models.items()}
    if as_json:
        click.echo(json.dumps(describe(memories, load, models)))
    else:
        show(memories, load)


def show(memories: dict[str, Memory], load: Load) -> None:
    """Print the plan as a table, a column a model."""
    from rich.console import Console
    from rich.table import Table

    what = f"{load.provider}{f' in {load.engine_precision}' if load.built else ''}"
    title = f"MB on {what}: batch {load.batch}, drafts of {load.draft_length}, context {load.context}"
    table = Table("", *memories, "total")
    for name, label in (
        ("weights", "weights"),
        ("cache", "cache"),
        ("logits", "logits"),
        ("steps", "steps (estimate)"),
        ("total", "total"),
    ):
        sizes = [getattr(memory, name) for memory in memories.values()]
        table.add_row(label, *(f"{size / MEGABYTE:.1f}" for size in (*sizes, sum(sizes))))
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(title, soft_wrap=True)
    console.print(table)
