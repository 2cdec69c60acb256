"""Says what a pair runs on: the processor, the cores this process may use, and how both models are opened there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
from pathlib import Path

from ..engines.providers import installed
from .ranges import integer

MOST_THREADS = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """What costs depend on besides the bundle. ``runtime`` is ONNX Runtime's version."""

    processor: str
    cores: int
    provider: str
    draft_provider: str
    threads: int
    draft_threads: int
    variant: str
    exact: bool
    runtime: str


def cores(root: Path = Path("/")) -> int:
    """The cores this process may use: no more than a container's share of their time is whole ones, for threads beyond
    it are stopped in turn, and those that wait for them spin."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    groups = root / "sys/fs/cgroup"
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # versions 2 and 1
        with contextlib.suppress(OSError, ValueError):  # no such file, or no limit: "max"
            quota, period = map(int, " ".join((groups / name).read_text(encoding="utf-8") for name in files).split())
            if quota > 0 and period > 0:
                return max(1, min(found, quota // period))
    return found


def this_device(
    *,
    provider: str,
    draft_provider: str | None,
    threads: int | None,
    draft_threads: int | None,
    variant: str,
    exact: bool,
) -> Device:
    """The machine this runs on, as it is used: what is None is filled in as ``load`` says. Raises UsageError for fewer
    threads than one, or more than MOST_THREADS."""
    threads = integer("threads", cores() if threads is None else threads, 1, MOST_THREADS)
    draft_threads = integer("draft_threads", threads if draft_threads is None else draft_threads, 1, MOST_THREADS)
    return Device(
        processor=processor(),
        cores=os.cpu_count() or 1,
        provider=provider,
        draft_provider=draft_provider or provider,
        threads=threads,
        draft_threads=draft_threads,
        variant=variant,
        exact=exact,
        runtime=", ".join(f"{name} {version}" for name, version in installed().items()),
    )


def processor(root: Path = Path("/")) -> str:
    """The processor's name as the system tells it. Linux on ARM64 tells none: the board's then (Jetson, Raspberry Pi),
    or its cores' codes."""
    info, board = root / "proc/cpuinfo", root / "proc/device-tree/model"
    told = [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in said(info).splitlines())]
    if names := [value for key, value in told if key == "model name"]:
        return names[0]
    if name := said(board).rstrip("\0\n"):
        return name
    codes = dict.fromkeys(value for key, value in told if key in ("CPU implementer", "CPU part"))
    return " ".join([platform.processor() or platform.machine(), *codes])


def said(path: Path) -> str:
    """What stands in a file of the system's; nothing where there is none, or where a sandbox lets nobody read it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
