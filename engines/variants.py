"""Which graph of a bundle takes the steps of so many rows: pure choices among names."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from ..bundle import Model, ModelEntry
from ..errors import EngineError, UsageError
from .base import EVEN, ONE_ROW, RAGGED, Widths

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
    if model.entry.recurrence is not None and provider != "cpu":
        raise UsageError(f"{model.folder.name} has recurrent layers, which run with provider cpu, not '{provider}'")


def choose(entry: ModelEntry, rows: int, provider: str, alone: Sequence[str], pinned: str = "auto") -> str:
    """For ``rows`` rows on ``provider``, of the variants that there are, ``pinned`` unless that is "auto"; ``alone`` is
    what one row on a CPU takes, best first. More take the smallest of the ragged ones that has room for all, or the
    largest again and again; or, where their attention would round by what is left over, ``grouped``. TensorRT's
    providers take ``canonical`` alone: they misread others in silence. Raises EngineError for a pinned one that takes
    fewer rows."""
    if pinned in ONE_ROW and rows > 1:
        raise EngineError(f"variant '{pinned}' takes one row, not {rows}: use variant 'grouped' or 'auto'")
    if pinned != "auto":
        return pinned
    if provider not in ("cpu", "cuda"):
        return "canonical"
    have = entry.variants
    many: tuple[str, ...] = WITHOUT_REST
    if alone != WITHOUT_REST and "gqa_even" in have:
        many = (*(name for name, most in RAGGED.items() if rows <= most), max(RAGGED, key=RAGGED.__getitem__), *many)
    wanted = ("nonpad",) if provider != "cpu" else alone if rows == 1 else many
    return next((name for name in wanted if name in have), "canonical")


@dataclasses.dataclass(slots=True)
class Choice:
    """``choose`` and ``graphs_of`` for one engine: what they ask, but for the rows."""

    entry: ModelEntry
    provider: str
    pinned: str
    alone: Sequence[str]

    def of(self, rows: int) -> str:
        """The variant of so many rows."""
        return choose(self.entry, rows, self.provider, self.alone, self.pinned)

    @property
    def narrowest(self) -> int:
        """The least width whose steps the graphs in use were made to let round like all wider ones."""
        many = self.pinned if self.pinned in ONE_ROW else self.of(2)
        return 1 if self.provider == "cpu" and {self.of(1), many} <= {*EVEN} else 2

    def graphs(self, variant: str, even: bool, widths: Widths) -> tuple[str, dict[int, str]]:
        """Those of steps that must round alike or (not ``even``) need not; ``widths`` are those that do."""
        sooner = not even and self.pinned == "auto"
        uneven = not even or widths.narrowest > 1
        apart = uneven and self.provider == "cpu" and self.entry.recurrence is None
        return graphs_of(variant, self.of(1), self.entry, sooner=sooner, apart=apart)


def without_equal_bits(variant: str, entry: ModelEntry) -> str:
    """The graph in the place of ``variant`` while no step has to round like another."""
    return "gqa" if variant == "gqa_even" and "gqa" in entry.variants and entry.parameters <= _SMALL else variant


def graphs_of(variant: str, one: str, entry: ModelEntry, *, sooner: bool, apart: bool) -> tuple[str, dict[int, str]]:
    """The graph of steps that do not branch, where ``choose`` says ``variant`` for all rows and ``one`` for one; and
    those that take steps of certain widths in its place. ``sooner``: no step has to round like another; ``apart``: none
    of one token in many rows like wider ones, so that ``one`` may take it."""
    many = variant not in ONE_ROW
    if variant in RAGGED and one in ONE_ROW:  # else it was pinned, and takes a row alone as well
        variant = one
    if sooner:
        variant, one = (without_equal_bits(each, entry) for each in (variant, one))
    return variant, {1: one} if apart and many and one in ONE_ROW else {}


def branching(variant: str, have: Collection[str]) -> str:
    """The graph for steps that branch, where other steps take ``variant``."""
    return "tree_gqa" if variant in ONE_ROW and "tree_gqa" in have else "tree"


def sessions(entry: ModelEntry, rows: int, *, exact: bool) -> int:
    """How many sessions, each with weights of its own, an engine on a CPU comes to hold for batches of 1 and ``rows``
    rows that do not branch."""
    preferred = ROUNDING_ALIKE if exact else SOONEST
    one, many = (choose(entry, each, "cpu", preferred) for each in (1, rows))
    return len({one, without_equal_bits(one, entry), many})
