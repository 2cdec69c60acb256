"""`leadout bench`: speculation against the fastest plain decode, on this machine."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import (
    AHEAD,
    BUNDLE,
    ENGINE,
    PROMPT_LINES,
    SETTINGS,
    Line,
    called,
    check_draft_options,
    given,
    options,
    prompt_ids,
    read_prompts,
    taken,
)

if TYPE_CHECKING:
    from ..engines import Engine
    from ..runtime.pair import Pair

# A checkout has held-out prompts for the demo pair; an installed package has these.
CHECKOUT = Path(__file__).parents[1] / "benchmarks" / "prompts.jsonl"
BUILT_IN = (
    'def quicksort(items):\n    """Sort a list in place."""\n',
    "import json\nimport sys\n\n\ndef main(argv=None):\n",
    "class LRUCache:\n    def __init__(self, capacity):\n",
    "def fibonacci(n):\n",
    "with open(path, encoding='utf-8') as stream:\n    for line in stream:\n",
    "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def test_empty(self):\n",
)

ENOUGH = 700  # new tokens of all prompts
SHORT = "the first rounds measure this device: take more prompts, or longer answers, before you believe it"

# The usual settings, except that the default temperature is 0 and not the bundle's.
GREEDY = tuple(
    (flag, given | {"help": "0 is greedy; else 1e-6 to 1e6. [default: 0]"} if flag == "--temperature" else given)
    for flag, given in SETTINGS
)


@click.command("bench")
@click.argument("bundle", type=BUNDLE)
@click.option("--prompts", type=click.Path(), metavar="FILE.jsonl", help=PROMPT_LINES)
@click.option("--limit", type=int, metavar="N", help="Only the first N prompts, 1 or more. [default: all]")
@click.option(
    "--batch-size", default=1, show_default=True, metavar="N", help="Prompts at once, 1 or more (above 1, alone, too)."
)
@options(GREEDY)
@options(ENGINE)
@options(AHEAD)
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON object.")
def command(
    bundle: str,
    prompts: str | None,
    limit: int | None,
    batch_size: int,
    as_json: bool,
    **settings: Any,
) -> None:
    """Measure the pair in BUNDLE against the fastest plain decode of its target, alternating in one process.

    The plain side takes steps of width 1 with exactness off. Greedy unless --temperature is given.
    """
    from ..runtime.bench import Bench
    from ..runtime.pair import load
    from ..runtime.ranges import integer

    for name, value in (("--batch-size", batch_size), ("--limit", 1 if limit is None else limit)):
        integer(name, value, 1)
    where = taken(settings, ENGINE, AHEAD)
    wanted = {"temperature": 0.0} | given(settings, prompts)
    lines, source = chosen(prompts, "bench")
    check_draft_options(where, [wanted])
    with load(bundle, **where) as pair:
        if pair.note:
            click.echo(pair.note, err=True)
        ids = prompt_ids(pair, lines[:limit])
        with bare_target(pair, where["provider"], where["threads"], where["variant"]) as plain:
            report = Bench(pair, wanted, batch_size, plain).run(ids, progress)
    report["source"] = source
    click.echo(json.dumps(report) if as_json else table(report))


def chosen(path: str | None, command: str) -> tuple[list[Line], str]:
    """The prompts of the file at ``path``, if it is given, and what they are called. Raises UsageError for a line with
    more than a prompt."""
    if path is None and CHECKOUT.is_file():
        path = str(CHECKOUT)
    if path is None:
        return [Line(prompt, {}, "") for prompt in BUILT_IN], "built-in prompts"
    return read_prompts(path, command), called(path)


def bare_target(pair: Pair, provider: str, threads: int | None, variant: str) -> AbstractContextManager[Engine | None]:
    """A context manager that gives the target's engine for the fastest plain decoding; None if that is the pair's own.
    (Where exactness needs no wider steps, it uses another graph, which is slower.)"""
    from ..engines import open_engine
    from ..engines.base import ANY
    from ..runtime.device import cores

    if not pair.exact or pair.target.spec.widths != ANY:
        return nullcontext()
    target = pair.bundle.model("target")
    return closing(open_engine(target, provider=provider, threads=threads or cores(), variant=variant))


def progress(line: str) -> None:
    """A line that overwrites itself, on a terminal only."""
    if sys.stderr.isatty():
        click.echo(f"\r{line}\x1b[K", err=True, nl=False)


def predicted(speedup: float | None) -> str:
    """What the measured costs of chains alone predict; nothing for trees."""
    return "" if speedup is None else f" (the cost tables predict {speedup:.2f})"


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    rows = [
        ("plain decode", f"{report['plain']['tokens_per_second']:.1f} tokens/s"),
        ("speculative", f"{report['speculative']['tokens_per_second']:.1f} tokens/s"),
        ("speedup", f"{report['speedup']:.2f}{predicted(report['predicted_speedup'])}"),
        ("unaccounted", ", ".join(f"{share:.1%} of {side}" for side, share in report["unaccounted"].items())),
        ("with the prompt", f"{report['speedup_with_prompt']:.2f}"),
        ("accepted", f"{report['acceptance_rate']:.1%} of the tested, {report['tokens_per_round']:.2f} tokens a round"),
        ("distance", f"{report['distance']:.4f} from the target's law a token"),
        ("host share", f"{report['host_share']:.1%}"),
        ("same tokens", {True: "yes", False: "NO", None: "not promised here"}[report["identical_outputs"]]),
        ("prompts", f"{report['prompts']} from {report['source']}, {report['batch_size']} at once"),
        *([] if report["tokens"] >= ENOUGH else [("note", SHORT)]),
        ("hardware", f"{report['hardware']['processor']}, {report['hardware']['cores']} cores"),
        ("versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())),
    ]
    if "alone" in report:
        alone = f"{report['alone']['tokens_per_second']:.1f} tokens/s; at once: {report['batch_gain']:.2f} times that"
        rows.insert(3, ("one at a time", alone))
    for divergence in report["plain_divergences"] or ():
        kind = "near-tie" if divergence["near_tie"] else "FAULT"
        rows.append((kind, f"width 1 parts at token {divergence['position']}, margin {divergence['margin']:.1e}"))
    return "\n".join(f"{name:16} {value}" for name, value in rows)
