"""Decides in pages of which size Linux holds a model's weights, of which every step reads all.

In pages of 4 KiB those of 105 M parameters in int8 are 25,000 addresses to look up, more than a processor remembers,
and it stops reading ahead at the end of each. Linux gives huge pages to those who ask, but onnxruntime does not ask. So
it is asked here to move what is there: steps of models of 15, 105 and 492 M parameters in int8 take 9, 6 and 7 % less
for one token, 3, 5 and 7 for five (docs/architecture.md). To move a gigabyte takes 0.2 s, in a virtual machine up to
2.5: not worth it to who writes one answer and is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter

Region = tuple[int, int]  # addresses: the first, and the one behind the last

_SETTINGS, _MAPS = Path("/sys/kernel/mm/transparent_hugepage"), Path("/proc/self/maps")
_COLLAPSE = 25  # madvise: huge pages in place of what is there (Linux 6.1 and later)
_IN_USE = 0.75  # of a huge page, the share that must be: the rest of it becomes memory, too
_WAITS = 10e-9  # seconds a byte, from when it was opened


class Pages:
    """The memory that an engine's sessions took when they were opened."""

    def __init__(self, wanted: bool) -> None:
        """``wanted``: steps read weights from there, not from a device."""
        self._wanted = wanted
        self._regions: list[Region] = []
        self._due = math.inf

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Around the opening of a session: what the process has more of afterwards is that session's."""
        before = anonymous() if self._wanted else []
        yield
        if not self._wanted:
            return
        self._regions += beyond(anonymous(), before)
        self._due = perf_counter() + _WAITS * sum(end - first for first, end in self._regions)

    def settle(self) -> None:
        """Before a prompt: move to huge pages what was opened long enough ago for the process to be one that stays."""
        if perf_counter() > self._due:
            regions, self._regions, self._due = self._regions, [], math.inf
            collapse(regions)


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


def collapse(regions: Sequence[Region]) -> int:
    """Put what of ``regions`` is in use into huge pages, as far as the kernel can and its settings let it: what stands
    in memory stays the same. Returns how many bytes were moved."""
    if not (size := huge_page()):
        return 0
    kernel, used, moved = ctypes.CDLL(None), (ctypes.c_ubyte * (size // mmap.PAGESIZE))(), 0
    for first, end in regions:
        for address in range(-(-first // size) * size, end - size + 1, size):
            place = ctypes.c_void_p(address), ctypes.c_size_t(size)
            there = kernel.mincore(*place, used) == 0 and sum(page & 1 for page in used) >= _IN_USE * len(used)
            if there and kernel.madvise(*place, _COLLAPSE) == 0:
                moved += size
    return moved


def huge_page() -> int:
    """Bytes of a huge page; 0 where there are none, or where memory has them unasked, or may not ask."""
    if sys.platform != "linux":
        return 0
    try:
        asked = "[madvise]" in (_SETTINGS / "enabled").read_text(encoding="ascii")
        return int((_SETTINGS / "hpage_pmd_size").read_text(encoding="ascii")) if asked else 0
    except (OSError, ValueError):
        return 0
