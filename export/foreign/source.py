"""What a directory of another exporter holds: which graph is taken, and what its configuration says about using it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...bundle import GENERATION_CONFIG, MANIFEST, SAMPLING, CacheShape, is_plain, read_json
from ...errors import BundleError, EngineError, ExportError, shown, typed
from ..checkpoints.defaults import unmet
from .graph import Graph, inside, read_graph

GRAPHS = ("model.onnx", "decoder_model_merged.onnx", "model_merged.onnx")
CONFIG, GENAI = "config.json", "genai_config.json"
_LEAST, _MOST = 3, 2**31 - 1  # tokens of context
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model directory, understood. ``root`` holds its configuration and tokenizer; lengths count tokens;
    ``unmet`` says what its defaults ask for that no answer will get."""

    root: Path
    graph: Graph
    dialect: str
    architecture: str
    vocab_size: int
    max_context: int
    cache: tuple[CacheShape, ...]
    eos_token_ids: tuple[int, ...]
    sampling: Mapping[str, float]
    unmet: str
    note: str


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """An object in a configuration file, field by field: null counts as missing, and each getter raises ExportError,
    naming file, field and what is legal, for a value of another kind. ``within`` leads to the object."""

    path: Path
    values: Mapping[str, Any]
    within: str = ""

    @classmethod
    def read(cls, root: Path, name: str) -> Fields:
        """The file ``name`` of a model directory. Raises ExportError if it is missing or no JSON object."""
        path = root / name
        if not path.is_file() or not inside(path, root):
            raise ExportError(f"'{root}' is not a model directory: {name} is missing")
        try:
            found = read_json(path, "JSON")
        except BundleError as error:
            raise ExportError(str(error)) from None
        if not isinstance(found, dict):
            raise ExportError(f"{path}: expected an object")
        return cls(path, found)

    def section(self, name: str) -> Fields:
        """The object under ``name``, empty where there is none."""
        found = self.values.get(name)
        if found is not None and not isinstance(found, dict):
            raise self.refused(name, "an object")
        return Fields(self.path, found or {}, f"{self.within}{name}.")

    def over(self, other: Fields) -> Fields:
        """These fields, and those of ``other`` for what is missing here."""
        known = {name: value for name, value in self.values.items() if value is not None}
        return Fields(self.path, {**other.values, **known}, other.within)

    def integer(self, name: str, least: int) -> int | None:
        """A whole number from ``least`` to 2147483647; None where there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if (found := _whole(value)) is None or not least <= found <= _MOST:
            raise self.refused(name, f"an integer from {least} to {_MOST}")
        return found

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.refused(name, "text")
        return value

    def names(self, name: str) -> list[str]:
        value = self.values.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            raise self.refused(name, "a list of names")
        return value or []

    def ids(self, name: str) -> tuple[int, ...]:
        """An id, or a list of them."""
        value = self.values.get(name)
        each = value if isinstance(value, list) else [] if value is None else [value]
        found = tuple(i for i in map(_whole, each) if i is not None)
        if len(found) < len(each):
            raise self.refused(name, "an integer or a list of integers")
        return found

    def sampling(self) -> dict[str, float]:
        """The defaults for answers that are drawn; none where they are not."""
        if not self.values.get("do_sample"):
            return {}
        given = {name: self.values.get(name) for name in SAMPLING}
        found = {"temperature": 1.0} | {name: value for name, value in given.items() if value is not None}
        for name, value in found.items():
            legal, holds = SAMPLING[name]
            if type(value) not in (int, float) or abs(value) > _MOST or not holds(float(value)):
                raise self.refused(name, legal)
        return {name: float(found[name]) for name in SAMPLING if name in found}

    def refused(self, name: str, legal: str) -> ExportError:
        return ExportError(f"{self.path}: {self.within}{name} must be {legal}, not {shown(self.values.get(name))}")


def read_source(path: str | Path) -> Source:
    """Understand a directory that optimum, onnx-community or onnxruntime-genai wrote, or one graph file in it.

    Of several graphs in a directory, ``model.onnx`` is taken, else ``decoder_model_merged.onnx``, each looked for
    there and then in ``onnx/``, which may be named itself; any other (``onnx/model_q4.onnx``) is taken when its path is
    given. Raises ExportError naming what is missing or cannot be used.
    """
    place = Path(path).absolute()  # a graph in the current directory lies in a folder of that name, too
    if not place.exists():
        raise ExportError(f"no model directory or graph '{path}'{_on_the_hub(str(path))}")
    folder = place if place.is_dir() else place.parent
    if (folder / MANIFEST).is_file():
        raise ExportError(f"'{folder}' is a bundle already")
    apart = folder.name == "onnx" and _is_described(folder.parent) and (place.is_file() or not _is_described(folder))
    root = folder.parent if apart else folder
    # onnxruntime-genai's graphs lie beside its configuration: one in onnx/ is another exporter's, if that was there
    ours = (root / GENAI).is_file() and not (apart and (root / CONFIG).is_file())
    return _genai(root, place) if ours else _concat(root, place)


def _concat(root: Path, place: Path) -> Source:
    config = Fields.read(root, CONFIG)
    config = config.section("text_config").over(config)
    defaults = root / GENERATION_CONFIG
    generation = Fields.read(root, GENERATION_CONFIG) if defaults.exists() else Fields(defaults, {})
    folders = (root, root / "onnx") if place == root else (place,)
    graph = read_graph(_choose(root, folders) if place.is_dir() else place, root)
    limit, note = _turning(graph, *_within(_window(config, graph), *_context(config)))
    if limit < _LEAST:
        raise ExportError(f"{config.path}: sliding_window must be at least {_LEAST}, not {limit}")
    named = [*config.names("architectures"), config.text("model_type") or "unknown"]
    return Source(
        root=root,
        graph=graph,
        # buffers as long as a past may be shorter than a window; other graphs may count their past by their length
        dialect="concat" if graph.least_slots is None else "genai",
        architecture=named[0],
        vocab_size=_vocabulary(graph, config),
        max_context=limit,
        cache=_cache(graph, config, ("num_key_value_heads", "num_attention_heads"), "head_dim"),
        eos_token_ids=(generation if "eos_token_id" in generation.values else config).ids("eos_token_id"),
        sampling=generation.sampling(),
        unmet=unmet(generation.path.name, generation.values, generation.sampling()),
        note=note,
    )


def _genai(root: Path, place: Path) -> Source:
    config = Fields.read(root, GENAI)
    model = config.section("model")
    decoder = model.section("decoder")
    search, kind = config.section("search"), model.text("type") or "unknown"
    if extra := sorted({"encoder", "vision", "speech", "embedding", "encoder_decoder_init"} & model.values.keys()):
        raise ExportError(f"'{root}' is a {kind} model with its own {extra[0]} graph; Leadout runs decoders")
    name = decoder.text("filename") or ""
    if not is_plain(name):
        raise ExportError(f"{config.path}: decoder.filename '{name}' is not the name of one graph")
    if place.is_dir() and not (root / name).is_file():
        raise ExportError(f"{config.path}: decoder.filename '{name}' is missing; download the whole directory")
    graph = read_graph(root / name if place.is_dir() else place, root)
    limit, note = model.integer("context_length", _LEAST), ""
    if limit is None:
        raise ExportError(f"{config.path}: model.context_length is missing; it must be from {_LEAST} to {_MOST}")
    window = decoder.section("sliding_window").integer("window_size", -1) or 0
    if not graph.windowed:
        limit, note = _within(window, limit, note)
    limit, note = _turning(graph, limit, note)
    if limit < _LEAST:
        raise ExportError(f"{config.path}: sliding_window.window_size must be at least {_LEAST}, not {limit}")
    return Source(
        root=root,
        graph=graph,
        dialect="genai" if graph.in_place else "concat",
        architecture=kind,
        vocab_size=_vocabulary(graph, model),
        max_context=limit,
        cache=_cache(graph, decoder, ("num_key_value_heads",), "head_size"),
        eos_token_ids=model.ids("eos_token_id"),
        sampling=search.sampling(),
        unmet=unmet(GENAI, search.values, search.sampling()),
        note=note,
    )


def _is_described(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG, GENAI))


def _on_the_hub(name: str) -> str:
    """What to do with a name that may be a repository's."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) or Path(name).parent.exists():
        return ""
    return f"; a repository of the hub is downloaded first: hf download {name} --local-dir DIR"


