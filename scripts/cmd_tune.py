"""`leadout tune`: measure what steps cost on this device, keep it in the bundle, and say what to expect."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ..errors import BundleError, UsageError
from .cmd_bench import bare_target, chosen, progress
from .options import BUNDLE, ENGINE, PROMPT_LINES, options, prompt_ids

if TYPE_CHECKING:
    from ..engines import Engine
    from ..runtime.device import Device
    from ..runtime.pair import Pair
    from ..runtime.text import Codec


def sizes(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """``1,4,16``: each from 1 to as many as the file of costs takes."""
    from ..engines.base import MOST_ROWS

    try:
        found = tuple(dict.fromkeys(int(part) for part in value.split(",")))
    except ValueError:
        found = ()
    if not found or not 1 <= min(found) <= max(found) <= MOST_ROWS:
        raise click.BadParameter(f"'{value}' is not a list of numbers from 1 to {MOST_ROWS}, for instance 1,4")
    return found


@click.command("tune")
@click.argument("bundle", type=BUNDLE)
@click.option("--prompts", type=click.Path(), metavar="FILE.jsonl", help=f"Your own. {PROMPT_LINES}")
@click.option("--limit", default=12, show_default=True, metavar="N", help="Only the first N prompts, 1 or more.")
@click.option(
    "--batch-sizes",
    default="1,4",
    show_default=True,
    callback=sizes,
    metavar="N,N",
    help="Prompts at once, in turn; each 1 to 4096.",
)
@click.option(
    "--draft",
    "drafts",
    type=BUNDLE,
    multiple=True,
    metavar="BUNDLE",
    help="A bundle with another draft to compare, with all of the target's tokens (not a trimmed one). Repeatable.",
)
@click.option(
    "--max-new-tokens", default=128, show_default=True, metavar="N", help="Tokens to write for each prompt, 1 or more."
)
@click.option("--temperature", default=0.0, show_default=True, metavar="T", help="0 is greedy; else 1e-6 to 1e6.")
@click.option(
    "--context", default=1024, show_default=True, metavar="N", help="Measure contexts of up to N tokens, 1 or more."
)
@click.option("--save/--no-save", default=True, show_default=True, help="Keep the costs in the bundle.")
@options(ENGINE)
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON object.")
def command(
    bundle: str,
    prompts: str | None,
    limit: int,
    batch_sizes: tuple[int, ...],
    drafts: tuple[str, ...],
    max_new_tokens: int,
    temperature: float,
    context: int,
    save: bool,
    as_json: bool,
    **where: Any,
) -> None:
    """Measure what the steps of BUNDLE cost on this device and how much of the draft your prompts accept.

    Prints the speedup to expect for each draft length and number of prompts at once, beside what was observed. The
    costs are kept in BUNDLE/tuned.json, where `leadout generate` starts from them; on a CPU only, for other devices
    have no name here, and not where they do not hold together, because other work ran beside.
    """
    from ..runtime.controller import tuned
    from ..runtime.device import this_device
    from ..runtime.pair import load
    from ..runtime.ranges import integer
    from ..runtime.tune import doubt, tune

    for name, value in (("--limit", limit), ("--context", context)):
        integer(name, value, 1)
    lines, source = chosen(prompts, "tune")
    device = this_device(**where)
    with load(bundle, **where, draft_ahead=False) as pair, contextlib.ExitStack() as opened:
        candidates = {name: opened.enter_context(candidate(name, pair, device)) for name in drafts}
        pair, draft_of = drafting(pair, candidates)
        ids = prompt_ids(pair, lines[:limit])
        settings = {"temperature": temperature, "max_new_tokens": max_new_tokens}
        plain = opened.enter_context(bare_target(pair, device.provider, device.threads, device.variant))
        options: dict[str, Any] = {"plain": plain, "longest_context": context, "progress": progress}
        options["draft_of"] = draft_of
        report, costs = tune(pair, ids, settings, batch_sizes, candidates, **options)
        report["source"], failed = source, None
        if reason := doubt(report):
            report["note"] = f"{reason}: other work ran here, or too few tokens; measure again"
        elif draft_of is not None:
            report["note"] = "the costs are those of another bundle's draft; this one has none"
        elif save and {device.provider, device.draft_provider} == {"cpu"}:
            try:
                report["saved"] = str(tuned.write(pair.bundle, device, costs))
            except BundleError as error:  # the report took minutes: it is shown before that is said
                failed = error
    click.echo(json.dumps(report) if as_json else "\n".join(table(report)))
    if failed is not None:
        raise failed


def drafting(pair: Pair, candidates: dict[str, Engine]) -> tuple[Pair, str | None]:
    """``pair``; where it has no draft, with the first of the ``candidates``, taken from there, and that one's name."""
    from ..runtime.pair import Pair

    if pair.draft is not None or not candidates:
        return pair, None
    name = next(iter(candidates))
    made = Pair(
        pair.bundle, pair.codec, pair.target, candidates.pop(name), exact=pair.exact, batch_size=pair.batch_size
    )
    return made, name


