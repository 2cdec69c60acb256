"""Decides where randomness comes from: a counter, so that no result depends on the batch it sat in."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from . import buffers

_REMEMBERED = 32
SHORT = 1 << 14  # of longer rows few tokens' noise is asked for
FEW = 100  # tokens, whose numbers are made one by one sooner than those of a long row altogether
_TOGETHER = 4  # positions
_WORD = (1 << 64) - 1
_EVEN, _ODD = 0xD2E7470EE14C6C93, 0xCA5A826395121157  # Philox's multipliers, and what its keys grow by a round
_GROWTH = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B


class Purpose(IntEnum):
    """What a number is for. Two purposes never share a number (a draft's coin used again for the residual is biased:
    papers call it shared noise; total variation 0.03 on a toy). In the order in which a round asks."""

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
        self._keys = [((seed + i * _GROWTH[0]) & _WORD, (stream + i * _GROWTH[1]) & _WORD) for i in range(10)]
        self._raws: dict[tuple[int, int], tuple[NDArray[np.float64], int]] = {}
        self._gumbels: dict[tuple[int, int], NDArray[np.float64]] = {}
        self._fours: dict[tuple[int, int], list[float]] = {}
        self._coins: dict[tuple[int, Purpose], list[float]] = {}

    def gumbel(self, position: int, size: int) -> NDArray[np.float64]:
        """Standard Gumbel noise, float64 [size], by token id: what stands at ``position`` (absolute, 0-based) gets
        the same noise whoever asks, draft or target, this round or the next. The first n numbers do not depend on
        ``size``. Of short rows the next positions' is made, too, at little more than the price of one. Remembered for
        a while, because draft and target both ask: do not write to it."""
        if (known := self._gumbels.get((position, size))) is not None:
            return known
        if size > SHORT:
            return gumbel(self.raw(position, size)[0])
        if len(self._gumbels) >= _REMEMBERED:
            self._gumbels.clear()
        noise = np.empty((_TOGETHER, size))
        for ahead, row in enumerate(noise):
            self._many(position + ahead, Purpose.GUMBEL, row)
        for ahead, row in enumerate(gumbel(noise.reshape(-1)).reshape(noise.shape)):
            self._gumbels[position + ahead, size] = row
        return self._gumbels[position, size]

    def gumbel_of(self, position: int, size: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """``gumbel(position, size)[ids]``."""
        if size <= SHORT:
            return self.gumbel(position, size)[ids]
        if ids.size > FEW or (position, size) in self._raws:
            return gumbel(self.raw(position, size)[0][ids])
        if len(self._fours) >= _REMEMBERED * FEW:
            self._fours.clear()
        each, fours = list[float](), self._fours
        for token in ids.tolist():
            block = token // 4 + 1, position
            if (four := fours.get(block)) is None:  # draft and target ask for much the same tokens
                four = fours[block] = self._four(*block, Purpose.GUMBEL)
            each.append(four[token % 4])
        return gumbel(np.array(each))

    def raw(self, position: int, size: int) -> tuple[NDArray[np.float64], int]:
        """The uniforms that a long row's noise is made of, and where the largest is. Remembered for a while: do not
        write to them."""
        if (known := self._raws.get((position, size))) is not None:
            return known
        if len(self._raws) >= _REMEMBERED:
            self._raws.clear()
        uniforms = buffers.empty(size, np.float64)
        self._many(position, Purpose.GUMBEL, uniforms)
        known = self._raws[position, size] = uniforms, int(uniforms.argmax())
        return known

    def uniforms(self, position: int, purpose: Purpose, size: int) -> list[float]:
        """Uniforms in [0, 1), ``size`` of them. A round asks with the position it starts at and takes its i-th number
        for its i-th draft: the next round starts further on and so shares nothing with it. (Keyed by the draft's own
        position instead, block verification would be biased: it looks at coins beyond the ones it commits.)"""
        coins = self._coins.get((position, purpose)) or self._toss(position, purpose)
        if size > len(coins):
            more = range(len(coins) // 4 + 1, -(-size // 4) + 1)
            coins = [*coins, *(coin for place in more for coin in self._four(place, position, purpose))]
            self._coins[position, purpose] = coins
        return coins[:size]

    def _toss(self, position: int, purpose: Purpose) -> list[float]:
        """The first four numbers for ``purpose``, and for the purposes that a round asks for after it, while the code
        is in the cache."""
        if len(self._coins) >= _REMEMBERED:
            self._coins.clear()
        tossed = {(position, each): self._four(1, position, each) for each in Purpose if each >= purpose}
        self._coins |= tossed
        return tossed[position, purpose]

    def _four(self, place: int, position: int, purpose: Purpose) -> list[float]:
        return [(number >> 11) * 2.0**-53 for number in self._block(place, position, purpose)]

    def _block(self, a: int, b: int, c: int) -> tuple[int, int, int, int]:
        """Philox4x64-10 of the counter (a, b, c, 0). For a few numbers Python's integers are faster here than numpy: to
        set the counter of its generator takes code that a model's step has displaced from the cache."""
        d = 0
        for first, second in self._keys:
            even, odd = _EVEN * a, _ODD * c
            a, b, c, d = (odd >> 64) ^ b ^ first, odd & _WORD, (even >> 64) ^ d ^ second, even & _WORD
        return a, b, c, d

    def _many(self, position: int, purpose: Purpose, out: NDArray[np.float64]) -> None:
        """The same numbers as ``uniforms``, as many as ``out`` takes."""
        counter = self._state["state"]["counter"]
        counter[:] = (0, position, purpose, 0)
        self._philox.state = self._state
        self._generator.random(out=out)


def gumbel(uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard Gumbel noise of uniforms in [0, 1): -log(-log u), -inf of 0, so that such a token simply loses."""
    if not uniforms[uniforms.argmin()]:
        with np.errstate(divide="ignore"):
            return -np.log(-np.log(uniforms))
    noise = np.log(uniforms, out=buffers.like(uniforms))
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    np.negative(noise, out=noise)
    return noise
