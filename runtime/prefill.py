"""Decides which tokens of prompts go through a model: none that its cache holds already, and equal prompts only once,
for their rows are copied."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..engines.base import READ_ALONE
from .steps import Stepper

ALL = sys.maxsize  # tokens


def prefill(stepper: Stepper, prompts: Sequence[Sequence[int]], held: int = 0) -> None:
    """Bring prompts[b] (may be empty) into row b of an engine that was reset for all rows, or whose only row holds the
    first ``held`` tokens. No logits are wanted.

    Rows of equal prompts hold the bits each would hold alone wherever a step's bits do not depend on its rows.
    """
    first: dict[tuple[int, ...], int] = {}
    sources = [first.setdefault(tuple(prompt), len(first)) for prompt in prompts]
    rest = [prompt[held:] for prompt in first]
    enough = READ_ALONE if stepper.reads_alone else ALL
    alone = {row: prompt for row, prompt in enumerate(rest) if len(prompt) >= enough}
    together = [[] if row in alone else prompt for row, prompt in enumerate(rest)]
    if any(together):  # first, for its padding stands where the other rows begin
        stepper.last_logits(together, [held] * len(rest))
    if alone:
        stepper.read(alone)
    # A source never stands after its copies: going backwards, no row is overwritten that is still to be copied.
    for place in reversed(range(len(prompts))):
        if prompts[place] and sources[place] != place:
            stepper.copy_row(sources[place], place)
