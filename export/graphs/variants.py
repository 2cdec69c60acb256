"""Which variants of its canonical graph a model gets, and what makes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx_ir as ir

from ...bundle import ModelEntry
from ...engines.base import RAGGED
from .gqa import to_gqa, to_gqa_even, to_grouped, to_nonpad
from .ragged import to_ragged
from .tree import to_tree, to_tree_gqa

VARIANTS: dict[str, Callable[[ir.Model], int]] = {
    "gqa": to_gqa,
    "gqa_even": to_gqa_even,
    "grouped": to_grouped,
    "nonpad": to_nonpad,
    "tree": to_tree,
    "tree_gqa": to_tree_gqa,
    **{name: partial(to_ragged, rows=rows) for name, rows in RAGGED.items()},
}


def suits(name: str, entry: ModelEntry) -> bool:
    """Whether the variant may be of use to a model."""
    if name in RAGGED:  # a draft's steps are of one token, and need not round alike
        return entry.directory == "target" and entry.recurrence is None and entry.features is None
    # A node of a tree would be read beside what its parent gave, or go on from what a sibling left.
    return not name.startswith("tree") or not (entry.reads_features or entry.recurrence is not None)
