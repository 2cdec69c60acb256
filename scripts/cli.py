"""The command line: which commands there are, and what becomes of an error.

Commands are imported when used, so that `leadout --help` needs neither a runtime nor PyTorch. Results go to stdout,
progress and summaries to stderr; the exit code is the error's own (see ``leadout.errors``), or 128 and the number of
the signal that ended it.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..errors import LeadoutError, one_line

COMMANDS = ("export", "generate", "chat", "bench", "tune", "check", "inspect", "plan", "build", "doctor")
STREAMS = ("stdout", "stderr")
_MOMENT = 0.05  # seconds


class Commands(click.Group):
    """The sub-commands, each in its own module ``cmd_NAME`` as ``command``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f".cmd_{cmd_name}", __package__).command
        # Variables are named as options are, whatever a function calls them; with a prefix of click's own,
        # LEADOUT_VERSION would be one for --version.
        for option in command.params:
            if isinstance(option, click.Option):
                flag = max(option.opts, key=len)
                option.envvar = f"LEADOUT_{cmd_name}_{flag.lstrip('-').replace('-', '_')}".upper()
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and (near := difflib.get_close_matches(args[0], COMMANDS, n=1)):
            ctx.fail(f"no command '{args[0]}'; did you mean '{near[0]}'?")
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        open_streams()
        try:
            return super().main(*args, **kwargs)
        except OSError as error:  # a closed pipe ends in silence before it comes here
            if error.filename not in STREAMS:
                raise
            complain(f"cannot write to {error.filename}: {error.strerror or error}")
            sys.exit(1)

    def make_context(self, info_name: str | None, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(info_name, *args, **kwargs)
        except KeyboardInterrupt as interrupt:
            raise click.exceptions.Exit(stopped(interrupt)) from None
        except (click.NoSuchOption, click.BadOptionUsage) as error:  # the program's own options
            raise click.exceptions.Exit(misused(error, info_name or "")) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with stopped_by_signals():
                return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            ctx.exit(stopped(interrupt))
        except LeadoutError as error:
            complain(one_line(error))
            ctx.exit(error.exit_code)
        except click.UsageError as error:
            ctx.exit(misused(error, ctx.command_path))


def misused(error: click.UsageError, command: str) -> int:
    """Say what click, which would take three lines, could not read of the line of ``command`` or of a command in it.
    Returns the exit code."""
    where = command if error.ctx is None else error.ctx.command_path
    complain(f"{one_line(error.format_message())} (see: {where} --help)")
    return error.exit_code


def stopped(interrupt: KeyboardInterrupt) -> int:
    """Say what ended a command. Returns the exit code."""
    number = interrupt.signal if isinstance(interrupt, Stopped) else signal.SIGINT
    if number == signal.SIGINT and sys.stderr.isatty():
        click.echo(err=True)  # behind the ^C of the terminal, or what was written of an answer
    complain(f"stopped by {number.name}")
    return 128 + number


def complain(line: str) -> None:
    """Say on stderr why a command ends; where nobody can be told, the exit code remains."""
    with contextlib.suppress(OSError):
        click.echo(f"leadout: {line}", err=True)


def open_streams() -> None:
    """Let nothing fail for being printed: a stream may be closed, and may know fewer characters than a model writes.
    One that takes nothing, on a full disk for instance, says which it is. Standard input that is closed is empty, and
    a byte that is no text there is an error in the locale C, too."""
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115  # for good
    elif isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors == "surrogateescape":
        sys.stdin.reconfigure(errors="strict")
    for name in STREAMS:
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # for good
        elif isinstance(stream, io.TextIOWrapper):
            if stream.errors in ("strict", "surrogateescape"):  # the latter in the locale C
                stream.reconfigure(errors="replace")
            setattr(sys, name, NamedStream(stream, name))


class NamedStream:
    """A stream whose errors name it, as those of files do: ``filename`` of an OSError is its name. What it did not take
    is not tried again, for Python's last flush would complain once more."""

    def __init__(self, stream: io.TextIOWrapper, name: str) -> None:
        self._stream, self._name, self._broken = stream, name, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._named():
            return self._stream.write(text)

    def flush(self) -> None:
        if not self._broken:
            with self._named():
                self._stream.flush()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._broken, error.filename = True, self._name
            raise


class Stopped(KeyboardInterrupt):
    """A signal that asks the process to end; what Ctrl-C undoes is undone."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise Stopped inside, once: a terminal that closes sends more than one, and what they end must
    come to its end. One that is ignored, as under nohup, stays so. Where Python drops an exception (in a destructor, a
    callback of C) it comes again a moment later; so does Ctrl-C."""
    again: list[threading.Timer] = []

    def stop(number: int, frame: object) -> None:
        for each in ours:  # not SIG_IGN: of one that has come, too, Python would say that it was lost
            signal.signal(each, lambda number, frame: None)
        raise Stopped(number)

    def dropped(unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(error := unraisable.exc_value, KeyboardInterrupt):
            told(unraisable)
            return
        number = error.signal if isinstance(error, Stopped) else signal.SIGINT
        for each in ours:
            signal.signal(each, stop)
        again.append(threading.Timer(_MOMENT, send, [number]))
        again[-1].daemon = True
        again[-1].start()

    known = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    main_thread = threading.current_thread() is threading.main_thread()  # no other may say what a signal does
    ours = [number for number in known if main_thread and signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, stop)
    told, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        yield
    finally:
        sys.unraisablehook = told
        for timer in again:
            timer.cancel()
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def send(number: int) -> None:
    """Signal the main thread, whatever it waits for."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        signal.raise_signal(number)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog='Completion: eval "$(_LEADOUT_COMPLETE=bash_source leadout)" (or zsh_source, fish_source).',
)
@click.version_option(__version__, prog_name="leadout")
def main() -> None:
    """Speculative decoding on ONNX Runtime: a small draft proposes, the target decides, the text stays the target's."""


if __name__ == "__main__":
    main()
