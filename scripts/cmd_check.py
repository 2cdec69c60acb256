"""`leadout check`: does this bundle do on this machine what it promises?"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from ..errors import CheckError, UsageError
from .options import BUNDLE, DEVICE, options

if TYPE_CHECKING:
    from ..runtime.check import Check


@click.command("check")
@click.argument("bundle", type=BUNDLE)
@options(DEVICE)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def command(bundle: str, provider: str, draft_provider: str | None, threads: int | None, as_json: bool) -> None:
    """Check BUNDLE here, without PyTorch: golden logits, step widths, and the same tokens with and without a draft.

    Exits with 7 if anything fails; with 3, at once, if the files are not as the manifest says.
    """
    from ..runtime.check import run

    require_device(bundle, provider, draft_provider, threads)
    failed = []
    for check in run(bundle, provider=provider, draft_provider=draft_provider, threads=threads):
        click.echo(json.dumps(dataclasses.asdict(check)) if as_json else line(check))
        failed += [] if check.ok else [check.name]
    if failed:
        raise CheckError(f"{len(failed)} of the checks failed, first: {failed[0]}")


def require_device(bundle: str, provider: str, draft_provider: str | None, threads: int | None) -> None:
    """Raise, before anything is checked, what would stop it halfway: UsageError, or EngineError for a provider that is
    not there."""
    from ..bundle import read_manifest
    from ..engines import BUILT, providers
    from ..engines.tensorrt import compat
    from ..runtime.device import this_device

    given: dict[str, Any] = {"provider": provider, "draft_provider": draft_provider, "threads": threads}
    device = this_device(**given, draft_threads=None, variant="auto", exact=True)
    if draft_provider not in (None, provider) and "draft" not in read_manifest(bundle).models:
        raise UsageError(f"draft-provider '{draft_provider}': this bundle has no draft model")
    for each in (device.provider, device.draft_provider):
        compat.sdk(each) if each in BUILT else providers.require(each)


def line(check: Check) -> str:
    """One check, for people."""
    return f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.detail}"
