"""Weights that are made when they are written, and not all at once: there is no room for copies of a whole model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Array = NDArray[Any]
PIECE = 1 << 22  # bytes that are made at once, or one row
ALL = slice(None)


class Pieces(ir.LazyTensor):  # type: ignore[misc]
    """A constant of a graph of which ``make(rows, columns)`` gives a part, as an array of its own: slices of its first
    axis and of its second. ``source``: what it is made of; two of one name and one source are the same."""

    def __init__(
        self, make: Callable[[slice, slice], Array], dtype: ir.DataType, shape: Sequence[int], source: Any
    ) -> None:
        super().__init__(lambda: ir.tensor(make(ALL, ALL), dtype=dtype), dtype, ir.Shape(shape))
        self.make, self.source = make, source

    def tofile(self, file: BinaryIO) -> None:
        """Write it, PIECE bytes or a row at a time."""
        for rows in steps(self.shape.numpy(), self.dtype.itemsize):
            file.write(np.ascontiguousarray(self.make(rows, ALL)).view(np.uint8).data)


def steps(shape: Sequence[int], itemsize: float = 4) -> list[slice]:
    """Slices of the first axis, of PIECE bytes each or of one row."""
    height = max(1, int(PIECE // max(1, math.prod(shape[1:]) * itemsize)))
    return [slice(start, min(start + height, shape[0])) for start in range(0, shape[0], height)]


def piece_of(tensor: ir.TensorProtocol, rows: slice, columns: slice = ALL) -> Array:
    """These rows of a constant, and of them these columns: what is not asked for is not made, and not read."""
    return tensor.make(rows, columns) if isinstance(tensor, Pieces) else np.asarray(tensor.numpy())[rows, columns]
