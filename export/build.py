"""Exports a pair of checkpoints to a bundle: the order of the steps, and what is checked after which.

Everything is written beside the destination (``writing.aside``); any failure removes it.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ..bundle import TOKENIZER, ModelEntry, file_entry
from ..engines.golden import GOLDEN
from ..engines.providers import onnxruntime
from ..errors import ExportError, UsageError
from .canonical import Canonical, capture_to, simplify_and_pack
from .capture.refusals import context_length, is_recurrent
from .checkpoints.checkpoint import (
    Checkpoint,
    load,
    open_tokenizer,
    other_reading,
    quiet,
    read_config,
    save_texts,
    vocabulary,
)
from .checkpoints.defaults import choose_sampling, keep_readable
from .checkpoints.hub import require_there
from .checkpoints.pairing import Vocabulary
from .drafts.choice import DraftChoice, InOneStep, choose_draft, mask_of
from .drafts.head_checkpoint import Head, is_head, read_head
from .drafts.ids import DraftIds
from .drafts.mtp import OwnLayers, has_own_layers, own_layers
from .foreign.importing import ChooseDraft, WriteDraft
from .golden import Truth, compute_truth, head_truth, save_golden, write_rows
from .graphs.experts import never_alone, unrounded_experts
from .graphs.quantize import ROUNDINGS, quantize
from .graphs.rewrite import graph_inputs, let_go
from .graphs.smooth import observe, smooth
from .graphs.variants import VARIANTS, suits
from .parity import ImprecisionError, check_graph
from .writing import Progress, aside, destination, write_manifest

GRAPH, BLOB, SCRATCH = "model.onnx", "model.onnx.data", "scratch"
FITTED = (8, 64)  # rows that the model writes, and tokens of each, for roundings to be fitted to


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
    mask_token: int | str | None = None,
    max_context: int | None = None,
    progress: Progress = silent,
) -> Path:
    """Export checkpoints (local directories or hub ids) to the bundle ``out``; without ``draft``, the target alone.

    ``draft`` may be ``self``, the target in fewer bits, or ``mtp``, its own layers for multi-token prediction, either
    with a colon and a precision behind it. ``draft_vocabulary`` trims a draft's head: to so many tokens, the most
    frequent in the texts ``calibration``, or to those whose ids are in a file. ``mask_token`` is the id by which it
    says a whole draft in one step, or "none"; by default its config.json's. A bundle at ``out`` is replaced, anything
    else refused. ``draft_precision`` is by default int4 (int8 in one step), fp16 beside fp16; the target's, if the
    draft would be too far from its checkpoint. Raises UsageError, ExportError, EngineError; then ``out`` is as it was.
    """
    onnxruntime()  # which checks every graph: without it a capture of minutes would be for nothing
    choice = choose_draft(str(target), draft, precision, draft_precision)
    _check_asked(choice, draft_precision, draft_vocabulary, calibration, mask_token)
    place = destination(out)
    sources = {"target": str(target)} | ({} if choice is None else {"draft": choice.source})
    configs = {"target": read_config(require_there(str(target)))}
    context = context_length(configs["target"], max_context)
    tokens, head = vocabulary(str(target), configs["target"]), None
    _require_logits(tokens)
    _check_halves(configs["target"], "precision", [precision])
    if choice is None and has_own_layers(sources["target"], configs["target"]):
        progress("target: it has layers for multi-token prediction of its own; they draft for it with --draft mtp")
    if choice is not None:
        head = _head_of(choice, configs["target"])
        configs["draft"] = read_config(choice.source) if head is None else head.config
        if head is None:
            _check_halves(configs["draft"], "draft-precision", choice.precisions)
        draft_ids = _ids_of(choice, head, configs["draft"], tokens, draft_vocabulary, calibration)
        at_once = _in_one_step(choice, head, configs["draft"], mask_token, draft_ids, progress)
        if at_once.mask is not None and draft_precision is None:
            choice = choice.in_one_step(precision)
    draft_context = min(context, context_length(configs["draft"])) if choice is not None else context
    with quiet(), aside(place, progress) as folder:
        _keep_texts(sources["target"], tokens, folder, progress)
        checkpoint = load(sources["target"], context)
        sampling = choose_sampling(folder, checkpoint.sampling, progress)
        fitted = not ROUNDINGS.keys().isdisjoint([precision, *(choice.precisions if choice is not None else ())])
        reader = None if head is None else head.checkpoint(checkpoint.model, draft_context)
        canonical = _canonical(checkpoint, folder / SCRATCH / "target", progress, fitted=fitted, reader=reader)
        entries = {"target": export_first(canonical, folder / "target", [precision], progress)}
        if choice is not None:
            if choice.made != "self" or draft_ids.wanted is not None:  # else the target's graph is the draft's
                canonical = _of_draft(canonical, choice, reader, draft_context, progress, draft_ids, fitted=fitted)
            entries["draft"] = _export_draft(canonical, folder / "draft", choice, draft_ids, at_once, progress)
        shutil.rmtree(folder / SCRATCH)
        write_manifest(folder, entries, sampling, _provenance(sources, configs))
    return place


def beside_import(
    draft: str | Path,
    *,
    draft_precision: str | None = None,
    draft_vocabulary: int | str | Path | None = None,
    calibration: Sequence[str | Path] = (),
    mask_token: int | str | None = None,
    progress: Progress = silent,
) -> ChooseDraft:
    """A checkpoint that drafts for an imported target (``import_pair``); as ``export_pair``, with the same errors."""
    choice = choose_draft("", draft, "fp32", draft_precision)
    if choice is None or choice.made != "checkpoint" or is_head(require_there(choice.source)):
        raise UsageError(f"draft '{draft}' needs its target's checkpoint; beside --from-onnx take a model of its own")
    _check_asked(choice, draft_precision, draft_vocabulary, calibration, mask_token)
    length = context_length(config := read_config(choice.source))
    _check_halves(config, "draft-precision", choice.precisions)

    def choose(tokens: Vocabulary) -> WriteDraft:
        ids = _ids_of(choice, None, config, tokens, draft_vocabulary, calibration)
        at_once = _in_one_step(choice, None, config, mask_token, ids, progress)
        how = choice.in_one_step("fp32") if at_once.mask is not None and draft_precision is None else choice

        def write(folder: Path, target: ModelEntry) -> ModelEntry:
            progress(f"draft: reading {how.source}")
            scratch, fitted = folder.with_name(SCRATCH), not ROUNDINGS.keys().isdisjoint(how.precisions)
            with quiet():
                checkpoint, ends = load(how.source, min(target.max_context, length)), target.eos_token_ids
                canonical = _canonical(checkpoint, scratch / "draft", progress, fitted=fitted, ids=ids, ends=ends)
                entry = _export_draft(canonical, folder, how, ids, at_once, progress)
            shutil.rmtree(scratch)
            return entry

        return write

    return choose


def _keep_texts(target: str, tokens: Vocabulary, folder: Path, progress: Progress) -> None:
    """Copy what decoding needs besides weights into ``folder``; tell ``progress`` what is left out or read
    differently."""
    theirs = open_tokenizer(target)
    save_texts(target, folder, theirs)
    tokens.save(folder / TOKENIZER)
    if tokens.note:
        progress(f"target: {tokens.note}")
    keep_readable(folder, progress)
    if otherwise := other_reading(theirs, tokens):
        progress(f"target: {otherwise}")
    progress(f"target: reading {target}")


def _check_asked(
    choice: DraftChoice | None,
    draft_precision: str | None,
    draft_vocabulary: int | str | Path | None,
    calibration: Sequence[str | Path],
    mask_token: int | str | None,
) -> None:
    """Raise UsageError for options of a draft that is not given."""
    if choice is None and draft_vocabulary is not None:
        raise UsageError("draft-vocabulary trims a draft, and none was given")
    if choice is None and draft_precision is not None:
        raise UsageError("draft-precision is that of a draft, and none was given")
    if mask_token is not None and (choice is None or choice.made == "self"):
        raise UsageError("mask-token is that of a draft with a checkpoint of its own, and none was given")
    if draft_vocabulary is None and calibration:
        raise UsageError("calibration texts are for draft-vocabulary, which was not given")


def _check_halves(config: Any, option: str, precisions: Sequence[str]) -> None:
    """Raise UsageError for recurrent layers in half precision: their states are in float32 everywhere."""
    if "fp16" in precisions and is_recurrent(config):
        raise UsageError(f"{option} fp16: {config.model_type} has recurrent layers; they take fp32, int8 or int4")


def _head_of(choice: DraftChoice, target: Any) -> Head | OwnLayers | None:
    """The draft, if it is a head that reads its target's features; ``target``: the target's configuration."""
    if choice.made == "mtp":
        return own_layers(choice.source, target)
    return read_head(require_there(choice.source), target) if choice.made == "checkpoint" else None


def _ids_of(
    choice: DraftChoice,
    head: Head | OwnLayers | None,
    config: Any,
    target: Vocabulary,
    asked: int | str | Path | None,
    calibration: Sequence[str | Path],
) -> DraftIds:
    """Which of its target's tokens the draft may say; ``asked`` and ``calibration`` as for ``export_pair``."""
    if head is None:
        return DraftIds.choose(target, vocabulary(choice.source, config), asked, calibration)
    return DraftIds.choose(target, head.vocabulary(target), asked, calibration, head.ids)


