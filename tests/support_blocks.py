"""Pieces of layers as their authors' equations have them, for heads whose own width is 16."""

from __future__ import annotations

import torch
from torch.nn import functional


def norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(rows, weight.shape, weight, 1e-6)


def heads(rows: torch.Tensor) -> torch.Tensor:
    return rows.unflatten(-1, (-1, 16)).transpose(1, 2)


def rotary(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    turns = torch.arange(length)[:, None] / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    angles = torch.cat([turns, turns], -1)[None]
    return angles.cos(), angles.sin()
