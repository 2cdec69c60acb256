"""Checks, when a graph is opened, that it has the inputs and outputs that the manifest describes; else the first step
would fail with an error of the runtime."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..bundle import ModelEntry
from ..errors import BundleError
from .memory import NAMED


def require_declared(entry: ModelEntry, session: Any, graph: str) -> None:
    """Raise BundleError unless ``session``, of the file ``graph``, has what ``entry`` says a model keeps: caches of as
    many layers, heads and numbers, states, trails, features and logits. (Sizes that a graph leaves open are any.)"""
    values = (*session.get_inputs(), *session.get_outputs())
    declared = {".".join(value.name.split(".")[:NAMED]): value.shape for value in values}
    for name, sizes in _wanted(entry):
        if name not in declared:
            raise _otherwise(graph, f"it says there is {name}, the graph has none")
        found = {axis: declared[name][axis] for axis in sizes}
        if any(isinstance(size, int) and size != sizes[axis] for axis, size in found.items()):
            ours, theirs = (" x ".join(map(str, each.values())) for each in (sizes, found))
            raise _otherwise(graph, f"it says {name} is of {ours}, the graph has {theirs}")
    trails = () if entry.recurrence is None else entry.recurrence.trails
    for name in (f"past_key_values.{len(entry.cache)}.key", f"past_trail.{len(trails)}"):
        if name in declared:
            raise _otherwise(graph, f"it says nothing of {name}, which the graph has")


def _otherwise(graph: str, how: str) -> BundleError:
    return BundleError(f"leadout.json does not describe {graph}: {how} (copy the whole bundle or export it again)")


def _wanted(entry: ModelEntry) -> Iterator[tuple[str, dict[int, int]]]:
    """The name of each input or output that there must be, and the sizes of the axes that the manifest says."""
    for i, layer in enumerate(entry.cache):
        for kind, width in (("key", layer.key_dim), ("value", layer.value_dim)):
            yield f"past_key_values.{i}.{kind}", {1: layer.heads, 3: width}
    if entry.recurrence is not None:
        for i, width in enumerate(entry.recurrence.trails):
            yield f"past_trail.{i}", {-1: width}
        for i, state in enumerate(entry.recurrence.states):
            yield f"past_state.{i}", {1: state.heads, 2: state.key_dim, 3: state.value_dim}
    if entry.features is not None:
        yield "features", {-1: entry.features}
    yield "logits", {-1: entry.vocab_size}
