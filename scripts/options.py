"""The options that several commands share, how they become ``Settings`` (flags are field names with dashes), and the
files of prompts that they name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from ..engines import PROVIDERS
from ..errors import BundleError, UsageError, named, shown
from ..runtime.settings import DRAFTS, MODEL_DRAFTS, RULES, check_names
from ..runtime.settings import SETTINGS as FIELDS

if TYPE_CHECKING:
    from ..runtime.pair import Pair

Command = TypeVar("Command", bound=Callable[..., Any])


class BundlePath(click.Path):
    """Where a bundle is. An empty name, a variable that was not set for instance, is not the current directory's."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            raise BundleError("no bundle at '': the name is empty")
        return super().convert(value, param, ctx)


BUNDLE = BundlePath(readable=False)  # a folder need not be listed; what cannot be read of it is a BundleError


class Text(click.types.StringParamType):
    """Any text. Of several that one environment variable gives, each is a line."""

    envvar_list_splitter = "\n"


TEXT = Text()
BIASES = "logit_bias of token"


def draft_length(value: str) -> int | str:
    """A number of tokens, or ``auto``. The range is checked by ``Settings``, as in the Python API."""
    try:
        return value if value == "auto" else int(value)
    except ValueError:
        raise click.BadParameter(f"'{value}' is neither a number nor 'auto'") from None


def schema(value: str) -> str:
    """JSON text of an object as it is, or what is in the file of that name."""
    return value if value.lstrip().startswith("{") else read_text(value)


def branches(value: str) -> tuple[int, ...]:
    """``3,2,1``: children a node, by depth."""
    try:
        return tuple(int(width) for width in value.split(","))
    except ValueError:
        raise click.BadParameter(f"'{value}' is not a list of numbers like 3,2,1") from None


def bias(value: str) -> tuple[int, float]:
    """``ID=VALUE``: what to add to one token's logit."""
    token_id, _, amount = value.partition("=")
    try:
        return int(token_id), float(amount)
    except ValueError:
        raise click.BadParameter(f"'{value}' is not ID=VALUE, for instance 42=-5") from None


def switch(context: click.Context, option: click.Parameter, value: str) -> bool | str:
    """``on`` and ``off`` as the Python API has them."""
    return {"on": True, "off": False}.get(value, value)


SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--max-new-tokens", {"type": int, "metavar": "N", "help": "Stop after N tokens, 1 or more. [default: 128]"}),
    (
        "--min-new-tokens",
        {"type": int, "metavar": "N", "help": "No stop before N tokens, up to --max-new-tokens. [default: 0]"},
    ),
    (
        "--temperature",
        {"type": float, "metavar": "T", "help": "0 is greedy; else 1e-6 to 1e6. [default: the bundle's, or 0]"},
    ),
    (
        "--top-k",
        {"type": int, "metavar": "K", "help": "Sample among the K likeliest; 0 is off. [default: the bundle's, or 0]"},
    ),
    (
        "--top-p",
        {
            "type": float,
            "metavar": "P",
            "help": "Sample among the likeliest that sum to P, above 0; 1 is off. [default: the bundle's, or 1]",
        },
    ),
    (
        "--min-p",
        {
            "type": float,
            "metavar": "P",
            "help": "Drop tokens below P, at most 1, times the likeliest; 0 is off. [default: the bundle's, or 0]",
        },
    ),
    (
        "--repetition-penalty",
        {
            "type": float,
            "metavar": "X",
            "help": "Divide logits of tokens already seen, 1e-6 to 1e6; 1 is off. [default: the bundle's, or 1]",
        },
    ),
    (
        "--presence-penalty",
        {
            "type": float,
            "metavar": "X",
            "help": "Subtract from tokens already written, -1e6 to 1e6; 0 is off. [default: 0]",
        },
    ),
    (
        "--frequency-penalty",
        {"type": float, "metavar": "X", "help": "Subtract for each time written, -1e6 to 1e6; 0 is off. [default: 0]"},
    ),
    (
        "--logit-bias",
        {
            "type": bias,
            "multiple": True,
            "metavar": "ID=VALUE",
            "help": "Add VALUE, -1e12 to 1e12 or -inf, to a token's logit. Repeatable.",
        },
    ),
    ("--stop", {"type": TEXT, "multiple": True, "metavar": "TEXT", "help": "Stop before TEXT. Repeatable."}),
    (
        "--stop-token-id",
        {"type": int, "multiple": True, "metavar": "ID", "help": "Stop at a token, 0 or more. Repeatable."},
    ),
    ("--ignore-eos", {"is_flag": True, "default": None, "help": "Write on after the end-of-text token."}),
    (
        "--seed",
        {"type": int, "metavar": "S", "help": "Repeat a text exactly; 0 to 2**63 - 1. [default: a new one each time]"},
    ),
    (
        "--draft",
        {
            "type": click.Choice(DRAFTS),
            "help": "Who proposes; auto: the most promising, each round. [default: auto]",
        },
    ),
    (
        "--draft-length",
        {"type": draft_length, "metavar": "N|auto", "help": "Tokens to propose a round, 0 to 16. [default: auto]"},
    ),
    (
        "--branches",
        {
            "type": branches,
            "metavar": "N,N,...",
            "help": "Draft a tree of up to 64 nodes, 16 deep: children a node, by depth. With --draft model.",
        },
    ),
    (
        "--rule",
        {
            "type": click.Choice(RULES),
            "help": "Who is accepted; typical and lenient are lossy. [default: auto]",
        },
    ),
    (
        "--typical-epsilon",
        {"type": float, "metavar": "E", "help": "Of rule typical, above 0, at most 1. [default: 0.09]"},
    ),
    ("--typical-delta", {"type": float, "metavar": "D", "help": "Of rule typical, above 0, at most 1. [default: 0.3]"}),
    (
        "--leniency",
        {"type": float, "metavar": "L", "help": "Of rule lenient, above 0, at most 1, which is exact. [default: 0.5]"},
    ),
    ("--json-schema", {"type": TEXT, "metavar": "FILE|JSON", "help": "Answer with JSON that has this schema."}),
    ("--regex", {"type": TEXT, "metavar": "TEXT", "help": "Answer with text that this regular expression matches."}),
    ("--grammar", {"type": click.Path(), "metavar": "FILE", "help": "Answer with text of this Lark grammar."}),
)

