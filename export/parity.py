"""Checks that an exported model computes what transformers does, on the real engine and in each situation of decoding.

The truth is a full recompute without a cache (``golden.compute_truth``); the engine steps in place. Four situations: a
prefill, five tokens on top of a past, one token after a roll-back, and three rows, ragged and whole. What was prefilled
is committed, so that after the roll-back layers that keep states read them. If the engine takes trees, a fifth: the
five tokens as one branch among siblings. In float32, in which each model is checked first, the first three are repeated
in a roomy cache: attention may depend on positions, but never on the number of slots. Features, if the model gives any,
are compared after the first two situations, and the blocks of a head that drafts blocks at the end."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bundle import FileEntry, Model, ModelEntry
from ..engines import ONE_ROW, Engine
from ..engines.base import BLOCK, PADDING, CommittingEngine, FeatureEngine, TreeEngine
from ..engines.golden import TOLERANCE
from ..engines.ort import SlotEngine
from ..errors import EngineError, ExportError
from .golden import Truth
from .writing import Progress

ROOMY = 4096  # slots; a mask made from the buffer's size instead of from positions is wrong in a large one
# Not float32: what a sound quantisation stays well inside and a wrong graph does not.
LOOSE_DIVERGENCE, LOOSE_AGREEMENT, LOOSE_FEATURES = 1.0, 0.5, 1.0


class ImprecisionError(ExportError):
    """A model is too far from its checkpoint in the precision asked for; in a higher one it may do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Parity:
    """How far an engine's logits are from transformers' over all rows compared.

    ``difference``: largest absolute one; ``scale``: max(1, largest |logit|); ``divergence``: mean KL(truth || engine)
    in nats; ``agreement``: share of rows with the same largest logit; ``features``: how far its features are, as a part
    of their own length.
    """

    difference: float
    scale: float
    divergence: float
    agreement: float
    features: float = 0.0

    def describe(self, precision: str) -> str:
        """One line for people."""
        text = f"largest difference {self.difference:.1e}"
        same = f", {self.divergence:.1e} nats, same top token in {self.agreement:.0%}"
        return text if precision == "fp32" else text + same

    def require(self, stage: str, precision: str) -> None:
        """Raise ExportError (ImprecisionError below fp32) naming ``stage`` if the difference is not what ``precision``
        explains."""
        if not self.features <= (TOLERANCE if precision == "fp32" else LOOSE_FEATURES):
            raise ImprecisionError(
                f"{stage}: features differ from transformers' by {self.features:.1e} of their length; nothing was"
                " written"
            )
        if precision == "fp32":
            if not self.difference <= TOLERANCE * self.scale:
                raise ExportError(
                    f"{stage}: logits differ from transformers by {self.difference:.1e},"
                    f" allowed are {TOLERANCE * self.scale:.1e}; nothing was written"
                )
        elif not (self.divergence <= LOOSE_DIVERGENCE and self.agreement >= LOOSE_AGREEMENT):
            raise ImprecisionError(
                f"{stage}: {precision} gives {self.divergence:.2f} nats from transformers and the same top token in"
                f" {self.agreement:.0%} of positions (allowed: {LOOSE_DIVERGENCE} and {LOOSE_AGREEMENT:.0%});"
                " nothing was written, take a higher precision"
            )