@contextlib.contextmanager
def candidate(name: str, pair: Pair, device: Device) -> Iterator[Engine]:
    """The draft of another bundle, opened. Raises BundleError without one, UsageError if it does not fit."""
    from ..bundle import TOKENIZER, VOCABULARY, Bundle
    from ..engines import open_engine
    from ..runtime.text import Codec

    bundle = Bundle.read(name)
    model = bundle.model("draft")
    have, want = model.entry.vocab_size, pair.target.spec.vocab_size
    other = "a draft that is trimmed, or of another tokenizer, cannot be compared here"
    if have != want or VOCABULARY in model.entry.files:
        found = f"{have} tokens, the target {want}" if have != want else "ids of its own"
        raise UsageError(f"--draft '{name}': its draft has {found}; {other}")
    if not same_tokens(pair.codec, Codec(bundle.path / TOKENIZER)):  # two of one size are no rarity
        raise UsageError(f"--draft '{name}': its draft has other tokens; {other}")
    if model.entry.reads_features:
        raise UsageError(f"--draft '{name}': its draft is a head, which reads the features of its own target alone")
    where: dict[str, Any] = {"provider": device.draft_provider, "threads": device.draft_threads}
    engine = open_engine(model, **where, variant=device.variant)
    try:
        yield engine
    finally:
        engine.close()


def same_tokens(one: Codec, other: Codec) -> bool:
    """Whether an id means the same token to both, but for tokens that stand beside a tokenizer's own (special ones)."""
    found = [codec.tokenizer.get_vocab(with_added_tokens=True) for codec in (one, other)]
    added = {token.content for codec in (one, other) for token in codec.tokenizer.get_added_tokens_decoder().values()}
    return {token for token, _ in found[0].items() ^ found[1].items()} <= added


def table(report: dict[str, Any]) -> list[str]:
    """The report for people, line by line."""
    found = report["batch_sizes"]
    text = [f"speedup over plain decode to expect, {report['prompts']} prompts from {report['source']}", ""]
    text.append(f"{'drafts':>8}" + "".join(f"{f'{rows} at once':>14}" for rows in found))
    for length in range(len(next(iter(found.values()))["predicted"])):
        text.append(f"{length:>8}" + "".join(cell(each, length) for each in found.values()))
    for rows, each in found.items():
        text += ["", *verdict(rows, each, report["drafts"][rows])]
    if "note" in report:
        return [*text, "", f"not kept: {report['note']}"]
    return [*text, "", f"kept in {report['saved']}" if "saved" in report else "not kept"]


def cell(each: dict[str, Any], length: int) -> str:
    mark = "*" if length == each["best_length"] else " "
    return f"{each['predicted'][length]:12.2f} {mark}"


def verdict(rows: int, each: dict[str, Any], drafts: dict[str, dict[str, Any]]) -> list[str]:
    """What was observed of a promise, and which draft is best if there were several."""
    best = each["best_length"]
    text = [
        f"{rows} at once: drafts of {best} observed at {each['observed']:.2f}, {each['off']:+.1%} off"
        f" (tokens a round {each['tokens_rest']:+.1%}, time {each['time_rest']:+.1%});"
        f" draft auto, the default, at {each['auto']:.2f}"
    ]
    if len(drafts) > 1:
        winner = max(drafts, key=lambda name: max(drafts[name]["predicted"]))
        text += [
            f"  {'*' if name == winner else ' '} {name}: {draft['acceptance_rate']:.0%} accepted,"
            f" {draft['draft_ms']:.2f} ms a token, best at {draft['best_length']}: {max(draft['predicted']):.2f}"
            for name, draft in drafts.items()
        ]
    return text
