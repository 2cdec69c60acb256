"""Where two answers to one prompt part, and whether rounding explains it: a near-tie with its margin, or a fault."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..engines import Engine
from ..errors import UsageError
from .held import agreement
from .rules.noise import Noise
from .rules.sampling import Chain, Sampler, Scores
from .settings import Settings
from .steps import Stepper

if TYPE_CHECKING:
    from .pair import Pair

# Twice the usual difference between the logits of two graph forms of a small model: a greedy choice can flip only where
# its lead is smaller. Quantised activations may round to the next level, which deep models amplify: see ``spread``.
NEAR_TIE = {"fp32": 2e-3, "fp16": 5e-2, "bf16": 2e-1, "int8": 2e-1, "int4": 2e-1, "int2": 2e-1}
_TAIL = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between two answers: its ``position`` among the new tokens, and whether it is a near-tie by
    the ``margin`` between the two choices. That is their distance in what the rule takes the largest of: the target's
    logits after all penalties, for ``coupled`` with noise added. Where top-k, top-p or min-p leave out one of the two
    tokens, it is by how much that token missed being kept."""

    position: int
    margin: float
    near_tie: bool


def first_divergence(
    pair: Pair, prompt: Sequence[int], ours: Sequence[int], other: Sequence[int], settings: Settings | None = None
) -> Divergence | None:
    """Compare two answers by ``settings`` (greedy by default; or coupled, with its seed); None if they are the same.
    A near-tie is within NEAR_TIE, or within twice the target's ``spread`` on this text. Uses the target's cache."""
    position = agreement(ours, other)
    if position == len(ours) == len(other):
        return None
    if position == min(len(ours), len(other)):
        return Divergence(position, float("inf"), near_tie=False)
    text = [*prompt, *ours[:position]]
    logits, either, scale = last_logits(pair.target, text), (ours[position], other[position]), 1.0
    if settings is None:
        margin = abs(float(logits[either[0]]) - float(logits[either[1]]))
    else:
        margin = _margin(logits, settings, prompt, ours[:position], either)
        scale = max(settings.repetition_penalty, 1.0 / settings.repetition_penalty) / (settings.temperature or 1.0)
    near = margin <= scale * NEAR_TIE[pair.target.spec.precision] or margin <= scale * 2.0 * spread(pair.target, text)
    return Divergence(position, margin, near)


def spread(engine: Engine, text: Sequence[int]) -> float:
    """How far two roundings of one model are apart: the largest difference between its logits after the last 64 tokens
    of ``text``, read in steps as wide as they may be, and one by one as plain decoding does. 0 where these round alike.
    """
    wide, tail = min(_TAIL, engine.spec.max_verify), text[-_TAIL:]
    before, found = len(text) - len(tail), []
    for width, even in ((wide, True), (1, False)):
        stepper = Stepper(engine, "target", exact=True)
        stepper.reset(1, even=even)
        if before:
            stepper.last_logits([text[:before]], [0])
        steps = [(at, tail[at : at + width]) for at in range(0, len(tail), width)]
        found.append([np.array(stepper.all_logits([piece], [before + at])[0, : len(piece)]) for at, piece in steps])
    wider, single = map(np.concatenate, found)
    return float(np.abs(wider - single).max())


def _margin(
    logits: NDArray[np.float32],
    settings: Settings,
    prompt: Sequence[int],
    written: Sequence[int],
    either: tuple[int, int],
) -> float:
    """The margin between two tokens that were chosen after ``written``. (No end token is struck out here, for a token
    that is struck out cannot have been chosen.)"""

    def chain(of: Settings) -> Chain:
        made = Chain(of, logits.size, prompt, ())
        made.extend(written)
        return made

    if settings.acceptance_rule != "coupled":
        weights = chain(settings).weights(logits)
        with np.errstate(divide="ignore"):
            return abs(float(np.log(weights[either[0]]) - np.log(weights[either[1]])))
    if settings.seed is None:
        raise UsageError("answers by rule 'coupled' can only be compared with the seed they were drawn with")
    noisy = Sampler("coupled", chain(settings), Noise(settings.seed)).noisy(logits, (), len(prompt) + len(written))
    left_out = [token for token in either if noisy[token] == -math.inf]
    if not left_out:
        return abs(float(noisy[either[0]] - noisy[either[1]]))
    nucleus = dataclasses.replace(settings, min_p=0.0)
    rank = dataclasses.replace(nucleus, top_p=1.0)
    none = dataclasses.replace(rank, top_k=0)
    whole, by_rank, in_nucleus = (chain(of).scores(logits) for of in (none, rank, nucleus))
    return max(_missed_by(token, settings, whole, by_rank, in_nucleus) for token in left_out)


def _missed_by(token: int, settings: Settings, whole: Scores, by_rank: Scores, in_nucleus: Scores) -> float:
    """By how much ``token`` missed being kept, by the cut that it missed most. Scores are log p up to a constant, the
    largest 0: without any cut (``whole``), after top-k (``by_rank``), and after top-k and top-p (``in_nucleus``). It
    missed the nucleus by its distance to the least likely token there, or by how far the mass of the tokens before it
    exceeds top_p (as a logarithm), whichever is less."""
    score = float(whole[token])
    missed = [_least(by_rank) - score]
    if settings.top_p < 1.0:
        before = float(np.exp(by_rank[by_rank > score]).sum() / np.exp(by_rank).sum())
        missed.append(min(_least(in_nucleus) - score, math.log(max(before, settings.top_p) / settings.top_p)))
    if settings.min_p > 0.0:
        missed.append(math.log(settings.min_p) - score)
    return max(missed)


def _least(scores: Scores) -> float:
    """The smallest score of a token that was kept."""
    return float(scores[scores > -math.inf].min())


def last_logits(engine: Engine, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits after ``token_ids`` [vocab_size], on an empty cache."""
    engine.reset(1)
    return np.array(Stepper(engine, "target", exact=True).last_logits([token_ids], [0])[0])
