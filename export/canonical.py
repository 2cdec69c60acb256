"""How a checkpoint becomes a canonical graph on disk: captured, simplified, packed, and checked after each.

From the capture on, a model's weights are mapped from files, torch's copies are freed, and graphs are checked with the
weights left in the file. So a whole model in float32 is never in memory (``stored.py``, ``pieces.py``).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from ..bundle import ModelEntry
from .capture.decoder_graph import capture
from .capture.kept import kept
from .capture.taps import FeatureReader
from .checkpoints.checkpoint import Checkpoint
from .checkpoints.pairing import Ids
from .drafts.trimming import kept_mass, trimmed_head
from .golden import Truth
from .graphs.passes import pack, simplify
from .graphs.rewrite import let_go
from .parity import check_graph
from .writing import Progress


@dataclasses.dataclass(frozen=True, slots=True)
class Canonical:
    """A model as ``graph``, a file in float32 whose weights lie beside it, and the logits it ought to give.

    ``entry`` says what holds in every precision and variant, with the parity of the steps so far; ``columns`` are the
    ids, in order, of its logits (None: all); ``written`` int64 [rows, length] is what the model writes, for roundings
    to be fitted to (None: they are not).
    """

    graph: Path
    entry: ModelEntry
    truth: Truth
    columns: Ids | None = None
    written: NDArray[np.int64] | None = None

    def checked(self, step: str, graph: Path, progress: Progress) -> Canonical:
        """What ``step`` made of it. Raises ExportError if that gives other logits."""
        found = check_graph(self.entry, self.truth, graph, step, progress, lean=True)
        entry = dataclasses.replace(self.entry, parity={**self.entry.parity, step: found})
        return dataclasses.replace(self, graph=graph, entry=entry)


def capture_to(
    folder: Path,
    checkpoint: Checkpoint,
    truth: Truth,
    progress: Progress,
    columns: Ids | None = None,
    reader: FeatureReader | None = None,
) -> Canonical:
    """Capture a checkpoint, whose logits are ``truth``, into a new ``folder`` that has the name of its role. With
    ``columns`` the graph gives the logits of those tokens alone; ``reader`` is the head that reads its features. Not
    checked yet: the caller may release the checkpoint first."""
    role, note = folder.name, ""
    if columns is not None:
        note = f"{kept_mass(truth.logits, columns):.1%} of its own probability"
        progress(f"{role}: head of {columns.size} of {checkpoint.vocab_size} tokens: {note}")
    shapes, recurrence = kept(checkpoint.model)
    with trimmed_head(checkpoint.model, columns):
        entry = ModelEntry(
            directory=role,
            architecture=checkpoint.architecture,
            precision="fp32",
            dialect="slots",
            dtype="float32",
            vocab_size=checkpoint.vocab_size if columns is None else columns.size,
            max_context=checkpoint.max_context,
            parameters=checkpoint.model.num_parameters(),
            cache=shapes,
            eos_token_ids=checkpoint.eos_token_ids,
            variants={},
            files={},
            features=None if truth.features is None else truth.features.shape[-1],
            reads_features=truth.beside is not None,
            recurrence=recurrence,
            note=note,
        )
        progress(f"{role}: capture")
        graph = capture(checkpoint.model, shapes, recurrence, reader)
        folder.mkdir(parents=True)
        ir.save(graph, folder / "capture.onnx", external_data="capture.data")
    let_go(graph)
    return Canonical(folder / "capture.onnx", entry, truth.of(columns), columns)


def simplify_and_pack(captured: Canonical, progress: Progress) -> Canonical:
    """Check what was captured; simplify and check; pack and check. The last one's files are left in its folder."""
    folder = captured.graph.parent
    captured = captured.checked("capture", captured.graph, progress)
    graph = ir.load(captured.graph)
    simplify(graph, captured.entry.max_context)
    ir.save(graph, folder / "simplify.onnx")  # its weights stay references into capture.data
    simple = captured.checked("simplify", folder / "simplify.onnx", progress)
    _pack(simple.graph, folder / "pack.onnx")
    for name in ("capture.onnx", "capture.data", "simplify.onnx"):
        (folder / name).unlink(missing_ok=True)
    return simple.checked("pack", folder / "pack.onnx", progress)


def _pack(simple: Path, packed: Path) -> None:
    graph = ir.load(simple)
    pack(graph)
    ir.save(graph, packed, external_data="pack.data")
    let_go(graph)
