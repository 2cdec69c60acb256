"""What a directory of another exporter holds: which graph is taken, and what its configuration says about using it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..bundle import SAMPLING, CacheShape
from ..errors import EngineError, ExportError
from .foreign_graph import Graph, inside, is_plain, read_graph

GRAPHS = ("model.onnx", "decoder_model_merged.onnx", "model_merged.onnx")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model directory, understood. ``root`` holds its configuration and tokenizer; lengths count tokens."""

    root: Path
    graph: Graph
    dialect: str
    architecture: str
    vocab_size: int
    max_context: int
    cache: tuple[CacheShape, ...]
    eos_token_ids: tuple[int, ...]
    sampling: Mapping[str, float]
    note: str


def read_source(path: str | Path) -> Source:
    """Understand a directory that optimum, onnx-community or onnxruntime-genai wrote, or one graph file in it.

    Of several graphs in a directory, ``model.onnx`` is taken, else ``decoder_model_merged.onnx``, each looked for
    there and then in ``onnx/``; any other (``onnx/model_q4.onnx``) is taken when its path is given.
    Raises ExportError naming what is missing or cannot be used.
    """
    place = Path(path)
    if not place.exists():
        raise ExportError(f"no model directory '{place}'")
    root = place if place.is_dir() else place.parent.parent if place.parent.name == "onnx" else place.parent
    return _genai(root, place) if (root / "genai_config.json").is_file() else _concat(root, place)


def _concat(root: Path, place: Path) -> Source:
    config = _json(root, "config.json")
    config = config.get("text_config", config)
    generation = _json(root, "generation_config.json") if (root / "generation_config.json").exists() else {}
    graph = read_graph(_choose(root) if place.is_dir() else place, root)
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    limit, note = _context(root, config)
    return Source(
        root=root,
        graph=graph,
        dialect="concat",
        architecture=(config.get("architectures") or [config.get("model_type", "unknown")])[0],
        vocab_size=_vocabulary(root, graph, config.get("vocab_size")),
        max_context=limit,
        cache=_cache(graph, heads, config.get("head_dim")),
        eos_token_ids=_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
        sampling=_sampling(generation),
        note=note,
    )


def _genai(root: Path, place: Path) -> Source:
    config = _json(root, "genai_config.json")
    model = config.get("model", {})
    decoder = model.get("decoder", {})
    if extra := sorted({"encoder", "vision", "speech", "embedding", "encoder_decoder_init"} & model.keys()):
        raise ExportError(
            f"'{root}' is a {model.get('type')} model with its own {extra[0]} graph; Leadout runs decoders"
        )
    name = decoder.get("filename", "")
    if not is_plain(name):
        raise ExportError(f"{root / 'genai_config.json'}: decoder.filename '{name}' is not the name of one graph")
    graph = read_graph(root / name if place.is_dir() else place, root)
    limit, note = int(model.get("context_length", 0)), ""
    window = int((decoder.get("sliding_window") or {}).get("window_size", 0))
    if 0 < window < limit and not graph.windowed:
        # the graph attends to everything and relies on a runtime that forgets; inside one window both are the same
        limit, note = window, f"context limited to the sliding window of {window}: the graph itself has none"
    if limit < 3:
        raise ExportError(f"{root / 'genai_config.json'}: context_length must be at least 3, not {limit}")
    return Source(
        root=root,
        graph=graph,
        dialect="genai",
        architecture=str(model.get("type", "unknown")),
        vocab_size=_vocabulary(root, graph, model.get("vocab_size")),
        max_context=limit,
        cache=_cache(graph, decoder.get("num_key_value_heads"), decoder.get("head_size")),
        eos_token_ids=_ids(model.get("eos_token_id")),
        sampling=_sampling(config.get("search", {})),
        note=note,
    )


def _choose(root: Path) -> Path:
    folders = (root, root / "onnx")
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
    raise ExportError(f"'{root}' has no ONNX graph; a checkpoint is exported with: leadout export {root}")


def _json(root: Path, name: str) -> dict[str, Any]:
    path = root / name
    if not path.is_file() or not inside(path, root):
        raise ExportError(f"'{root}' is not a model directory: {name} is missing")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ExportError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ExportError(f"{path}: expected an object")
    return found


def _context(root: Path, config: Mapping[str, Any]) -> tuple[int, str]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "dynamic":
        raise ExportError(f"'{root}': dynamic-NTK rope rescales every position as the text grows; it cannot be rewound")
    names = ("original_max_position_embeddings", *_CONTEXT) if kind == "longrope" else _CONTEXT
    limit = next((int(value) for name in names if (value := config.get(name) or rope.get(name))), 0)
    if limit < 3:
        raise ExportError(f"{root / 'config.json'}: says no context length (one of: {', '.join(_CONTEXT)})")
    return limit, f"context limited to {limit}: one set of rope factors" if kind == "longrope" else ""


def _vocabulary(root: Path, graph: Graph, configured: int | None) -> int:
    size = graph.signature.logits.shape[2] or configured
    if not size:
        raise ExportError(f"'{root}': neither the graph nor its configuration says vocab_size")
    return int(size)


def _cache(graph: Graph, heads: int | None, width: int | None) -> tuple[CacheShape, ...]:
    try:
        return graph.signature.cache(heads, width)
    except EngineError as error:
        raise ExportError(f"{graph.path}: {error}") from None


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (int(value),)


def _sampling(settings: Mapping[str, Any]) -> dict[str, float]:
    if not settings.get("do_sample"):
        return {}
    found = {name: settings.get(name, 1.0 if name == "temperature" else None) for name in SAMPLING}
    return {name: float(value) for name, value in found.items() if value is not None}
