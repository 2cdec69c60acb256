"""A head that drafts a whole block in one step from its target's features (DFlash, Chen et al. 2602.06036).

Its layers know the text by nothing but features: of each token that the target has read, one vector, made of several of
the target's layers, is what every layer takes its key and value from. Behind the text stands the block: the last token,
which the target has not read yet, and mask tokens, each of which says what stands in its own place. All of a block see
each other.

In the graph both are rows of a step. A row of text reads its feature in each layer, in place of what the layer before
made; nothing looks at what else becomes of it. Names of weights are those of published checkpoints, whose layers are
Qwen 3's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3PreTrainedModel,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

from ...engines.base import BLOCK, PADDING, TEXT
from ..capture.taps import FeatureReader
from .eagle import capped

SLIDING = "sliding_attention"


class BlockLayer(nn.Module):  # type: ignore[misc]
    """Qwen 3's, but for what rows of text read."""

    def __init__(self, config: Qwen3Config, index: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Qwen3Attention(config, index), Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, told: Tensor, is_text: Tensor, places: Any, mask: Tensor, cache: Any) -> Tensor:
        read = torch.where(is_text, told, self.input_layernorm(hidden))
        out = hidden + self.self_attn(read, places, mask, cache)[0]
        return out + self.mlp(self.post_attention_layernorm(out))


class BlockHead(FeatureReader, Qwen3PreTrainedModel):  # type: ignore[misc]
    """The draft. ``config`` is a Qwen 3's and more: ``taps``, ``target_hidden_size`` and ``draft_vocab_size`` (as of
    FeatureHead), ``mask_token_id``, ``causal`` (of each layer, whether a row of a block sees those before it alone),
    and ``scale``, ``multiplier`` and ``softcap``, which its embedding and its logits are multiplied by and capped at.
    """

    config_class = Qwen3Config
    _supports_attention_backend = True
    lag = 0

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        size, read = config.hidden_size, len(config.taps) * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.fc = nn.Linear(read, size, bias=False)
        self.hidden_norm, self.norm = (Qwen3RMSNorm(size, config.rms_norm_eps) for _ in range(2))
        self.layers = nn.ModuleList(BlockLayer(config, index) for index in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.post_init()

    @property
    def feature_size(self) -> int:
        return int(self.config.hidden_size) + 1

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def feature(self, streams: Sequence[Tensor]) -> Tensor:
        made = self.hidden_norm(self.fc(torch.cat(tuple(streams), -1)))
        return torch.cat((made, torch.full_like(streams[0][..., :1], TEXT)), -1)

    def say(self, tokens: Tensor, features: Tensor, places: Tensor, mask: Any, cache: Any) -> tuple[Tensor, Tensor]:
        """See FeatureReader: of rows of a block, which stand behind those of text; the features are as they are
        given."""
        told, kinds = features[..., :-1], features[..., -1:]
        hidden = self.embed_tokens(tokens) * self.config.scale
        slots = tokens.shape[1] if cache is None else cache.get_mask_sizes(tokens.shape[1], 0)[0]
        turned, is_text = self.rotary_emb(hidden, places), kinds > BLOCK
        masks = {sight: self._mask(places, kinds[..., 0], slots, *sight) for sight in dict.fromkeys(self._sights())}
        for layer, sight in zip(self.layers, self._sights(), strict=True):
            hidden = layer(hidden, told, is_text, turned, masks[sight], cache)
        return capped(self.lm_head(self.norm(hidden)), self.config), features

    def _sights(self) -> list[tuple[bool, int | None]]:
        """Of each layer, whether it is causal, and how wide its window is (None: as wide as the text)."""
        kinds, window = self.config.layer_types, self.config.sliding_window
        return [
            (bool(causal), window if kind == SLIDING else None)
            for causal, kind in zip(self.config.causal, kinds, strict=True)
        ]

    def _mask(self, positions: Tensor, kinds: Tensor, slots: int, causal: bool, window: int | None) -> Tensor:
        """Which of so many ``slots`` each row sees, [B, 1, S, slots]: all up to its own, and within a block, where it
        is not ``causal``, all of it. Rows of padding, behind all others, are seen by none."""
        at, slot = positions[:, None, :, None], torch.arange(slots)[None, None, None, :]
        sees = slot <= at
        if not causal:
            ends = torch.where(kinds > PADDING, positions, -1).amax(-1)[:, None, None, None]
            sees = sees | ((kinds[:, None, :, None] == BLOCK) & (slot <= ends))
        if window is not None:
            sees = sees & ((at - slot).abs() < window)
        if self.config._attn_implementation == "eager":
            return torch.where(sees, 0.0, torch.finfo(torch.float32).min)
        return sees
