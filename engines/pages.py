"""Moves a model's weights to huge pages of Linux, because every step reads all of them.

In pages of 4 KiB the weights of 105 M parameters in int8 are 25,000 pages, more than a processor's table of addresses
holds, and reading ahead stops at the end of each. Linux gives huge pages to programs that ask for them, which
onnxruntime does not. So they are asked for here, for weights that are loaded already: steps of models of 15, 105 and
492 M parameters in int8 take 9, 6 and 7 % less for one token, 3, 5 and 7 % less for five (docs/notes.md). To move a
gigabyte takes 0.2 s, in a virtual machine up to 2.5 s, so it is done in small parts, between texts."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter

Region = tuple[int, int]  # addresses: the first, and the one behind the last

_SETTINGS, _MAPS = Path("/sys/kernel/mm/transparent_hugepage"), Path("/proc/self/maps")
_COLLAPSE = 25  # madvise: a huge page in place of what is there (Linux 6.1 and later)
_IN_USE = 0.75  # of a huge page, the share that must be: the rest of it becomes memory, too
_AT_ONCE, _SHARE = 0.1, 0.05  # seconds a prompt; of the time since weights were there


class Pages:
    """The memory that an engine's sessions took when they were opened."""

    def __init__(self, wanted: bool) -> None:
        """``wanted``: steps read weights from there, not from a device."""
        self._size = huge_page() if wanted else 0
        self._small: list[int] = []  # addresses of what huge pages may stand for
        self._began, self._spent = perf_counter(), 0.0

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Around the opening of a session: memory that the process has afterwards and had not before holds its
        weights."""
        before = anonymous() if self._size else []
        yield
        if self._size:
            self._small += places(beyond(anonymous(), before), self._size)

    def settle(self) -> None:
        """Before a prompt: move some of the weights to huge pages, for at most 0.1 s, and altogether for at most 1/20
        of the time since the first were loaded: a process that writes one short answer would not profit from more."""
        if not self._small:
            return
        now = started = perf_counter()
        until = min(started + _AT_ONCE, started + _SHARE * (started - self._began) - self._spent)
        while self._small and now < until:
            collapse(self._small.pop(), self._size)
            now = perf_counter()
        self._spent += now - started


def anonymous() -> list[Region]:
    """The process's own memory that no file stands behind, in order; none where there is no telling."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            first, end = (int(address, 16) for address in addresses.split("-"))
            found.append((first, end))
    return found


def beyond(after: Sequence[Region], before: Sequence[Region]) -> list[Region]:
    """What of ``after`` is not in ``before``; the regions of each are in order and do not overlap."""
    found = []
    for first, end in after:
        for start, stop in before:
            if start < end and first < stop:
                if first < start:
                    found.append((first, start))
                first = stop
        if first < end:
            found.append((first, end))
    return found


def places(regions: Sequence[Region], size: int) -> list[int]:
    """The multiples of ``size`` at which so many bytes of ``regions`` begin."""
    return [place for first, end in regions for place in range(-(-first // size) * size, end - size + 1, size)]


def collapse(place: int, size: int) -> bool:
    """Put the ``size`` bytes at ``place`` into a huge page, if they are in use and the kernel can; what stands in them
    stays the same. Returns whether it did."""
    kernel, used = ctypes.CDLL(None), (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    where = ctypes.c_void_p(place), ctypes.c_size_t(size)
    if kernel.mincore(*where, used) or sum(page & 1 for page in used) < _IN_USE * len(used):
        return False
    return int(kernel.madvise(*where, _COLLAPSE)) == 0


def huge_page() -> int:
    """Bytes of a huge page; 0 where there are none, or where memory has them unasked, or may not ask."""
    if sys.platform != "linux":
        return 0
    try:
        asked = "[madvise]" in (_SETTINGS / "enabled").read_text(encoding="ascii")
        return int((_SETTINGS / "hpage_pmd_size").read_text(encoding="ascii")) if asked else 0
    except (OSError, ValueError):
        return 0
