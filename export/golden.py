"""What transformers says, kept in the bundle so that a machine without PyTorch can check any engine against it.

``golden.npz`` (no pickle), for R rows of at most T tokens and the K = 64 (or fewer) largest logits of each position:

    tokens    int64   [R, T]      the rows, padded on the right with 0
    lengths   int64   [R]         tokens in each row
    ids       int32   [R, T, K]   the ids of the K largest logits after tokens[r, : t + 1], largest first
    logits    float32 [R, T, K]   their values, as transformers' eager attention computes them in float32,
                                  without a cache; zero (like ids) at and beyond lengths[r]
    beside    float32 [R, T, D]   of a head alone: the features that it reads beside each token
    texts     int64   [R]         of a head that drafts blocks alone: how many of a row's tokens are text; behind them
                                  stands a block
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ..engines.base import BLOCK
from ..errors import ExportError
from .capture.refusals import own_code
from .capture.taps import FeatureReader, tapped
from .checkpoints.checkpoint import Checkpoint
from .drafts.dflash import BlockHead

ROWS, LENGTH, TOP = 3, 32, 64
STEP = 5  # tokens that are looked at together behind a past, or as many as a row has behind its first


@dataclasses.dataclass(frozen=True, slots=True)
class Truth:
    """What transformers says: token rows [R, T] int64 and the logits [R, T, V] float32 after each token. ``features``
    [R, T, D]: of each token, where a head reads them, or as a head itself gives them; ``beside`` [R, T, D]: those that
    a head reads beside each token. Of a head that drafts blocks, ``block`` [R, STEP] are the tokens of a block after
    row r's first ``starts()[r]`` tokens, and ``said`` [R, STEP, V] are its logits."""

    tokens: NDArray[np.int64]
    logits: NDArray[np.float32]
    features: NDArray[np.float32] | None = None
    beside: NDArray[np.float32] | None = None
    block: NDArray[np.int64] | None = None
    said: NDArray[np.float32] | None = None

    def starts(self) -> NDArray[np.int64]:
        """Where the last step of each row begins, int64 [R]: nowhere the same, where rows are long enough."""
        rows, length = self.tokens.shape
        last = max(1, length - STEP)
        return np.array([last - (r * 7) % max(1, last - 1) for r in range(rows)], np.int64)

    def of(self, columns: NDArray[np.int64] | None) -> Truth:
        """The same of a model that gives the logits of ``columns`` alone (None: of all)."""
        if columns is None:
            return self
        said = None if self.said is None else np.ascontiguousarray(self.said[..., columns])
        return dataclasses.replace(self, logits=np.ascontiguousarray(self.logits[..., columns]), said=said)


def compute_truth(checkpoint: Checkpoint, reader: FeatureReader | None = None) -> Truth:
    """Let the model write ROWS rows (sampled, seed 0) and recompute them whole: eager attention, no cache.

    Rows have LENGTH tokens, or as many as the context takes, and begin with the checkpoint's BOS if it has one.

    Rows that the model wrote are rows it is asked to write later; on noise, quantised models look worse than they are.
    ``reader`` is the head that reads its features. Raises ExportError if a logit is not finite, or the model's own code
    fails.
    """
    model, taps = checkpoint.model, () if reader is None else reader.config.taps
    tokens = write_rows(checkpoint, ROWS, min(LENGTH, checkpoint.max_context), seed=0)
    attention = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with own_code(checkpoint.architecture), torch.no_grad(), tapped(model, taps) as streams:
            rows, read = [], []
            for row in torch.from_numpy(tokens):
                rows.append(model(input_ids=row[None], use_cache=False).logits[0].float().numpy())
                read += [] if reader is None else [reader.feature(streams)[0].float().numpy()]
    finally:
        model.set_attn_implementation(attention)
    logits = np.stack(rows)
    if not np.isfinite(logits).all():
        raise _not_finite(checkpoint.source)
    return Truth(tokens, logits, np.stack(read) if read else None)


def head_truth(head: Checkpoint, target: Truth) -> Truth:
    """What a head says of its target's rows, whose features it reads: one token less, where the first has none before
    it, and no more than its own context takes. Raises ExportError if a logit is not finite."""
    assert target.features is not None
    lag = head.model.lag
    length = min(target.tokens.shape[1] - lag, head.max_context)
    tokens, beside = target.tokens[:, lag : lag + length], target.features[:, :length]
    with torch.no_grad():
        out = head.model(torch.from_numpy(tokens), torch.from_numpy(beside))
    if not out.logits.isfinite().all():
        raise _not_finite(head.source)
    truth = Truth(np.ascontiguousarray(tokens), out.logits.numpy(), out.hidden_states.numpy(), beside)
    return _with_blocks(truth, head.model) if isinstance(head.model, BlockHead) else truth


