"""How a pair of checkpoints becomes a bundle: in which order, what is checked after which step, and nothing by halves.

Everything is written beside the destination (``writing.aside``); any failure removes it.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ..bundle import FileEntry, Model, ModelEntry, file_entry
from ..engines import ONE_ROW, open_engine
from ..errors import EngineError, ExportError, UsageError
from .capture import cache_shapes, capture
from .checkpoint import Checkpoint, context_length, load, read_config, save_texts, vocabulary
from .defaults import choose_sampling, keep_readable
from .draft_choice import DraftChoice, choose_draft
from .draft_ids import DraftIds
from .golden import Truth, compute_truth, save_golden
from .pairing import Ids, Vocabulary
from .parity import ImprecisionError, measure, measure_roomy
from .passes import pack, simplify, to_gqa, to_gqa_even, to_grouped, to_nonpad
from .quantize import quantize
from .tree import to_tree, to_tree_gqa
from .trimming import kept_mass, trimmed_head
from .writing import aside, destination, write_manifest

GRAPH, BLOB, GOLDEN, SCRATCH = "model.onnx", "model.onnx.data", "golden.npz", "scratch"
VARIANTS: dict[str, Callable[[ir.Model], int]] = {
    "gqa": to_gqa,
    "gqa_even": to_gqa_even,
    "grouped": to_grouped,
    "nonpad": to_nonpad,
    "tree": to_tree,
    "tree_gqa": to_tree_gqa,
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
    draft_vocabulary: int | str | Path | None = None,
    calibration: Sequence[str | Path] = (),
    max_context: int | None = None,
    progress: Progress = silent,
) -> Path:
    """Export checkpoints (local directories or hub ids) to the bundle ``out``; without ``draft``, the target alone.

    ``draft`` may be ``self`` or ``self:PRECISION``: the target in fewer bits. ``draft_vocabulary`` trims the draft's
    head: to so many tokens, the most frequent in the texts ``calibration``, or to those whose ids are in a file.
    An existing bundle at ``out`` is replaced, anything else there is refused. A ``draft_precision`` that is not given
    is int4, fp16 beside a target in fp16; the target's, if in that the draft is too far from its checkpoint. Raises
    UsageError, ExportError; then ``out`` is as it was.
    """
    choice = choose_draft(str(target), draft, precision, draft_precision)
    if choice is None and draft_vocabulary is not None:
        raise UsageError("draft-vocabulary trims a draft, and none was given")
    if choice is None and draft_precision is not None:
        raise UsageError("draft-precision is that of a draft, and none was given")
    if draft_vocabulary is None and calibration:
        raise UsageError("calibration texts are for draft-vocabulary, which was not given")
    place = destination(out)
    sources = {"target": str(target)} | ({} if choice is None else {"draft": choice.source})
    configs = {role: read_config(require_there(source)) for role, source in sources.items()}
    contexts = {"target": context_length(configs["target"], max_context)}
    vocabularies = {role: vocabulary(sources[role], configs[role]) for role in sources}
    _require_logits(vocabularies["target"])
    if choice is not None:
        contexts["draft"] = min(contexts["target"], context_length(configs["draft"]))
        draft_ids = DraftIds.choose(vocabularies["target"], vocabularies["draft"], draft_vocabulary, calibration)
    with aside(place, progress) as folder:
        save_texts(sources["target"], folder)
        keep_readable(folder, progress)
        progress(f"target: reading {sources['target']}")
        checkpoint = load(sources["target"], contexts["target"])
        sampling = choose_sampling(folder, checkpoint.sampling, progress)
        entries = {"target": export_first(checkpoint, folder / "target", [precision], progress)}
        ends = checkpoint.eos_token_ids
        if choice is not None:
            if not choice.itself:
                progress(f"draft: reading {choice.source}")
                checkpoint = load(choice.source, contexts["draft"])
            entries["draft"] = _export_draft(checkpoint, folder / "draft", choice, draft_ids, ends, progress)
        progress("writing the manifest")
        write_manifest(folder, entries, sampling, _provenance(sources, configs))
    return place


def require_there(source: str) -> str:
    """``source``. Raises ExportError for one that looks like a path, not like a hub id, and leads nowhere."""
    if (source.startswith(("/", ".", "~")) or source.count("/") > 1) and not Path(source).exists():
        raise ExportError(f"no checkpoint '{source}': no such directory (nor is it a hub id, like OWNER/NAME)")
    return source


def _require_logits(target: Vocabulary) -> None:
    """Raise ExportError for a tokenizer that gives ids beyond the target's logits: no text could be read with it."""
    ids = 1 + max((target.ids or {}).values(), default=-1)
    if ids > target.logits:
        raise ExportError(
            f"'{target.source}' has {target.logits} logits, too few for its tokenizer.json of {ids} ids;"
            " put the tokenizer it was trained with into its directory"
        )


