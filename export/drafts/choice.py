"""What a pair's draft is made of (a checkpoint of its own, the target in fewer bits, or the target's own layers for
multi-token prediction), in which precision, and whether it says a whole draft in one step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...errors import ExportError, UsageError, shown

BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4, "int4-128": 4}
PRECISIONS = tuple(BITS)
# A draft's precision costs acceptance, never a token of the answer, and beside the target its weights come from memory
# at every step: the fewest bytes win, unless the pair is made for a GPU.
DRAFT_PRECISIONS = {"fp32": "int4", "fp16": "fp16", "int8": "int4", "int4": "int4", "int4-128": "int4"}
# One that says a whole draft in one step takes wide steps, in which int8 is the faster: of eight tokens the demo draft
# takes 0.6 ms in int8 and 1.0 in int4.
PARALLEL_PRECISIONS = DRAFT_PRECISIONS | {"fp32": "int8", "int8": "int8", "int4": "int8", "int4-128": "int8"}
Made = Literal["checkpoint", "self", "mtp"]  # of one of its own, or how the target drafts for itself
MASK_TOKENS = ("pard_token", "ptd_token_id")  # what config.json calls it (AMD's PARD checkpoints; vLLM reads both)


@dataclasses.dataclass(frozen=True, slots=True)
class DraftChoice:
    """``source``: a checkpoint; ``precisions``: the first of them that keeps close enough is taken; ``made``: of what
    is there ("self": of all of the target, "mtp": of its layers for multi-token prediction)."""

    source: str
    precisions: tuple[str, ...]
    made: Made = "checkpoint"

    def in_one_step(self, precision: str) -> DraftChoice:
        """The same for a draft that says a whole draft in one step, beside a target in ``precision``, where nobody
        asked for the draft's."""
        return dataclasses.replace(self, precisions=_first_then(PARALLEL_PRECISIONS[precision], precision))


class InOneStep(NamedTuple):
    """How a draft is asked for several tokens in one step: by which token of its own, and for how many at most (None:
    by none, and for any number)."""

    mask: int | None = None
    block: int | None = None


def mask_of(source: str, config: Any, asked: int | str | None) -> int | None:
    """The id by which a draft is asked for several tokens in one step: as ``asked`` ("none": it is not), by default
    what its config.json names; None for a draft that says one token a step. Raises UsageError, ExportError for what is
    no id of it."""
    text = config.get_text_config()
    name, found = "mask-token", asked
    if asked is None:
        name = next((name for name in MASK_TOKENS if getattr(text, name, None) is not None), "")
        found = getattr(text, name, None) if name else None
    if found is None or found == "none":
        return None
    ids = int(text.vocab_size)
    if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < ids:
        return found
    if asked is None:
        raise ExportError(f"'{source}': config.json: {name} must be from 0 to {ids - 1}, not {shown(found)}")
    raise UsageError(f"{name} must be from 0 to {ids - 1}, or none, for '{source}', not {shown(found)}")


def choose_draft(target: str, draft: str | Path | None, precision: str, asked: str | None) -> DraftChoice | None:
    """What ``draft`` means: None, a checkpoint, or ``self`` or ``mtp``, which may be followed by a colon and a
    precision. ``asked``: the draft's precision.

    Raises UsageError for an unknown precision, or a target that would draft for itself at its own price.
    """
    for value in (precision, asked or precision):
        check_precision(value)
    if draft is None:
        return None
    made, _, own = str(draft).partition(":")
    if made not in ("self", "mtp"):
        return DraftChoice(str(draft), _in_turn(precision, asked))
    if own and asked:
        raise UsageError(f"draft '{draft}' already says its precision; leave out --draft-precision {asked}")
    if own:
        check_precision(own)
    if made == "mtp":
        return DraftChoice(target, _in_turn(precision, own or asked), "mtp")
    chosen = own or asked or "int4"
    if BITS[chosen] >= BITS[precision]:
        fewer = ", ".join(p for p in PRECISIONS if BITS[p] < BITS[precision]) or "none"
        raise UsageError(
            f"draft 'self' in {chosen} is no cheaper than the target in {precision} (cheaper precisions: {fewer})"
        )
    return DraftChoice(target, (chosen,), "self")


def number_or_word(value: str | None) -> int | str | None:
    """An option as the command line has it: how many tokens or where their ids are, a token's id or ``none``."""
    return int(value) if value is not None and value.isdecimal() else value


def _in_turn(beside: str, asked: str | None) -> tuple[str, ...]:
    """The precision that was ``asked`` for; else the one that serves best beside a target's, then that itself."""
    return (asked,) if asked else _first_then(DRAFT_PRECISIONS[beside], beside)


def _first_then(first: str, other: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((first, other)))


def check_precision(value: str) -> None:
    """Raise UsageError for a precision that does not exist."""
    if value not in PRECISIONS:
        raise UsageError(f"precision '{value}' is unknown (one of: {', '.join(PRECISIONS)})")