def _with_blocks(truth: Truth, head: BlockHead) -> Truth:
    """``truth`` and what ``head`` says of blocks behind its texts."""
    assert truth.beside is not None
    block = np.full((len(truth.tokens), STEP), head.config.mask_token_id)
    block[:, 0] = truth.tokens[np.arange(len(block)), truth.starts()]
    said = []
    for row, beside, behind, start in zip(truth.tokens, truth.beside, block, truth.starts(), strict=True):
        tokens = torch.from_numpy(np.concatenate([row[:start], behind]))[None]
        features = torch.full((1, tokens.shape[1], beside.shape[1]), BLOCK)
        features[0, :start] = torch.from_numpy(beside[:start])
        with torch.no_grad():
            said.append(head(tokens, features).logits[0, start:].numpy())
    return dataclasses.replace(truth, block=block, said=np.stack(said))


def save_golden(truth: Truth, path: Path) -> None:
    """Write ``golden.npz`` as described above."""
    lengths, more = np.full(len(truth.tokens), truth.tokens.shape[1], np.int64), dict[str, NDArray[Any]]()
    if truth.block is not None:
        lengths, more["texts"], truth = truth.starts() + STEP, truth.starts(), _ending_in_blocks(truth)
    if truth.beside is not None:
        more["beside"] = truth.beside
    top = min(TOP, truth.logits.shape[-1])
    ids = np.argsort(-truth.logits, axis=-1, kind="stable")[..., :top]
    np.savez_compressed(
        path,
        tokens=truth.tokens,
        lengths=lengths,
        ids=ids.astype(np.int32),
        logits=np.take_along_axis(truth.logits, ids, -1),
        **more,  # type: ignore[arg-type]  # as in pairing.py
    )


def _ending_in_blocks(truth: Truth) -> Truth:
    """Rows that are a text and the block behind it; 0 beyond that."""
    assert truth.block is not None and truth.said is not None and truth.beside is not None
    block = np.full((*truth.block.shape, truth.beside.shape[-1]), BLOCK, np.float32)

    def ending(texts: NDArray[Any], blocks: NDArray[Any]) -> NDArray[Any]:
        rows = np.zeros_like(texts)
        for row, start in enumerate(truth.starts().tolist()):
            rows[row, :start], rows[row, start : start + STEP] = texts[row, :start], blocks[row]
        return rows

    return dataclasses.replace(
        truth,
        tokens=ending(truth.tokens, truth.block),
        logits=ending(truth.logits, truth.said),
        beside=ending(truth.beside, block),
    )


def write_rows(checkpoint: Checkpoint, rows: int, length: int, *, seed: int) -> NDArray[np.int64]:
    """[rows, length]: two tokens drawn at random (or BOS and one), then what the model samples at temperature 1, never
    an end of text. Raises ExportError if a logit is not finite, or the model's own code fails."""
    vocab, first = checkpoint.vocab_size, checkpoint.bos_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        written = torch.randint(vocab, (rows, 2))
        if isinstance(first, int) and 0 <= first < vocab:
            written[:, 0] = first
        if length > written.shape[1]:
            settings = GenerationConfig(
                do_sample=True,
                top_k=0,
                max_length=length,
                min_length=length,
                pad_token_id=0,
                eos_token_id=[i for i in checkpoint.eos_token_ids if 0 <= i < vocab] or None,
            )
            with own_code(checkpoint.architecture), torch.no_grad(), _no_defaults(checkpoint.model):
                written = checkpoint.model.generate(
                    written,
                    attention_mask=torch.ones_like(written),
                    generation_config=settings,
                    logits_processor=LogitsProcessorList([_RequireFinite(checkpoint.source)]),
                )
    return np.asarray(written.numpy())


@contextlib.contextmanager
def _no_defaults(model: PreTrainedModel) -> Iterator[None]:
    """transformers fills what a generation config leaves open from the model's own, which may ask for anything."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


class _RequireFinite(LogitsProcessor):  # type: ignore[misc]
    """Raises ExportError where no token can be drawn; an end of text at -inf is no such place."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not scores.logsumexp(-1).isfinite().all():
            raise _not_finite(self.source)
        return scores


def _not_finite(source: str) -> ExportError:
    return ExportError(f"'{source}': its logits are not finite, though its weights are: they overflow float32")
