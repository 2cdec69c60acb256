"""The few moves every graph pass is made of: make a node, put it in, swap a value, sweep up, evaluate a corner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import extract
from onnx_ir.passes import common

from ...engines.providers import onnxruntime
from .pieces import Array, Pieces

CONTRIB = "com.microsoft"


def constant(model: ir.Model, name: str, contents: Array | Pieces) -> ir.Value:
    """An initializer; one of this name with these contents is used again, one with others makes the name longer."""
    while (known := model.graph.initializers.get(name)) is not None:
        if _is(known.const_value, contents):
            return known
        name += "_"
    tensor = contents if isinstance(contents, Pieces) else ir.tensor(contents)
    tensor.name = name
    value = ir.Value(name=name, const_value=tensor)
    value.dtype, value.shape = tensor.dtype, tensor.shape
    model.graph.register_initializer(value)
    return value


def _is(known: ir.TensorProtocol | None, contents: Array | Pieces) -> bool:
    if isinstance(known, Pieces) or isinstance(contents, Pieces):
        return isinstance(known, Pieces) and isinstance(contents, Pieces) and known.source is contents.source
    if known is None or known.dtype != ir.DataType.from_numpy(contents.dtype):
        return False
    return np.array_equal(known.numpy(), contents)


def graph_inputs(model: ir.Model) -> dict[str, ir.Value]:
    """The inputs of a graph by name."""
    return {str(value.name): value for value in model.graph.inputs}


def add_input(model: ir.Model, name: str, dtype: ir.DataType, shape: Sequence[Any]) -> ir.Value:
    """A new input of the graph."""
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    model.graph.inputs.append(value)
    return value


def array_of(value: ir.Value | None) -> Array | None:
    """The contents of an initializer; None for anything computed."""
    return None if value is None or value.const_value is None else np.asarray(value.const_value.numpy())


def node(
    model: ir.Model,
    before: ir.Node,
    op: str,
    inputs: Sequence[ir.Value | None],
    *,
    outputs: int = 1,
    domain: str = "",
    like: ir.Value | None = None,
    **attributes: Any,
) -> Any:
    """Insert a node; its output (a tuple of several) is returned, with the type and shape of ``like`` if given."""
    new = ir.node(op, inputs, attributes=attributes, num_outputs=outputs, domain=domain)
    model.graph.insert_before(before, new)
    if domain == CONTRIB:
        model.opset_imports[CONTRIB] = 1
    if like is not None:
        new.outputs[0].shape, new.outputs[0].type = like.shape, like.type
    return new.outputs[0] if outputs == 1 else tuple(new.outputs)


def made_by(value: ir.Value | None, op: str) -> ir.Node | None:
    """The node that computes ``value``, if it is an ``op``."""
    producer = value.producer() if value is not None else None
    return producer if producer is not None and producer.op_type == op else None


def only_user(value: ir.Value, op: str) -> ir.Node | None:
    """The one node that reads ``value``, if there is one only and it is an ``op``."""
    users = value.consumers()
    return users[0] if len(users) == 1 and users[0].op_type == op and not value.is_graph_output() else None


def swap(old: ir.Value, new: ir.Value) -> None:
    """Let every reader of ``old`` read ``new``; a graph output keeps its name."""
    name, public = old.name, old.is_graph_output()
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if public:
        old.name, new.name = None, name
    new.shape, new.type = old.shape, old.type


def dims(value: ir.Value | None) -> tuple[Any, ...]:
    """The shape, as ints and symbol names; empty where it is unknown."""
    if value is None or value.shape is None:
        return ()
    return tuple(d if isinstance(d, int) else d.value for d in value.shape)


def sweep(model: ir.Model) -> None:
    """Drop nodes and initializers that no output needs."""
    common.RemoveUnusedNodesPass()(model)
    initializers = model.graph.initializers
    for name in [n for n, v in initializers.items() if not v.uses() and not v.is_graph_output()]:
        del initializers[name]


def let_go(model: ir.Model) -> None:
    """Drop the weights of a graph that is saved: it refers to itself in circles, so they would stay until Python looks
    for such; and torch's exporter goes on referring to the last one it made."""
    for value in model.graph.initializers.values():
        value.const_value = None


def sources(values: Iterable[ir.Value], *, shapes: bool = True) -> set[str]:
    """The names of the graph inputs that ``values`` are computed from; without ``shapes``, from what is in them."""
    found, seen, left = set(), set(), list(values)
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if value.is_graph_input():
            found.add(str(value.name))
        if (producer := value.producer()) is not None and (shapes or producer.op_type != "Shape"):
            left += [v for v in producer.inputs if v is not None]
    return found


def evaluate(model: ir.Model, values: Sequence[ir.Value], feeds: Mapping[str, Array]) -> list[Array]:
    """Compute ``values`` on ONNX Runtime from the graph inputs named in ``feeds`` (those they need, at least)."""
    needed = sorted(sources(values))
    corner = extract(model.graph, needed, [str(v.name) for v in values])
    small = ir.external_data.load_to_model(ir.Model(corner, ir_version=model.ir_version))
    proto = ir.to_proto(small)
    options = onnxruntime().SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime().InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    results: list[Array] = session.run(None, {name: feeds[name] for name in needed})
    return results
