"""How a pair of checkpoints becomes a bundle: in which order, what is checked after which step, and nothing by halves.

Everything is written beside the destination (``writing.aside``); any failure removes it.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ..bundle import FileEntry, Model, ModelEntry, file_entry
from ..engines import ONE_ROW, open_engine
from ..errors import UsageError
from .capture import cache_shapes, capture
from .checkpoint import Checkpoint, context_length, load, read_config, save_texts, vocabulary
from .golden import Truth, compute_truth, save_golden
from .pairing import same_vocabulary
from .parity import ImprecisionError, measure
from .passes import pack, simplify, to_gqa, to_gqa_even, to_grouped, to_nonpad
from .quantize import quantize
from .writing import aside, destination, write_manifest

PRECISIONS = ("fp32", "fp16", "int8", "int4")
# A draft's precision costs acceptance, never a token of the answer, and beside the target its weights come from memory
# at every step: the fewest bytes win, unless the pair is made for a GPU.
DRAFT_PRECISIONS = {"fp32": "int4", "fp16": "fp16", "int8": "int4", "int4": "int4"}
GRAPH, BLOB, GOLDEN, SCRATCH = "model.onnx", "model.onnx.data", "golden.npz", "scratch"
VARIANTS: dict[str, Callable[[ir.Model], int]] = {
    "gqa": to_gqa,
    "gqa_even": to_gqa_even,
    "grouped": to_grouped,
    "nonpad": to_nonpad,
}
Progress = Callable[[str], None]


def silent(message: str) -> None:
    """The progress callback that says nothing."""


def export_pair(
    target: str | Path,
    draft: str | Path | None,
    out: str | Path,
    *,
    precision: str = "fp32",
    draft_precision: str | None = None,
    max_context: int | None = None,
    progress: Progress = silent,
) -> Path:
    """Export checkpoints (local directories or hub ids) to the bundle ``out``; without ``draft``, the target alone.

    An existing bundle at ``out`` is replaced, anything else there is refused. A ``draft_precision`` that is not given
    is int4, fp16 beside a target in fp16; the target's, if in that the draft is too far from its checkpoint. Raises
    UsageError, ExportError; then ``out`` is as it was.
    """
    sources = {"target": str(target)} | ({} if draft is None else {"draft": str(draft)})
    precisions = {"target": precision, "draft": draft_precision or DRAFT_PRECISIONS.get(precision, precision)}
    for value in precisions.values():
        if value not in PRECISIONS:
            raise UsageError(f"precision '{value}' is unknown (one of: {', '.join(PRECISIONS)})")
    place = destination(out)
    configs = {role: read_config(source) for role, source in sources.items()}
    contexts = {"target": context_length(configs["target"], max_context)}
    note = ""
    if draft is not None:
        contexts["draft"] = min(contexts["target"], context_length(configs["draft"]))
        vocabularies = [vocabulary(sources[role], configs[role]) for role in ("target", "draft")]
        note = same_vocabulary(*vocabularies)
    with aside(place) as folder:
        save_texts(sources["target"], folder)
        entries: dict[str, ModelEntry] = {}
        for role, source in sources.items():
            progress(f"{role}: reading {source}")
            checkpoint = load(source, contexts[role])
            if role == "target":
                sampling, vocab_size = checkpoint.sampling, checkpoint.vocab_size
            forms = [precisions[role]] + ([precision] if role == "draft" and draft_precision is None else [])
            entries[role] = export_first(checkpoint, folder / role, forms, vocab_size, progress)
        if note:
            entries["draft"] = dataclasses.replace(entries["draft"], note=note)
        progress("writing the manifest")
        write_manifest(folder, entries, sampling, _provenance(sources, configs))
    return place


def export_first(
    checkpoint: Checkpoint, folder: Path, precisions: list[str], vocab_size: int, progress: Progress
) -> ModelEntry:
    """``export_model`` in the first of ``precisions`` that keeps close enough to the checkpoint."""
    first, *others = precisions
    folder.mkdir()
    try:
        return export_model(checkpoint, folder, first, vocab_size, progress)
    except ImprecisionError:
        if not others:
            raise
        progress(f"{folder.name}: {first} is too far from the checkpoint; trying {others[0]}")
        shutil.rmtree(folder)
        return export_first(checkpoint, folder, others, vocab_size, progress)


def export_model(
    checkpoint: Checkpoint, folder: Path, precision: str, vocab_size: int, progress: Progress
) -> ModelEntry:
    """Capture, simplify, pack, quantise, lower; check after each. Writes everything of one model into ``folder``."""
    role = folder.name
    progress(f"{role}: reference logits of {checkpoint.architecture}")
    shapes = cache_shapes(checkpoint.model)
    truth = compute_truth(checkpoint.model, checkpoint.max_context, vocab_size, checkpoint.bos_token_id)
    save_golden(truth, folder / GOLDEN)
    entry = ModelEntry(
        directory=role,
        architecture=checkpoint.architecture,
        precision=precision,
        dialect="slots",
        dtype="float32",
        vocab_size=vocab_size,
        max_context=checkpoint.max_context,
        parameters=checkpoint.model.num_parameters(),
        cache=shapes,
        eos_token_ids=checkpoint.eos_token_ids,
        variants={},
        files={},
    )
    progress(f"{role}: capture")
    graph = capture(checkpoint.model, shapes, vocab_size)
    checks = _Checks(folder, entry, truth, progress)
    checks.stage("capture", graph, "fp32")
    simplify(graph, checkpoint.max_context)
    checks.stage("simplify", graph, "fp32")
    pack(graph)
    if precision != "fp32":
        checks.stage("pack", graph, "fp32")
        quantize(graph, precision)
    ir.save(graph, folder / GRAPH, external_data=BLOB)
    checks.variant("pack" if precision == "fp32" else precision, "canonical", GRAPH, precision)
    for name, lower in VARIANTS.items():
        _save_variant(folder, name, lower, checks, precision)
    cache_type = next(v.dtype for v in graph.graph.inputs if v.name == "past_key_values.0.key")
    return dataclasses.replace(
        entry,
        dtype="float16" if cache_type == ir.DataType.FLOAT16 else "float32",
        variants={name: file_entry(folder / file) for name, file in checks.files.items()},
        files={name: file_entry(folder / name) for name in (BLOB, GOLDEN)},
        parity=checks.found,
    )


def _save_variant(folder: Path, name: str, lower: Callable[[ir.Model], int], checks: _Checks, precision: str) -> None:
    """A lowered copy of the canonical graph: its weights stay references into the canonical graph's blob."""
    graph = ir.load(folder / GRAPH)
    if lower(graph):  # 0 layers changed: it would be the canonical graph again
        file = f"model.{name}.onnx"
        ir.save(graph, folder / file)
        checks.variant(name, name, file, precision)


