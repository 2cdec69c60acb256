"""Checks that an argument is of the right kind and within its range.

Each function returns a value of Python's own types. numpy's numbers are accepted as numbers, bools are not.
"""

from __future__ import annotations

from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

import numpy as np

from ..errors import UsageError, shown


def integer(name: str, value: object, low: int, high: int | None = None, *, also: str = "") -> int:
    """``value`` as an int. Raises UsageError unless it is one from ``low`` to ``high`` (None: no end); ``also`` is what
    else the caller takes."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        found = int(value)
        if low <= found and (high is None or found <= high):
            return found
    legal = f"of at least {low}" if high is None else f"from {low} to {high}"
    raise UsageError(f"{name} must be an integer {legal}{f' or {also}' if also else ''}, not {shown(value)}")


def number(name: str, value: object, low: float, high: float, *, also: float | None = None) -> float:
    """``value`` as a float. Raises UsageError unless it is a number from ``low`` to ``high``, or ``also``."""
    found = _real(value)
    if found is not None and found == also:
        return found
    if found is None or not low <= found <= high:
        other = "" if also is None else f"{also:.15g} or "
        raise UsageError(f"{name} must be {other}a number from {low:.15g} to {high:.15g}, not {shown(value)}")
    return found


def share(name: str, value: object) -> float:
    """``value`` as a float in (0, 1]. Raises UsageError unless it is one."""
    found = _real(value)
    if found is None or not 0 < found <= 1:
        raise UsageError(f"{name} must be above 0 and at most 1, not {shown(value)}")
    return found


def flag(name: str, value: object) -> bool:
    """``value`` as a bool. Raises UsageError unless it is one."""
    if not isinstance(value, (bool, np.bool_)):
        raise UsageError(f"{name} must be True or False, not {shown(value)}")
    return bool(value)


def spelled(name: str, value: object) -> str:
    """``value`` as a str. Raises UsageError unless it is one of at least one character, all of them whole."""
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} must be text of at least one character, not {shown(value)}")
    return whole(name, str(value))


def whole(name: str, text: str) -> str:
    """``text``. Raises UsageError where half of a surrogate pair stands alone: no character, so no bytes to read.
    Python puts one in place of each byte that it cannot read (of an argument, of a file's name)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        byte = 0xDC80 <= half <= 0xDCFF
        what = f"a byte that is no character (0x{half - 0xDC00:02X}" if byte else f"a lone surrogate (U+{half:04X}"
        raise UsageError(f"{name} must be text of whole characters, not with {what} at {error.start})") from None
    return text


def one_of(name: str, value: object, known: Collection[str]) -> None:
    """Raise UsageError unless ``value`` is among ``known``."""
    if not isinstance(value, str) or value not in known:
        raise UsageError(f"{name} {shown(value)} is unknown (one of: {', '.join(known)})")


def items(name: str, value: Any, what: str) -> tuple[Any, ...]:
    """The items of a list, a tuple or an array of one dimension. Raises UsageError for anything else; ``what`` says
    what the items should be."""
    if isinstance(value, (list, tuple)):
        return tuple(value)
    if is_array(value) and value.ndim == 1:
        return tuple(value.tolist())
    raise UsageError(f"{name} must be a list or tuple of {what}, not {shown(value)}")


def is_array(value: object) -> bool:
    """Whether ``value`` is an array of numpy's kind, whoever made it, and neither a scalar nor bare memory."""
    array = hasattr(value, "tolist") and not isinstance(value, memoryview)
    return array and bool(getattr(value, "ndim", 0))


def _real(value: object) -> float | None:
    """``value`` as a float, None for what is no number or too large for one."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
