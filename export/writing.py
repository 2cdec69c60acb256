"""Writes a bundle completely or not at all: beside its place first, then it is renamed. Needs no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from ..bundle import (
    CHAT_TEMPLATE,
    FORMAT,
    GENERATION_CONFIG,
    MANIFEST,
    TOKENIZER,
    TOKENIZER_CONFIG,
    Manifest,
    ModelEntry,
    check_manifest,
    dump,
    file_entry,
)
from ..engines import locks
from ..errors import BundleError, ExportError

Progress = Callable[[str], None]  # told in a line what an export does next, or leaves out

_TRIES = 100  # to take a place that others want
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NUMPY_S = re.compile(r"problem writing element|requested and \d+ written")  # its word for each of them: no number
# What decoding needs of a model's directory besides weights.
TEXTS = (TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE, GENERATION_CONFIG)


def destination(out: str | Path) -> Path:
    """``out`` made absolute. Raises ExportError unless it is free, empty or a bundle (which will be replaced), and
    neither a mount point nor where this process is."""
    place = Path(out).expanduser()
    with _named(place):
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            raise ExportError(f"'{place}' is not a directory; choose another place for the bundle")
        if place.is_dir() and any(place.iterdir()) and not (place / MANIFEST).is_file():
            raise ExportError(f"'{place}' exists and is not a bundle; choose another place, or empty it")
        if os.path.ismount(place):  # Path.is_mount says so of "."
            raise ExportError(f"'{place}' is a mount point, which no directory can replace; choose a place below it")
        if place.is_dir() and _is_here(place):  # whoever is in what was replaced finds nothing there
            raise ExportError(f"'{place}' is where you are, and a bundle replaces what is there; go elsewhere first")
    return place.absolute()


def _is_here(place: Path) -> bool:
    """Whether this process works in a directory, or somewhere below it."""
    try:
        return Path.cwd().is_relative_to(place.resolve())
    except FileNotFoundError:  # where it works is gone
        return False


@contextlib.contextmanager
def aside(place: Path, progress: Progress) -> Iterator[Path]:
    """A directory beside ``place`` that takes its place if all goes well and vanishes if not; what processes that were
    killed left there vanishes, too. Tells ``progress`` where a bundle will be replaced. Raises ExportError if nothing
    can be written there."""
    folder, old = _beside(place, os.getpid())
    with _named(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        _clear(place, progress)
        folder.mkdir()
    try:
        with _lock(folder):
            if (place / MANIFEST).is_file():
                progress(f"replacing the bundle at {place}, with its engines and tuned.json")
            with _room(place):
                yield folder
            with _named(place):
                _change_places(folder, place, old)
    finally:
        _discard(place, os.getpid())


def _change_places(folder: Path, place: Path, old: Path) -> None:
    """``folder`` becomes ``place``, and what was there ``old``. Another export may do the same at this moment: what it
    put there is replaced, too. Raises OSError."""
    for tries in reversed(range(_TRIES)):
        with contextlib.suppress(FileNotFoundError):  # none is there, or another has just taken it away
            place.rename(old)
        try:
            folder.rename(place)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not tries:
                raise
            _remove(old)
    _remove(old)  # now: it must not come back where the place is free for a moment


def _beside(place: Path, process: int) -> tuple[Path, Path]:
    """Where a process writes a bundle, and where it puts the one that was there while they change places."""
    folder, old = (place.with_name(f".{place.name}.{process}.{kind}") for kind in ("partial", "old"))
    return folder, old


def _discard(place: Path, process: int) -> None:
    """Remove what a process has beside ``place``. A bundle that it moved away without putting another there comes
    back."""
    folder, old = _beside(place, process)
    if old.exists() and not place.exists():
        with _named(place):
            old.rename(place)
    for path in (folder, old):
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a directory, with all in it that may be removed: its folders may be read-only, as on a device."""
    for folder, _, _ in os.walk(path):
        with contextlib.suppress(OSError):
            Path(folder).chmod(stat.S_IRWXU)
    shutil.rmtree(path, ignore_errors=True)


def _clear(place: Path, progress: Progress) -> None:
    """Discard what exports to ``place`` left whose processes are gone: killed, they could not."""
    ours = re.compile(re.escape(f".{place.name}.") + r"([1-9]\d{0,8})\.(partial|old)")
    with contextlib.suppress(PermissionError):  # a folder may be open to those who know its names alone
        for process in sorted(
            {int(found[1]) for path in place.parent.iterdir() if (found := ours.fullmatch(path.name))}
        ):
            if _is_gone(place, process):
                progress(f"removing what an export that was killed left beside {place}")
                _discard(place, process)


def _is_gone(place: Path, process: int) -> bool:
    """Whether a process that wrote beside ``place`` has ended. None may have its number, but for this one, which has
    not begun; and none may hold the lock, for processes of another container, say, have numbers of their own."""
    folder, old = _beside(place, process)
    try:
        with _lock(folder if folder.exists() else old) as free:
            return free and (process == os.getpid() or not _is_alive(process))
    except OSError:  # no such directory any more, or somebody else's
        return False


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        pass
    return True


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Hold the lock of a directory. Gives whether it was to be had."""
    if not locks.AVAILABLE:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield locks.lock(handle, wait=False)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _room(place: Path) -> Iterator[None]:
    """A disk that is full inside, or takes no file of that size, becomes an ExportError that says how much it takes."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL and not (error.errno is None and _NUMPY_S.search(str(error))):
            raise
        raise ExportError(
            f"cannot write beside '{place}': {error.strerror or error}; an export takes 8 bytes a parameter there while"
            " it runs"
        ) from None


@contextlib.contextmanager
def _named(place: Path) -> Iterator[None]:
    """An OSError inside becomes an ExportError that names ``place``."""
    try:
        yield
    except OSError as error:
        raise ExportError(f"cannot write '{place}': {error.strerror or error}; choose another place") from None


def write_manifest(
    folder: Path,
    models: Mapping[str, ModelEntry],
    sampling: Mapping[str, float],
    provenance: Mapping[str, str],
) -> None:
    """Write ``leadout.json`` for a bundle whose files are all there. Ids that no model says (beyond a target's logits,
    negative) end no text and are left out. Raises ExportError for what no bundle may say."""
    limits = {role: model.vocab_size if role == "target" else math.inf for role, model in models.items()}
    models = {
        role: dataclasses.replace(model, eos_token_ids=tuple(i for i in model.eos_token_ids if 0 <= i < limits[role]))
        for role, model in models.items()
    }
    files = {path.name: file_entry(path) for path in sorted(folder.iterdir()) if path.is_file()}
    manifest = Manifest(
        format=FORMAT,
        leadout=metadata.version("leadout"),
        models=models,
        files=files,
        sampling=sampling,
        provenance=provenance,
    )
    try:
        check_manifest(manifest, MANIFEST)
    except BundleError as error:
        raise ExportError(f"this cannot become a bundle: {error}") from None
    (folder / MANIFEST).write_text(dump(manifest), encoding="utf-8")
