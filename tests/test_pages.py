"""Weights in huge pages: the memory that a session took and no other, moved bit by bit, and the same afterwards."""

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
from leadout.engines.pages import Pages, Region, anonymous, beyond, collapse, huge_page, places

SIZE = 2 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
gives = pytest.mark.skipif(huge_page() != SIZE, reason="this kernel gives no huge pages of 2 MiB to those who ask")


def disjoint(cuts: list[int]) -> list[Region]:
    """Every second stretch between cuts."""
    ends = sorted(set(cuts))
    return list(zip(ends[::2], ends[1::2], strict=False))


def inside(regions: list[Region]) -> set[int]:
    return {place for first, end in regions for place in range(first, end)}


@given(after=st.lists(st.integers(0, 40)).map(disjoint), before=st.lists(st.integers(0, 40)).map(disjoint))
def test_beyond_is_what_was_not_there_before(after: list[Region], before: list[Region]) -> None:
    found = beyond(after, before)
    assert inside(found) == inside(after) - inside(before)
    assert sum(end - first for first, end in found) == len(inside(found)), "nothing twice, nothing empty"
    assert found == sorted(found)


@given(regions=st.lists(st.integers(0, 60)).map(disjoint), size=st.integers(1, 7))
def test_places_are_whole_pages_inside(regions: list[Region], size: int) -> None:
    whole = [n for n in range(0, 61, size) if any(first <= n and n + size <= end for first, end in regions)]
    assert places(regions, size) == whole


@pytest.fixture
def taken() -> Callable[[int], tuple[mmap.mmap, int]]:
    """Memory of a mapping's own, and its address."""

    def take(size: int) -> tuple[mmap.mmap, int]:
        found = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return found, np.frombuffer(found, np.uint8).ctypes.data

    return take


@linux
def test_memory_that_was_taken_meanwhile_is_found(
    taken: Callable[[int], tuple[mmap.mmap, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "huge_page", lambda: SIZE)
    found, none = Pages(True), Pages(False)
    earlier = taken(4 * SIZE)
    with found.opening(), none.opening():
        later = taken(4 * SIZE)
    expected = set(places([(later[1], later[1] + 4 * SIZE)], SIZE))
    assert len(expected) >= 3 and expected <= set(found._small)
    assert not set(places([(earlier[1], earlier[1] + 4 * SIZE)], SIZE)) & set(found._small)
    assert none._small == []


def huge(place: int) -> int:
    """Bytes of huge pages in the mapping of ``place``."""
    here = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        head = line.split()[0]
        if not head.endswith(":"):
            start, end = (int(each, 16) for each in head.split("-"))
            here = start <= place < end
        elif here and head == "AnonHugePages:":
            return int(line.split()[1]) << 10
    return 0


def put_together(memory: mmap.mmap, start: int) -> bool:
    """Whether this kernel can, now: Linux can from 6.1 on, while there is a huge page left."""
    try:
        memory.madvise(pages._COLLAPSE, start, SIZE)
    except OSError:
        return False
    return True


@gives
def test_what_is_in_use_moves_and_stays_as_it_is(taken: Callable[[int], tuple[mmap.mmap, int]]) -> None:
    memory, address = taken(6 * SIZE)
    full, sparse, other, *_ = places([(address, address + 6 * SIZE)], SIZE)
    array = np.frombuffer(memory, np.uint8)[full - address :][:SIZE]
    np.frombuffer(memory, np.uint8)[sparse - address :][: SIZE // 2] = 1
    array[:] = np.random.default_rng(0).integers(0, 256, SIZE)
    before, already = array.copy(), huge(full)
    moved = collapse(full, SIZE)
    assert huge(full) == already + moved * SIZE and np.array_equal(array, before)
    np.frombuffer(memory, np.uint8)[other - address :][:SIZE] = 1
    assert moved or not put_together(memory, other - address), "asked without us, the kernel does what it did not"
    assert not collapse(sparse, SIZE), "half of it is in use: the rest would only become memory"
    assert not collapse(SIZE, SIZE), "nothing is there"


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
    monkeypatch.setattr(pages, "_MAPS", tmp_path / "none")
    assert anonymous() == []
    monkeypatch.setattr(sys, "platform", "win32")
    assert huge_page() == 0


def test_it_is_done_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second a prompt at most, and a twentieth of all the time there was."""
    now, moved = [50.0], []

    def move(place: int, size: int) -> bool:
        moved.append(place)
        now[0] += 0.03
        return True

    monkeypatch.setattr(pages, "perf_counter", lambda: now[0])
    monkeypatch.setattr(pages, "huge_page", lambda: 10)
    taken = iter([[(0, 10)], [(0, 110)], [(0, 110)], [(0, 110), (200, 230)]])
    monkeypatch.setattr(pages, "anonymous", lambda: next(taken))
    monkeypatch.setattr(pages, "collapse", move)
    held = Pages(True)
    with held.opening():
        pass
    assert len(held._small) == 10
    held.settle()
    assert moved == [], "there was no time yet"
    counts = []
    for seconds in (0.5, 0.5, 100.0, 0.0):
        now[0] += seconds
        held.settle()
        counts.append(len(moved))
    assert counts == [1, 2, 6, 10]
    with held.opening():
        pass
    held.settle()
    assert len(moved) == 13 and len(set(moved)) == 13 and held._small == []


@pytest.mark.parametrize("rows", [1, 2])
def test_an_engine_settles_before_its_prompts(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    settled: list[int] = []
    monkeypatch.setattr(Pages, "settle", lambda self: settled.append(1))
    engine = open_engine(Bundle.read(tiny_bundle).model("target"), threads=1)
    engine.reset(rows)
    settled.clear()
    tokens = np.arange(1, 9)[None].repeat(rows, 0)
    engine.forward(tokens, np.zeros(rows, np.int64))
    assert settled == [1]
    if rows == 1:
        engine.row_logits([1, 2], 8, last=False)  # type: ignore[attr-defined]
        assert settled == [1], "what one row writes is not held up"
    engine.close()


@pytest.mark.slow
@gives
def test_the_demo_target_steps_the_same_from_huge_pages(demo_bundle: Callable[[str], Path]) -> None:
    engine = open_engine(Bundle.read(demo_bundle("int8")).model("target"), threads=1)
    tokens = np.arange(1, 65)[None]
    expected = np.array(engine.forward(tokens, np.zeros(1, np.int64)))
    held = engine._pages  # type: ignore[attr-defined]
    while held._small:
        held._began = -1e9
        held.settle()
    engine.reset(1)
    assert np.array_equal(np.asarray(engine.forward(tokens, np.zeros(1, np.int64))), expected)
    engine.close()
