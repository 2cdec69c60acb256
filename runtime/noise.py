"""Decides where randomness comes from: a counter, so that no result depends on the batch it sat in."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_REMEMBERED = 32


class Purpose(IntEnum):
    """What a number is for. Two purposes never share a number (a draft's coin used again for the residual is biased:
    papers call it shared noise; total variation 0.03 on a toy)."""

    GUMBEL = 0
    DRAFT = 1
    ACCEPT = 2
    FINAL = 3


class Noise:
    """The noise of one answer: Philox4x64-10 (Salmon et al. 2011), key = (seed, stream), counter = (position, purpose).

    Each pair has its own 2^64 blocks of four numbers, so that asking for more never reaches into another's.
    """

    def __init__(self, seed: int, stream: int = 0) -> None:
        """``seed`` and ``stream`` (which of several answers to one prompt) are below 2^64."""
        self.seed = seed
        self._philox = np.random.Philox(key=seed | stream << 64)
        self._generator = np.random.Generator(self._philox)
        self._state = self._philox.state
        self._gumbels: dict[tuple[int, int], NDArray[np.float64]] = {}

    def gumbel(self, position: int, size: int) -> NDArray[np.float64]:
        """Standard Gumbel noise, float64 [size], by token id: what stands at ``position`` (absolute, 0-based) gets
        the same noise whoever asks, draft or target, this round or the next. The first n numbers do not depend on
        ``size``. Remembered for a while, because both ask: do not write to it."""
        if (known := self._gumbels.get((position, size))) is not None:
            return known
        if len(self._gumbels) >= _REMEMBERED:
            self._gumbels.clear()
        noise = self.uniforms(position, Purpose.GUMBEL, size)
        with np.errstate(divide="ignore"):  # log(0) for a uniform of exactly 0: that token simply loses
            np.log(noise, out=noise)
            np.negative(noise, out=noise)
            np.log(noise, out=noise)
        np.negative(noise, out=noise)
        self._gumbels[position, size] = noise
        return noise

    def uniforms(self, position: int, purpose: Purpose, size: int) -> NDArray[np.float64]:
        """Uniforms in [0, 1), float64 [size]. A round asks with the position it starts at and takes its i-th number
        for its i-th draft: the next round starts further on and so shares nothing with it. (Keyed by the draft's own
        position instead, block verification would be biased: it looks at coins beyond the ones it commits.)"""
        counter = self._state["state"]["counter"]
        counter[:] = (0, position, purpose, 0)
        self._philox.state = self._state
        return self._generator.random(size)
