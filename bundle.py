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

Reading checks everything: unknown keys, values that no model has, missing files, sizes, SHA-256, and that no path
leaves the directory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints
from zipfile import BadZipFile

from .errors import BundleError, shown

FORMAT = 1
MANIFEST = "leadout.json"
# Of a checkpoint, and kept in its bundle under the same names.
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
CHAT_TEMPLATE, GENERATION_CONFIG = "chat_template.jinja", "generation_config.json"
VOCABULARY = "vocabulary.npz"  # of a draft (runtime/vocabulary.py)
ROLES = ("target", "draft")
PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int4", "int2")
DEFAULT_TEMPLATE = "default"  # the name of a conversation's template, if there are several
DTYPES = ("float32", "float16")
RAGGED = ("ragged_4", "ragged_8", "ragged_16")  # by how many rows they take
VARIANTS = {
    "slots": ("canonical", "gqa", "gqa_even", "grouped", "nonpad", "tree", "tree_gqa", *RAGGED),
    "concat": ("canonical",),
    "genai": ("canonical",),
}
NO_ARRAYS = (OSError, EOFError, ValueError, KeyError, BadZipFile)  # what numpy raises of an .npz that is none
_MOST, _MOST_BYTES = 2**31 - 1, 2**63 - 1
_RANGES = {"vocab_size": (1, _MOST), "max_context": (2, _MOST), "parameters": (0, _MOST_BYTES)}
# What the settings of these names may be: a default that nobody could ask for is a fault of the bundle.
SAMPLING: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("0, or from 1e-06 to 1e+06", lambda value: value == 0 or 1e-6 <= value <= 1e6),
    "top_k": (f"an integer from 0 to {_MOST}", lambda value: 0 <= value <= _MOST and value.is_integer()),
    "top_p": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("from 1e-06 to 1e+06", lambda value: 1e-6 <= value <= 1e6),
}


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


@dataclasses.dataclass(frozen=True, slots=True)
class Recurrence:
    """What layers keep of a row whose memory is no list of slots: short convolutions, linear attention, state spaces.

    ``trails``: how many numbers each keeps of a token, for the last ``slots`` tokens; ``states``: what each has made of
    all before those, ``heads`` matrices [key_dim, value_dim]; ``context``: tokens before a step's first that the step
    still reads. A graph has no state where there are convolutions alone.
    """

    slots: int
    context: int
    trails: tuple[int, ...]
    states: tuple[CacheShape, ...] = ()

    @property
    def widest(self) -> int:
        """The most tokens of a step, so that as many before it can be taken back."""
        return (self.slots - self.context) // 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model of the bundle.

    ``dialect`` names the graph's inputs and cache: ``slots`` (ours: a fixed buffer, rows written at ``past_lens``),
    ``concat`` (optimum, onnx-community: the cache grows by concatenation), ``genai`` (onnxruntime-genai: a shared
    buffer and an attention mask). ``variants`` maps a variant's name, one of ``VARIANTS``, to its graph. A target's
    ``eos_token_ids`` are among its logits; those of a trimmed draft may not be. ``mask_token`` is the id by which a
    draft is asked for tokens behind one that it does not know yet (None: it says one a step), ``block`` the most of
    them that it was taught to say (None: as many as it is asked for). ``features`` is how many numbers the graph gives
    of each token beside logits, and, with ``reads_features``, reads beside each. ``cache`` are the layers that attend,
    ``recurrence`` is what the others keep (None: all attend). ``least_slots`` is how many slots each buffer of a row
    has to have, however short its text (None: no more than that). ``parity`` maps the name of a lowering or
    quantisation to the largest absolute difference of logits found when it was checked. ``files`` are all others in the
    folder: weight blobs, ``golden.npz``.
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
    mask_token: int | None = None
    block: int | None = None
    features: int | None = None
    reads_features: bool = False
    recurrence: Recurrence | None = None
    least_slots: int | None = None
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
        bundle = cls(Path(path), read_manifest(path))
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
            if not is_plain(model.directory):
                raise BundleError(f"{MANIFEST}: model directory '{model.directory}' leaves the bundle")
            for entry in (*model.variants.values(), *model.files.values()):
                check_file(self.path / model.directory, entry)


