"""Channels scaled up where weights are multiplied and down where their factors come from, so that rounding costs less.

Trained models have channels whose activations are a hundred times the others'. Rounded by the largest of a row, all
others have few levels left. X W = (X / s) (s W) for any s > 0, and what makes X can give X / s for nothing: the scale
of a norm before q, k, v, gate, up and the head, the product with up before down (SmoothQuant, arXiv 2211.10438,
section 4; AWQ, arXiv 2306.00978, section 3.2, for weights in blocks). The graph has the nodes and bytes it had, but
where a table is embedding and head: what is looked up is scaled back.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ...engines.providers import onnxruntime, read_weights_in_place
from .linear import Linear, linear_of
from .pieces import Array, Pieces, piece_of, steps
from .rewrite import array_of, constant, dims, graph_inputs

# A channel's scale is the mean of its magnitudes to one of these powers: the one that ought to cost least.
_EXPONENTS = (0.0, 0.15, 0.3, 0.4, 0.5, 0.6, 0.75)
_WORTH = 0.85  # of the cost without: for less, a model that was trained for its rounding is better left alone
_FLOOR = 0.05  # of the mean over all channels, added to each: one that was silent here may speak elsewhere


@dataclasses.dataclass(frozen=True)
class Rounding:
    """``block`` neighbours along K (None: all of a row) share a step; the largest of them is ``levels`` steps from 0,
    of activations and of weights."""

    block: int | None
    activation_levels: int
    weight_levels: int


@dataclasses.dataclass(frozen=True)
class _Place:
    """A constant that can be divided along ``axis`` from ``start`` on: input ``index`` of ``owner``."""

    owner: ir.Node
    index: int
    axis: int = -1
    start: int = 0


@dataclasses.dataclass(frozen=True)
class _Joint:
    """A value [..., K], the products with constants that are all that read it, and where it can be divided."""

    value: ir.Value
    linears: list[Linear]
    places: list[_Place]


def smooth(model: ir.Model, seen: dict[str, Array], rounding: Rounding) -> int:
    """Scale the channels of a canonical graph in float32, in place; it computes what it did. ``seen`` are rows [T,K]
    of its values by name (``observe``), which are let go of one by one. Returns how many values are scaled now."""
    done, weights = 0, list[ir.TensorProtocol | None]()
    for joint in _joints(model):
        _unmap(weights)  # of the joint before, whose arrays are gone now
        weights = [linear.weight.const_value for linear in joint.linears]
        scale = best_scale(seen.pop(str(joint.value.name)), [linear.rows for linear in joint.linears], rounding)
        if scale is not None:
            _apply(model, joint, scale)
            done += 1
    return done


def observe(graph: Path, tokens: Array) -> dict[str, Array]:
    """What ``smooth`` wants to have seen: float32 [rows * length, K] by value's name, while the canonical graph reads
    ``tokens`` int64 [rows, length] in float32. Needs to write a file beside ``graph``, whose weights it shares."""
    model = ir.load(graph)
    joints = list(_joints(model))
    if not joints:
        return {}
    model.graph.outputs[:] = [joint.value for joint in joints]
    names = [str(value.name) for value in model.graph.outputs]
    place = graph.with_name("observe.onnx")
    ir.save(model, place)
    try:
        options = onnxruntime().SessionOptions()
        options.log_severity_level = 3  # that it copies a cache is of no interest here
        read_weights_in_place(options)
        session = onnxruntime().InferenceSession(place, options, providers=["CPUExecutionProvider"])
        asked = {given.name for given in session.get_inputs()}
        found = session.run(None, {k: v for k, v in _feeds(model, tokens).items() if k in asked})
    finally:
        place.unlink()
    return {name: rows.reshape(-1, rows.shape[-1]) for name, rows in zip(names, found, strict=True)}


def _feeds(model: ir.Model, tokens: Array) -> dict[str, Array]:
    """The inputs of a canonical graph that reads texts [rows, length] from their beginnings."""
    rows, length = tokens.shape
    every, start = np.tile(np.arange(length, dtype=np.int64), (rows, 1)), np.zeros(rows, np.int64)
    kept = {  # rows, heads, slots (as many as there are tokens, where the graph leaves that open), width
        name: np.zeros((rows, *(n if isinstance(n, int) else length for n in dims(v)[1:])), np.float32)
        for name, v in graph_inputs(model).items()
        if name.startswith(("past_key_values.", "past_trail.", "past_state."))
    }
    feeds = {"input_ids": tokens, "position_ids": every, "logit_index": every, "past_lens": start, **kept}
    return feeds | {"anchors": start, "replayed": np.zeros(1, np.int64)}


def best_scale(seen: Array, weights: Sequence[Array], rounding: Rounding) -> Array | None:
    """What to divide rows ``seen`` [T,K] by and to multiply ``weights`` [N,K] with, float32 [K]; None if 1 is best.

    The error expected of Y = X W^T is that of independent, uniform roundings: a step of activations squared times
    the weights it meets squared, and the other way round; relative to each row's size, for all rows matter alike.
    """
    loud = np.abs(seen).mean(0)
    if not loud.any():
        return None
    loud = loud + _FLOOR * loud.mean()
    energy = sum(np.einsum("nk,nk->k", rows, rows) for rows in weights)
    share = 1 / np.maximum(np.square(seen).sum(1), 1e-30)
    costs = [_cost(seen, weights, energy, share, loud**e, rounding) for e in _EXPONENTS]
    best = int(np.argmin(costs))
    return (loud ** _EXPONENTS[best]).astype(np.float32) if costs[best] < _WORTH * costs[0] else None


def _cost(
    seen: Array, weights: Sequence[Array], energy: Array, share: Array, scale: Array, rounding: Rounding
) -> float:
    divided = _blocks(seen / scale, rounding.block)
    of_activations = np.square(np.abs(divided).max(2)) / rounding.activation_levels**2
    met = _blocks((energy * scale**2)[None], rounding.block)[0].sum(1)
    peaks = [_squared_peaks(part * scale, rounding.block) for rows in weights for part in _parts(rows)]
    of_weights = np.sum(peaks, axis=0) / rounding.weight_levels**2
    return float(share @ (of_activations @ met + np.square(divided).sum(2) @ of_weights))


def _squared_peaks(rows: Array, block: int | None) -> Array:
    peaks = _blocks(np.abs(rows), block).max(2)
    squares: Array = np.einsum("nb,nb->b", peaks, peaks)
    return squares


def _parts(rows: Array) -> Iterator[Array]:
    """A table in pieces, for what is made of it is as large."""
    return (rows[at] for at in steps(rows.shape))


def _blocks(rows: Array, block: int | None) -> Array:
    """[R,K] -> [R, K/block, block], padded with zeros."""
    width = rows.shape[1] if block is None else block
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % width))).reshape(len(rows), -1, width)


def _joints(model: ir.Model) -> Iterator[_Joint]:
    """All that can be scaled, in the graph's order: a product before what is made of it, and each as it is by then."""
    for value in list({id(n.inputs[0]): n.inputs[0] for n in model.graph if linear_of(n) is not None}.values()):
        readers = value.consumers()
        linears = [linear for n in readers if (linear := linear_of(n)) is not None and _is_scalable(linear)]
        places = [] if value.is_graph_output() or len(linears) < len(readers) else _places(value, dims(value)[-1:])
        if places:
            yield _Joint(value, linears, places)


