"""Who proposes what, and how much of it is kept: every drafter over prompts of several kinds, counted in rounds.

    python benchmarks/drafters.py bundles/demo

One table a kind of prompt (the field ``kind`` of each line): tokens a round, and for each drafter its rounds and the
tokens it had accepted in them. Nothing is timed here. Draft lengths are chosen from costs measured on the way unless
``--draft-length`` fixes them. Each drafter starts without any earlier request.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import click
from programs import read_kinds, run

from leadout.runtime.pair import Pair, load
from leadout.runtime.settings import DRAFTS as ALL_DRAFTS
from leadout.scripts.options import draft_length

PROMPTS = Path(__file__).with_name("kinds.jsonl")
DRAFTS = tuple(name for name in ALL_DRAFTS if name != "siblings")  # it takes several answers: siblings.py


def count(pair: Pair, prompts: list[str], **settings: Any) -> dict[str, Any]:
    """Answer one prompt after the other: tokens a round, and each drafter's rounds and accepted tokens."""
    totals: Counter[str] = Counter()
    by: dict[str, Counter[str]] = defaultdict(Counter)
    for prompt in prompts:
        stats = pair.generate(prompt, **settings).stats
        totals.update(tokens=stats.tokens, rounds=stats.rounds)
        for name, counts in stats.by_drafter.items():
            by[name].update(counts)
    return {"tokens_per_round": totals["tokens"] / totals["rounds"], **totals, "by_drafter": by}


def line(draft: str, row: dict[str, Any]) -> str:
    """One drafter's counts, for people."""
    shares = sorted(row["by_drafter"].items(), key=lambda item: -item[1]["rounds"])
    listed = ", ".join(f"{name} {counts['accepted']} in {counts['rounds']}" for name, counts in shares)
    return f"  {draft:10} {row['tokens_per_round']:5.2f} tokens a round; accepted tokens: {listed} rounds"


@click.command()
@click.argument("bundle")
@click.option("--prompts", default=str(PROMPTS), help="JSON lines with kind and prompt. [default: kinds.jsonl]")
@click.option("--draft", "drafts", multiple=True, type=click.Choice(DRAFTS), help="Repeatable. [default: all]")
@click.option("--draft-length", type=draft_length, default="auto", show_default=True, metavar="N|auto")
@click.option("--max-new-tokens", default=128, show_default=True, metavar="N")
@click.option("--temperature", default=0.0, show_default=True, metavar="T", help="Above 0: with seed 7, coupled.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N prompts of each kind.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def main(bundle: str, prompts: str, drafts: tuple[str, ...], limit: int | None, as_json: bool, **settings: Any) -> None:
    """Count what each drafter of BUNDLE proposes and the target accepts."""
    kinds = read_kinds(prompts)
    report: dict[str, dict[str, Any]] = {kind: {} for kind in kinds}
    with load(bundle) as pair:
        for draft in drafts or [name for name in DRAFTS if name != "model" or pair.draft is not None]:
            pair.forget()
            for kind, texts in kinds.items():
                report[kind][draft] = count(pair, texts[:limit], draft=draft, seed=7, **settings)
    for kind, rows in () if as_json else report.items():
        click.echo("\n".join([kind, *(line(draft, row) for draft, row in rows.items())]))
    if as_json:
        click.echo(json.dumps(report))


if __name__ == "__main__":
    run(main)
