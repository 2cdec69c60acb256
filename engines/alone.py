"""Reads the prompt of one row among many by the graph for one row: its attention is one operator where that for many
rows is a dozen, which takes up to twice the time, and no row waits for a longer one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .base import ModelSpec, Tokens
from .memory import Buffer, HostBuffer, on_host
from .ort_step import Step


def prompt_step(
    session: Any, cache: Sequence[Buffer], row: int, tokens: Tokens, past_len: int, least_width: Tokens, spec: ModelSpec
) -> Step:
    """A step of ``session``, whose graph takes one row, that brings ``tokens`` [S] behind the first ``past_len`` slots
    of ``row`` in ``cache``, which holds them in the host's memory. Nobody wants its logits.

    It is bound for this once: neither a row nor a prompt's width comes again soon, and to bind is little beside it.
    """
    width, own = len(tokens), [_row(buffer, row) for buffer in cache]
    logits = np.empty((1, 1, spec.vocab_size), np.float32)
    step = Step.shaped(session, (1, width, 1, 0), 0, least_width, logits, None)
    if spec.features:
        step.with_features(own[-1], None)
    step.bind(own, None)
    step.feed(tokens, past_len)
    step.count_positions(spec.max_context)
    return step


def _row(buffer: Buffer, row: int) -> HostBuffer:
    return HostBuffer(on_host(buffer)[row : row + 1])
