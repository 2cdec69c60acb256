"""Which variants of its canonical graph a model gets, and what makes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx_ir as ir

from ...bundle import ModelEntry
from ...engines.strides import STRIDE, STRIDES
from .gqa import to_gqa, to_gqa_even, to_grouped, to_nonpad
from .strides import to_strides
from .tree import to_tree, to_tree_gqa

VARIANTS: dict[str, Callable[[ir.Model], int]] = {
    "gqa": to_gqa,
    "gqa_even": to_gqa_even,
    "grouped": to_grouped,
    "nonpad": to_nonpad,
    "tree": to_tree,
    "tree_gqa": to_tree_gqa,
    STRIDES: partial(to_strides, width=STRIDE),
}
# Parameters up to which attention is so much of many rows' steps that strides pay: plain steps of eight and of sixteen
# rows take 0.59 and 0.45 of the time in a target of 16 M, 0.72 and 0.63 in one of 105 M, and all of it in one of 0.5 B.
_MOST = 1 << 28


def suits(name: str, entry: ModelEntry) -> bool:
    """Whether the variant may be of use to a model."""
    if name == STRIDES:  # a draft need not round alike
        return entry.directory == "target" and entry.recurrence is None and entry.parameters <= _MOST
    # A node of a tree would be read beside what its parent gave, or go on from what a sibling left.
    return not name.startswith("tree") or not (entry.reads_features or entry.recurrence is not None)
