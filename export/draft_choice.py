"""What a pair's draft is made of: a checkpoint of its own, or the target itself in fewer bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..errors import UsageError

BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}
PRECISIONS = tuple(BITS)
# A draft's precision costs acceptance, never a token of the answer, and beside the target its weights come from memory
# at every step: the fewest bytes win, unless the pair is made for a GPU.
DRAFT_PRECISIONS = {"fp32": "int4", "fp16": "fp16", "int8": "int4", "int4": "int4"}
SELF = "self"


@dataclasses.dataclass(frozen=True, slots=True)
class DraftChoice:
    """``source``: a checkpoint; ``precisions``: the first of them that keeps close enough is taken."""

    source: str
    precisions: tuple[str, ...]
    itself: bool = False


def choose_draft(target: str, draft: str | Path | None, precision: str, asked: str | None) -> DraftChoice | None:
    """What ``draft`` means: None, a checkpoint, ``self`` or ``self:PRECISION``. ``asked``: the draft's precision.

    Raises UsageError for an unknown precision, or a target that would draft for itself at its own price.
    """
    for value in (precision, asked or precision):
        check_precision(value)
    if draft is None:
        return None
    name, _, own = str(draft).partition(":")
    if name != SELF:
        first = asked or DRAFT_PRECISIONS[precision]
        return DraftChoice(str(draft), (first,) if asked else tuple(dict.fromkeys((first, precision))))
    if own and asked:
        raise UsageError(f"draft '{draft}' already says its precision; leave out --draft-precision {asked}")
    check_precision(chosen := own or asked or "int4")
    if BITS[chosen] >= BITS[precision]:
        fewer = ", ".join(p for p in PRECISIONS if BITS[p] < BITS[precision]) or "none"
        raise UsageError(
            f"draft '{SELF}' in {chosen} is no cheaper than the target in {precision} (cheaper precisions: {fewer})"
        )
    return DraftChoice(target, (chosen,), itself=True)


def check_precision(value: str) -> None:
    """Raise UsageError for a precision that does not exist."""
    if value not in PRECISIONS:
        raise UsageError(f"precision '{value}' is unknown (one of: {', '.join(PRECISIONS)})")
