"""How a bundle comes into being whole or not at all: written beside its place, then renamed. Needs no torch."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from ..bundle import FORMAT, MANIFEST, Manifest, ModelEntry, dump, file_entry
from ..errors import ExportError


def destination(out: str | Path) -> Path:
    """``out`` made absolute. Raises ExportError unless it is free, empty or a bundle (which will be replaced)."""
    place = Path(out)
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise ExportError(f"'{place}' is not a directory; choose another place for the bundle")
    if place.is_dir() and any(place.iterdir()) and not (place / MANIFEST).is_file():
        raise ExportError(f"'{place}' exists and is not a bundle; choose another place, or empty it")
    return place.absolute()


@contextlib.contextmanager
def aside(place: Path) -> Iterator[Path]:
    """A directory beside ``place`` that takes its place if all goes well and vanishes if not."""
    place.parent.mkdir(parents=True, exist_ok=True)
    folder = place.with_name(f".{place.name}.{os.getpid()}.partial")
    old = place.with_name(f".{place.name}.{os.getpid()}.old")
    folder.mkdir()
    try:
        yield folder
        if place.exists():
            place.rename(old)
        try:
            folder.rename(place)
        except BaseException:
            if old.exists():
                old.rename(place)
            raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def write_manifest(
    folder: Path,
    models: Mapping[str, ModelEntry],
    sampling: Mapping[str, float],
    provenance: Mapping[str, str],
) -> None:
    """Write ``leadout.json`` for a bundle whose files are all there."""
    files = {path.name: file_entry(path) for path in sorted(folder.iterdir()) if path.is_file()}
    manifest = Manifest(
        format=FORMAT,
        leadout=metadata.version("leadout"),
        models=models,
        files=files,
        sampling=sampling,
        provenance=provenance,
    )
    (folder / MANIFEST).write_text(dump(manifest), encoding="utf-8")
