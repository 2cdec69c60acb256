"""How a bundle comes into being whole or not at all: written beside its place, then renamed. Needs no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

from ..bundle import FORMAT, MANIFEST, Manifest, ModelEntry, check_manifest, dump, file_entry
from ..errors import BundleError, ExportError


def destination(out: str | Path) -> Path:
    """``out`` made absolute. Raises ExportError unless it is free, empty or a bundle (which will be replaced)."""
    place = Path(out)
    with _named(place):
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            raise ExportError(f"'{place}' is not a directory; choose another place for the bundle")
        if place.is_dir() and any(place.iterdir()) and not (place / MANIFEST).is_file():
            raise ExportError(f"'{place}' exists and is not a bundle; choose another place, or empty it")
    return place.absolute()


@contextlib.contextmanager
def aside(place: Path, progress: Callable[[str], None]) -> Iterator[Path]:
    """A directory beside ``place`` that takes its place if all goes well and vanishes if not. Tells ``progress`` where
    a bundle will be replaced. Raises ExportError if nothing can be written there."""
    folder = place.with_name(f".{place.name}.{os.getpid()}.partial")
    old = place.with_name(f".{place.name}.{os.getpid()}.old")
    with _named(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    try:
        if (place / MANIFEST).is_file():
            progress(f"replacing the bundle at {place}, with its engines and tuned.json")
        yield folder
        with _named(place):
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
