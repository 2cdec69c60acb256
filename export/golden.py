"""What transformers says, kept in the bundle so that a machine without PyTorch can check any engine against it.

``golden.npz`` (no pickle), for R rows of at most T tokens and the K = 64 (or fewer) largest logits of each position:

    tokens    int64   [R, T]      the rows, padded on the right with 0
    lengths   int64   [R]         tokens in each row
    ids       int32   [R, T, K]   the ids of the K largest logits after tokens[r, : t + 1], largest first
    logits    float32 [R, T, K]   their values, as transformers' eager attention computes them in float32,
                                  without a cache; zero (like ids) at and beyond lengths[r]
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, PreTrainedModel

ROWS, LENGTH, TOP = 3, 32, 64


@dataclasses.dataclass(frozen=True, slots=True)
class Truth:
    """Token rows [R, T] int64 and the logits [R, T, V] float32 that transformers gives after each token."""

    tokens: NDArray[np.int64]
    logits: NDArray[np.float32]

    def of(self, columns: NDArray[np.int64] | None) -> Truth:
        """The same of a model that gives the logits of ``columns`` alone (None: of all)."""
        return self if columns is None else Truth(self.tokens, np.ascontiguousarray(self.logits[..., columns]))


def compute_truth(model: PreTrainedModel, max_context: int, first: int | None = None) -> Truth:
    """Let ``model`` write ROWS rows (sampled, seed 0) and recompute them whole: eager attention, no cache.

    Rows begin with the token ``first`` if given.

    Rows that the model wrote are rows it is asked to write later; on noise, quantised models look worse than they are.
    """
    tokens = _write_rows(model, min(LENGTH, max_context), first)
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            rows = [model(input_ids=row[None], use_cache=False).logits[0].float() for row in tokens]
    finally:
        model.set_attn_implementation(attention)
    return Truth(tokens.numpy(), np.stack([row.numpy() for row in rows]))


def save_golden(truth: Truth, path: Path) -> None:
    """Write ``golden.npz`` as described above."""
    top = min(TOP, truth.logits.shape[-1])
    ids = np.argsort(-truth.logits, axis=-1, kind="stable")[..., :top]
    rows, length = truth.tokens.shape
    np.savez_compressed(
        path,
        tokens=truth.tokens,
        lengths=np.full(rows, length, np.int64),
        ids=ids.astype(np.int32),
        logits=np.take_along_axis(truth.logits, ids, -1),
    )


def _write_rows(model: PreTrainedModel, length: int, first: int | None) -> torch.Tensor:
    """[ROWS, length] int64: two tokens drawn at random (or ``first`` and one), then what the model samples."""
    vocab = model.get_output_embeddings().weight.shape[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start = torch.randint(vocab, (ROWS, 2))
        if first is not None:
            start[:, 0] = first
        settings = GenerationConfig(do_sample=True, top_k=0, max_length=length, min_length=length, pad_token_id=0)
        with torch.no_grad():
            rows: torch.Tensor = model.generate(
                start, attention_mask=torch.ones_like(start), generation_config=settings
            )
    return rows
