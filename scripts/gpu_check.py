"""Hold the GPU path to account on one NVIDIA GPU, in minutes: is it right, and what does it cost?

    python -m leadout.scripts.gpu_check                 # writes benchmarks/results/<device>.json
    python -m leadout.scripts.gpu_check --dry-run       # the same on the CPU, tiny, in seconds

Exports the demo pair and pairs grown from it (``scripts.grow``), then runs every provider that is installed; what is
not is skipped with the reason. The report is written after every section, so that a run that is cut short leaves what
it has. Needs the export extra.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import click

from ..engines import BUILT, require
from ..errors import EngineError, LeadoutError, first_line
from .gpu_measure import ahead_gain, cost_table, graph_gain, identity, speed, stale_slots, units_for

CHECKOUT = Path(__file__).parents[1]
PROMPTS = CHECKOUT / "benchmarks" / "prompts.jsonl"
GROWN = {"0.4B": (4e8, 16), "1B": (1e9, 24), "3B": (3e9, 32)}  # parameters, layers
LEAST_SECONDS = 20.0  # a section is not begun with less time left


class Report:
    """Sections as they come, on disk after each. A section that cannot run has ``skipped`` and why."""

    def __init__(self, minutes: float, path: Path | None) -> None:
        self.found: dict[str, Any] = {}
        self._end, self._path = monotonic() + 60 * minutes, path

    @property
    def seconds_left(self) -> float:
        return self._end - monotonic()

    def section(self, name: str, work: Callable[[], Any], seconds: float = LEAST_SECONDS) -> Any:
        """Run one section unless less than ``seconds`` are left. Returns what it found, None if it was skipped."""
        start, value = monotonic(), None
        click.echo(f"{name} ({self.seconds_left:.0f} s left)", err=True)
        try:
            if self.seconds_left < seconds:
                raise EngineError(f"out of time: {self.seconds_left:.0f} s left, about {seconds:.0f} s needed")
            value = work()
            self.found[name] = value
        except Exception as error:  # the report says what did not work; the other sections go on
            kind = "skipped" if isinstance(error, LeadoutError | ImportError) else "failed"
            self.found[name] = {kind: f"{type(error).__name__}: {first_line(error)}"}
        self.found.setdefault("seconds", {})[name] = round(monotonic() - start, 1)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
        return value


class Size:
    """How much of everything: the real check, or one of seconds."""

    def __init__(self, dry: bool) -> None:
        self.providers = ("cpu",) if dry else ("cuda", *BUILT)
        self.prompts, self.tokens, self.bench_tokens = (2, 6, 8) if dry else (8, 48, 64)
        self.widths = range(1, 4) if dry else range(1, 17)
        self.batches = (1, 2) if dry else (1, 4, 16)
        self.past = 16 if dry else 256
        self.precision = "fp32" if dry else "fp16"
        self.grown = {"small": (1e6, 4)} if dry else GROWN


@click.command()
@click.option("--dry-run", is_flag=True, help="On the CPU, tiny, in seconds.")
@click.option("--minutes", type=float, default=8.0, show_default=True, help="Begin nothing that ends later.")
@click.option("--target", type=click.Path(path_type=Path), default=CHECKOUT / "models" / "target", help="A checkpoint.")
@click.option("--draft", type=click.Path(path_type=Path), default=CHECKOUT / "models" / "draft", help="A checkpoint.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="[default: benchmarks/results/<device>.json]")
def main(dry_run: bool, minutes: float, target: Path, draft: Path, output: Path | None) -> None:
    """Check the GPU path on this machine; the report goes to stdout as JSON, progress to stderr."""
    from .cmd_doctor import findings

    about = findings()
    device = "cpu" if dry_run else about["gpu"].partition(",")[0].lower().replace(" ", "-")
    if not dry_run and about["gpu"].startswith("no "):
        raise click.ClickException(f"{about['gpu']} (or try --dry-run)")
    default = None if dry_run else CHECKOUT / "benchmarks" / "results" / f"{device}.json"
    report = Report(minutes, output or default)
    with tempfile.TemporaryDirectory(prefix="leadout-") as folder:
        run(report, Size(dry_run), about, (target, draft), Path(folder))
    click.echo(json.dumps(report.found, indent=1))


def run(report: Report, size: Size, about: dict[str, Any], models: tuple[Path, Path], folder: Path) -> None:
    """Every section, the ones about correctness first."""
    report.section("machine", lambda: about, seconds=0)
    bundle = report.section("export", lambda: str(export(*models, folder / "demo", "fp32")))
    there = [name for name in size.providers if report.section(name, partial(usable, name), seconds=0)]
    if bundle is None:
        return
    for name in there:
        check_provider(report, size, Path(bundle), name)
    previous = LEAST_SECONDS
    for label, (parameters, layers) in size.grown.items():
        begun = report.seconds_left
        measure_grown(report, size, models, folder / label, (label, parameters, layers), there, previous)
        previous = 3 * (begun - report.seconds_left)  # sizes are about a factor of three apart


def usable(provider: str) -> bool:
    """Raises EngineError where the provider cannot run here."""
    require(provider)
    return True


def export(target: Path, draft: Path, out: Path, precision: str) -> Path:
    """A bundle of two checkpoints."""
    from ..export.build import export_pair

    return export_pair(target, draft, out, precision=precision)


def built(report: Report, size: Size, name: str, provider: str, bundle: Path) -> bool:
    """Whether the provider has what it runs: engines, if it runs built ones, in a section of their own."""
    if provider not in BUILT:
        return True
    return report.section(f"{name}: build", lambda: build(bundle, provider, size)) is not None


def build(bundle: Path, provider: str, size: Size) -> str:
    """Build the engines of a bundle. Returns the command. Raises EngineError with what it said."""
    command = [sys.executable, "-m", "leadout.scripts.cli", "build", str(bundle), "--sdk", provider]
    command += ["--max-batch", str(max(size.batches)), "--max-draft", str(max(size.widths) - 1)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineError(f"leadout build: {(done.stderr.splitlines() or ['it said nothing'])[-1]}")
    return " ".join(command[3:])


@contextmanager
def opened(bundle: Path, provider: str) -> Iterator[Any]:
    """A pair on ``provider``."""
    from ..runtime.pair import load

    with load(bundle, provider=provider) as pair:
        yield pair


def check_provider(report: Report, size: Size, bundle: Path, provider: str) -> None:
    """Correctness on one provider: identity with the CPU, stale slots, graphs."""
    from ..runtime.pair import load

    if not built(report, size, provider, provider, bundle):
        return

    def tokens() -> dict[str, Any]:
        with load(bundle) as reference, opened(bundle, provider) as pair:
            return identity(reference, pair, prompts(pair, size.prompts), size.tokens)

    def slots() -> dict[str, Any]:
        with opened(bundle, provider) as pair:
            return {"target": stale_slots(pair.target)} | ({"draft": stale_slots(pair.draft)} if pair.draft else {})

    def graphs() -> dict[str, Any]:
        with opened(bundle, provider) as pair:
            return graph_gain(pair.target, 2, size.past)

    report.section(f"{provider}: same tokens as the CPU", tokens)
    report.section(f"{provider}: stale slots", slots)
    report.section(f"{provider}: CUDA graphs, ms", graphs)


def measure_grown(
    report: Report,
    size: Size,
    models: tuple[Path, Path],
    folder: Path,
    wanted: tuple[str, float, int],
    there: list[str],
    seconds: float,
) -> None:
    """Grow the target, export it with the draft, and measure costs, speed and memory on every provider."""
    label, parameters, layers = wanted
    made = report.section(f"{label}: export", lambda: grown(*models, folder, parameters, layers, size), seconds)
    for provider in there if made is not None else []:
        bundle, name = Path(made["bundle"]), f"{label}, {provider}"
        if built(report, size, name, provider, bundle):
            report.section(name, partial(costs, bundle, provider, size))


def grown(target: Path, draft: Path, folder: Path, parameters: float, layers: int, size: Size) -> dict[str, Any]:
    """A bundle with the target grown to about ``parameters`` parameters."""
    from .grow import write_grown

    have = json.loads((target / "config.json").read_text(encoding="utf-8"))
    layers = max(layers, have["num_hidden_layers"])
    units = max(units_for(parameters, have["hidden_size"], layers), have["intermediate_size"])
    count = write_grown(target, folder / "checkpoint", layers, units)
    bundle = export(folder / "checkpoint", draft, folder / "bundle", size.precision)
    return {"bundle": str(bundle), "parameters": count, "precision": size.precision}


def costs(bundle: Path, provider: str, size: Size) -> dict[str, Any]:
    """Step costs, tokens a second, bytes moved and memory of one pair."""
    before = free_bytes(provider)
    with opened(bundle, provider) as pair:
        found = {"speed": speed(pair, prompts(pair, size.prompts), size.bench_tokens)}
        found["draft_ahead"] = ahead_gain(pair, prompts(pair, size.prompts), size.bench_tokens)
        found["step_ms"] = cost_table(pair.target, size.widths, size.batches, size.past)
        found["draft_step_ms"] = cost_table(pair.draft, (1, 2), size.batches, size.past)
        return found | {"device_bytes_used": before - free_bytes(provider)}


def free_bytes(provider: str) -> int:
    """Free device memory; 0 where there is no device."""
    if provider == "cpu":
        return 0
    from ..engines.tensorrt.cuda import Cuda

    cuda = Cuda()
    try:
        return cuda.memory()[0]
    finally:
        cuda.close()


def prompts(pair: Any, count: int) -> list[list[int]]:
    """Prompts of unequal length: the held-out ones of a checkout, or the built-in ones."""
    from .cmd_bench import BUILT_IN
    from .options import read_prompts

    texts = [line.prompt for line in read_prompts(str(PROMPTS))] if PROMPTS.is_file() else list(BUILT_IN)
    room = pair.target.spec.max_context // 2
    return [pair.token_ids(text)[:room] for text in texts[:count]]


if __name__ == "__main__":
    main()
