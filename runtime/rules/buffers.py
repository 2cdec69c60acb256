"""Keeps the memory of arrays of a vocabulary's size for the next ones.

An allocator returns large arrays to the system, so that each page of the next one costs a page fault: for a vocabulary
of 151,936 tokens more time than to compute the exponentials that go into it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_LARGE = 1 << 16  # bytes: below this an allocator keeps memory itself
_KEPT = 32  # arrays of a size, beyond which memory is let go of

_stock: dict[int, list[NDArray[np.uint8]]] = {}


class _Loan:
    """Memory of the stock, which returns there when the array made from it and all its views are gone."""

    __slots__ = ("__array_interface__", "_memory")

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self.__array_interface__: dict[str, Any] = memory.__array_interface__

    def __del__(self, stock: dict[int, list[NDArray[np.uint8]]] = _stock, kept: int = _KEPT) -> None:
        if len(same := stock.setdefault(self._memory.size, [])) < kept:  # bound: at exit a module has no names left
            same.append(self._memory)


def empty(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """``np.empty(size, dtype)``: the numbers are anything. Safe from several threads."""
    length = size * np.dtype(dtype).itemsize
    if length < _LARGE:
        return np.empty(size, dtype)
    try:
        memory = _stock[length].pop()
    except (KeyError, IndexError):
        memory = np.empty(length, np.uint8)
    return np.asarray(_Loan(memory)).view(dtype)


def spread(places: NDArray[np.intp], values: NDArray[Any], size: int, others: float) -> NDArray[Any]:
    """[``size``] with ``values`` at ``places`` and ``others`` elsewhere."""
    row = empty(size, values.dtype)
    row.fill(others)
    row[places] = values
    return row


def like(row: NDArray[Any]) -> NDArray[Any]:
    """The same of the size and kind of ``row``."""
    return empty(row.size, row.dtype)
