"""`leadout build`: TensorRT engines of a bundle's models, on the device or ahead of time."""

from __future__ import annotations

import click

from ..engines import BUILT
from ..engines.tensorrt.buildable import PRECISIONS
from ..errors import ExportError
from .cmd_export import tell
from .options import BUNDLE


@click.command("build")
@click.argument("bundle", type=BUNDLE)
@click.option("--sdk", type=click.Choice(BUILT), required=True, help="Which TensorRT.")
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    default="fp16",
    show_default=True,
    help="Of weights and cache; int4: weights alone, the rest in fp16.",
)
@click.option("--max-batch", type=int, default=4, show_default=True, metavar="B", help="Rows of a step, 1 to 4096.")
@click.option(
    "--max-draft", type=int, default=8, show_default=True, metavar="K", help="Drafted tokens of a round, 1 to 64."
)
@click.option(
    "--max-prefill",
    type=int,
    metavar="P",
    help="Tokens of a prompt at once, more than K, at most M. [default: 512, or M]",
)
@click.option(
    "--capacity", type=int, metavar="M", help="Slots of a row's cache, 2 (K + 1) or more. [default: the context and K]"
)
@click.option("--top", type=int, default=64, show_default=True, metavar="N", help="Logits of the top head, 1 to 3840.")
@click.option("--sm", metavar="SM,...", help="Compute capabilities to build for (tensorrt-rtx). [default: portable]")
def command(
    bundle: str,
    sdk: str,
    precision: str,
    max_batch: int,
    max_draft: int,
    max_prefill: int | None,
    capacity: int | None,
    top: int,
    sm: str | None,
) -> None:
    """Build an engine of each model of BUNDLE, beside the model.

    tensorrt builds for the GPU of this machine; tensorrt-rtx builds ahead of time, without one.
    """
    from ..bundle import Bundle

    found = Bundle.read(bundle)
    try:
        from ..export.tensorrt.build import Sizes, build_engines
    except ModuleNotFoundError as error:
        raise ExportError(
            f"building needs '{error.name}', which is not installed: pip install 'leadout[{sdk}]'"
        ) from None
    sizes = Sizes(max_batch=max_batch, max_draft=max_draft, max_prefill=max_prefill, capacity=capacity, top=top)
    targets = [] if sm is None else sm.split(",")
    for path in build_engines(found, sdk, precision=precision, sizes=sizes, capabilities=targets, progress=tell):
        click.echo(str(path))
