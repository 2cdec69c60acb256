"""Every fixed draft length against ``auto``, and both against plain decoding: interleaved in one process, one table.

    python benchmarks/lengths.py bundles/demo --limit 20
    python benchmarks/lengths.py bundles/demo --temperature 1 --draft ngram --lengths 1 2 4 8 --json lengths.json
    python benchmarks/lengths.py bundles/demo --by-kind  # a table for each kind of text in kinds.jsonl
    python benchmarks/lengths.py bundles/demo --by-kind --priced grown-int8  # on the prices of devices.json: no noise

Rates are tokens per second after the prompt, over all prompts; ``of plain`` divides by the fastest plain decode
(width 1, exactness off), ``of best`` by the best fixed length.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from devices import SEED, priced
from programs import at_least_one, keep, read_kinds, result_file, run

import leadout
from leadout.runtime.bench import Bench, Group, Totals, surroundings
from leadout.scripts.options import read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, help="JSON lines (prompts.jsonl beside this; kinds.jsonl by kind)")
    parser.add_argument("--by-kind", action="store_true", help="a table for each 'kind' of the prompts")
    parser.add_argument("--limit", type=at_least_one, default=20, help="prompts of each table")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8])
    parser.add_argument("--max-new-tokens", type=at_least_one, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--draft", default="model")
    parser.add_argument("--provider", default="cpu", help="where to run")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--priced", metavar="DEVICE", help="with the prices of this device in devices.json")
    parser.add_argument("--json", type=result_file, help="write the result to this file")
    options = parser.parse_args()
    options.plain = None
    result = {}
    with ExitStack() as stack:
        pair = stack.enter_context(leadout.load(options.bundle, provider=options.provider, threads=options.threads))
        if options.priced:
            options.plain = stack.enter_context(priced(pair, None, options.priced))
        for kind, prompts in prompts_of(pair, options).items():
            result[kind] = sweep(pair, prompts[: options.limit], options)
            print(f"{kind}\n{table(result[kind])}", flush=True)
            keep(options.json, (result if options.by_kind else result["all"]) | surroundings())


def prompts_of(pair: leadout.Pair, options: argparse.Namespace) -> dict[str, Group]:
    """The token ids of the prompts, by kind (``all`` where kinds are not asked for)."""
    name = "kinds.jsonl" if options.by_kind else "prompts.jsonl"
    path = str(options.prompts or Path(__file__).parent / name)
    if not options.by_kind:
        return {"all": [pair.token_ids(line.prompt) for line in read_prompts(path)]}
    return {kind: [pair.token_ids(text) for text in texts] for kind, texts in read_kinds(path).items()}


def sweep(pair: leadout.Pair, prompts: Group, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second and tokens a round of every length, prompt after prompt."""
    settings = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature, "draft": options.draft}
    settings |= {"seed": SEED} if options.priced else {}
    runs = {str(n): Bench(pair, settings | {"draft_length": n}, 1, options.plain) for n in (*options.lengths, "auto")}
    totals = {name: Totals() for name in ("plain", *runs)}
    plain = next(iter(runs.values()))
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first time warms up
        for name in totals if number % 2 else reversed(totals):
            into = totals[name] if number else Totals()
            (plain.time_plain if name == "plain" else runs[name].time_speculative)([prompt], into)
        if not number:
            for run in runs.values():
                run.speculative.forget()
    rates = {name: side.tokens_per_second for name, side in totals.items()}
    best = max(map(str, options.lengths), key=rates.__getitem__)
    return {
        "tokens_per_second": rates,
        "tokens_per_round": {name: side.count("tokens") / side.count("rounds") for name, side in totals.items()},
        "best": best,
        "auto_of_best": rates["auto"] / rates[best],
    }


def table(result: dict[str, Any]) -> str:
    rates, per_round = result["tokens_per_second"], result["tokens_per_round"]
    lines = [f"{'length':>8} {'tokens/s':>9} {'of plain':>9} {'of best':>8} {'a round':>8}"]
    for name, rate in rates.items():
        of_plain, of_best = rate / rates["plain"], rate / rates[result["best"]]
        lines.append(f"{name:>8} {rate:9.1f} {of_plain:9.3f} {of_best:8.3f} {per_round[name]:8.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