def _in_one_step(
    choice: DraftChoice,
    head: Head | OwnLayers | None,
    config: Any,
    asked: int | str | None,
    ids: DraftIds,
    progress: Progress,
) -> InOneStep:
    """How the draft says a whole draft in one step, if it does."""
    if asked is not None and head is not None:
        raise UsageError(f"mask-token: the draft '{choice.source}' is a head, which knows how it is asked")
    if isinstance(head, Head):
        return InOneStep(head.mask, head.block)
    mask = mask_of(choice.source, config, asked) if choice.made == "checkpoint" else None
    if mask is not None and ids.match.tokenizer is not None:
        progress("draft: it has another tokenizer, and so says one token a step; its mask token is left out")
        return InOneStep()
    return InOneStep(mask)


def _require_logits(target: Vocabulary) -> None:
    """Raise ExportError for a tokenizer that gives ids beyond the target's logits: no text could be read with it."""
    ids = 1 + max((target.ids or {}).values(), default=-1)
    if ids > target.logits:
        raise ExportError(
            f"'{target.source}' has {target.logits} logits, too few for its tokenizer.json of {ids} ids;"
            " put the tokenizer it was trained with into its directory"
        )


def _canonical(
    checkpoint: Checkpoint,
    folder: Path,
    progress: Progress,
    *,
    fitted: bool,
    ids: DraftIds | None = None,
    ends: Sequence[int] = (),
    read: Truth | None = None,
    reader: Checkpoint | None = None,
) -> Canonical:
    """Make a checkpoint a canonical graph in ``folder``; the checkpoint cannot be used afterwards. ``fitted``: also let
    it write rows, to which roundings are fitted. For a draft, ``ids`` say which tokens' logits it gives, and ``ends``
    are the target's tokens that end a text. If the draft is a head that reads the target's features, ``read`` is what
    the target says (given with the head), and ``reader`` is the head (given with the target)."""
    checkpoint.require_finite()
    progress(f"{folder.name}: reference logits of {checkpoint.architecture}")
    its = None if reader is None else reader.model
    truth = compute_truth(checkpoint, its) if read is None else head_truth(checkpoint, read)
    rows, length = FITTED
    written = write_rows(checkpoint, rows, min(length, checkpoint.max_context), seed=1) if fitted else None
    columns = None if ids is None else ids.columns(checkpoint, truth.logits, ends)
    captured = capture_to(folder, checkpoint, truth, progress, columns, its)
    checkpoint.release()
    return dataclasses.replace(simplify_and_pack(captured, progress), written=written)