def check_graph(
    entry: ModelEntry,
    truth: Truth,
    graph: Path,
    step: str,
    progress: Progress,
    variant: str = "canonical",
    *,
    lean: bool = False,
) -> float:
    """The largest difference between a graph's logits and ``truth``, told to ``progress`` as what ``step`` made.
    ``lean`` as for ``open_session``. Raises ExportError (ImprecisionError below fp32) naming both if it is not what the
    precision of ``entry`` explains, or the engine cannot run it."""
    named = f"{entry.architecture}, {step}"
    there = dataclasses.replace(entry, variants={variant: FileEntry(graph.name, "", 0)})
    try:
        engine = SlotEngine(Model(graph.parent, there), threads=os.cpu_count() or 1, variant=variant, lean=lean)
        try:
            parity = measure(truth, engine, batched=variant not in ONE_ROW)
            roomy = measure_roomy(truth, engine) if entry.precision == "fp32" else None
        finally:
            engine.close()
    except EngineError as error:  # the folder is about to vanish: name what the user knows
        reason = str(error).removeprefix(f"{graph}: ").replace(str(graph), "the graph")
        raise ExportError(f"{entry.directory}: {named}: {reason}") from None
    progress(f"{entry.directory}: {step}: {parity.describe(entry.precision)}")
    parity.require(named, entry.precision)
    if roomy is not None:
        roomy.require(f"{named}: its attention depends on the cache's capacity", entry.precision)
    return parity.difference


def measure(truth: Truth, engine: Engine, *, batched: bool = True) -> Parity:
    """Run the four situations (without ``batched`` the first three) and compare every row of logits."""
    pairs = list(_alone(truth, engine, 0))
    features = _features_apart(truth, engine)
    if batched:
        pairs += _ragged(truth, engine)
    if isinstance(engine, TreeEngine) and engine.spec.trees:
        pairs += _branched(truth, engine)
    if truth.block is not None:
        pairs += _blocks(truth, engine, len(truth.tokens) if batched else 1)
    return dataclasses.replace(_compare(pairs), features=features)


def measure_roomy(truth: Truth, engine: Engine) -> Parity:
    """The first three situations in a cache as large as decoding may reserve, or of ROOMY slots if that is less."""
    return _compare(list(_alone(truth, engine, min(engine.spec.max_context, ROOMY))))


