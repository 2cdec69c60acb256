"""Is the automatic mode ever slower than plain decoding? Every kind of text, temperature and batch, one table.

    python benchmarks/never_slower.py bundles/demo --limit 8
    python benchmarks/never_slower.py bundles/demo bundles/demo-int8 --useless --json grid.json
    python benchmarks/never_slower.py bundles/demo-int8 --priced demo-int8 --limit 4

Each cell is tokens per second of ``--draft auto`` over those of the fastest plain decode of as many rows (width 1,
exactness off), the median over groups that alternate in one process; behind it the same over all of them with the
prompts, which a draft model reads, too. ``--useless`` replaces what the draft model says by noise, at its full price.
Batches larger than ``--limit`` take prompts of all kinds. With ``--priced`` steps take what a table of ``devices.json``
says: no noise, the same on every machine. Exit code 1 if a cell (without prompts) is below 0.97.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from devices import SEED, priced
from programs import at_least_one, keep, read_kinds, result_file, run

import leadout
from leadout.engines import Logits, Tokens
from leadout.engines.wrapped import Wrapped
from leadout.runtime.bench import Bench, surroundings
from leadout.scripts.cmd_bench import bare_target

LIMIT = 0.97
GROUPS = 3  # of prompts, at least: a median of one is none


class Useless(Wrapped):
    """A draft model that takes its time and then says what a die says, the same for the same token."""

    row_logits = None  # every step is one of these

    def forward(self, tokens: Tokens, past_lens: Tokens, logit_index: Tokens | None = None) -> Logits:
        logits = super().forward(tokens, past_lens, logit_index)
        noise = np.random.default_rng(int(tokens.sum())).standard_normal(logits.shape[-1], np.float32)
        return np.broadcast_to(noise, logits.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "kinds.jsonl")
    parser.add_argument("--limit", type=at_least_one, default=12, help="prompts of each kind")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.2])
    parser.add_argument("--batches", type=at_least_one, nargs="+", default=[1, 4, 16])
    parser.add_argument("--max-new-tokens", type=at_least_one, default=64)
    parser.add_argument("--provider", default="cpu", help="where to run")
    parser.add_argument("--useless", action="store_true", help="with a draft model that says noise")
    parser.add_argument("--no-exact", action="store_true", help="without the price of exactness")
    parser.add_argument("--priced", metavar="DEVICE", help="with the prices of this device in devices.json")
    parser.add_argument("--json", type=result_file, help="write the cells to this file")
    options = parser.parse_args()
    how = {"provider": options.provider, "useless": options.useless}
    how |= {"exact": not options.no_exact, "priced": options.priced}
    cells: list[dict[str, Any]] = []
    for cell in (cell for bundle in options.bundles for cell in grid(bundle, options)):
        cells.append(cell)
        row = f"{cell['bundle']:12} {cell['kind']:10} T={cell['temperature']:<4} batch {cell['batch']:<3}"
        rate = f"{cell['speedup']:5.2f} of plain's {cell['plain']:7.1f} tokens/s"
        print(f"{row} {rate}, with the prompt {cell['with_prompt']:.2f}", flush=True)
        keep(options.json, how | {"cells": cells} | surroundings())
    below = [cell for cell in cells if cell["speedup"] < LIMIT]
    print(f"{len(cells)} cells, {len(below)} below {LIMIT}; the least {min(cell['speedup'] for cell in cells):.2f}")
    sys.exit(1 if below else 0)


def grid(bundle: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One cell after the other."""
    kinds: dict[str, list[list[int]]] = {}
    with ExitStack() as stack:
        pair = stack.enter_context(leadout.load(bundle, provider=options.provider, exact=not options.no_exact))
        plain = stack.enter_context(bare_target(pair, options.provider, None, "auto"))
        if options.priced:
            plain = stack.enter_context(priced(pair, plain, options.priced))
        if options.useless and pair.draft is not None:
            pair.draft = Useless(pair.draft)
        for kind, texts in read_kinds(str(options.prompts)).items():
            kinds[kind] = [pair.token_ids(text) for text in texts]
        mixed = [prompt for each in zip(*kinds.values(), strict=False) for prompt in each]
        for temperature, batch in itertools.product(options.temperatures, options.batches):
            settings = {"temperature": temperature, "max_new_tokens": options.max_new_tokens, "ignore_eos": True}
            settings |= {"seed": SEED} if options.priced else {}
            bench = Bench(pair, settings, batch, plain)
            for kind, prompts in sorted(kinds.items()) if batch <= options.limit else [("all", mixed)]:
                report = bench.run(prompts[: max(options.limit, GROUPS * batch)])
                yield {
                    "bundle": bundle.name,
                    "kind": kind,
                    "temperature": temperature,
                    "batch": batch,
                    "speedup": report["speedup_median"],
                    "speedup_mean": report["speedup"],
                    "with_prompt": report["speedup_with_prompt"],
                    "plain": report["plain"]["tokens_per_second"],
                }


if __name__ == "__main__":
    run(main)
