"""Is an exported model the model transformers has? Measured on the real engine, in every situation decoding meets.

Truth is a full recompute without a cache (``golden.compute_truth``); the engine steps in place. Four situations:
a prefill, five tokens on top of a past, one token after a roll-back, and a ragged batch of three. Where the engine
takes them, a fifth: those five tokens among siblings, as a branch of a tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engines import Engine
from ..engines.base import TreeEngine
from ..errors import ExportError
from .golden import Truth

STEP = 5
TOLERANCE = 1e-4  # float32: of logits, absolute up to 1 and relative to the largest above
# Not float32: what a sound quantisation stays well inside and a wrong graph does not.
LOOSE_DIVERGENCE, LOOSE_AGREEMENT = 1.0, 0.5


class ImprecisionError(ExportError):
    """A model is too far from its checkpoint in the precision asked for; in a higher one it may do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Parity:
    """How far an engine's logits are from transformers' over all rows compared.

    ``difference``: largest absolute one; ``scale``: max(1, largest |logit|); ``divergence``: mean KL(truth || engine)
    in nats; ``agreement``: share of rows with the same largest logit.
    """

    difference: float
    scale: float
    divergence: float
    agreement: float

    def describe(self, precision: str) -> str:
        """One line for people."""
        text = f"largest difference {self.difference:.1e}"
        same = f", {self.divergence:.1e} nats, same top token in {self.agreement:.0%}"
        return text if precision == "fp32" else text + same

    def require(self, stage: str, precision: str) -> None:
        """Raise ExportError (ImprecisionError below fp32) naming ``stage`` if the difference is not what ``precision``
        explains."""
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


def measure(truth: Truth, engine: Engine, *, batched: bool = True) -> Parity:
    """Run the four situations (without ``batched`` the first three) and compare every row of logits."""
    pairs = list(_alone(truth, engine))
    if batched:
        pairs += _ragged(truth, engine)
    if isinstance(engine, TreeEngine) and engine.spec.trees:
        pairs += _branched(truth, engine)
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


def _alone(truth: Truth, engine: Engine) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """One row: prefill all but a step, a step, then its first token again after rolling back."""
    row, logits = truth.tokens[0], truth.logits[0]
    start = len(row) - STEP
    engine.reset(1)
    engine.reserve(len(row))
    yield np.array(engine.forward(row[None, :start], np.array([0]))[0]), logits[:start]
    yield np.array(engine.forward(row[None, start:], np.array([start]))[0]), logits[start:]
    yield np.array(engine.forward(row[None, start : start + 1], np.array([start]))[0]), logits[start : start + 1]


def _ragged(truth: Truth, engine: Engine) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Three rows, each with its own past: padded prefill, a step, then one token after rolling back."""
    rows, length = truth.tokens.shape
    lens = np.array([length - STEP - (r * 7) % (length - STEP - 1) for r in range(rows)], np.int64)
    each = np.arange(rows)
    engine.reset(rows)
    engine.reserve(length)
    padded = np.where(np.arange(lens.max()) < lens[:, None], truth.tokens[:, : lens.max()], 0)
    last = engine.forward(padded, np.zeros(rows, np.int64), (lens - 1)[:, None])
    yield np.array(last[:, 0]), truth.logits[each, lens - 1]
    places = lens[:, None] + np.arange(STEP)
    new = truth.tokens[each[:, None], places]
    vocab = truth.logits.shape[-1]
    yield np.array(engine.forward(new, lens)).reshape(-1, vocab), truth.logits[each[:, None], places].reshape(-1, vocab)
    yield np.array(engine.forward(new[:, :1], lens)[:, 0]), truth.logits[each, lens]


def _branched(truth: Truth, engine: TreeEngine) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """One row: the last step as the branch of every second node, each with a sibling before it."""
    row, logits = truth.tokens[0], truth.logits[0]
    start = len(row) - STEP
    new = np.repeat(row[start:], 2)
    new[::2] = (new[::2] + 1) % truth.logits.shape[-1]
    sees = np.eye(2 * STEP, dtype=np.bool_)
    sees[:, 1::2] |= np.arange(2 * STEP)[:, None] > np.arange(1, 2 * STEP, 2)
    engine.reset(1)
    engine.reserve(start + 2 * STEP)
    engine.forward(row[None, :start], np.array([0]))
    yield np.array(engine.forward_tree(new[None], np.array([start]), sees[None])[0, 1::2]), logits[start:]


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    out: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return out
