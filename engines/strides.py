"""Takes a step of any width in steps of a few widths, whose graphs round a token as if it came alone."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from .base import Logits, Tokens

# The variant for so many rows and more (export.graphs.strides), and how many tokens of each its steps take, no more and
# no fewer. Of fewer rows a wide step gains more, and a graph that takes any width does it sooner.
STRIDES, STRIDE, STRIDE_ROWS = "strides", 4, 8


def strides(width: int, native: Collection[int]) -> list[tuple[int, int]]:
    """How ``width`` tokens are cut into steps of ``native`` widths: the width of each, and how many of its tokens are
    not padding, which is at most a quarter of it where steps of one token are there."""
    found = []
    while width:
        fitting = [each for each in native if width >= each - each // 4]
        step = max(fitting, default=min(native))
        found.append((step, min(step, width)))
        width -= found[-1][1]
    return found


def in_strides(
    forward: Callable[[Tokens, Tokens, Tokens | None], Logits],
    native: Collection[int],
    tokens: Tokens,
    past_lens: Tokens,
    logit_index: Tokens | None,
) -> Logits:
    """``Engine.forward`` in terms of one that takes ``native`` widths alone."""
    rows, width = tokens.shape
    wanted = np.tile(np.arange(width), (rows, 1)) if logit_index is None else logit_index
    steps, begin, found = strides(width, native), 0, np.zeros(0, np.float32)
    for step, count in steps:
        piece = np.zeros((rows, step), np.int64)
        piece[:, :count] = tokens[:, begin : begin + count]
        here = wanted[:, begin : begin + count] if logit_index is None else wanted
        logits = forward(piece, past_lens + begin, np.clip(here - begin, 0, count - 1))
        if len(steps) == 1:
            return logits
        if not begin:
            found = np.empty((*wanted.shape, logits.shape[-1]), np.float32)
        if logit_index is None:
            found[:, begin : begin + count] = logits
        else:
            inside = (begin <= wanted) & (wanted < begin + count)
            found[inside] = np.asarray(logits)[inside]
        begin += count
    return found
