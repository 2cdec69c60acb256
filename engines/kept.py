"""Keeps the steps that were bound to a cache, for as long as it stays where it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .base import ModelSpec
from .memory import Buffer
from .ort_step import Step
from .ragged import RaggedSteps
from .trails import Turn

_KEPT_STEPS, _MANY_STEPS = 32, 256

Shape = tuple[int, int, int | None, int, Turn]  # rows, tokens and wanted logits (None: all) a row, columns of the mask


class KeptSteps:
    """Steps that were bound, by the graphs in use and their shape: valid while the cache stays where it is."""

    def __init__(self) -> None:
        self._by_graphs: dict[tuple[str, ...], dict[Shape, Step]] = {}
        self._ragged: RaggedSteps | None = None

    def of(self, *graphs: str) -> dict[Shape, Step]:
        """Those of ``graphs``, to be added to."""
        return self._by_graphs.setdefault(graphs, {})

    def ragged(
        self, variant: str, opened: Callable[[str], Any], cache: Sequence[Buffer], spec: ModelSpec
    ) -> RaggedSteps:
        """Those of all rows, by the session that ``opened`` has of ``variant``."""
        if self._ragged is None:
            self._ragged = RaggedSteps(variant, opened(variant), cache, spec)
        return self._ragged

    def forget(self) -> None:
        """Let go of all."""
        self._ragged = None
        for steps in self._by_graphs.values():
            while steps:
                steps.popitem()[1].free()


def make_room(steps: dict[Shape, Step], *, many: bool) -> None:
    """Let go of one, if there are as many as are kept: of the widest, for a prompt's width seldom comes again, a
    draft's does. ``many``: each is a graph, or what is read again makes it another."""
    if len(steps) >= (_MANY_STEPS if many else _KEPT_STEPS):
        steps.pop(max(steps, key=lambda kept: kept[1])).free()
