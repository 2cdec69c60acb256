"""`leadout generate`: text to stdout as it comes, what it cost to stderr."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError, named, shown
from .options import (
    AHEAD,
    BUNDLE,
    ENGINE,
    SETTINGS,
    TEXT,
    Line,
    check_draft_options,
    given,
    options,
    read_prompts,
    taken,
)

if TYPE_CHECKING:
    from rich.segment import Segment

    from ..runtime.pair import Pair, Piece, Result, Stream

STATS = (
    "held",
    "rounds",
    "drafted",
    "tested",
    "accepted",
    "acceptance_rate",
    "tested_per_position",
    "accepted_per_position",
    "by_drafter",
    "tokens_per_round",
    "tokens_per_second",
    "seconds",
)

# A model may write escape sequences; a terminal must not obey them.
HARMLESS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
HARMLESS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)  # some obey these, too, and no characters depict them


@click.command("generate")
@click.argument("bundle", type=BUNDLE)
@click.option(
    "-p",
    "--prompt",
    "prompts",
    type=TEXT,
    multiple=True,
    metavar="TEXT",
    help="What to continue. Repeatable: a batch.",
)
@click.option(
    "--batch-file",
    type=click.Path(),
    metavar="FILE.jsonl",
    help='One {"prompt": ..., any settings} a line: a batch. "messages" may stand for the prompt; labels \'kind\' and'
    " 'file' are passed over. - is standard input.",
)
@click.option(
    "--batch-size", default=16, show_default=True, metavar="N", help="The most prompts to run at once, 1 or more."
)
@click.option(
    "--n",
    type=int,
    metavar="N",
    help="Answers to each prompt, 1 to 1024, as samples that share its cache. [default: 1]",
)
@options(SETTINGS)
@options(ENGINE)
@options(AHEAD)
@click.option("--json", "as_json", is_flag=True, help="One JSON object an answer instead of text.")
def command(
    bundle: str,
    prompts: tuple[str, ...],
    batch_file: str | None,
    batch_size: int,
    n: int | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Continue prompts with the pair in BUNDLE.

    Text goes to stdout as it is written (on a terminal, what the draft proposed is tinted), a summary to stderr.
    """
    from ..runtime.pair import Request, load

    where = taken(settings, ENGINE, AHEAD)
    wanted = given(settings, batch_file)
    lines = [Line(prompt, {}, f"prompt {shown(prompt)}" if prompts[1:] else "") for prompt in prompts]
    lines += [] if batch_file is None else read_prompts(batch_file)
    if not lines:
        raise UsageError("nothing to continue; give -p TEXT or --batch-file FILE.jsonl")
    check_draft_options(where, [wanted | line.settings for line in lines])
    with load(bundle, **where, batch_size=batch_size) as pair:
        if pair.note:
            click.echo(pair.note, err=True)
        if as_json or len(lines) > 1 or n is not None:
            write_batch(pair, lines, wanted, as_json, n)
        else:
            check_lines(pair, lines, wanted)
            write_stream(pair.stream(Request(lines[0].prompt, **lines[0].settings), **wanted))


def check_lines(pair: Pair, lines: Sequence[Line], settings: dict[str, Any], n: int = 1) -> None:
    """Raise UsageError or ContextError for what cannot be answered, before anything runs: the options, or a line, which
    is named. One whose prompt stands in another, too, is asked for twice: answers to it may draft from each other."""
    from ..runtime.pair import Request

    pair.settings(settings)
    prompts = []
    for line in lines:
        with named(line.where):
            prompts.append(tuple(pair.token_ids(line.prompt)))
    counts = Counter(prompts)
    for line, prompt in zip(lines, prompts, strict=True):
        with named(line.where):
            pair.answers([Request(line.prompt, **line.settings)] * min(counts[prompt], 2), n=n, **settings)


def write_stream(stream: Stream) -> None:
    """Show an answer as it comes, then the summary."""
    write_pieces(stream)
    summarise(stream.result)


def write_pieces(pieces: Iterable[Piece]) -> None:
    """Show pieces as they come, drafted ones tinted, and end the line."""
    from rich.console import Console
    from rich.segment import Segments

    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    for piece in pieces:
        if console.is_terminal:
            console.print(Segments(tinted(piece)), end="")
        else:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    click.echo()


def tinted(piece: Piece) -> Iterator[Segment]:
    """A piece as a terminal gets it: line by line, and not as rich's Text, which writes spaces for tabs."""
    from rich.segment import Segment
    from rich.style import Style

    tint = Style(color="cyan") if piece.from_draft else None
    for part in re.split("(\n)", piece.text.translate(HARMLESS)):
        yield Segment(part, None if part == "\n" else tint)


def write_batch(
    pair: Pair, lines: Sequence[Line], settings: dict[str, Any], as_json: bool, n: int | None = None
) -> None:
    """Answer all lines (each ``n`` times), in order and as they are finished: a JSON object a line, or the texts one
    after the other."""
    from ..runtime.pair import Request
    from ..runtime.samples import check_n

    each = 1 if n is None else check_n(n)
    check_lines(pair, lines, settings, each)
    for result in in_order(pair.answers([Request(line.prompt, **line.settings) for line in lines], n=each, **settings)):
        text = result.text.translate(HARMLESS) if sys.stdout.isatty() else result.text
        sys.stdout.write((json.dumps(to_json(result)) if as_json else text) + "\n")  # click.echo leaves escapes out
        sys.stdout.flush()
        if not as_json:
            summarise(result)


def in_order(found: Iterable[tuple[int, Result]]) -> Iterator[Result]:
    """Results, each with its index, as soon as they and all before them are there."""
    waiting: dict[int, Result] = {}
    place = 0
    for index, result in found:
        waiting[index] = result
        while place in waiting:
            yield waiting.pop(place)
            place += 1


def to_json(result: Result) -> dict[str, Any]:
    """A result as `--json` prints it."""
    row = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return row | {"stats": {name: getattr(result.stats, name) for name in STATS}}


def summarise(result: Result) -> None:
    """One line on stderr: tokens, speed, acceptance, rule."""
    from ..runtime.settings import LOSSY

    stats = result.stats
    parts = [
        f"{stats.tokens} tokens in {stats.total_seconds:.2f} s, {stats.tokens_per_second:.0f} a second",
        f"{stats.tokens_per_round:.2f} a round",
        f"draft {result.draft}: {stats.accepted} of {stats.tested} accepted{shares(result)}"
        if stats.tested
        else "no draft",
        f"{result.rule}{'' if result.seed is None else f' with seed {result.seed}'}",
        f"stopped by {result.finish_reason}",
    ]
    if result.rule in LOSSY and not result.lossless:  # without a draft it is exact, whatever the rule
        parts.insert(-1, f"LOSSY: {result.distance:.4f} from the target's law a token")
    click.echo("; ".join(parts), err=True)


def shares(result: Result) -> str:
    """Which drafter the accepted tokens came from, where there was a choice."""
    if result.draft != "auto":
        return ""
    counts = sorted(((counts["accepted"], name) for name, counts in result.stats.by_drafter.items()), reverse=True)
    listed = ", ".join(f"{name} {accepted}" for accepted, name in counts if accepted)
    return f" ({listed})" if listed else ""
