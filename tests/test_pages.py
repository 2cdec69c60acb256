"""Weights in huge pages: the memory that a session took and no other, moved once, and the same afterwards."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadout.bundle import Bundle
from leadout.engines import open_engine, pages
from leadout.engines.pages import Pages, Region, anonymous, beyond, collapse, huge_page

SIZE = 2 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")


def disjoint(cuts: list[int]) -> list[Region]:
    """Every second stretch between cuts."""
    ends = sorted(set(cuts))
    return [(a, b) for a, b in zip(ends[::2], ends[1::2], strict=False)]


def inside(regions: list[Region]) -> set[int]:
    return {place for first, end in regions for place in range(first, end)}


@given(after=st.lists(st.integers(0, 40)).map(disjoint), before=st.lists(st.integers(0, 40)).map(disjoint))
def test_beyond_is_what_was_not_there_before(after: list[Region], before: list[Region]) -> None:
    found = beyond(after, before)
    assert inside(found) == inside(after) - inside(before)
    assert sum(end - first for first, end in found) == len(inside(found)), "nothing twice, nothing empty"
    assert found == sorted(found)


@linux
def test_memory_that_was_taken_meanwhile_is_found() -> None:
    kept, files = Pages(True), Pages(False)
    with kept.opening(), files.opening():
        taken = mmap.mmap(-1, 3 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = np.frombuffer(taken, np.uint8).ctypes.data
    assert any(start <= first and first + 3 * SIZE <= end for start, end in kept._regions)
    assert any(start <= first and first + 3 * SIZE <= end for start, end in anonymous())
    assert files._regions == []


def huge(first: int) -> int:
    """Bytes of huge pages where ``first`` is."""
    here = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            start, end = (int(each, 16) for each in head.split("-"))
            here = start <= first < end
        elif here and head == "AnonHugePages:":
            return int(line.split()[1]) << 10
    return 0


@pytest.mark.skipif(huge_page() != SIZE, reason="this kernel gives no huge pages of 2 MiB to those who ask")
def test_what_is_in_use_moves_and_stays_as_it_is() -> None:
    taken = mmap.mmap(-1, 8 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(taken, np.uint8)
    first = array.ctypes.data
    begin = -first % SIZE
    array[: begin + 2 * SIZE] = np.random.default_rng(0).integers(0, 256, begin + 2 * SIZE)  # the rest is never touched
    before = array[: begin + 2 * SIZE].copy()
    moved = collapse([(first, first + 8 * SIZE)])
    if not moved:
        pytest.skip("this kernel cannot collapse (it needs Linux 6.1), or has no huge page left")
    assert moved in (SIZE, 2 * SIZE) and huge(first) == moved
    assert np.array_equal(array[: begin + 2 * SIZE], before)


ASKED = "always [madvise] never"


@pytest.mark.parametrize(
    ("enabled", "size", "expected"),
    [
        (ASKED, "2097152", SIZE),
        ("[always] madvise never", "2097152", 0),
        ("always madvise [never]", "2097152", 0),
        (ASKED, "", 0),
        (None, "2097152", 0),
    ],
)
@linux
def test_settings_are_kept_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: str | None, size: str, expected: int
) -> None:
    monkeypatch.setattr(pages, "_SETTINGS", tmp_path)
    if enabled is not None:
        (tmp_path / "enabled").write_text(enabled + "\n")
    (tmp_path / "hpage_pmd_size").write_text(size + "\n")
    assert huge_page() == expected
    if not expected:
        assert collapse([(0, 4 * SIZE)]) == 0
    monkeypatch.setattr(pages, "_MAPS", tmp_path / "none")
    assert anonymous() == []
    monkeypatch.setattr(sys, "platform", "win32")
    assert huge_page() == 0


def test_only_who_stays_pays_for_it(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in the first seconds find weights where they are; the first after that moves them, once; those of a graph
    that is opened later are moved later."""
    moved: list[list[Region]] = []
    now, taken = [100.0], iter(range(100))
    monkeypatch.setattr(pages, "perf_counter", lambda: now[0])
    monkeypatch.setattr(pages, "_WAITS", 1.0)
    monkeypatch.setattr(pages, "anonymous", lambda: [(0, 10), (20, 21 + next(taken))])  # more each time it is asked
    monkeypatch.setattr(pages, "collapse", lambda regions: moved.append(list(regions)))
    engine = open_engine(Bundle.read(tiny_bundle).model("target"), threads=1)

    def logits(rows: int) -> np.ndarray:
        engine.reset(rows)
        return np.array(engine.forward(np.arange(1, 9)[None].repeat(rows, 0), np.zeros(rows, np.int64)))

    first = logits(1)
    now[0] += 1.0
    assert np.array_equal(logits(1), first) and moved == []
    now[0] += 0.5
    assert np.array_equal(logits(1), first) and moved == [[(21, 22)]]
    now[0] += 100.0
    assert np.array_equal(logits(1), first) and len(moved) == 1
    logits(2)
    assert len(moved) == 1
    now[0] += 2.0
    logits(2)
    assert moved == [[(21, 22)], [(23, 24)]]
    engine.close()


@pytest.mark.slow
@pytest.mark.skipif(huge_page() != SIZE, reason="this kernel gives no huge pages of 2 MiB to those who ask")
def test_the_demo_target_steps_the_same_from_huge_pages(demo_bundle: Callable[[str], Path]) -> None:
    engine = open_engine(Bundle.read(demo_bundle("int8")).model("target"), threads=1)
    tokens = np.arange(1, 65)[None]
    expected = np.array(engine.forward(tokens, np.zeros(1, np.int64)))
    engine._pages._due = 0.0  # type: ignore[attr-defined]
    engine.reset(1)
    assert np.array_equal(np.asarray(engine.forward(tokens, np.zeros(1, np.int64))), expected)
    assert engine._pages._regions == []  # type: ignore[attr-defined]
    engine.close()
