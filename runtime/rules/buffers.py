"""Decides where arrays of a vocabulary's size live: in memory that was touched before.

An allocator gives large arrays back to the system, and every page of the next one costs a fault: at a vocabulary of
151,936 more than the exponentials that are put into it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_LARGE = 1 << 16  # bytes: below this an allocator keeps memory itself
_KEPT = 32  # arrays of a size, beyond which memory is let go of

_stock: dict[int, list[NDArray[np.uint8]]] = {}


class _Loan:
    """Memory of the stock, which goes back when the array made of it, and every view of that, is gone."""

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


def like(row: NDArray[Any]) -> NDArray[Any]:
    """The same of the size and kind of ``row``."""
    return empty(row.size, row.dtype)
