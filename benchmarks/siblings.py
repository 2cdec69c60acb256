"""What several answers to one prompt are worth to each other: tokens a round for 1, 2, 4 and 8 of them, by drafter.

    python benchmarks/siblings.py bundles/demo

``siblings`` drafts from the other answers alone, ``model`` is the baseline that drafts for each on its own, ``suffix``
knows the text itself and what is finished, ``auto`` chooses. A row of a round that commits k tokens counts as one
round with k tokens, so that the figures say how much of the target's work is saved, not how much time. Each cell
starts without any earlier request. Counts do not depend on the machine unless ``--draft-length auto`` or ``auto``
chooses by measured costs. Smaller ``--batch-size``: later answers know finished ones.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import click
from programs import run

from leadout.errors import UsageError
from leadout.runtime.pair import Pair, load
from leadout.runtime.settings import DRAFTS
from leadout.scripts.options import draft_length, read_prompts

PROMPTS = Path(__file__).with_name("prompts.jsonl")
NUMBERS = (1, 2, 4, 8)


def count(pair: Pair, prompts: list[Any], n: int, **settings: Any) -> dict[str, Any]:
    """Answer each prompt n times: tokens a round of a row, milliseconds a token, and the tokens accepted by drafter."""
    pair.forget()
    stats = [answer.stats for prompt in prompts for answer in pair.generate(prompt, n=n, **settings)]
    tokens, rounds = sum(each.tokens for each in stats), sum(each.rounds for each in stats)
    by = {name: sum(each.by_drafter.get(name, {}).get("accepted", 0) for each in stats) for name in DRAFTS}
    return {
        "tokens_per_round": tokens / rounds,
        "tokens": tokens,
        "rounds": rounds,
        "ms_per_token": 1000 * sum(each.total_seconds for each in stats) / tokens,
        "accepted": {name: accepted for name, accepted in by.items() if accepted},
    }


def table(report: dict[str, dict[int, dict[str, Any]]]) -> str:
    """Tokens a round: a line a drafter, a column a number of answers."""
    lines = ["tokens a round" + "".join(f"{n:>8}" for n in NUMBERS) + "  answers"]
    for draft, cells in report.items():
        shown = (f"{cells[n]['tokens_per_round']:8.2f}" if n in cells else f"{'-':>8}" for n in NUMBERS)
        lines.append(f"{draft:14}" + "".join(shown))
    return "\n".join(lines)


@click.command()
@click.argument("bundle")
@click.option("--prompts", default=str(PROMPTS), help="JSON lines with a prompt each. [default: prompts.jsonl]")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N prompts.")
@click.option("--max-new-tokens", default=64, show_default=True, metavar="N")
@click.option("--temperature", default=0.8, show_default=True, metavar="T", help="Above 0: with seed 7, coupled.")
@click.option("--draft-length", type=draft_length, default="4", show_default=True, metavar="N|auto")
@click.option("--batch-size", default=max(NUMBERS), show_default=True, metavar="N", help="Answers written at once.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def main(
    bundle: str, prompts: str, limit: int | None, batch_size: int, as_json: bool, temperature: float, **settings: Any
) -> None:
    """Count what answers to one prompt are worth to each other on the pair in BUNDLE."""
    if temperature == 0:
        raise UsageError("temperature must be above 0: at 0 all answers are the same")
    texts = [line.prompt for line in read_prompts(prompts, "siblings.py")][:limit]
    settings |= {"temperature": temperature, "seed": 7}
    with load(bundle, batch_size=batch_size) as pair:
        drafts = [name for name in ("siblings", "model", "suffix", "auto") if name != "model" or pair.draft is not None]
        report: dict[str, dict[int, dict[str, Any]]] = {draft: {} for draft in drafts}
        for draft, n in itertools.product(drafts, NUMBERS):
            if n > 1 or draft != "siblings":
                click.echo(f"{draft}, answers to a prompt: {n}", err=True)
                report[draft][n] = count(pair, texts, n, draft=draft, **settings)
    click.echo(json.dumps(report) if as_json else table(report))


if __name__ == "__main__":
    run(main)
