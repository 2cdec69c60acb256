"""`leadout chat`: a conversation with the pair, a message a line."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError, shown
from .cli import Stopped
from .cmd_generate import summarise, write_pieces
from .options import AHEAD, BUNDLE, ENGINE, SETTINGS, TEXT, check_draft_options, given, options, taken

if TYPE_CHECKING:
    from ..runtime.pair import Pair, Piece

LENGTH = "--max-new-tokens"


@click.command("chat")
@click.argument("bundle", type=BUNDLE)
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation.")
@click.option(
    "--variable",
    "variables",
    type=TEXT,
    multiple=True,
    metavar="NAME=JSON",
    help="What else the chat template reads, for instance enable_thinking=false. Repeatable.",
)
@click.option(
    LENGTH, type=int, metavar="N", help="End an answer after N tokens, 1 or more. [default: when the model does]"
)
@options(tuple(each for each in SETTINGS if each[0] != LENGTH))
@options(ENGINE)
@options(AHEAD)
def command(bundle: str, system: str | None, variables: tuple[str, ...], **settings: Any) -> None:
    """Talk with the pair in BUNDLE, by the chat template of its checkpoint.

    Each line is a message; the answer goes to stdout as it is written, a summary to stderr. Ctrl-C ends an answer,
    Ctrl-D (the end of the input) the conversation.
    """
    from ..runtime.pair import load

    known = read_variables(variables)
    where = taken(settings, ENGINE, AHEAD)
    wanted = given(settings, "-")
    check_draft_options(where, [wanted])
    with load(bundle, **where, batch_size=1) as pair:
        if pair.note:
            click.echo(pair.note, err=True)
        wanted.setdefault("max_new_tokens", pair.target.spec.max_context)
        converse(pair, [] if system is None else [{"role": "system", "content": system}], known, wanted)


def read_variables(texts: Iterable[str]) -> dict[str, Any]:
    """Of each ``NAME=JSON`` the value by its name. Raises UsageError, for a name that is given twice, too."""
    found = dict[str, Any]()
    for text in texts:
        name, value = variable(text)
        if name == "messages":
            raise UsageError("variable 'messages' is the conversation itself; what comes before it is --system")
        if name in found:
            raise UsageError(f"variable '{name}' must be given once, not as {shown(found[name])} and {shown(value)}")
        found[name] = value
    return found


def variable(text: str) -> tuple[str, Any]:
    """``NAME=JSON``: a name and its value. Raises UsageError."""
    name, _, value = text.partition("=")
    try:
        if name.isidentifier():
            return name, json.loads(value)
    except (ValueError, RecursionError):
        pass
    raise UsageError(f"variable '{text}' is not NAME=JSON, for instance enable_thinking=false")


def converse(pair: Pair, messages: list[dict[str, str]], variables: dict[str, Any], settings: dict[str, Any]) -> None:
    """Answer line after line of stdin, each after all before it. Raises what cannot be answered: before the first line
    what is wrong with bundle, settings, variables or what the conversation begins with, ContextError once it has become
    too long."""
    from ..runtime.pair import Chat

    pair.chat_template.check(variables)  # a template that is missing is missed now
    check_beginning(pair, messages, variables, settings)
    for line in lines():
        messages.append({"role": "user", "content": line})
        stream = pair.stream(Chat(messages, **variables), **settings)
        texts: list[str] = []
        try:
            write_pieces(noted(stream, texts))
            summarise(stream.result)
        except Stopped:
            raise
        except KeyboardInterrupt:  # what was written stands
            click.echo()
        messages.append({"role": "assistant", "content": "".join(texts)})


def check_beginning(
    pair: Pair, messages: list[dict[str, str]], variables: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Raise what any first line would end in, and UsageError for a system message that the template leaves out."""
    from ..runtime.pair import Chat

    line = {"role": "user", "content": "x"}
    pair.answers([Chat([*messages, line], **variables)], **settings)  # nothing runs until the first is asked for
    if messages:
        others = [message | {"content": message["content"] + "x"} for message in messages]  # no template's own text
        made, other = (pair.chat_template.render(Chat([*each, line], **variables)) for each in (messages, others))
        if made == other:
            raise UsageError("the bundle's chat template leaves out what --system says")


def lines() -> Iterator[str]:
    """What the user says; lines of white space say nothing. A terminal is asked for each. Raises UsageError, for the
    line that it is, where it is no text."""
    for line in asked() if sys.stdin.isatty() else piped():
        if line.strip():
            yield line


def asked() -> Iterator[str]:
    """The lines that are typed on a terminal."""
    prompt = "> " if sys.stdout.isatty() else ""
    if prompt:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() its line editing
    while True:
        try:
            yield input(prompt)
        except EOFError:
            if prompt:
                click.echo()  # Ctrl-D ends no line
            return
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input: {error}") from None


def piped() -> Iterator[str]:
    """The lines of a pipe or a file, in UTF-8 as other files are, whatever the terminal's characters. They are decoded
    one by one: what is wrong with the next is no matter of this one."""
    number = 0
    try:
        for number, line in enumerate(sys.stdin.buffer, start=1):
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input, line {number}: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read standard input: {error.strerror or error}") from None


def noted(pieces: Iterable[Piece], texts: list[str]) -> Iterator[Piece]:
    """``pieces``, whose texts are put down in ``texts``, also those of an answer that is not taken to its end."""
    for piece in pieces:
        texts.append(piece.text)
        yield piece
