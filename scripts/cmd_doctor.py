"""`leadout doctor`: what is installed here, and whether it fits together."""

from __future__ import annotations

import json
import platform
from typing import Any

import click

from ..engines import PROVIDERS, require
from ..engines.providers import DISTRIBUTIONS, onnxruntime, version_of
from ..engines.saturation import saturates
from ..errors import EngineError
from ..runtime.device import cores

PARTS = {
    "core": ("numpy", "click", "tokenizers", "jinja2", "rich"),
    "export": ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "optimum", "safetensors"),
    "grammar": ("llguidance",),
    "tensorrt": ("tensorrt", "tensorrt-rtx-cu13", "cuda-bindings"),
}

INT8 = {
    False: "exact sums by the fastest kernels",
    True: "exact sums by slower kernels: this processor's fastest ones cut them (an x86 without VNNI)",
}


@click.command("doctor")
@click.option("--provider", type=click.Choice(PROVIDERS), help="Fail, saying what is missing, if this cannot run here.")
@click.option("--json", "as_json", is_flag=True, help="The findings as one JSON object.")
def command(provider: str | None, as_json: bool) -> None:
    """Show versions, providers and conflicts. Fails where Leadout could not generate."""
    found = findings()
    if as_json:
        click.echo(json.dumps(found))
    else:
        show(found)
    if found["conflicts"]:
        raise EngineError(found["conflicts"][0])
    if provider is not None:
        require(provider)


def findings() -> dict[str, Any]:
    """Versions by part, cores, providers, how products in int8 are summed up here, and what is wrong (``conflicts``,
    empty when all is well)."""
    runtimes = {name: version_of(name) for name in DISTRIBUTIONS}
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": cores(),
        "runtime": runtimes,
        "providers": [],
        "int8": "",
        "gpu": gpu(),
        "conflicts": [],
    }
    found |= {part: {name: version_of(name) for name in names} for part, names in PARTS.items()}
    try:
        found["providers"] = onnxruntime().get_available_providers()
        found["int8"] = INT8[saturates(onnxruntime())]
    except EngineError as error:
        found["conflicts"].append(str(error))
    return found


def gpu() -> str:
    """The first CUDA device, or why there is none."""
    from ..engines.tensorrt.compat import compute_capability
    from ..engines.tensorrt.cuda import Cuda

    try:
        capability, cuda = compute_capability(), Cuda()
    except EngineError as error:
        return str(error)
    try:
        return f"{cuda.name}, compute capability {capability}, driver for CUDA {cuda.driver}"
    finally:
        cuda.close()


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
    Console(highlight=False, markup=False, emoji=False).print(table)
