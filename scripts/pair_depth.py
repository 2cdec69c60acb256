"""Decides where the drafts begin that a model learns from and is measured by, and how much of them is accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of laws p and log q [..., V], of each position
FADE = 0.85  # what a token counts for beside the one before it: it matters where that was accepted
ByDepth = tuple[list[float], list[float]]


def some_anchors(rng: np.random.Generator, length: int, depth: int, share: int) -> torch.Tensor:
    """Places of a text of ``length`` tokens, one for ``share`` of them, behind which a whole draft of ``depth`` is
    still text, int64 [A]."""
    return torch.from_numpy(np.sort(rng.choice(length - depth, length // share, replace=False)))


def accepted_by_depth(laws: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> ByDepth:
    """Of laws p and q [A, depth, V] of drafts, text by text, two lists of ``depth``: the mean of 1 - TV at each place,
    and the share of greedy drafts that are right up to there."""
    sampled, greedy = [], []
    for p, q in laws:
        sampled.append(torch.minimum(p, q).sum(-1).mean(0))
        greedy.append((p.argmax(-1) == q.argmax(-1)).cumprod(1).float().mean(0))
    return torch.stack(sampled).mean(0).tolist(), torch.stack(greedy).mean(0).tolist()


def by_place(sampled: Iterable[float], greedy: Iterable[float]) -> dict[str, Any]:
    """A model card's figures of ``accepted_by_depth``."""
    return {
        "mean_acceptance_by_place_at_temperature_1": ", ".join(f"{rate:.3f}" for rate in sampled),
        "greedy_drafts_right_up_to_each_place": ", ".join(f"{share:.3f}" for share in greedy),
    }
