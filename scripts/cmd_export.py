"""`leadout export`: checkpoints, or other exporters' ONNX directories, become a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..bundle import Bundle, read_manifest
from ..errors import UsageError, not_installed, require_docstrings
from ..export.drafts.choice import PRECISIONS, number_or_word


@click.command("export")
@click.argument("target", required=False)
@click.option(
    "--draft",
    metavar="DRAFT",
    help="The draft: a model or head (EAGLE, DFlash), as a directory or hub id; mtp, the target's own layers for"
    " multi-token prediction; or self[:int4], the target in int4.",
)
@click.option("--from-onnx", "onnx_target", type=click.Path(), metavar="DIR", help="An exported target instead.")
@click.option("--draft-from-onnx", "onnx_draft", type=click.Path(), metavar="DIR", help="An exported draft instead.")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(),
    metavar="BUNDLE",
    help="Where to write. A bundle there is replaced, with its engines and tuned.json.",
)
@click.option("--precision", type=click.Choice(PRECISIONS), help="Of the target's weights. [default: fp32]")
@click.option(
    "--draft-precision",
    type=click.Choice(PRECISIONS),
    help="Of the draft's weights. [default: int4 (int8, if it says drafts in one step); with fp16, fp16]",
)
@click.option(
    "--draft-vocabulary", metavar="N|FILE", help="Let the draft say only its N likeliest tokens, or the ids in FILE."
)
@click.option(
    "--calibration",
    type=click.Path(),
    multiple=True,
    metavar="TEXTFILE",
    help="A text whose tokens are the likely ones. Repeatable.",
)
@click.option(
    "--mask-token",
    metavar="ID|none",
    help="The draft's token that asks it for a whole draft in one step (PARD). [default: as its config.json says]",
)
@click.option("--max-context", type=int, metavar="N", help="Positions to allow, 2 to the model's own. [default: these]")
def command(
    target: str | None,
    draft: str | None,
    onnx_target: str | None,
    onnx_draft: str | None,
    output: str,
    precision: str | None,
    draft_precision: str | None,
    draft_vocabulary: str | None,
    calibration: tuple[str, ...],
    mask_token: str | None,
    max_context: int | None,
) -> None:
    """Write BUNDLE from TARGET (a checkpoint directory or hub id) and its draft.

    With --from-onnx, TARGET is a directory that optimum, onnx-community or onnxruntime-genai wrote, and its draft one
    (--draft-from-onnx) or a checkpoint (--draft); graphs keep the precision they have.
    """
    paths = {"TARGET": target, "--draft": draft, "--from-onnx": onnx_target, "--draft-from-onnx": onnx_draft}
    for name, path in (paths | {"-o": output}).items():
        if path == "":  # a variable that was not set, for instance: neither the current directory nor nothing
            raise UsageError(f"{name}: the name is empty")
    if (target is None) == (onnx_target is None):
        raise UsageError("give one target: TARGET (a checkpoint) or --from-onnx DIR")
    if onnx_target is None and onnx_draft is not None:
        raise UsageError("--draft-from-onnx goes with --from-onnx; give the draft with --draft")
    try:
        if onnx_target is None:
            options = {
                "precision": precision or "fp32",
                "draft_precision": draft_precision,
                "draft_vocabulary": number_or_word(draft_vocabulary),
                "calibration": calibration,
                "mask_token": number_or_word(mask_token),
                "max_context": max_context,
            }
            export_checkpoints(str(target), draft, output, options)
        else:
            for_draft = {
                "draft_precision": draft_precision,
                "draft_vocabulary": number_or_word(draft_vocabulary),
                "calibration": calibration,
                "mask_token": number_or_word(mask_token),
            }
            if precision is not None or max_context is not None:
                raise UsageError("--from-onnx takes no --precision and no --max-context: the graphs stay as they are")
            import_onnx(onnx_target, onnx_draft, draft, output, for_draft)
    except ImportError as error:
        raise not_installed(error) from None
    click.echo(output)


def export_checkpoints(target: str, draft: str | None, output: str, options: dict[str, Any]) -> None:
    """Export two checkpoints, ``options`` as for ``export_pair``; say so if the bundle's prompts of a conversation are
    not those of transformers."""
    require_docstrings()
    from ..export.build import export_pair
    from .chat_probe import difference

    export_pair(target, draft, Path(output), progress=tell, **options)
    if line := difference(Bundle(Path(output), read_manifest(output)), target):
        tell(line)


def import_onnx(target: str, onnx_draft: str | None, draft: str | None, output: str, for_draft: dict[str, Any]) -> None:
    """Import a target, and a draft or a checkpoint that drafts for it, ``for_draft`` as for ``beside_import``."""
    from ..export.foreign.importing import import_pair

    if draft is not None and onnx_draft is not None:
        raise UsageError("give one draft: --draft (a checkpoint) or --draft-from-onnx")
    if draft is None and any(each not in (None, ()) for each in for_draft.values()):
        raise UsageError("options of a draft go with --draft, a checkpoint: graphs stay as they are")
    made = None
    if draft is not None:
        require_docstrings()
        from ..export.build import beside_import

        made = beside_import(draft, progress=tell, **for_draft)
    import_pair(Path(target), Path(onnx_draft) if onnx_draft else None, Path(output), draft=made, progress=tell)


def tell(line: str) -> None:
    """Progress, to stderr."""
    click.echo(line, err=True)
