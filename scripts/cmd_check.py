"""`leadout check`: does this bundle do on this machine what it promises?"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from ..errors import CheckError
from .options import DEVICE, options

if TYPE_CHECKING:
    from ..runtime.check import Check


@click.command("check")
@click.argument("bundle", type=click.Path())
@options(DEVICE)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def command(bundle: str, provider: str, draft_provider: str | None, threads: int | None, as_json: bool) -> None:
    """Check BUNDLE here, without PyTorch: golden logits, step widths, and the same tokens with and without a draft.

    Exits with 7 if anything fails.
    """
    from ..runtime.check import run

    failed = []
    for check in run(bundle, provider=provider, draft_provider=draft_provider, threads=threads):
        click.echo(json.dumps(dataclasses.asdict(check)) if as_json else line(check))
        failed += [] if check.ok else [check.name]
    if failed:
        raise CheckError(f"{len(failed)} of the checks failed, first: {failed[0]}")


def line(check: Check) -> str:
    """One check, for people."""
    return f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.detail}"