DEVICE: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--provider",
        {"type": click.Choice(PROVIDERS), "default": "cpu", "show_default": True, "help": "Where to run."},
    ),
    (
        "--draft-provider",
        {"type": click.Choice(PROVIDERS), "help": "Where the draft model runs. [default: where the target does]"},
    ),
    ("--threads", {"type": int, "metavar": "N", "help": "Threads of each model, 1 to 1024. [default: all cores]"}),
)

ENGINE: tuple[tuple[str, dict[str, Any]], ...] = (
    *DEVICE,
    ("--draft-threads", {"type": int, "metavar": "N", "help": "The draft model's, 1 to 1024. [default: --threads]"}),
    ("--variant", {"default": "auto", "show_default": True, "metavar": "NAME", "help": "Pin a graph of the bundle."}),
    (
        "--exact/--no-exact",
        {
            "default": True,
            "show_default": True,
            "help": "Every step of a greedy or seeded answer rounds alike, whatever its width.",
        },
    ),
)

AHEAD: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--draft-ahead",
        {
            "type": click.Choice(("auto", "on", "off")),
            "default": "auto",
            "show_default": True,
            "callback": switch,
            "help": "Let the draft model work while the target does; auto: while it pays, never on one device.",
        },
    ),
)


def options(table: tuple[tuple[str, dict[str, Any]], ...]) -> Callable[[Command], Command]:
    """Add every option of ``table``, in that order."""

    def add(command: Command) -> Command:
        for flag, arguments in reversed(table):
            command = click.option(flag, **arguments)(command)
        return command

    return add


def taken(values: dict[str, Any], *tables: tuple[tuple[str, dict[str, Any]], ...]) -> dict[str, Any]:
    """What was said for the options of ``tables``, by name, taken out of ``values``."""
    flags = [flag.partition("/")[0] for table in tables for flag, _ in table]
    return {name: values.pop(name) for name in (flag.lstrip("-").replace("-", "_") for flag in flags)}


def check_draft_options(where: dict[str, Any], asked: Sequence[dict[str, Any]]) -> None:
    """Raise UsageError for an option of the draft model in ``where`` that is of no use to any request (``asked``: their
    settings). A draft length that has no effect is only told, for whoever compares drafts gives it to all of them."""
    wanted = [each for each in asked if each.get("draft", "auto") in MODEL_DRAFTS and each.get("draft_length") != 0]
    for name, off in (("draft_provider", (None,)), ("draft_threads", (None,)), ("draft_ahead", ("auto", False))):
        if where[name] not in off and not wanted:
            does = "draft auto or model does, with a draft_length above 0"
            raise UsageError(f"{name} is for the draft model, which no request asks here ({does})")
    if where["draft_ahead"] is True and all(settings.get("branches") for settings in wanted):
        raise UsageError("draft_ahead and branches exclude each other: no one branch is likely to be kept whole")
    if any(each.get("draft") == "none" and each.get("draft_length") not in (None, 0, "auto") for each in asked):
        click.echo("draft_length has no effect with draft 'none': nobody proposes", err=True)


def given(values: dict[str, Any], asked_in: str | None = None) -> dict[str, Any]:
    """The settings the user gave, by the names of ``Settings``; what was not given is left to the bundle. What they are
    for stands in the file ``asked_in``: raises UsageError where that and a setting are both standard input."""
    found = {name: value for name, value in values.items() if value is not None and value != ()}
    if "logit_bias" in found:
        found["logit_bias"] = once(found["logit_bias"], BIASES)
    if "stop_token_id" in found:
        found["stop_token_ids"] = found.pop("stop_token_id")
    for name, read in (("json_schema", schema), ("grammar", read_text)):
        if name in found:
            if found[name] == asked_in == "-":
                raise UsageError(f"{name} cannot be standard input: what is to be answered is read from there")
            found[name] = read(found[name])
    return found


