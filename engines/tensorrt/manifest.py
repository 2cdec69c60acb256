"""What is written beside a built engine, and how the engine for a device is found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from ...bundle import FileEntry, Model, check_file, parse
from ...errors import EngineError

PORTABLE = "portable"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The largest step one optimization profile takes: rows, and tokens a row."""

    max_batch: int
    max_width: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineManifest:
    """``<sdk>-<compute capability>-<precision>.json``.

    ``capacity``: slots a row, fixed. ``profiles``: prefill first, then verify (its ``max_width`` is the longest draft
    and one). ``aliases``: output name to the input whose memory it shares. ``heads``: the outputs beside ``logits``;
    ``top``: k of the top-k head. ``graph_sha256``: the canonical graph it was built from, as in leadout.json.
    """

    sdk: str
    version: str
    compute_capability: str
    precision: str
    capacity: int
    profiles: tuple[Profile, ...]
    aliases: Mapping[str, str]
    heads: tuple[str, ...]
    top: int
    graph_sha256: str
    engine_sha256: str
    engine_bytes: int
    log: tuple[str, ...]


def read(path: Path) -> EngineManifest:
    """Raises BundleError naming what is wrong and where."""
    manifest: EngineManifest = parse(EngineManifest, json.loads(path.read_text(encoding="utf-8")), str(path))
    return manifest


def find(model: Model, sdk: str, version: str, compute_capability: str) -> tuple[Path, EngineManifest]:
    """The engine of ``model`` for this SDK and device, checked: its file and its manifest.

    Raises EngineError for a missing, stale or foreign engine with the command that builds it, BundleError for a
    damaged one.
    """
    again = f"build it on this device with: leadout build {model.folder.parent} --sdk {sdk}"
    kinds = (compute_capability, PORTABLE)
    found = [path for kind in kinds for path in sorted(model.folder.glob(f"{sdk}-{kind}-*.json"))]
    if not found:
        raise EngineError(f"{model.folder} has no {sdk} engine for compute capability {compute_capability}: {again}")
    manifest = read(found[0])
    if manifest.version != version:
        raise EngineError(f"{found[0].stem} was built with {sdk} {manifest.version}, here is {version}: {again}")
    if manifest.graph_sha256 != model.entry.variants["canonical"].sha256:
        raise EngineError(f"{found[0].stem} was built from another graph than the bundle's: {again}")
    path = found[0].with_suffix(".engine")
    check_file(model.folder, FileEntry(path.name, manifest.engine_sha256, manifest.engine_bytes))
    return path, manifest