def _is_scalable(linear: Linear) -> bool:
    """Whether what else reads its weights looks rows up in them, if a Transpose lies between."""
    table = linear.transposed
    alone = table is None or len(table.outputs[0].uses()) == 1
    return alone and (table is None or all(n is table or _looks_up(n) for n in linear.weight.consumers()))


def _looks_up(n: ir.Node) -> bool:
    return n.op_type == "Gather" and ("axis" not in n.attributes or n.attributes["axis"].as_int() == 0)


def _places(value: ir.Value, width: tuple[int, ...]) -> list[_Place]:
    """Where ``value`` [..., K], ``width`` (K,), can be divided along its last axis; empty if nowhere."""
    n = value.producer()
    if n is None:
        return []
    vectors = [i for i, given in enumerate(n.inputs) if array_of(given) is not None and dims(given) == width]
    if n.op_type in ("RMSNormalization", "LayerNormalization"):
        return [_Place(n, i) for i in range(1, len(n.inputs))] if len(vectors) == len(n.inputs) - 1 else []
    if n.op_type == "Mul" and vectors:
        return [_Place(n, vectors[0])]
    if n.op_type == "Mul":
        return next(filter(None, (_above(given, width) for given in n.inputs)), [])
    if n.op_type == "Add" and len(vectors) == 1:
        rest = _above(n.inputs[1 - vectors[0]], width)
        return [*rest, _Place(n, vectors[0])] if rest else []
    if n.op_type in ("GatherND", "Relu") or (n.op_type == "Reshape" and dims(n.inputs[0])[-1:] == width):
        return _above(n.inputs[0], width)
    if n.op_type == "Split":
        return _part(n, value)
    linear = linear_of(n)
    if linear is not None and linear.transposed is None and linear.shape[:1] == width:
        bias = [_Place(n, 2)] if len(n.inputs) == 3 and dims(n.inputs[2]) == width else []
        return [_Place(n, 1, axis=0 if linear.by_row else 1), *bias] if len(n.inputs) == 2 or bias else []
    return []


