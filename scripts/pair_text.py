"""Decides which text the models of the pair learn from beside the corpus, and which they are measured on."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import click
import numpy as np
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from .pair_corpus import Corpus, token_stream
from .pair_edits import edited
from .pair_recipes import BFLOAT16, CONTEXT, SEED


def edits(corpus: Corpus, tokens: int) -> np.ndarray:
    """So many tokens of edits of the corpus, int64 [tokens]."""
    return token_stream(corpus.tokenizer, edited(corpus.texts, SEED))[:tokens]


@torch.no_grad()
def own_text(model: LlamaForCausalLM, stream: np.ndarray, tokens: int, length: int = CONTEXT // 4) -> np.ndarray:
    """What ``model`` itself writes at temperature 1 after 32 tokens of ``stream``, int64 [N], N >= tokens.

    A draft is asked for continuations of its target's text, not of the corpus (Zhou et al. 2310.08461: distil on the
    policy that is met in use).
    """
    rng, rows, opening = np.random.default_rng(SEED), 256, 32
    texts: list[torch.Tensor] = []
    torch.manual_seed(SEED)
    writer = cast(Any, deepcopy(model).to(torch.bfloat16) if BFLOAT16 else model)
    while len(texts) * rows * length < tokens:
        starts = rng.integers(0, len(stream) - opening, rows)
        prompts = torch.from_numpy(np.stack([stream[s : s + opening] for s in starts]))
        rest = GenerationConfig(
            do_sample=True, top_k=0, min_new_tokens=length - opening, max_new_tokens=length - opening, pad_token_id=0
        )
        texts.append(writer.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=rest))
        click.echo(f"{len(texts) * rows * length:,} tokens of the target's own", err=True)
    return cast(np.ndarray, torch.cat(texts).flatten().numpy())


def half_edits(teacher: LlamaForCausalLM, corpus: Corpus, own_tokens: int) -> np.ndarray:
    """The corpus, what ``teacher`` writes, and half as much as the corpus of edits of it, int64 [N]."""
    own = own_text(teacher, corpus.stream, own_tokens)
    return np.concatenate([corpus.stream, own, edits(corpus, len(corpus.stream) // 2)])


def held_out_windows(corpus: Corpus, length: int = CONTEXT // 4) -> torch.Tensor:
    """Consecutive windows [N, length]."""
    return torch.from_numpy(corpus.held_stream[: len(corpus.held_stream) // length * length].reshape(-1, length))


def held_out_rows(stream: np.ndarray) -> torch.Tensor:
    """Consecutive windows of the whole context, [N, CONTEXT + 1]."""
    starts = range(0, len(stream) - CONTEXT, CONTEXT)
    return torch.from_numpy(np.stack([stream[s : s + CONTEXT + 1] for s in starts]))