def _choose(root: Path, folders: Sequence[Path]) -> Path:
    for folder in folders:
        for name in GRAPHS:
            if (folder / name).is_file():
                return folder / name
    found = sorted(str(p.relative_to(root)) for folder in folders for p in folder.glob("*.onnx"))
    if "decoder_with_past_model.onnx" in {Path(name).name for name in found}:
        raise ExportError(
            f"'{root}' splits the decoder in two graphs; export it again as one (optimum: without --no-post-process)"
        )
    if found:
        raise ExportError(f"'{root}' has no {GRAPHS[0]}; name the graph to take, one of: {', '.join(found)}")
    raise ExportError(f"'{root}' has no ONNX graph; a checkpoint is exported with: leadout export {typed(root)}")


def _context(config: Fields) -> tuple[int, str]:
    """Positions there are, and why no more."""
    said = next((name for name in ("rope_parameters", "rope_scaling") if config.values.get(name)), None)
    rope = Fields(config.path, {}) if said is None else config.section(said)
    kind = rope.text("rope_type") or rope.text("type")
    if kind == "dynamic":
        raise ExportError(
            f"'{config.path.parent}': dynamic-NTK rope rescales every position as the text grows; it cannot be rewound"
        )
    names = ("original_max_position_embeddings", *_CONTEXT) if kind == "longrope" else _CONTEXT
    for name in names:
        for fields in (config, rope):
            if fields.values.get(name) and (limit := fields.integer(name, _LEAST)):
                return limit, _one_set(limit) if kind == "longrope" else ""
    raise ExportError(f"{config.path}: says no context length (one of: {', '.join(_CONTEXT)})")