def _of_draft(
    target: Canonical,
    choice: DraftChoice,
    reader: Checkpoint | None,
    context: int,
    progress: Progress,
    ids: DraftIds,
    *,
    fitted: bool,
) -> Canonical:
    """``_canonical`` of the draft of ``target``: of ``reader``, a head that reads its features, or of a model. The
    graph of the target is removed."""
    folder = target.graph.parent.with_name("draft")
    shutil.rmtree(target.graph.parent)
    progress(f"draft: reading {choice.source}")
    ends, read = target.entry.eos_token_ids, None if reader is None else target.truth
    fitted = fitted and reader is None  # a head writes no text by itself
    checkpoint = reader or load(choice.source, context)
    return _canonical(checkpoint, folder, progress, fitted=fitted, ids=ids, ends=ends, read=read)


def _export_draft(
    canonical: Canonical, folder: Path, choice: DraftChoice, ids: DraftIds, at_once: InOneStep, progress: Progress
) -> ModelEntry:
    entry = export_first(canonical, folder, choice.precisions, progress)
    columns = canonical.columns
    kept = np.arange(ids.match.outputs.size) if columns is None else columns
    notes = [ids.match.note] + ([ids.describe(kept)] if columns is not None else []) + [entry.note]
    if choice.made == "self":
        size = entry.files[BLOB].bytes / 1e6
        notes.append(
            f"the target itself in {entry.precision}: {size:.0f} MB beside its own weights, for none are shared"
        )
    if choice.made == "mtp":
        notes.append("the target's own layer for multi-token prediction")
    if entry.reads_features:
        notes.append(f"reads {entry.features} features of its target beside each token")
    if at_once.mask is not None:
        most = "" if at_once.block is None else f"of {at_once.block} tokens at most "
        notes.append(f"says a whole draft {most}in one step, by the mask token {at_once.mask}")
    files = {**entry.files, **ids.match.save(folder, kept)}
    said = "; ".join(filter(None, notes))
    return dataclasses.replace(entry, files=files, mask_token=at_once.mask, block=at_once.block, note=said)


