"""Show that fast is not wrong: the command line's own output, with every draft, against the target alone.

    python benchmarks/identity.py bundles/demo bundles/demo-int8 bundles/demo-int4

For each bundle, greedy and coupled (temperature 1, seed 7), twenty held-out prompts alone and as one ragged batch:
one line for every comparison, exit code 1 if any token differs. Alone and batched are two graph variants unless one
is pinned; with the fastest of each, every first divergence is listed with its margin in logits.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
from programs import run

from leadout.runtime.divergence import first_divergence
from leadout.runtime.pair import load

PROMPTS = Path(__file__).with_name("prompts.jsonl")
DRAFTS = (
    ("none", "auto"),
    ("model", "auto"),
    ("model", "1"),
    ("model", "3"),
    ("model", "8"),
    ("ngram", "auto"),
    ("ngram", "5"),
    ("suffix", "auto"),
    ("suffix", "6"),
    ("recycling", "auto"),
    ("recycling", "4"),
    ("auto", "auto"),
    ("auto", "4"),
)
MODES = {"greedy": ("--temperature", "0"), "coupled": ("--temperature", "1", "--rule", "coupled", "--seed", "7")}


def generate(bundle: str, prompts: Path, tokens: int, *options: str) -> list[list[int]]:
    """What ``leadout generate --json`` writes: the token ids of every prompt."""
    command = [sys.executable, "-m", "leadout.scripts.cli", "generate", bundle, "--batch-file", str(prompts), "--json"]
    command += ["--max-new-tokens", str(tokens), *options]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [json.loads(line)["token_ids"] for line in lines]


def compare(
    bundle: str, prompts: Path, tokens: int, mode: str, batch: int, *options: str
) -> tuple[bool, list[list[int]]]:
    """All drafts against none; prints the line. Returns whether they agree, and the target's own tokens."""
    common = (*MODES[mode], "--batch-size", str(batch), *options)
    runs = [
        generate(bundle, prompts, tokens, *common, "--draft", draft, "--draft-length", length)
        for draft, length in DRAFTS
    ]
    differing = [f"{d} {n}" for (d, n), run in zip(DRAFTS, runs, strict=True) if run != runs[0]]
    where = "alone" if batch == 1 else f"as one batch of {batch}"
    verdict = f"DIFFERENT: {', '.join(differing)}" if differing else f"{len(DRAFTS)} drafts, same tokens"
    click.echo(f"{bundle} {mode} {where} {' '.join(options)}: {sum(map(len, runs[0]))} tokens, {verdict}")
    return not differing, runs[0]


def near_ties(bundle: str, prompts: Path, alone: list[list[int]], batched: list[list[int]]) -> bool:
    """List the first divergences between alone and batched under ``auto``; returns whether all are near-ties."""
    rows = [json.loads(line)["prompt"] for line in prompts.read_text(encoding="utf-8").splitlines()]
    with load(bundle) as pair:
        found = [first_divergence(pair, pair.token_ids(p), a, b) for p, a, b in zip(rows, alone, batched, strict=True)]
    parted = [d for d in found if d is not None]
    listed = "".join(f"; token {d.position}, margin {d.margin:.2e}{'' if d.near_tie else ' FAULT'}" for d in parted)
    click.echo(f"{bundle} greedy, alone against batched, auto: {len(parted)} of {len(found)} part{listed}")
    return all(d.near_tie for d in parted)


@click.command()
@click.argument("bundles", nargs=-1, required=True)
@click.option(
    "--count",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Prompts, taken evenly from benchmarks/prompts.jsonl.",
)
@click.option("--max-new-tokens", "tokens", default=48, show_default=True)
def main(bundles: tuple[str, ...], count: int, tokens: int) -> None:
    """Compare every draft with the target alone, in every BUNDLE."""
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    prompts = Path("build") / "identity.jsonl"
    prompts.parent.mkdir(exist_ok=True)
    prompts.write_text("\n".join(lines[:: max(1, len(lines) // count)][:count]) + "\n", encoding="utf-8")
    good = True
    for bundle in bundles:
        for mode in MODES:
            alone_ok, alone = compare(bundle, prompts, tokens, mode, 1)
            batch_ok, batched = compare(bundle, prompts, tokens, mode, count)
            good &= alone_ok and batch_ok
            pinned = [
                generate(bundle, prompts, tokens, *MODES[mode], "--variant", "grouped", "--batch-size", str(size))
                for size in (1, count)
            ]
            same = pinned[0] == pinned[1]
            click.echo(
                f"{bundle} {mode}, alone against batched, variant grouped: {'same tokens' if same else 'DIFFERENT'}"
            )
            good &= same
            if mode == "greedy":
                good &= near_ties(bundle, prompts, alone, batched)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    run(main)
