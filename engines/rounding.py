"""Finds out, by trying, from which width on the steps of a graph round alike on this processor.

A kernel computes some rows, or some terms of a sum, in blocks, and what is left over in another way. On x86 one token
alone rounds differently inside attention (and in int4 products where there is no AVX-512); wider steps are alike, as
far as heads are at most 128 wide and at least 16. The sums of wider ones ``GroupQueryAttention`` cuts into blocks where
more than 64 slots are in use (of 256: where 65 to 128 are beyond a multiple of 128), so that a token rounds by who
comes with it; of those 8 wide it takes 16 rows at once, so that a 17th is alone. On ARM64 it sums over as many slots as
are in use, and where their number is no multiple of four the last ones round differently: a token's logits depend on
how many tokens come with it, at every width. Attention over all slots there are has no such rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import EngineError
from .base import Engine, LogitArray, Tokens

_TRIALS = {  # least width: the steps of its trial
    1: (2, 1, 3, 1, 5, 1, 3, 2, 1, 3, 1, 9, 17, 12, 2, 1, 3, 1, 2, 1),
    2: (2, 3, 5, 3, 2, 3, 5, 9, 17, 12, 2, 3, 2, 3),
}
_TOKENS, _TOGETHER = 72, 40  # the second step, of the rest, has tokens on both sides of 64


def even_from(engine: Engine, least: int) -> int | None:
    """The least width, ``least`` or 2, from which on steps of the first row gave the bits of one step; None if none.

    Up to 72 tokens spread over the vocabulary are run three times at most. Overwrites the first row's slots.
    """
    spec = engine.spec
    count = min(_TOKENS, spec.max_context)
    tokens = np.arange(1, count + 1, dtype=np.int64)[None] * spec.vocab_size // (count + 1)
    together = _stepped(engine, tokens, (count,) if count <= _TOGETHER else (_TOGETHER, count - _TOGETHER))
    for width, pieces in _TRIALS.items():
        if width >= least:
            apart = _stepped(engine, tokens, pieces)
            if np.array_equal(apart, together[: len(apart)]):
                return width
    return None


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