def _compare(pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> Parity:
    found = np.concatenate([pair[0] for pair in pairs]).astype(np.float64)
    expected = np.concatenate([pair[1] for pair in pairs]).astype(np.float64)
    if not np.isfinite(found).all():
        return Parity(float("inf"), 1.0, float("inf"), 0.0)
    log_p, log_q = _log_softmax(expected), _log_softmax(found)
    return Parity(
        difference=float(np.abs(found - expected).max()),
        scale=max(1.0, float(np.abs(expected).max())),
        divergence=float((np.exp(log_p) * (log_p - log_q)).sum(-1).mean()),
        agreement=float((found.argmax(-1) == expected.argmax(-1)).mean()),
    )


def _features_apart(truth: Truth, engine: Engine) -> float:
    """How far the features of the engine's first row, just run, are from those of ``truth``."""
    if truth.features is None:
        return 0.0
    assert isinstance(engine, FeatureEngine)
    expected = truth.features[0].astype(np.float64)
    found = engine.features(0, 0, len(expected)).astype(np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def _read(truth: Truth, engine: Engine, places: NDArray[np.int64]) -> None:
    """Tell an engine that reads features those beside the next step's tokens: of row b those at ``places`` [B, S]."""
    if truth.beside is not None:
        assert isinstance(engine, FeatureEngine)
        within = np.minimum(places, truth.beside.shape[1] - 1)
        engine.beside(truth.beside[np.arange(len(places))[:, None], within])


def _commit(engine: Engine, lengths: Sequence[int]) -> None:
    """States may stand at these lengths from the next step on."""
    if isinstance(engine, CommittingEngine):
        engine.commit(lengths)


def _alone(truth: Truth, engine: Engine, slots: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """One row in a cache of at least ``slots``: prefill all but a step, a step, then its first token again after
    rolling back."""
    row, logits, start = truth.tokens[0], truth.logits[0], int(truth.starts()[0])
    engine.reset(1)
    engine.reserve(max(len(row), slots))
    each = np.arange(len(row))[None]
    _read(truth, engine, each[:, :start])
    yield np.array(engine.forward(row[None, :start], np.array([0]))[0]), logits[:start]
    _read(truth, engine, each[:, start:])
    _commit(engine, [start])
    yield np.array(engine.forward(row[None, start:], np.array([start]))[0]), logits[start:]
    _read(truth, engine, each[:, start : start + 1])
    yield np.array(engine.forward(row[None, start : start + 1], np.array([start]))[0]), logits[start : start + 1]


def _ragged(truth: Truth, engine: Engine) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Three rows, each with its own past: padded prefill, a step, then one token after rolling back; then all of
    each text at once, which is what is looked at on a device."""
    rows, length = truth.tokens.shape
    lens = truth.starts()
    start, each = int(lens[0]), np.arange(rows)
    engine.reset(rows)
    engine.reserve(length)
    padded = np.where(np.arange(lens.max()) < lens[:, None], truth.tokens[:, : lens.max()], 0)
    _read(truth, engine, np.tile(np.arange(padded.shape[1]), (rows, 1)))
    last = engine.forward(padded, np.zeros(rows, np.int64), (lens - 1)[:, None])
    yield np.array(last[:, 0]), truth.logits[each, lens - 1]
    places = lens[:, None] + np.arange(length - start)
    new = truth.tokens[each[:, None], places]
    vocab = truth.logits.shape[-1]
    _read(truth, engine, places)
    _commit(engine, lens.tolist())
    yield np.array(engine.forward(new, lens)).reshape(-1, vocab), truth.logits[each[:, None], places].reshape(-1, vocab)
    _read(truth, engine, places[:, :1])
    yield np.array(engine.forward(new[:, :1], lens)[:, 0]), truth.logits[each, lens]
    engine.reset(rows)
    engine.reserve(length)
    _read(truth, engine, np.tile(np.arange(length), (rows, 1)))
    whole = np.array(engine.forward(truth.tokens, np.zeros(rows, np.int64)))
    yield whole.reshape(-1, vocab), truth.logits.reshape(-1, vocab)


def _branched(truth: Truth, engine: TreeEngine) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """One row: the last step as the branch of every second node, each with a sibling before it."""
    row, logits, start = truth.tokens[0], truth.logits[0], int(truth.starts()[0])
    new = np.repeat(row[start:], 2)
    new[::2] = (new[::2] + 1) % truth.logits.shape[-1]
    nodes = np.arange(new.size)
    sees = np.eye(new.size, dtype=np.bool_)
    sees[:, 1::2] |= nodes[:, None] > nodes[1::2]
    engine.reset(1)
    engine.reserve(start + new.size)
    engine.forward(row[None, :start], np.array([0]))
    yield np.array(engine.forward_tree(new[None], np.array([start]), sees[None])[0, 1::2]), logits[start:]


def _blocks(truth: Truth, engine: Engine, rows: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Of the first ``rows`` texts the block behind each, and padding behind that; beyond it all, slots that a longer
    block wrote."""
    assert isinstance(engine, FeatureEngine) and truth.block is not None and truth.said is not None
    block, starts, longest = truth.block[:rows], truth.starts()[:rows], truth.block.shape[1] + 2
    engine.reset(rows)
    engine.reserve(int(starts.max()) + 2 * longest)
    places = np.tile(np.arange(starts.max()), (rows, 1))
    _read(truth, engine, places)
    engine.forward(truth.tokens[:rows, : starts.max()], np.zeros(rows, np.int64), np.zeros((rows, 1), np.int64))
    for width, kinds in ((2 * longest, (BLOCK, BLOCK)), (longest, (BLOCK, PADDING))):
        features = np.zeros((rows, width, engine.spec.features), np.float32)
        features[:, : block.shape[1], -1], features[:, block.shape[1] :, -1] = kinds
        engine.beside(features)
        tokens = np.pad(block, ((0, 0), (0, width - block.shape[1])), mode="edge")
        logits = engine.forward(tokens, starts)
    yield np.concatenate(np.asarray(logits)[:, : block.shape[1]]), np.concatenate(truth.said[:rows])


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    out: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return out
