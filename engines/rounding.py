"""Finds out, by trying, in which widths the steps of a graph round alike on this processor.

A kernel computes some rows, or some terms of a sum, in blocks, and what is left over in another way. On x86 one token
alone rounds differently inside attention (and in int4 products where there is no AVX-512). Products in blocks of 64
weights and more take rows in pairs, so that the last of an odd number rounds differently. Wider steps are alike, as far
as heads are at most 128 wide and at least 16. The sums of wider ones ``GroupQueryAttention`` cuts into blocks where
more than 64 slots are in use (of 256: where 65 to 128 are beyond a multiple of 128), so that a token rounds by who
comes with it; of those 8 wide it takes 16 rows at once, so that a 17th is alone. On ARM64 it sums over as many slots as
are in use, and where their number is no multiple of four the last ones round differently: a token's logits depend on
how many tokens come with it, at every width. Attention over all slots there are has no such rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ..errors import EngineError
from .base import Engine, LogitArray, ModelSpec, Tokens, Widths

_TRIALS = {  # widths: the steps of their trial
    Widths(1): (2, 1, 3, 1, 5, 1, 3, 2, 1, 3, 1, 9, 17, 12, 2, 1, 3, 1, 2, 1),
    Widths(2): (2, 3, 5, 3, 2, 3, 5, 9, 17, 12, 2, 3, 2, 3),
    Widths(2, 2): (2, 4, 6, 2, 8, 10, 18, 12, 2, 4, 2, 2),
}
SEVERAL = 32  # tokens of a step that are surely computed in one block
_ALONE = 8  # tokens whose logits are asked for by themselves
_TOKENS, _TOGETHER = 72, 40  # the second step, of the rest, has tokens on both sides of 64


def even_widths(engine: Engine, least: int) -> Widths | None:
    """Which steps of at least ``least`` tokens (1 or 2) gave the first row the bits of one step: the most widths of
    which that is so; None if none.

    Up to 72 tokens spread over the vocabulary are run four times at most. Overwrites the first row's slots.
    """
    tokens = _probe(engine)
    together = _stepped(engine, tokens, _whole(tokens))
    for widths, pieces in _TRIALS.items():
        if widths.narrowest >= least:
            apart = _stepped(engine, tokens, pieces)
            if np.array_equal(apart, together[: len(apart)]):
                return widths
    return None


def rounded_alike(engine: Engine, widths: Widths) -> ModelSpec:
    """The spec of an engine of which ``even_widths`` found that: with the fewest logits to ask for, and with limits
    that are widths. Overwrites the first row's slots."""
    spec = engine.spec
    limits = {limit: getattr(spec, limit) // widths.multiple * widths.multiple for limit in ("max_step", "max_verify")}
    return dataclasses.replace(spec, widths=widths, fewest_logits=_fewest_logits(engine, widths), **limits)


def leaves_one(width: int) -> bool:
    """Whether blocks of rows may leave one over, which a kernel computes in another way: ONNX Runtime's attention takes
    twice as many rows at once as a head is wide, and those are multiples of 16."""
    return width > SEVERAL and width % 16 == 1


def shown(width: int) -> int:
    """How many tokens attention must see for a row that brings ``width``, so that none is computed alone."""
    return width + (width == 1 or leaves_one(width))


def _fewest_logits(engine: Engine, widths: Widths) -> int:
    """Whether the logits of one token alone are those it has among others (1) or not (2, the least number to ask
    for)."""
    tokens, step = _probe(engine)[:, :_ALONE], widths.holding(1)
    together = _stepped(engine, tokens, _whole(tokens))
    for past in range(0, tokens.shape[1] - step + 1, step):
        last = np.array([[step - 1]])
        alone = engine.forward(tokens[:, past : past + step], np.array([past]), last)
        if not np.array_equal(np.array(alone, np.float32)[0, 0], together[past + step - 1]):
            return 2
    return 1


def _probe(engine: Engine) -> Tokens:
    """Tokens [1, T], T even where there is room for two."""
    spec = engine.spec
    count = min(_TOKENS, spec.max_context)
    count -= count % 2 if count > 1 else 0
    return np.arange(1, count + 1, dtype=np.int64)[None] * spec.vocab_size // (count + 1)


def _whole(tokens: Tokens) -> tuple[int, ...]:
    count = tokens.shape[1]
    return (count,) if count <= _TOGETHER else (_TOGETHER, count - _TOGETHER)


def uneven(name: str, instead: str = "take variant auto") -> EngineError:
    """The error for a graph ``name`` whose steps round differently at every width; ``instead``: what may help."""
    return EngineError(
        f"{name}: on this processor its steps round by their width, so no answer would be the target's own, token for"
        f" token: {instead}, or do without (--no-exact, exact=False)"
    )


def _stepped(engine: Engine, tokens: Tokens, pieces: Sequence[int]) -> LogitArray:
    """Logits [T, vocab_size] of the first row's tokens, run in ``pieces``, as far as there are tokens for them."""
    engine.reserve(tokens.shape[1])
    parts, past = [], 0
    for width in pieces:
        if past + width > tokens.shape[1]:
            break
        step = engine.forward(tokens[:, past : past + width], np.array([past]))
        parts.append(np.array(step, np.float32)[0])
        past += width
    return np.concatenate(parts)