def read_manifest(root: str | Path) -> Manifest:
    """``leadout.json`` of the bundle at ``root``, without a look at the other files. Raises BundleError."""
    source = Path(root) / MANIFEST
    try:
        there = root != "" and source.is_file()
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise BundleError(f"no bundle at '{root}': {error.strerror}") from None
    if not there:
        raise BundleError(f"no bundle at '{root}': {MANIFEST} is missing (write one with: leadout export)")
    raw = read_json(source, "a manifest")
    found = raw.get("format") if isinstance(raw, dict) else None
    if isinstance(found, int) and found > FORMAT:
        newer = f"written by a newer Leadout (this one reads {FORMAT}): upgrade leadout"
        raise BundleError(f"{source}: format {shown(found)}, {newer}")
    if found != FORMAT:
        raise BundleError(f"{source}: format {shown(found)}, this Leadout reads {FORMAT}; export the pair again")
    manifest: Manifest = parse(Manifest, raw, str(source))
    check_manifest(manifest, str(source))
    return manifest


def read_json(path: Path, kind: str) -> Any:
    """What a JSON file holds. Raises BundleError, saying that it is not ``kind``, if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BundleError(f"{path}: cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise BundleError(f"{path}: not {kind}: its brackets are nested too deep") from None
    except ValueError as error:
        raise BundleError(f"{path}: not {kind}: {error}") from None


def named_templates(found: object) -> dict[str, str]:
    """A tokenizer's ``chat_template`` as templates by name: one alone is the default, a list has objects with ``name``
    and ``template``."""
    if isinstance(found, str):
        return {DEFAULT_TEMPLATE: found}
    entries = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    return {str(each.get("name")): text for each in entries if isinstance(text := each.get("template"), str)}


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like, of a tokenizer's settings: text, or an object with the text as ``content``."""
    found = {name: value for name, value in settings.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def check_manifest(manifest: Manifest, where: str) -> None:
    """Raise BundleError, naming key and legal values, for what no pair is like. ``where`` is the file's name."""
    _check_keys(manifest.models, ROLES, f"{where}: models", needed="target")
    for role, model in manifest.models.items():
        _check_model(model, f"{where}: models: {role}", ends=model.vocab_size if role == "target" else _MOST)
    _check_features(manifest.models, where)
    _check_sizes(manifest.files, f"{where}: files")
    _check_keys(manifest.sampling, SAMPLING, f"{where}: sampling")
    for name, value in manifest.sampling.items():
        legal, holds = SAMPLING[name]
        if not holds(value):
            raise BundleError(f"{where}: sampling: {name} must be {legal}, not {shown(value)}")


def _check_model(model: ModelEntry, where: str, *, ends: int) -> None:
    """``ends``: what its ids that end a text are below."""
    for key, names in {"precision": PRECISIONS, "dialect": tuple(VARIANTS), "dtype": DTYPES}.items():
        if (name := getattr(model, key)) not in names:
            raise BundleError(f"{where}: {key} must be one of {', '.join(names)}, not {shown(name)}")
    _check_keys(model.variants, VARIANTS[model.dialect], f"{where}: variants", needed="canonical")
    for key, (least, most) in _RANGES.items():
        _check_range(getattr(model, key), least, most, f"{where}: {key}")
    if not model.cache:
        raise BundleError(f"{where}: cache must have at least 1 layer, not 0")
    _check_shapes(model.cache, f"{where}: cache")
    if model.recurrence is not None:
        _check_recurrence(model.recurrence, f"{where}: recurrence")
    for i, token_id in enumerate(model.eos_token_ids):
        _check_range(token_id, 0, ends - 1, f"{where}: eos_token_ids[{i}]")
    if model.mask_token is not None:
        _check_range(model.mask_token, 0, _MOST, f"{where}: mask_token")
    if model.block is not None:
        _check_range(model.block, 1, _MOST, f"{where}: block")
    if model.features is not None:
        _check_range(model.features, 1, _MOST, f"{where}: features")
    if model.least_slots is not None:
        _check_range(model.least_slots, 1, _MOST, f"{where}: least_slots")
    _check_sizes(model.variants, f"{where}: variants")
    _check_sizes(model.files, f"{where}: files")
    for name, difference in model.parity.items():
        if not 0 <= difference < math.inf:
            raise BundleError(f"{where}: parity: {name} must be a finite number of at least 0, not {shown(difference)}")


def _check_shapes(shapes: tuple[CacheShape, ...], where: str) -> None:
    for i, shape in enumerate(shapes):
        for key, size in dataclasses.asdict(shape).items():
            _check_range(size, 1, _MOST, f"{where}[{i}]: {key}")


def _check_recurrence(found: Recurrence, where: str) -> None:
    if not found.trails:
        raise BundleError(f"{where}: trails must be at least 1, not 0")
    for i, width in enumerate(found.trails):
        _check_range(width, 1, _MOST, f"{where}: trails[{i}]")
    _check_shapes(found.states, f"{where}: states")
    _check_range(found.context, 0, _MOST, f"{where}: context")
    _check_range(found.slots, found.context + 4, _MOST, f"{where}: slots")


def _check_features(models: Mapping[str, ModelEntry], where: str) -> None:
    """Who reads features must be given them, as many as it reads, and only a draft may."""
    given = models["target"].features
    for role, model in models.items():
        if model.reads_features and (role == "target" or model.features is None or model.features != given):
            read, has = shown(model.features), "none" if given is None else given
            raise BundleError(f"{where}: models: {role}: reads {read} features a token, the target gives {has}")


def _check_keys(found: Mapping[str, Any], known: Collection[str], where: str, *, needed: str | None = None) -> None:
    if unknown := sorted(set(found) - set(known)):
        raise BundleError(f"{where}: unknown option '{unknown[0]}' (known: {', '.join(known)})")
    if needed is not None and needed not in found:
        raise BundleError(f"{where}: '{needed}' is missing")


def _check_sizes(files: Mapping[str, FileEntry], where: str) -> None:
    for name, entry in files.items():
        _check_range(entry.bytes, 0, _MOST_BYTES, f"{where}: {name}: bytes")


def _check_range(value: int, least: int, most: int, where: str) -> None:
    if not least <= value <= most:
        raise BundleError(f"{where} must be from {least} to {most}, not {shown(value)}")


def file_entry(path: Path) -> FileEntry:
    """Describe a file as it stands on disk."""
    with path.open("rb") as stream:
        return FileEntry(path.name, hashlib.file_digest(stream, "sha256").hexdigest(), path.stat().st_size)


def check_file(folder: Path, entry: FileEntry) -> None:
    """Raise BundleError unless the file is there, inside ``folder``, whole and unchanged."""
    path = folder / entry.file
    try:
        if not is_plain(entry.file):
            raise BundleError(f"{MANIFEST}: file '{entry.file}' leaves the bundle; only plain names are allowed")
        if path.is_symlink():
            raise BundleError(f"{path} is a link, which may leave the bundle; copy the files themselves (cp -rL)")
        if not path.is_file():
            raise BundleError(f"{path} is missing; copy the whole bundle or export it again")
        size = path.stat().st_size
        if size != entry.bytes:
            raise BundleError(f"{path} has {size} bytes instead of {entry.bytes}; the copy is incomplete")
        if file_entry(path).sha256 != entry.sha256:
            raise BundleError(f"{path} does not match its SHA-256 in {MANIFEST}; it was changed or damaged")
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror or error}") from None


