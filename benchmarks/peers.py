"""Leadout beside other programs that decode speculatively: the same checkpoints, prompts, threads and precision.

    python benchmarks/peers.py                                              # everything: 40 minutes on two cores
    python benchmarks/peers.py --pairs demo --precisions int8 --temperatures 0 --limit-per-kind 3
    python benchmarks/peers.py --peers genai,openvino --json compared.json

onnxruntime-genai (plain, draft model of fixed and adaptive length, n-gram), OpenVINO GenAI (plain, draft model of fixed
and dynamic length, prompt lookup), transformers (plain, assisted, prompt lookup) and llama.cpp (plain, prompt lookup)
are installed by pip into environments of their own, convert the checkpoints with their own tools, and answer prompt
after prompt in turns: one process a mode, all others stopped meanwhile. Rates are after the prompt; ``+prompt`` counts
it. Greedy outputs are compared with Leadout's. What cannot be installed or run is one line, with the reason.

"Grown" is the demo pair with a target of 105 M parameters (scripts/grow.py), "large" with one of 492 M, "mixture" with
one of 629 M, two of whose 16 experts take a token. transformers is measured in fp32 alone: its weights of few bits need
a further package on a CPU. llama.cpp's Python package speculates by prompt lookup only.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import sleep
from typing import Any

import click
from adapters.children import Child, PeerError
from adapters.environments import python_of, run
from adapters.report import Side, summarise, table
from adapters.table import PEERS, REFERENCE, Peer
from programs import run as run_program
from tokenizers import Tokenizer

from leadout.errors import UsageError
from leadout.runtime.device import processor

HERE = Path(__file__).parent
MODELS, EXPORTER = HERE.parent / "models", HERE.parent / "export"
# Not 4096 units: genai's builder takes a product as wide as the vocabulary for the head.
GROWN = {
    "grown": {"layers": 20, "intermediate": 4064},
    "large": {"layers": 20, "intermediate": 4864, "hidden": 1536},
    "mixture": {"layers": 8, "intermediate": 1024, "hidden": 1536, "experts": 16},
}
PREPARE_SECONDS, SETTLES = 900, 0.05
CHOICES = {
    "pairs": ("demo", *GROWN),
    "precisions": ("fp32", "int8", "int4"),
    "peers": tuple(peer.name for peer in PEERS if peer.name != REFERENCE[0]),
}


def several(name: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """A click callback: names from CHOICES between commas."""

    def parse(context: click.Context, parameter: click.Parameter, value: str) -> list[str]:
        for part in (parts := value.split(",")):
            if part not in CHOICES[name]:
                raise click.BadParameter(f"'{part}' (possible, between commas: {', '.join(CHOICES[name])})")
        return parts

    return parse


def temperatures(context: click.Context, parameter: click.Parameter, value: str) -> list[float]:
    """A click callback: numbers from 0 between commas."""
    try:
        numbers = [float(part) for part in value.split(",")]
    except ValueError:
        numbers = [-1.0]
    if min(numbers) < 0:
        raise click.BadParameter(f"'{value}' (possible, between commas: numbers from 0)")
    return numbers


class Comparison:
    """Where everything lies, and what one configuration measures."""

    def __init__(self, folder: Path, threads: int, max_new_tokens: int, seed: int) -> None:
        self.folder, self.threads, self.max_new_tokens, self.seed = folder, threads, max_new_tokens, seed
        self.failures: list[dict[str, str]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def checkpoints(self, pair: str) -> dict[str, str]:
        """The target's and the draft's directory; grows the target on first use."""
        target = MODELS / "target"
        if pair in GROWN:
            shape = "x".join(map(str, GROWN[pair].values()))
            grown = self.folder / "models" / f"grown-{shape}-{digest(target)}"
            if not (grown / "README.md").is_file():  # written last
                from leadout.scripts.grow import write_grown

                write_grown(target, grown, **GROWN[pair])
            target = grown
        return {"target": str(target.resolve()), "draft": str((MODELS / "draft").resolve())}

    def prepare(self, peer: Peer, pair: str, precision: str) -> dict[str, Any]:
        """Install it and convert the pair, unless that was done. The job without a mode. Raises PeerError."""
        if precision != "fp32" and peer.refused:
            raise PeerError(f"no {precision}: {peer.refused}")
        job: dict[str, Any] = {**self.checkpoints(pair), "precision": precision, "threads": self.threads}
        job |= {"draft_precision": peer.draft_precision, "python": str(python_of(peer, self.folder))}
        name = "-".join([peer.name, precision, digest(Path(job["target"])), digest(Path(job["draft"])), recipe(peer)])
        models = self.folder / "models" / name
        job["models"] = str(models)
        if not (models / "done").is_file():
            models.mkdir(parents=True, exist_ok=True)
            run(command(peer, "prepare", job), models / "prepare.log", PREPARE_SECONDS, environment(self.threads))
            (models / "done").touch()
        return job

    def start(
        self, children: dict[Side, Child], peers: Sequence[Peer], pair: str, precision: str, prompt: list[int]
    ) -> None:
        """Fill ``children`` with every mode that loads and answers ``prompt``; the others become failures."""
        for peer in peers:
            try:
                job = self.prepare(peer, pair, precision)
            except PeerError as error:
                self.fail((peer.name, "(all modes)"), error)
                continue
            for mode in peer.modes:
                click.echo(f"  {peer.name} {mode}", err=True)
                log = self.folder / f"{peer.name}-{mode}.log"
                try:
                    children[peer.name, mode] = Child(
                        command(peer, "serve", {**job, "mode": mode}), log, environment(self.threads)
                    )
                    children[peer.name, mode].ask({**self.request(prompt, 0.0, 0), "warm_up": True})
                except PeerError as error:
                    self.drop(children, (peer.name, mode), error)

    def request(self, prompt: list[int], temperature: float, number: int) -> dict[str, Any]:
        settings = {"max_new_tokens": self.max_new_tokens, "temperature": temperature, "seed": self.seed + number}
        return {"prompt_ids": prompt, **settings}

    def fail(self, side: Side, error: PeerError) -> None:
        """Note why, without where on this machine it was."""
        reason = str(error).replace(f"{self.folder.resolve()}/", "")
        self.failures.append({"peer": side[0], "mode": side[1], "reason": reason})

    def drop(self, children: dict[Side, Child], side: Side, error: PeerError) -> None:
        """A mode that failed is not measured."""
        if side in children:
            children.pop(side).close()
        self.fail(side, error)

    def measure(
        self, peers: Sequence[Peer], pair: str, precision: str, temperature: float, prompts: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """Every prompt by every mode in turns, who begins moving on with each. Between two turns nobody works: threads
        of the one before that spin on would take a core from the next. Raises UsageError if Leadout fails."""
        self.failures = []
        children: dict[Side, Child] = {}
        try:
            self.start(children, peers, pair, precision, prompts[0]["ids"][::-1])
            versions = {f"{peer} {mode}": child.hello["versions"] for (peer, mode), child in children.items()}
            sides: dict[Side, list[dict[str, Any]]] = {side: [] for side in children}
            for number, prompt in enumerate(prompts):
                turn = number % max(1, len(children))
                for side in [*children][turn:] + [*children][:turn]:
                    sleep(SETTLES)
                    try:
                        row = children[side].ask(self.request(prompt["ids"], temperature, number))
                        sides[side].append(row | {"kind": prompt["kind"]})
                    except PeerError as error:
                        self.drop(children, side, error)
                click.echo(f"\r  {number + 1} of {len(prompts)} prompts", nl=False, err=True)
            click.echo(err=True)
            found = self.result(children, sides, pair, precision, temperature, prompts)
            return found | {"versions": versions, "remarks": remarks(peers, sides, precision, temperature)}
        finally:
            for child in children.values():
                child.close()

    def result(
        self,
        children: dict[Side, Child],
        sides: dict[Side, list[dict[str, Any]]],
        pair: str,
        precision: str,
        temperature: float,
        prompts: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        if REFERENCE not in children:
            raise UsageError(f"without {' '.join(REFERENCE)} nothing can be compared: {self.failures}")
        kept = {side: sides[side] for side in children}
        eos = json.loads((MODELS / "target" / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
        summary = summarise(kept, REFERENCE, [eos] if isinstance(eos, int) else eos, greedy=temperature == 0)
        for entry in summary:
            for parted in entry.get("divergences", ()):
                ids = [
                    kept[side][parted["prompt"]]["token_ids"] for side in (REFERENCE, (entry["peer"], entry["mode"]))
                ]
                question = {"prompt_ids": prompts[parted["prompt"]]["ids"], "compare": ids}
                parted |= children[REFERENCE].ask(question)
        return {
            "pair": pair,
            "precision": precision,
            "temperature": temperature,
            "threads": self.threads,
            "max_new_tokens": self.max_new_tokens,
            "prompts": len(prompts),
            "processor": processor(),
            "sides": summary,
            "failures": self.failures,
            "answers": {" ".join(side): rows for side, rows in kept.items()},
        }


def remarks(peers: Sequence[Peer], sides: Iterable[Side], precision: str, temperature: float) -> dict[str, str]:
    """What a reader must know of each program in this configuration."""
    found, loaded = {}, {name for name, _ in sides}
    for peer in (peer for peer in peers if peer.name in loaded):
        said = [peer.stored(precision), peer.sampled if temperature > 0 else ""]
        if any(said):
            found[peer.name] = "; ".join(filter(None, said))
    return found


def command(peer: Peer, verb: str, job: dict[str, Any]) -> list[str]:
    return [job["python"], str(HERE / "adapters" / peer.adapter), verb, json.dumps(job)]


def environment(threads: int) -> dict[str, str]:
    """No hub, no telemetry, and pools of the agreed size wherever a library has one of its own."""
    return {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}


def digest(checkpoint: Path) -> str:
    """Names a checkpoint by its contents: conversions are kept under it."""
    total = hashlib.sha256((checkpoint / "config.json").read_bytes())
    total.update((checkpoint / "model.safetensors").read_bytes())
    return total.hexdigest()[:12]


def recipe(peer: Peer) -> str:
    """Names how a program converts: its pinned versions and its adapter; for Leadout, which changes, its exporter."""
    total = hashlib.sha256(repr((peer.pip, peer.draft_precision)).encode())
    for path in [HERE / "adapters" / peer.adapter, *(() if peer.pip else sorted(EXPORTER.rglob("*.py")))]:
        total.update(path.read_bytes())
    return total.hexdigest()[:12]


def read_prompts(path: Path, limit: int) -> list[dict[str, Any]]:
    """Prompts as ids with their kind, ``limit`` of each, kinds taking turns."""
    tokenizer = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    kinds: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        kinds.setdefault(row["kind"], []).append({"kind": row["kind"], "ids": tokenizer.encode(row["prompt"]).ids})
    longest = max(len(rows) for rows in kinds.values())
    return [rows[i] for i in range(min(limit, longest)) for rows in kinds.values() if i < len(rows)]


@click.command(
    help=(__doc__ or "").replace("\n\n    py", "\n\n\b\n    py"), context_settings={"max_content_width": 120}
)
@click.option("--pairs", default="demo,grown", show_default=True, callback=several("pairs"))
@click.option("--precisions", default="fp32,int8", show_default=True, callback=several("precisions"))
@click.option("--temperatures", default="0,1", show_default=True, callback=temperatures)
@click.option("--peers", default=",".join(CHOICES["peers"]), show_default=True, callback=several("peers"))
@click.option("--limit-per-kind", type=click.IntRange(1), default=10, show_default=True, help="Prompts of each kind.")
@click.option("--max-new-tokens", type=click.IntRange(2), default=64, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=7, show_default=True)
@click.option("--environment", "folder", default=str(HERE / ".peers"), type=click.Path(path_type=Path), metavar="DIR")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write everything to this file.")
def main(
    pairs: list[str],
    precisions: list[str],
    temperatures: list[float],
    peers: list[str],
    limit_per_kind: int,
    max_new_tokens: int,
    threads: int,
    seed: int,
    folder: Path,
    path: Path | None,
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that stopped children are ended too
    chosen = [peer for peer in PEERS if peer.name in (REFERENCE[0], *peers)]
    prompts = read_prompts(HERE / "kinds.jsonl", limit_per_kind)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
    comparison, results = Comparison(folder.resolve(), threads, max_new_tokens, seed), []
    for pair in pairs:
        for precision in precisions:
            for temperature in temperatures:
                click.echo(f"{pair}, {precision}, temperature {temperature:g}", err=True)
                results.append(comparison.measure(chosen, pair, precision, temperature, prompts))
                click.echo(table(results[-1]) + "\n")
                if path:
                    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_program(main)
