"""Every fixed draft length against ``auto``, and both against plain decoding: interleaved in one process, one table.

    python benchmarks/lengths.py bundles/demo --limit 20
    python benchmarks/lengths.py bundles/demo --temperature 1 --draft ngram --lengths 1 2 4 8 --json lengths.json

Rates are tokens per second after the prompt, over all prompts; ``of plain`` divides by the fastest plain decode
(width 1, exactness off), ``of best`` by the best fixed length.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import leadout
from leadout.runtime.bench import Bench, Totals, surroundings


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "prompts.jsonl")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--draft", default="model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    result = sweep(options)
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def sweep(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second and tokens a round of every length, prompt after prompt."""
    settings = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature, "draft": options.draft}
    lines = options.prompts.read_text(encoding="utf-8").splitlines()[: options.limit]
    with leadout.load(options.bundle, threads=options.threads) as pair:
        prompts = [pair.token_ids(json.loads(line)["prompt"]) for line in lines]
        runs = {str(n): Bench(pair, settings | {"draft_length": n}) for n in (*options.lengths, "auto")}
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
    } | surroundings()


def table(result: dict[str, Any]) -> str:
    rates, per_round = result["tokens_per_second"], result["tokens_per_round"]
    lines = [f"{'length':>8} {'tokens/s':>9} {'of plain':>9} {'of best':>8} {'a round':>8}"]
    for name, rate in rates.items():
        of_plain, of_best = rate / rates["plain"], rate / rates[result["best"]]
        lines.append(f"{name:>8} {rate:9.1f} {of_plain:9.3f} {of_best:8.3f} {per_round[name]:8.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