def dump(manifest: Manifest) -> str:
    """The text of ``leadout.json``."""
    return json.dumps(dataclasses.asdict(manifest), indent=1, ensure_ascii=False) + "\n"


def is_plain(name: str) -> bool:
    """Whether ``name`` is the name of a file, and no path: it leads out of no directory."""
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
    if origin is types.UnionType:  # of one kind and None
        return None if raw is None else parse(get_args(kind)[0], raw, where)
    if kind is float and type(raw) is int and abs(raw) <= _MOST_BYTES:
        return float(raw)
    if isinstance(kind, type) and type(raw) is kind:
        return raw
    name = kind.__name__ if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) else str(kind)
    raise BundleError(f"{where}: expected {name}, found {shown(raw)}")


def _parse_dataclass(kind: Any, raw: Any, where: str) -> Any:
    if not isinstance(raw, dict):
        raise BundleError(f"{where}: expected an object, found {shown(raw)}")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    if unknown := sorted(set(raw) - set(fields)):
        raise BundleError(f"{where}: unknown option '{unknown[0]}' (known: {', '.join(fields)})")
    required = {n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING}
    if missing := sorted(required - set(raw)):
        raise BundleError(f"{where}: '{missing[0]}' is missing")
    hints = get_type_hints(kind)
    return kind(**{name: parse(hints[name], value, f"{where}: {name}") for name, value in raw.items()})
