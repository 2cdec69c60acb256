"""The command line: which commands there are, and what becomes of an error.

Commands are imported when used, so that `leadout --help` needs neither a runtime nor PyTorch. Results go to stdout,
progress and summaries to stderr; the exit code is the error's own (see ``leadout.errors``).
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..errors import LeadoutError

COMMANDS = ("export", "generate", "bench", "tune", "check", "inspect", "plan", "build", "doctor")


class Commands(click.Group):
    """The sub-commands, each in its own module ``cmd_NAME`` as ``command``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f".cmd_{cmd_name}", __package__).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and (near := difflib.get_close_matches(args[0], COMMANDS, n=1)):
            ctx.fail(f"no command '{args[0]}'; did you mean '{near[0]}'?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        open_streams()
        try:
            return super().invoke(ctx)
        except LeadoutError as error:
            click.echo("leadout: " + " ".join(str(error).split()), err=True)
            ctx.exit(error.exit_code)


def open_streams() -> None:
    """Let nothing fail for being printed: a stream may be closed, and may know fewer characters than a model writes."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  # for good
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "LEADOUT"},
    epilog='Completion: eval "$(_LEADOUT_COMPLETE=bash_source leadout)" (or zsh_source, fish_source).',
)
@click.version_option(__version__, prog_name="leadout")
def main() -> None:
    """Speculative decoding on ONNX Runtime: a small draft proposes, the target decides, the text stays the target's."""


if __name__ == "__main__":
    main()