def _export_draft(
    checkpoint: Checkpoint, folder: Path, choice: DraftChoice, ids: DraftIds, ends: Sequence[int], progress: Progress
) -> ModelEntry:
    columns = ids.columns(checkpoint, ends)
    entry = export_first(checkpoint, folder, choice.precisions, progress, columns)
    kept = np.arange(checkpoint.vocab_size) if columns is None else columns
    notes = [ids.match.note] + ([ids.describe(kept)] if columns is not None else []) + [entry.note]
    if choice.itself:
        size = entry.files[BLOB].bytes / 1e6
        notes.append(
            f"the target itself in {entry.precision}: {size:.0f} MB beside its own weights, for none are shared"
        )
    files = {**entry.files, **ids.match.save(folder, kept)}
    return dataclasses.replace(entry, files=files, note="; ".join(filter(None, notes)))


def export_first(
    checkpoint: Checkpoint, folder: Path, precisions: Sequence[str], progress: Progress, columns: Ids | None = None
) -> ModelEntry:
    """``export_model`` in the first of ``precisions`` that keeps close enough to the checkpoint."""
    first, *others = precisions
    folder.mkdir()
    try:
        return export_model(checkpoint, folder, first, progress, columns)
    except ImprecisionError:
        if not others:
            raise
        progress(f"{folder.name}: {first} is too far from the checkpoint; trying {others[0]}")
        shutil.rmtree(folder)
        return export_first(checkpoint, folder, others, progress, columns)


def export_model(
    checkpoint: Checkpoint, folder: Path, precision: str, progress: Progress, columns: Ids | None = None
) -> ModelEntry:
    """Capture, simplify, pack, quantise, lower; check after each. Writes everything of one model into ``folder``.

    With ``columns`` (ids, in order) the graph gives the logits of those tokens alone.
    """
    role = folder.name
    progress(f"{role}: reference logits of {checkpoint.architecture}")
    shapes = cache_shapes(checkpoint.model)
    whole = compute_truth(checkpoint)
    truth, note = whole.of(columns), ""
    if columns is not None:
        note = f"{kept_mass(whole.logits, columns):.1%} of its own probability"
        progress(f"{role}: head of {columns.size} of {checkpoint.vocab_size} tokens: {note}")
    save_golden(truth, folder / GOLDEN)
    with trimmed_head(checkpoint.model, columns):
        entry = ModelEntry(
            directory=role,
            architecture=checkpoint.architecture,
            precision=precision,
            dialect="slots",
            dtype="float32",
            vocab_size=checkpoint.vocab_size if columns is None else columns.size,
            max_context=checkpoint.max_context,
            parameters=checkpoint.model.num_parameters(),
            cache=shapes,
            eos_token_ids=checkpoint.eos_token_ids,
            variants={},
            files={},
            note=note,
        )
        progress(f"{role}: capture")
        graph = capture(checkpoint.model, shapes)
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
        named = f"{self.entry.architecture}, {step}"
        try:
            engine = open_engine(Model(folder, entry), threads=os.cpu_count() or 1, variant=variant)
            try:
                parity = measure(self.truth, engine, batched=variant not in ONE_ROW)
                roomy = measure_roomy(self.truth, engine)
            finally:
                engine.close()
        except EngineError as error:  # the folder is about to vanish: name what the user knows
            reason = str(error).removeprefix(f"{folder / file}: ").replace(str(folder / file), "the graph")
            raise ExportError(f"{self.folder.name}: {named}: {reason}") from None
        self.progress(f"{self.folder.name}: {step}: {parity.describe(precision)}")
        parity.require(named, precision)
        roomy.require(f"{named}: its attention depends on the cache's capacity", precision)
        self.found[step] = parity.difference


def _provenance(sources: dict[str, str], configs: dict[str, Any]) -> dict[str, str]:
    """Where the models came from (a directory's name, or hub id and commit) and what exported them."""
    found = {}
    for role, source in sources.items():
        commit = getattr(configs[role], "_commit_hash", None)
        place = Path(source).resolve().name if Path(source).exists() else source
        found[role] = f"{place}@{commit}" if commit else place
    return found | {name: metadata.version(name) for name in ("torch", "transformers", "onnx-ir")}