class _Checks:
    """Parity after each step of one model: ``found`` by step, ``files`` by variant."""

    def __init__(self, folder: Path, entry: ModelEntry, truth: Truth, progress: Progress) -> None:
        self.folder, self.entry, self.truth, self.progress = folder, entry, truth, progress
        self.found: dict[str, float] = {}
        self.files: dict[str, str] = {}

    def stage(self, step: str, graph: ir.Model, precision: str) -> None:
        """Check a graph that is not kept."""
        scratch = self.folder / SCRATCH
        scratch.mkdir()
        ir.save(graph, scratch / GRAPH, external_data=BLOB)
        self._measure(step, scratch, "canonical", GRAPH, precision)
        shutil.rmtree(scratch)

    def variant(self, step: str, variant: str, file: str, precision: str) -> None:
        """Check a graph of the bundle."""
        self.files[variant] = file
        self._measure(step, self.folder, variant, file, precision)

    def _measure(self, step: str, folder: Path, variant: str, file: str, precision: str) -> None:
        entry = dataclasses.replace(self.entry, variants={variant: FileEntry(file, "", 0)})
        engine = open_engine(Model(folder, entry), threads=os.cpu_count() or 1, variant=variant)
        try:
            parity = measure(self.truth, engine, batched=variant not in ONE_ROW)
        finally:
            engine.close()
        self.progress(f"{self.folder.name}: {step}: {parity.describe(precision)}")
        parity.require(f"{self.entry.architecture}, {step}", precision)
        self.found[step] = parity.difference


def _provenance(sources: dict[str, str], configs: dict[str, Any]) -> dict[str, str]:
    """Where the models came from (a directory's name, or hub id and commit) and what exported them."""
    found = {}
    for role, source in sources.items():
        commit = getattr(configs[role], "_commit_hash", None)
        place = Path(source).resolve().name if Path(source).exists() else source
        found[role] = f"{place}@{commit}" if commit else place
    return found | {name: metadata.version(name) for name in ("torch", "transformers", "onnx-ir")}