def _window(config: Fields, graph: Graph) -> int:
    """That of a model whose fused attention should have one and has none; 0 for others. (Other graphs have theirs in
    what they make of the mask.)"""
    kinds = config.names("layer_types")
    unused = config.values.get("use_sliding_window") is False or (kinds and "sliding_attention" not in kinds)
    if unused or graph.windowed or not graph.in_place:
        return 0
    return config.integer("sliding_window", -1) or 0


def _within(window: int, limit: int, note: str) -> tuple[int, str]:
    """No more positions than a window that the graph does not have: it attends to everything and relies on a runtime
    that forgets; inside one window both are the same."""
    if not 0 < window < limit:
        return limit, note
    return window, f"context limited to the sliding window of {window}: the graph itself has none"


def _turning(graph: Graph, limit: int, note: str) -> tuple[int, str]:
    """No more positions than the graph has one set of rope factors for."""
    return (limit, note) if graph.turn is None or limit <= graph.turn else (graph.turn, _one_set(graph.turn))


def _one_set(limit: int) -> str:
    return f"context limited to {limit}: one set of rope factors"


def _vocabulary(graph: Graph, config: Fields) -> int:
    size = graph.signature.logits.shape[2] or config.integer("vocab_size", 1)
    if not size:
        raise ExportError(f"'{config.path.parent}': neither the graph nor its configuration says vocab_size")
    return size


def _cache(graph: Graph, config: Fields, heads: tuple[str, ...], width: str) -> tuple[CacheShape, ...]:
    """The graph's shapes; the configuration is asked for what these leave open, and for nothing else."""
    left = any(None in (port.shape[1], port.shape[3]) for port in graph.signature.past)
    found = [config.integer(name, 1) for name in heads if left]
    wide = (config.integer(width, 1) or _width(config)) if left else None
    try:
        return graph.signature.cache(next(filter(None, found), None), wide)
    except EngineError as error:
        raise ExportError(f"{graph.path}: {error}") from None


def _width(config: Fields) -> int | None:
    """Of a head, where it has no name of its own: most configurations leave it to these two."""
    hidden, heads = config.integer("hidden_size", 1), config.integer("num_attention_heads", 1)
    return hidden // heads if hidden and heads and hidden % heads == 0 else None


def _whole(value: object) -> int | None:
    """A whole number as JSON may write it (4096, 4.096e3); None for all else."""
    if type(value) is float and value.is_integer():
        return int(value)
    return value if type(value) is int else None
