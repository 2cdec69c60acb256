"""What a graph made by another exporter is, read without its weights: ports, precision, and the files it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ...bundle import is_plain
from ...engines.foreign_graph import Port, Signature
from ...errors import EngineError, ExportError, first_line

_PER_TENSOR = {"DynamicQuantizeLinear", "DynamicQuantizeMatMul"}
_BLOCKS = {"MatMulNBits", "MatMulBnb4"}  # the second has four bits, and says nothing of it
_BITS = {TensorProto.INT4: 4, TensorProto.UINT4: 4}
_INTEGER = {"MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul", "DequantizeLinear"}


@dataclasses.dataclass(frozen=True, slots=True)
class Graph:
    """A decoder graph on disk. ``data`` are the files of external tensors beside it.

    ``turn``: behind so many tokens it rotates all positions of a step by other factors than before; a text that grows
    beyond has keys of both kinds in its cache, by the steps that it came in. None where it never does. ``per_tensor``:
    activations are quantised with one scale for all tokens of a step, so a token's logits depend on the tokens beside
    it. ``windowed``: its attention nodes know a sliding window themselves. ``in_place``: they can write keys and values
    where they read them. ``least_slots``: what their buffers must have, however short a text is (None: no more than
    that): a node that may forget what is behind its window asks for the window. ``parameters`` counts stored weights
    (4-bit ones by their number, not by their bytes).
    """

    path: Path
    signature: Signature
    precision: str
    per_tensor: bool
    windowed: bool
    in_place: bool
    least_slots: int | None
    parameters: int
    turn: int | None
    data: tuple[Path, ...]


def read_graph(path: Path, root: Path) -> Graph:
    """Read a graph whose files must lie in ``root``.

    Raises ExportError if it is not ONNX, needs a file outside its folder, or cannot be rewound by length.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf and onnx raise without a common base
        raise _unreadable(path, first_line(error)) from None
    if not model.HasField("graph"):  # a file of no bytes is a message of no fields
        raise _unreadable(path, "nothing is in it")
    tensors, nodes = list(_tensors(model)), list(_nodes(model))
    weights = {tensor.name for tensor in model.graph.initializer}  # old exporters name them among the inputs, too
    given = [value for value in model.graph.input if value.name not in weights]
    try:
        signature = Signature.read(map(_port, given), map(_port, model.graph.output))
    except EngineError as error:
        raise ExportError(f"{path}: {error}") from None
    return Graph(
        path=path,
        signature=signature,
        precision=_precision(nodes, tensors),
        per_tensor=any(node.op_type in _PER_TENSOR for node in nodes),
        windowed=any(_attribute(node, "local_window_size", -1) > 0 for node in nodes),
        in_place=any(node.op_type == "GroupQueryAttention" for node in nodes),
        least_slots=_least_slots(nodes),
        parameters=_count(nodes, tensors),
        turn=_turn(model.graph),
        data=tuple(sorted({_beside(path, root, tensor) for tensor in tensors if _location(tensor) is not None})),
    )


def inside(path: Path, root: Path) -> bool:
    """Whether a file really lies in ``root``; the hub cache's own links, snapshots/X/file -> blobs/hash, count too."""
    home, real = root.resolve(), path.resolve()
    return real.is_relative_to(home) or (
        home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    )


def _beside(path: Path, root: Path, tensor: TensorProto) -> Path:
    name = _location(tensor) or ""
    file = path.parent / name
    if not is_plain(name) or name == path.name:
        raise ExportError(f"{path}: external data '{name}' is not a plain file name beside the graph")
    if not file.is_file():
        raise ExportError(f"{path}: its weights '{name}' are missing; download the whole directory")
    if not inside(file, root):
        raise ExportError(f"{path}: its weights '{name}' are a link that leaves '{root}'")
    if (size := file.stat().st_size) < (least := _end(tensor)):
        raise ExportError(
            f"{path}: its weights '{name}' are incomplete or a git-lfs pointer ({size} bytes instead of at least"
            f" {least}); download them again"
        )
    return file


def _unreadable(path: Path, reason: str) -> ExportError:
    return ExportError(f"{path}: not an ONNX graph, incomplete or a git-lfs pointer ({reason}); download it again")


