"""The bundle: the directory that ``export`` writes and ``runtime`` reads, and nothing else crosses between them.

    bundle/
      leadout.json                the manifest: this file's dataclasses, nothing more
      tokenizer.json  generation_config.json  [tokenizer_config.json  chat_template.jinja]
      target/  model.onnx         the canonical graph (dialect "slots")
               model.gqa.onnx     for one row on a CPU       } variants: small files that share one weight blob;
               model.nonpad.onnx  for ragged rows on CUDA    } export.build names them all
               model.onnx.data    the weights
               golden.npz         token rows and top logits from transformers
      draft/   the same, and [vocabulary.npz: its ids in the target's; tokenizer.json: if it has another]

Reading checks everything: unknown keys, missing files, sizes, SHA-256, and that no path leaves the directory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from .errors import BundleError

FORMAT = 1
MANIFEST = "leadout.json"


@dataclasses.dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the bundle: a plain name inside its folder, its SHA-256 (hex) and its size in bytes."""

    file: str
    sha256: str
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class CacheShape:
    """One layer's cache: ``heads`` key-value heads, the width of a key and of a value."""

    heads: int
    key_dim: int
    value_dim: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model of the bundle.

    ``dialect`` names the graph's inputs and cache: ``slots`` (ours: a fixed buffer, rows written at ``past_lens``),
    ``concat`` (optimum, onnx-community: the cache grows by concatenation), ``genai`` (onnxruntime-genai: a shared
    buffer and an attention mask). ``variants`` maps a variant's name to its graph: ``canonical``, ``gqa``,
    ``gqa_even``, ``grouped``, ``nonpad``, ``tree``, ``tree_gqa`` for slots; ``canonical`` alone for the others.
    ``parity`` maps the name of a lowering or quantisation to the largest absolute difference of logits found when it
    was checked. ``files`` are all others in the folder: weight blobs, ``golden.npz``.
    """

    directory: str
    architecture: str
    precision: str
    dialect: str
    dtype: str
    vocab_size: int
    max_context: int
    parameters: int
    cache: tuple[CacheShape, ...]
    eos_token_ids: tuple[int, ...]
    variants: Mapping[str, FileEntry]
    files: Mapping[str, FileEntry]
    parity: Mapping[str, float] = dataclasses.field(default_factory=dict)
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """``leadout.json``. ``sampling`` holds the defaults of ``generation_config.json`` that Leadout knows."""

    format: int
    leadout: str
    models: Mapping[str, ModelEntry]
    files: Mapping[str, FileEntry]
    sampling: Mapping[str, float]
    provenance: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """One model of a bundle on disk: what an engine is opened from."""

    folder: Path
    entry: ModelEntry

    def path(self, variant: str) -> Path:
        """The graph of ``variant``. Raises BundleError naming the variants there are."""
        if variant not in self.entry.variants:
            have = ", ".join(sorted(self.entry.variants))
            raise BundleError(f"{self.folder.name} has no graph variant '{variant}' (it has: {have})")
        return self.folder / self.entry.variants[variant].file


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle on disk, checked."""

    path: Path
    manifest: Manifest

    @classmethod
    def read(cls, path: str | Path) -> Bundle:
        """Read and check a bundle. Raises BundleError naming what is wrong and where; changes nothing."""
        root = Path(path)
        manifest = read_manifest(root)
        bundle = cls(root, manifest)
        bundle._check_files()
        return bundle

    def model(self, role: str) -> Model:
        """``target`` or ``draft``. Raises BundleError if the bundle has no such model."""
        if role not in self.manifest.models:
            raise BundleError(f"bundle '{self.path}' has no {role} model (it has: {', '.join(self.manifest.models)})")
        entry = self.manifest.models[role]
        return Model(self.path / entry.directory, entry)

    def _check_files(self) -> None:
        for entry in self.manifest.files.values():
            check_file(self.path, entry)
        for model in self.manifest.models.values():
            if not _is_plain(model.directory):
                raise BundleError(f"{MANIFEST}: model directory '{model.directory}' leaves the bundle")
            for entry in (*model.variants.values(), *model.files.values()):
                check_file(self.path / model.directory, entry)


def read_manifest(root: Path) -> Manifest:
    """``leadout.json`` of the bundle at ``root``, without a look at the other files. Raises BundleError."""
    source = root / MANIFEST
    if not source.is_file():
        raise BundleError(f"no bundle at '{root}': {MANIFEST} is missing (write one with: leadout export)")
    try:
        raw = json.loads(source.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BundleError(f"{source}: not a manifest: {error}") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else None
        raise BundleError(f"{source}: format {found!r}, this Leadout reads {FORMAT}; export the pair again")
    manifest: Manifest = parse(Manifest, raw, str(source))
    return manifest


def file_entry(path: Path) -> FileEntry:
    """Describe a file as it stands on disk."""
    with path.open("rb") as stream:
        return FileEntry(path.name, hashlib.file_digest(stream, "sha256").hexdigest(), path.stat().st_size)


def check_file(folder: Path, entry: FileEntry) -> None:
    """Raise BundleError unless the file is there, inside ``folder``, whole and unchanged."""
    path = folder / entry.file
    if not _is_plain(entry.file) or path.is_symlink():
        raise BundleError(f"{MANIFEST}: file '{entry.file}' leaves the bundle; only plain names are allowed")
    if not path.is_file():
        raise BundleError(f"{path} is missing; copy the whole bundle or export it again")
    size = path.stat().st_size
    if size != entry.bytes:
        raise BundleError(f"{path} has {size} bytes instead of {entry.bytes}; the copy is incomplete")
    if file_entry(path).sha256 != entry.sha256:
        raise BundleError(f"{path} does not match its SHA-256 in {MANIFEST}; it was changed or damaged")


def dump(manifest: Manifest) -> str:
    """The text of ``leadout.json``."""
    return json.dumps(dataclasses.asdict(manifest), indent=1, ensure_ascii=False) + "\n"


def _is_plain(name: str) -> bool:
    return bool(name) and name not in (".", "..") and not any(c in name for c in "/\\:\0")


def parse(kind: Any, raw: Any, where: str) -> Any:
    """Build ``kind`` from JSON; unknown keys, missing keys and wrong types are refused by name."""
    origin = get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _parse_dataclass(kind, raw, where)
    if origin is Mapping and isinstance(raw, dict):
        return {key: parse(get_args(kind)[1], value, f"{where}: {key}") for key, value in raw.items()}
    if origin is tuple and isinstance(raw, list):
        return tuple(parse(get_args(kind)[0], value, f"{where}[{i}]") for i, value in enumerate(raw))
    if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if isinstance(kind, type) and type(raw) is kind:
        return raw
    name = kind.__name__ if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) else str(kind)
    raise BundleError(f"{where}: expected {name}, found {raw!r:.60}")


def _parse_dataclass(kind: Any, raw: Any, where: str) -> Any:
    if not isinstance(raw, dict):
        raise BundleError(f"{where}: expected an object, found {raw!r:.60}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if unknown := sorted(set(raw) - set(fields)):
        raise BundleError(f"{where}: unknown option '{unknown[0]}' (known: {', '.join(fields)})")
    required = {n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING}
    if missing := sorted(required - set(raw)):
        raise BundleError(f"{where}: '{missing[0]}' is missing")
    hints = get_type_hints(kind)
    return kind(**{name: parse(hints[name], value, f"{where}: {name}") for name, value in raw.items()})
