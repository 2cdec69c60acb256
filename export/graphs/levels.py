"""How rows of weights become levels and scales: int8 by row or by block, int4 by block."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .pieces import Array

BLOCK = 32  # weights along K that share a scale
WIDE_BLOCK = 128


def rows_to_int8(rows: Array) -> tuple[Array, Array]:
    """[N,K] float -> s8 [N,K] and fp32 scales [N]: the largest magnitude of a row becomes 127."""
    scale = int8_scale(np.abs(rows).max(axis=1))
    return to_int8(rows, scale[:, None]), scale


def int8_scale(peaks: Array) -> Array:
    """What 1 stands for, fp32, where the largest magnitude of what shares a scale is ``peaks``."""
    return np.maximum(peaks, 1e-12).astype(np.float32) / np.float32(127)


def to_int8(weights: Array, scale: Array) -> Array:
    """s8 in the shape of ``weights``."""
    return np.rint(weights / scale).astype(np.int8)


def blocks_to_int8(rows: Array) -> tuple[Array, Array]:
    """[N,K] float, K a multiple of 32 -> u8 [N,K], zero is 128, and fp32 scales [N,K/32]: the largest magnitude of a
    block becomes 127."""
    levels, scale = rows_to_int8(rows.reshape(-1, BLOCK))
    return levels.reshape(rows.shape).view(np.uint8) ^ np.uint8(128), scale.reshape(len(rows), -1)


def rows_to_int4(rows: Array, block: int = BLOCK) -> tuple[Array, Array]:
    """[N,K] float -> u8 [N, K/block, block/2] (two values a byte, zero is 8) and fp32 scales [N, K/block].

    The extreme of a block, with its sign, becomes -8: one level more than scaling by magnitude would use.
    """
    count, width = rows.shape
    blocks = np.pad(rows.astype(np.float32), ((0, 0), (0, -width % block))).reshape(count, -1, block)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    scale = extreme / np.float32(-8)
    levels = np.clip(np.rint(blocks / np.where(scale == 0, 1, scale)), -8, 7).astype(np.int8) + 8
    packed = (levels[..., 0::2] | (levels[..., 1::2] << 4)).astype(np.uint8)
    return packed, np.ascontiguousarray(scale[..., 0])


def int4_to_rows(packed: Array, scale: Array, width: int) -> Array:
    """What ``rows_to_int4`` stands for: fp32 [N, width]."""
    levels = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], -1).astype(np.float32) - 8
    rows: Array = (levels * scale[..., None]).reshape(len(packed), -1)[:, :width]
    return rows


def columns_to_int4(weight: Array) -> tuple[Array, Array]:
    """[K,N] float, K a multiple of 32 -> int4 [K,N] and fp32 scales [K/32,N], positive as TensorRT wants them: the
    least that reaches both extremes of a block, for levels from -8 to 7."""
    blocks = weight.astype(np.float32).reshape(-1, BLOCK, weight.shape[1])
    scale = np.maximum(np.maximum(blocks.max(1) / 7, blocks.min(1) / -8), np.float32(1e-7))
    levels = np.clip(np.rint(blocks / scale[:, None]), -8, 7).astype(ml_dtypes.int4)
    return levels.reshape(weight.shape), scale
