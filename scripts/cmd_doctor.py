"""`leadout doctor`: what is installed here, and whether it fits together."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from typing import Any

import click

from ..engines.providers import DISTRIBUTIONS, onnxruntime
from ..errors import EngineError

PARTS = {
    "core": ("numpy", "click", "tokenizers", "jinja2", "rich"),
    "export": ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "optimum", "safetensors"),
    "tensorrt": ("tensorrt",),
}


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="The findings as one JSON object.")
def command(as_json: bool) -> None:
    """Show versions, providers and conflicts. Fails where Leadout could not generate."""
    found = findings()
    if as_json:
        click.echo(json.dumps(found))
    else:
        show(found)
    if found["conflicts"]:
        raise EngineError(found["conflicts"][0])


def findings() -> dict[str, Any]:
    """Versions by part, cores, providers, and what is wrong (``conflicts``, empty when all is well)."""
    runtimes = {name: version(name) for name in DISTRIBUTIONS}
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "runtime": runtimes,
        "providers": [],
        "conflicts": [],
    }
    found |= {part: {name: version(name) for name in names} for part, names in PARTS.items()}
    try:
        found["providers"] = onnxruntime().get_available_providers()
    except EngineError as error:
        found["conflicts"].append(str(error))
    return found


def version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def show(found: dict[str, Any]) -> None:
    """Print the findings as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False)
    for name, value in found.items():
        if isinstance(value, dict):
            value = ", ".join(f"{part} {has or '(not installed)'}" for part, has in value.items())
        elif isinstance(value, list):
            value = ", ".join(value) or "none"
        table.add_row(name, str(value))
    Console(highlight=False).print(table, markup=False)