def export_first(canonical: Canonical, folder: Path, precisions: Sequence[str], progress: Progress) -> ModelEntry:
    """``export_model`` in the first of ``precisions`` that keeps close enough to the checkpoint."""
    first, *others = precisions
    folder.mkdir()
    try:
        return export_model(canonical, folder, first, progress)
    except ImprecisionError:
        if not others:
            raise
        progress(f"{folder.name}: {first} is too far from the checkpoint; trying {others[0]}")
        shutil.rmtree(folder)
        return export_first(canonical, folder, others, progress)


def export_model(canonical: Canonical, folder: Path, precision: str, progress: Progress) -> ModelEntry:
    """Quantise, lower; check after each. Writes everything of one model into ``folder``."""
    bits = precision.partition("-")[0]  # whoever runs a graph finds the size of its blocks in it
    entry = dataclasses.replace(canonical.entry, directory=folder.name, precision=bits)
    truth, parity, files = canonical.truth, dict(entry.parity), {"canonical": GRAPH}
    save_golden(truth, folder / GOLDEN)
    cache_type, left = _save(canonical, folder / GRAPH, precision)
    if left:
        progress(f"{folder.name}: {left}")
    if precision != "fp32":
        parity[precision] = check_graph(entry, truth, folder / GRAPH, precision, progress)
    for name, lower in VARIANTS.items():
        graph = ir.load(folder / GRAPH)
        if suits(name, entry) and lower(graph):  # 0 layers changed: it would be the canonical graph again
            files[name] = f"model.{name}.onnx"
            ir.save(graph, folder / files[name])  # its weights stay references into the canonical graph's blob
            parity[name] = check_graph(entry, truth, folder / files[name], name, progress, variant=name)
    return dataclasses.replace(
        entry,
        dtype="float16" if cache_type == ir.DataType.FLOAT16 else "float32",
        variants={name: file_entry(folder / file) for name, file in files.items()},
        files={name: file_entry(folder / name) for name in (BLOB, GOLDEN)},
        parity=parity,
        note="; ".join(filter(None, [entry.note, left])),
    )


def _save(canonical: Canonical, place: Path, precision: str) -> tuple[ir.DataType | None, str]:
    """Write the canonical graph in ``precision``, with its weights. Returns the type of its cache, and a note on
    weights that stay as they were; empty if there are none."""
    graph = ir.load(canonical.graph)
    if canonical.written is not None and (rounding := ROUNDINGS.get(precision)) is not None:
        smooth(graph, observe(canonical.graph, canonical.written), rounding)
    if precision != "fp32":
        quantize(graph, precision)
    never_alone(graph)
    note = _left_in_float(graph, precision) if precision in ROUNDINGS else ""
    ir.save(graph, place, external_data=BLOB)
    let_go(graph)
    return graph_inputs(graph)["past_key_values.0.key"].dtype, note


def _left_in_float(graph: ir.Model, precision: str) -> str:
    """A note on experts that ``quantize`` left in float32; empty if there are none."""
    if not (left := unrounded_experts(graph)):
        return ""
    rule = f"{precision} takes gates of SiLU or as gpt-oss has them, and products of whole blocks of 32"
    return f"{len(left)} weights of experts stay in float32, like {left[0]}: {rule}"


def _provenance(sources: dict[str, str], configs: dict[str, Any]) -> dict[str, str]:
    """Where the models came from (a directory's name, or hub id and commit) and what exported them."""
    found = {}
    for role, source in sources.items():
        commit = getattr(configs[role], "_commit_hash", None)
        place = Path(source).resolve().name if Path(source).exists() else source
        found[role] = f"{place}@{commit}" if commit else place
    return found | {name: metadata.version(name) for name in ("torch", "transformers", "onnx-ir")}
