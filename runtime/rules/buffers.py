"""Decides where arrays of a vocabulary's size live: in memory that was touched before.

An allocator gives large arrays back to the system, and every page of the next one costs a fault: at a vocabulary of
151,936 more than the exponentials that are put into it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_LARGE = 1 << 14  # numbers: below this an allocator keeps memory itself
_KEPT = 32  # arrays of a size, beyond which memory is let go of

_stock: dict[int, list[NDArray[np.float64]]] = {}


class _Loan:
    """Memory of the stock, which goes back when the array made of it, and every view of that, is gone."""

    __slots__ = ("__array_interface__", "_memory")

    def __init__(self, memory: NDArray[np.float64]) -> None:
        self._memory = memory
        self.__array_interface__: dict[str, Any] = memory.__array_interface__

    def __del__(self, stock: dict[int, list[NDArray[np.float64]]] = _stock, kept: int = _KEPT) -> None:
        if len(same := stock.setdefault(self._memory.size, [])) < kept:  # bound: at exit a module has no names left
            same.append(self._memory)


def empty(size: int) -> NDArray[np.float64]:
    """``np.empty(size)``: the numbers are anything. Safe from several threads."""
    if size < _LARGE:
        return np.empty(size)
    try:
        memory = _stock[size].pop()
    except (KeyError, IndexError):
        memory = np.empty(size)
    return np.asarray(_Loan(memory))


def narrow(size: int) -> NDArray[np.float32]:
    """The same in float32."""
    if size < _LARGE:
        return np.empty(size, np.float32)
    return empty((size + 1) // 2).view(np.float32)[:size]
