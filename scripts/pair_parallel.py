"""Decides how a draft learns to say a whole draft in one step (PARD, An et al. 2504.18583): behind its text it reads
mask tokens, and at each of them it learns to say what its target says there of the true text.

Many such beginnings share one pass over a text. Behind the text's tokens [0, L) stand blocks of DEPTH - 1 masks, one
for each of some anchors a: the i-th mask of a block (i from 1) has position a + i and sees the text up to a, and its
own block up to itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from .pair_depth import FADE, ByDepth, Divergence, accepted_by_depth, some_anchors
from .pruning import logits_of

DEPTH = 8  # tokens of a draft, that which needs no mask counted in
SHARE = 4  # one anchor for so many tokens of text


def mask_of(tokenizer: Tokenizer) -> int:
    """The id of the byte 0xFF, which no text in UTF-8 holds."""
    return tokenizer.get_vocab()["ÿ"]


def layout(length: int, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``length`` tokens of text and a block of masks for each of ``anchors`` int64 [A] the positions, int64 [S], and
    who sees whom, bool [S, S], True where a row's token sees the column's; S = length + A * (DEPTH - 1)."""
    text, masks = torch.arange(length), torch.arange(1, DEPTH)
    positions = torch.cat([text, (anchors[:, None] + masks).flatten()])
    ends = torch.cat([text, anchors.repeat_interleave(DEPTH - 1)])  # the last token of the text that each sees
    blocks = torch.cat([torch.full((length,), -1), torch.arange(len(anchors)).repeat_interleave(DEPTH - 1)])
    sees_text = (blocks[None] < 0) & (positions[None] <= ends[:, None])
    sees_block = (blocks[None] >= 0) & (blocks[None] == blocks[:, None]) & (positions[None] <= positions[:, None])
    return positions, sees_text | sees_block


def with_masks(text: torch.Tensor, anchors: torch.Tensor, mask: int) -> dict[str, torch.Tensor]:
    """What a model of transformers is called with for ``text`` int64 [B, L] with its masks behind it."""
    rows, length = text.shape
    positions, sees = layout(length, anchors)
    return {
        "input_ids": torch.cat([text, torch.full((rows, len(anchors) * (DEPTH - 1)), mask)], 1),
        "position_ids": positions.expand(rows, -1),
        "attention_mask": sees.expand(rows, 1, -1, -1),
    }


def parallel_loss(
    draft: LlamaForCausalLM,
    target: LlamaForCausalLM,
    mask: int,
    divergence: Divergence,
    seed: int,
    make: Callable[..., Any] = lambda step: step,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The loss of a batch [B, L + 1], p = target, q = draft: the mean ``divergence`` of the text's tokens, and that of
    the tokens at masks, the less the deeper. ``make`` may compile the step."""
    rng, weights = np.random.default_rng(seed), FADE ** torch.arange(1, DEPTH)

    def step(given: dict[str, torch.Tensor], anchors: torch.Tensor, length: int) -> torch.Tensor:
        with torch.no_grad():
            p = logits_of(target, given["input_ids"][:, :length]).softmax(-1)
        log_q = _logits(draft, given).log_softmax(-1)
        places = (anchors[:, None] + torch.arange(1, DEPTH)).flatten()
        ahead = divergence(p[:, places], log_q[:, length:]).unflatten(1, (-1, DEPTH - 1))
        return divergence(p, log_q[:, :length]).mean() + (ahead * weights).mean()

    made = make(step)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        text = batch[:, :-1]
        anchors = some_anchors(rng, text.shape[1], DEPTH, SHARE)
        return cast(torch.Tensor, made(with_masks(text, anchors, mask), anchors, text.shape[1]))

    return loss


@torch.no_grad()
def acceptance_by_depth(
    draft: LlamaForCausalLM, target: LlamaForCausalLM, mask: int, rows: torch.Tensor, seed: int = 0
) -> ByDepth:
    """``accepted_by_depth`` of drafts in texts ``rows`` int64 [N, L]."""
    rng = np.random.default_rng(seed)

    def laws(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        anchors = some_anchors(rng, len(row), DEPTH, SHARE)
        p = logits_of(target, row[None])[0].softmax(-1)[anchors[:, None] + torch.arange(DEPTH)]
        q = _logits(draft, with_masks(row[None], anchors, mask))[0].softmax(-1)
        return p, torch.cat([q[anchors][:, None], q[len(row) :].unflatten(0, (len(anchors), DEPTH - 1))], 1)

    return accepted_by_depth(map(laws, rows))


def _logits(model: LlamaForCausalLM, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return cast(torch.Tensor, cast(Any, model)(**given, use_cache=False).logits.float())