def _above(value: ir.Value, width: tuple[int, ...]) -> list[_Place]:
    """``_places`` of what is read in one place only."""
    return _places(value, width) if len(value.uses()) == 1 and not value.is_graph_output() else []


def _part(split: ir.Node, part: ir.Value) -> list[_Place]:
    """Where one part of a Split along the last axis can be divided: the same places as all of it, further on."""
    whole, sizes = split.inputs[0], [dims(output)[-1:] for output in split.outputs]
    axis = split.attributes["axis"].as_int() if "axis" in split.attributes else 0
    if axis not in (-1, len(dims(whole)) - 1) or not all(size and isinstance(size[0], int) for size in sizes):
        return []
    start = sum(size[0] for size in sizes[: split.outputs.index(part)])
    return [dataclasses.replace(place, start=start) for place in _above(whole, dims(whole)[-1:])]


def _apply(model: ir.Model, joint: _Joint, scale: Array) -> None:
    for place in joint.places:
        old = place.owner.inputs[place.index]
        factor = np.ones(dims(old)[place.axis], np.float32)
        factor[place.start : place.start + scale.size] = 1 / scale
        across = factor[:, None] if place.axis == 0 else factor
        place.owner.replace_input_with(place.index, _times(model, old, across))
    for linear in joint.linears:
        table = _times(model, linear.weight, scale if linear.by_row else scale[:, None])
        if linear.transposed is None:
            linear.product.replace_input_with(1, table)
            continue
        for reader in list(linear.weight.consumers()):
            reader.replace_input_with(0, table)
            if reader is not linear.transposed:
                _scale_back(model, reader, scale)


def _scale_back(model: ir.Model, lookup: ir.Node, scale: Array) -> None:
    found = lookup.outputs[0]
    users = list(found.uses())
    after = ir.node("Mul", [found, constant(model, "embedding.scale", 1 / scale)])
    model.graph.insert_after(lookup, after)
    after.outputs[0].shape, after.outputs[0].type = found.shape, found.type
    for user, index in users:
        user.replace_input_with(index, after.outputs[0])


def _times(model: ir.Model, value: ir.Value, factor: Array) -> ir.Value:
    """A constant times ``factor``, computed when it is asked for: all weights of a model at once are too many."""
    old = value.const_value
    assert old is not None

    if len(old.shape) == 1:
        return constant(model, f"{value.name}.smooth", old.numpy() * factor)
    factors = np.broadcast_to(factor, old.shape.numpy())

    def make(rows: slice, columns: slice) -> Array:
        scaled: Array = piece_of(old, rows, columns) * factors[rows, columns]
        return scaled

    return constant(model, f"{value.name}.smooth", Pieces(make, ir.DataType.FLOAT, old.shape.numpy(), factors))


def _unmap(weights: Sequence[ir.TensorProtocol | None]) -> None:
    """Let go of a file's pages, unless somebody looks at them: they are mapped again when they are asked for."""
    for weight in weights:
        if isinstance(weight, ir.ExternalTensor):
            with contextlib.suppress(BufferError):
                weight.release()
