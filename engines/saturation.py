"""Whether this processor adds int8 products in 16 bits that saturate: it is asked, not looked up.

ONNX Runtime's fastest u8 x s8 kernel for x86 without VNNI (``vpmaddubsw``) adds two products in 16 signed bits, and
2 x 255 x 127 is 64,770: sums of large numbers are cut, in silence, and one bundle would be another model on another
machine. Its u8 x u8 kernels add in 32 bits. The session option for them (``EXACT_SUMS``) also slows processors that
need no such thing, so a product that would be cut is computed first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

EXACT_SUMS = "session.x64quantprecision"  # "1": s8 weights become u8 when a graph is opened; the same integers result
_VARINT, _BYTES = 0, 2  # wire types of protobuf
_UINT8, _INT8 = 2, 3  # onnx.TensorProto.DataType


@functools.cache
def saturates(ort: Any) -> bool:
    """Whether MatMulInteger of onnxruntime ``ort`` (the module) is wrong here: one row and two take two kernels. A
    build without that operator cuts nothing."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(_matmul_integer(), options, providers=["CPUExecutionProvider"])
    except Exception:  # onnxruntime's own exceptions share no base class below this
        return False
    depth, columns = 8, 16
    weights = np.full((depth, columns), 127, np.int8)
    sums = [session.run(None, {"a": np.full((rows, depth), 255, np.uint8), "b": weights})[0] for rows in (1, 2)]
    return any((found != depth * 255 * 127).any() for found in sums)


def _matmul_integer() -> bytes:
    """A model of one node, y = MatMulInteger(a, b), as onnx.proto lays it out: the runtime has no onnx package."""
    node = _message([(1, b"a"), (1, b"b"), (2, b"y"), (4, b"MatMulInteger")])
    inputs = [(11, _value(b"a", _UINT8)), (11, _value(b"b", _INT8))]
    graph = _message([(1, node), (2, b"sums"), *inputs, (12, _message([(1, b"y")]))])
    return _message([(1, 8), (7, graph), (8, _message([(2, 13)]))])  # IR version, graph, opset


def _value(name: bytes, elements: int) -> bytes:
    return _message([(1, name), (2, _message([(1, _message([(1, elements)]))]))])


def _message(fields: Iterable[tuple[int, int | bytes]]) -> bytes:
    """A protobuf message of fields (number, value), values and lengths below 128."""
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts.append(bytes([number << 3 | _VARINT, value]))
        else:
            parts.append(bytes([number << 3 | _BYTES, len(value)]) + value)
    return b"".join(parts)
