"""Takes a step of any width in steps of a few widths, whose graphs round a token as if it came alone."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from .base import Logits, Tokens

# The variant for so many rows and more of a model of so many parameters at most, and how many tokens of each its steps
# take, no more and no fewer; others are taken one by one, by a graph for one row. Of fewer rows, and of larger models,
# wide steps gain more, and those of ``ragged.py`` are sooner.
STRIDES, STRIDE, STRIDE_ROWS, STRIDE_PARAMETERS = "strides", 4, 8, 1 << 25


def strides(width: int, native: Collection[int]) -> list[int]:
    """How ``width`` tokens are cut into steps of ``native`` widths, of which one is 1."""
    found = list[int]()
    while left := width - sum(found):
        found.append(max(each for each in native if each <= left))
    return found


def in_strides(
    forward: Callable[[Tokens, Tokens, Tokens | None], Logits],
    native: Collection[int],
    tokens: Tokens,
    past_lens: Tokens,
    logit_index: Tokens | None,
) -> Logits:
    """``Engine.forward`` in terms of one that takes ``native`` widths alone."""
    (rows, width), begin = tokens.shape, 0
    wanted = np.tile(np.arange(width), (rows, 1)) if logit_index is None else logit_index
    found = np.zeros(0, np.float32)
    for step in strides(width, native):
        end = begin + step
        here = wanted[:, begin:end] if logit_index is None else wanted
        logits = forward(tokens[:, begin:end], past_lens + begin, np.clip(here - begin, 0, step - 1))
        if not begin:
            found = np.empty((*wanted.shape, logits.shape[-1]), np.float32)
        inside = (begin <= wanted) & (wanted < end)
        found[inside] = np.asarray(logits)[inside[:, begin:end] if logit_index is None else inside]
        begin = end
    return found