def once(pairs: Iterable[tuple[Any, Any]], what: str = "key") -> dict[Any, Any]:
    """Names and values as a dict. Raises UsageError for a name that stands twice: one value would be lost."""
    found: dict[Any, Any] = {}
    for name, value in pairs:
        if name in found:
            raise UsageError(f"{what} {shown(name)} is given twice")
        found[name] = value
    return found


def read_text(path: str) -> str:
    """A text file the user named, or standard input, which is ``-``. Raises UsageError if it cannot be read."""
    try:
        with click.open_file(path, encoding="utf-8-sig") as file:
            return str(file.read())
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError, as is what is no UTF-8
        what = called(path) if path == "-" else f"'{path}'"
        if isinstance(error, UnicodeDecodeError):
            what += f", line {1 + error.object[: error.start].count(10)}"
        raise UsageError(f"cannot read {what}: {getattr(error, 'strerror', None) or error}") from None


def called(path: str) -> str:
    """What is read as ``path``, by the name that a user knows it by."""
    return "standard input" if path == "-" else path


LABELS = ("kind", "file")
PROMPT_LINES = (
    "One {\"prompt\": ...} or {\"messages\": [...]} a line; labels 'kind' and 'file' are passed over."
    " - is standard input."
)


class Line(NamedTuple):
    """A prompt (text, token ids or a Chat) with settings of its own, and where it stands: ``FILE, line 3``; empty for
    one that is an option."""

    prompt: Any
    settings: dict[str, Any]
    where: str


def read_prompts(path: str, command: str | None = None) -> list[Line]:
    """The prompts of a JSON-lines file, with the settings of each; those are refused where ``command`` has them as
    options alone.

    ``-`` is standard input; ``kind`` and ``file`` are labels and left out. Raises UsageError naming the line.
    """
    found = []
    for number, text in enumerate(read_text(path).split("\n"), start=1):  # other line ends may stand in a string
        if text.strip():
            where = f"{called(path)}, line {number}"
            with named(where):
                row = read_row(text)
                prompt = row.pop("prompt")
                check_names(row) if command is None else check_bare(row, command)
            found.append(Line(prompt, row, where))
    if not found:
        raise UsageError(f"{called(path)}: no prompts in it")
    return found


def read_row(text: str) -> dict[str, Any]:
    """A line as its ``prompt`` (made of ``messages``, if it has these instead) and its settings, by name. Raises
    UsageError for a line that is no such object."""
    from ..runtime.prompts import Chat

    try:
        row = json.loads(text, object_pairs_hook=once)
    except UsageError:  # a ValueError, too
        raise
    except RecursionError:
        raise UsageError("not JSON: its brackets are nested too deep") from None
    except ValueError as error:
        raise UsageError(f"not JSON: {error}") from None
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise UsageError('expected an object like {"prompt": "text"} or {"messages": [{"role": "user", ...}]}')
    if "messages" in row:
        row["prompt"] = Chat(row.pop("messages"))
    elif not is_prompt(row["prompt"]):
        raise UsageError(f"a prompt must be text or a list of token ids, not {shown(row['prompt'])}")
    if isinstance(biases := row.get("logit_bias"), dict):
        row["logit_bias"] = once(map(token_bias, biases, biases.values()), BIASES)
    return {name: value for name, value in row.items() if name not in LABELS}


def is_prompt(value: Any) -> bool:
    """Whether ``value`` is text, or a list that could be of token ids."""
    return isinstance(value, str) or (isinstance(value, list) and {type(each) for each in value} == {int})


def token_bias(token_id: str, amount: Any) -> tuple[int, Any]:
    """A bias as JSON has it: ids are strings there, and there is no -inf but as one. Raises UsageError."""
    try:
        return int(token_id), float(amount) if isinstance(amount, str) else amount
    except ValueError:
        raise UsageError('logit_bias must be token ids and numbers, for instance {"42": -5}') from None


def check_bare(row: dict[str, Any], command: str) -> None:
    """Raise UsageError for what stands beside a prompt."""
    for name in row:
        if name in FIELDS:
            raise UsageError(f"'{name}' is a setting; {command} takes settings as options")
        raise UsageError(f"unknown key '{name}' (known: prompt, messages, {', '.join(LABELS)})")


def prompt_ids(pair: Pair, lines: Iterable[Line]) -> list[list[int]]:
    """The token ids of prompts. Raises UsageError or ContextError naming the line of one that ``pair`` cannot take."""
    found = []
    for line in lines:
        with named(line.where):
            pair.stream(line.prompt, draft="none")  # checks the prompt; nothing runs until pieces are taken
            found.append(pair.token_ids(line.prompt))
    return found