def _location(tensor: TensorProto) -> str | None:
    return _external(tensor, "location") if tensor.data_location == TensorProto.EXTERNAL else None


def _external(tensor: TensorProto, key: str) -> str:
    return next((str(item.value) for item in tensor.external_data if item.key == key), "")


def _end(tensor: TensorProto) -> int:
    """How many bytes its file has at least; 0 where it does not say."""
    place = _external(tensor, "offset") or "0", _external(tensor, "length")
    return sum(map(int, place)) if all(each.isdecimal() for each in place) else 0


def _graphs(model: ModelProto) -> Iterator[GraphProto]:
    """The main graph and every branch and loop body in it."""
    waiting = [model.graph]
    while waiting:
        graph = waiting.pop()
        yield graph
        waiting += [g for node in graph.node for g in _bodies(node)]


def _bodies(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def _nodes(model: ModelProto) -> Iterator[NodeProto]:
    for graph in _graphs(model):
        yield from graph.node
    for function in model.functions:
        yield from function.node


def _tensors(model: ModelProto) -> Iterator[TensorProto]:
    for graph in _graphs(model):
        yield from graph.initializer
    for node in _nodes(model):
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t
            yield from attribute.tensors


def _port(value: ValueInfoProto) -> Port:
    kind = value.type.tensor_type
    dims = tuple(d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim)
    dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type).name if kind.elem_type else "undefined"
    return Port(value.name, dtype, dims)


def _attribute(node: NodeProto, name: str, default: int) -> int:
    return next((int(a.i) for a in node.attribute if a.name == name), default)


def _least_slots(nodes: list[NodeProto]) -> int | None:
    bounded = [node for node in nodes if _attribute(node, "sliding_window_cache", 0)]
    windows = [_attribute(node, "local_window_size", -1) for node in bounded]
    return max((window for window in windows if window > 0), default=None)


def _size(tensor: TensorProto) -> int:
    size = 1
    for n in tensor.dims:
        size *= n
    return size


def _turn(graph: GraphProto) -> int | None:
    """Where the rope of a Phi ("longrope") changes its factors, as onnxruntime-genai's builder writes it: the length is
    compared with a constant, which chooses between two tables (``If``), or shifts all positions into the second one."""
    made = {name: node for node in graph.node for name in node.output}
    known = {tensor.name: tensor for tensor in graph.initializer}
    known |= {node.output[0]: a.t for node in graph.node for a in node.attribute if a.name == "value"}
    asked = [made.get(node.input[0]) for node in graph.node if node.op_type == "If" and _holds_tables(node)]
    asked += [
        node
        for node in graph.node
        if node.op_type == "GreaterOrEqual" and (of := made.get(node.input[0])) and of.op_type == "ReduceMax"
    ]
    found = [known.get(node.input[1]) for node in asked if node and node.op_type in ("Greater", "GreaterOrEqual")]
    return min((int(numpy_helper.to_array(each).reshape(-1)[0]) for each in found if _is_number(each)), default=None)


def _holds_tables(node: NodeProto) -> bool:
    return all(inner.op_type == "Constant" for graph in _bodies(node) for inner in graph.node)


def _is_number(tensor: TensorProto | None) -> TypeGuard[TensorProto]:
    return tensor is not None and _location(tensor) is None and _size(tensor) == 1


def _precision(nodes: list[NodeProto], tensors: list[TensorProto]) -> str:
    bits = [_attribute(node, "bits", 4) for node in nodes if node.op_type in _BLOCKS]
    if bits := [*bits, *(_BITS[tensor.data_type] for tensor in tensors if tensor.data_type in _BITS)]:
        return f"int{min(bits)}"
    if any(node.op_type in _INTEGER for node in nodes):
        return "int8"
    largest = max(tensors, key=_size, default=None)
    names = {TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}
    return names.get(largest.data_type, "fp32") if largest is not None else "fp32"


def _count(nodes: list[NodeProto], tensors: list[TensorProto]) -> int:
    products = [node for node in nodes if node.op_type in _BLOCKS]
    packed = {name for node in products for name in node.input[1:4]}
    stored = sum(_size(t) for t in tensors if t.name not in packed and len(t.dims) > 0)
    return stored + sum(_attribute(node, "K", 0) * _attribute(node, "N", 0) for node in products)
