"""`leadout inspect`: what a bundle holds, for people and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .options import BUNDLE

if TYPE_CHECKING:
    from ..bundle import Bundle, ModelEntry, Recurrence


@click.command("inspect")
@click.argument("bundle", type=BUNDLE)
@click.option("--json", "as_json", is_flag=True, help="The manifest itself, as JSON.")
def command(bundle: str, as_json: bool) -> None:
    """Show the models, graph variants, sizes and parity figures of BUNDLE, after checking all of its files."""
    from ..bundle import Bundle, dump

    found = Bundle.read(bundle)
    if as_json:
        click.echo(dump(found.manifest), nl=False)
    else:
        show(found)


def show(bundle: Bundle) -> None:
    """Print the manifest as a table, a column a model."""
    from rich.console import Console
    from rich.table import Table

    models = bundle.manifest.models
    table = Table(
        "", *models, title=f"{bundle.path}, written by Leadout {bundle.manifest.leadout}", title_justify="left"
    )
    columns = [describe(model) for model in models.values()]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    console = Console(highlight=False, markup=False, emoji=False)  # a path, or a note, may hold brackets
    console.print(table)
    for title, entries in (("sampling", bundle.manifest.sampling), ("provenance", bundle.manifest.provenance)):
        if entries:
            console.print(f"{title}: " + ", ".join(f"{name} {value}" for name, value in entries.items()))


def describe(model: ModelEntry) -> dict[str, str]:
    """One model's rows: name to text."""
    shapes = sorted({f"{shape.heads} x {shape.key_dim}" for shape in model.cache})
    size = sum(entry.bytes for entry in (*model.variants.values(), *model.files.values()))
    return {
        "architecture": model.architecture,
        "parameters": f"{model.parameters / 1e6:.1f} M",
        "precision": f"{model.precision}, cache {model.dtype}",
        "graph": f"{model.dialect}: {', '.join(model.variants)}",
        "vocabulary": str(model.vocab_size),
        "context": str(model.max_context),
        "cache": "; ".join([f"{len(model.cache)} layers of {', '.join(shapes)}", *_recurrent(model.recurrence)]),
        "end of text": ", ".join(map(str, model.eos_token_ids)),
        "size": f"{size / 1e6:.1f} MB in {len(model.variants) + len(model.files)} files",
        "parity": "\n".join(f"{name} {value:.1e}" for name, value in model.parity.items()),
        "note": model.note,
    }


def _recurrent(kept: Recurrence | None) -> list[str]:
    """What there is to say of layers that keep states, or convolutions' inputs alone."""
    if kept is None:
        return []
    shapes = sorted({f"{state.heads} x {state.key_dim} x {state.value_dim}" for state in kept.states})
    states = f"{len(kept.states)} states of {', '.join(shapes)}, " if kept.states else ""
    return [f"{states}{len(kept.trails)} trails of {kept.slots} tokens"]
