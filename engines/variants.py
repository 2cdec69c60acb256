"""Which graph of a bundle takes the steps of so many rows: pure choices among names."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..bundle import Model, ModelEntry
from ..errors import EngineError, UsageError
from .base import ONE_ROW
from .strides import STRIDE, STRIDE_ROWS, STRIDES

# The graphs for one row, best first: those that take it soonest, those that let a token alone round like many, and
# those for processors whose attention rounds by what is left over (``rounding``), which many rows take anyway.
SOONEST, ROUNDING_ALIKE, WITHOUT_REST = ("gqa", "grouped"), ("gqa_even", "grouped", "gqa"), ("grouped", "nonpad")
# Parameters up to which a graph of its own, for steps that may round as they like, is worth holding the weights twice:
# it is 4 % sooner than ``gqa_even`` told so on 16 M of them, and it is nodes that it saves, not arithmetic.
_SMALL = 1 << 25


def require_possible(model: Model, provider: str, pinned: str) -> None:
    """Raise UsageError where ``provider`` runs no such model, or not the variant ``pinned``, or the bundle has none of
    that name."""
    if provider not in ("cpu", "cuda") and pinned not in ("auto", "canonical"):
        raise UsageError(f"variant '{pinned}': provider '{provider}' takes canonical alone")
    if pinned != "auto":
        model.path(pinned)
    if pinned == STRIDES and model.entry.variants.keys().isdisjoint(ONE_ROW):
        raise UsageError(f"variant '{pinned}' takes steps of {STRIDE} tokens; {model.folder.name} has no graph for one")
    if model.entry.recurrence is not None and provider != "cpu":
        raise UsageError(f"{model.folder.name} has recurrent layers, which run with provider cpu, not '{provider}'")


def choose(entry: ModelEntry, rows: int, provider: str, alone: Sequence[str], pinned: str = "auto") -> str:
    """For ``rows`` rows on ``provider``, of the variants that there are, ``pinned`` unless that is "auto"; ``alone`` is
    what one row on a CPU takes, best first. Raises EngineError for a pinned one that takes fewer rows."""
    if pinned in ONE_ROW and rows > 1:
        raise EngineError(f"variant '{pinned}' takes one row, not {rows}: use variant 'grouped' or 'auto'")
    if pinned != "auto":
        return pinned
    if provider not in ("cpu", "cuda"):
        return "canonical"
    have = entry.variants
    enough = STRIDE_ROWS // 2 if entry.parameters <= _SMALL else STRIDE_ROWS
    strides = rows >= enough and alone == ROUNDING_ALIKE and "gqa_even" in have
    many = (STRIDES, *WITHOUT_REST) if strides else WITHOUT_REST
    wanted = ("nonpad",) if provider != "cpu" else alone if rows == 1 else many
    return next((name for name in wanted if name in have), "canonical")


def without_equal_bits(variant: str, entry: ModelEntry) -> str:
    """The graph in the place of ``variant`` while no step has to round like another."""
    return "gqa" if variant == "gqa_even" and "gqa" in entry.variants and entry.parameters <= _SMALL else variant


def graphs_of(variant: str, one: str, entry: ModelEntry, *, sooner: bool, apart: bool) -> tuple[str, dict[int, str]]:
    """The graph of steps that do not branch, where ``choose`` says ``variant`` for all rows and ``one`` for one; and
    those that take steps of certain widths in its place. ``sooner``: no step has to round like another; ``apart``: none
    of one token in many rows like wider ones, so that ``one`` may take it."""
    if variant == STRIDES:
        one = next(name for name in ("gqa_even", "gqa") if name in entry.variants)
        return one, {1: one, STRIDE: variant}
    if sooner:
        variant, one = (without_equal_bits(each, entry) for each in (variant, one))
    return variant, {1: one} if apart and variant not in ONE_ROW and one in ONE_ROW else {}


def branching(variant: str, have: Collection[str]) -> str:
    """The graph for steps that branch, where other steps take ``variant``."""
    return "tree_gqa" if variant in ONE_ROW and "tree_gqa" in have else "tree"


def sessions(entry: ModelEntry, rows: int, *, exact: bool) -> int:
    """How many sessions, each with weights of its own, an engine on a CPU comes to hold for batches of 1 and ``rows``
    rows that do not branch."""
    preferred = ROUNDING_ALIKE if exact else SOONEST
    one, many = (choose(entry, each, "cpu", preferred) for each in (1, rows))
    return len({one, without_equal_bits(one, entry), many})
