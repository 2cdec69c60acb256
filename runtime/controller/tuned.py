"""Decides which measured costs belong to this device, and how they are kept in a bundle: ``tuned.json``.

The file stands beside ``leadout.json`` and outside its checks, for it is written on the device: it holds numbers that
steer speed and never text. It names the manifest it was measured with by SHA-256, and each table the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...bundle import MANIFEST, Bundle, parse, read_json, read_manifest
from ...engines.base import MOST_ROWS
from ...engines.locks import lock
from ...errors import BundleError, shown, typed
from ..device import Device
from ..settings import MAX_GUESS_LENGTH
from .costs import PARTS, Cost

FORMAT = 2
TUNED = "tuned.json"
_MOST_BUCKETS, _LONGEST = 40, 3600.0
_WRITING = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class Tuning:
    """One device's table."""

    device: Device
    costs: tuple[Cost, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Tuned:
    """``tuned.json``. ``manifest`` is the SHA-256 (hex) of the ``leadout.json`` it was measured with."""

    format: int
    manifest: str
    tunings: tuple[Tuning, ...]


def read(bundle: Bundle, device: Device) -> tuple[tuple[Cost, ...], str]:
    """What ``tuned.json`` knows of ``device``, and a note where there is a file and it knows nothing.

    Raises BundleError for a file that is not one.
    """
    path = bundle.path / TUNED
    if not path.exists():
        return (), ""
    found = _read(path)
    if found.manifest != _manifest(bundle):
        return (), f"{TUNED} was measured with another export; measure again with: leadout tune {typed(bundle.path)}"
    costs = next((tuning.costs for tuning in found.tunings if tuning.device == device), ())
    other = f"{TUNED} does not know this device used this way; measure with: leadout tune {typed(bundle.path)}"
    return costs, "" if costs else other


def write(bundle: Bundle, device: Device, costs: Sequence[Cost]) -> Path:
    """Put the costs of ``device`` into the bundle, in place of what it had; whole or not at all. Who may read the
    manifest may read them, whatever the umask: a bundle is not opened beside a table that cannot be read.

    Tables of other devices stay if they belong to the same export, those that others write at this moment, too. Raises
    BundleError if it cannot be written, or the bundle is gone, or another by now: what was measured is not that one's.
    """
    with _alone(bundle.path / MANIFEST):
        return _write(bundle, device, costs)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Whoever asks for the same file, in this process or another, waits; where nothing can be locked, only this
    process's threads do."""
    with _WRITING, contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):
            lock(opened.enter_context(path.open("rb")).fileno(), wait=True)
        yield


def _write(bundle: Bundle, device: Device, costs: Sequence[Cost]) -> Path:
    if read_manifest(bundle.path) != bundle.manifest:
        raise BundleError(f"'{bundle.path}' was replaced while it was measured; tune it again")
    path, manifest, kept = bundle.path / TUNED, _manifest(bundle), list[Tuning]()
    if path.exists() and (found := _read(path)).manifest == manifest:
        kept = [tuning for tuning in found.tunings if tuning.device != device]
    tuned = Tuned(FORMAT, manifest, (*kept, Tuning(device, tuple(costs))))
    aside = path.with_name(f".{TUNED}.{os.getpid()}.partial")
    try:
        aside.write_text(json.dumps(dataclasses.asdict(tuned), indent=1) + "\n", encoding="utf-8")
        aside.chmod(stat.S_IMODE((bundle.path / MANIFEST).stat().st_mode) | stat.S_IWUSR)
        aside.replace(path)
    except OSError as error:
        raise BundleError(
            f"cannot write '{path}': {error.strerror or error}; tune a copy of the bundle, or use --no-save"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()
    return path


def _read(path: Path) -> Tuned:
    try:
        if path.is_symlink():
            raise BundleError(f"{path} is a link; only plain files are read")
        if not path.is_file():  # to open a pipe would wait for who writes into it
            raise BundleError(f"{path} is no file")
        raw = read_json(path, "a table of costs")
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise BundleError(f"{path}: not of format {FORMAT}")
        tuned: Tuned = parse(Tuned, raw, str(path))
        for cost in (cost for tuning in tuned.tunings for cost in tuning.costs):
            _check(cost, path)
    except BundleError as error:
        raise BundleError(f"{error} (delete {path.name}, it is only measurements, and run: leadout tune)") from None
    return tuned


def _check(cost: Cost, path: Path) -> None:
    ranges = {
        "rows": (1, MOST_ROWS),
        "context": (0, _MOST_BUCKETS),
        "width": (1, MAX_GUESS_LENGTH + 1),
        "seconds": (1e-9, _LONGEST),
    }
    if cost.part not in PARTS:
        raise BundleError(f"{path}: part '{cost.part}' is unknown (one of: {', '.join(PARTS)})")
    for name, (low, high) in ranges.items():
        if not low <= (value := getattr(cost, name)) <= high:
            raise BundleError(f"{path}: {name} must be from {low:g} to {high:g}, not {shown(value)}")


def _manifest(bundle: Bundle) -> str:
    return hashlib.sha256((bundle.path / MANIFEST).read_bytes()).hexdigest()
