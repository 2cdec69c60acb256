"""How a head that drafts from its target's features (EAGLE, Li et al. 2401.15077) is built.

The head is one Llama layer. For each token it reads, beside the token, a feature vector of the one before it: what the
target's hidden streams said there or, of a token that it drafted itself, its own output. Token and feature meet in one
of three ways: ``attention`` reads both side by side and adds what it says to the feature (EAGLE-3, 2503.01840); a
``projection`` mixes them, each normed, into what an ordinary layer reads (as heads for multi-token prediction do,
2412.19437, section 2.2); or a ``bare`` projection mixes them as they are for a layer that norms neither what attention
reads nor what it says itself: its output is what the target's own head would read (EAGLE, EAGLE-2), and its logits are
what the target would make of that, which is more than its head where a target scales or caps what that says (Granite,
Cohere, Gemma). Names of weights are those of published checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from ..capture.taps import FeatureReader


class SideBySide(nn.Module):  # type: ignore[misc]
    """The layer of EAGLE-3. With ``norm_before_residual`` what attention says is added to the normed feature."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.self_attn, self.mlp = LlamaAttention(config, 0), LlamaMLP(config)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * size, rows, bias=config.attention_bias))
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            setattr(self, name, LlamaRMSNorm(size, config.rms_norm_eps))
        self.normed = bool(getattr(config, "norm_before_residual", False))

    def forward(self, embedded: Tensor, features: Tensor, places: Any, mask: Any, cache: Any) -> Tensor:
        normed = self.hidden_norm(features)
        read = torch.cat((self.input_layernorm(embedded), normed), -1)
        out = (normed if self.normed else features) + self.self_attn(read, places, mask, cache)[0]
        return out + self.mlp(self.post_attention_layernorm(out))


class Mixed(LlamaDecoderLayer):  # type: ignore[misc]
    """An ordinary layer behind ``eh_proj``, which mixes token and feature, each normed."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 0)
        size = config.hidden_size
        self.enorm, self.hnorm = (LlamaRMSNorm(size, config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * size, size, bias=False)

    def forward(self, embedded: Tensor, features: Tensor, places: Any, mask: Any, cache: Any) -> Tensor:
        mixed = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(features)), -1))
        out = mixed + self.self_attn(self.input_layernorm(mixed), places, mask, cache)[0]
        return out + self.mlp(self.post_attention_layernorm(out))


class Bare(LlamaDecoderLayer):  # type: ignore[misc]
    """The layer of EAGLE and EAGLE-2. ``projection_bias``: their projection adds something."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 0)
        del self.input_layernorm
        bias = bool(getattr(config, "projection_bias", False))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)

    def forward(self, embedded: Tensor, features: Tensor, places: Any, mask: Any, cache: Any) -> Tensor:
        mixed = self.eh_proj(torch.cat((embedded, features), -1))
        out = mixed + self.self_attn(mixed, places, mask, cache)[0]
        return out + self.mlp(self.post_attention_layernorm(out))


JOINS: dict[str, type[SideBySide | Mixed | Bare]] = {"attention": SideBySide, "projection": Mixed, "bare": Bare}


NORMS = ("fc_norm", "norm_before_fc", "norm_output")  # what config.json calls those that EAGLE-3 was without


class FeatureHead(FeatureReader, LlamaPreTrainedModel):  # type: ignore[misc]
    """The draft. ``config`` is a Llama's of one layer and more: ``join`` (of JOINS), ``draft_vocab_size`` (how many
    tokens it can say), ``taps`` (of FeatureReader) and ``target_hidden_size``. ``fc`` makes one feature of all streams,
    of each normed by itself (``fc_norm``) or of all together (``norm_before_fc``); where it is None, the only stream is
    the feature. With ``norm_output`` its own output is normed, too, where it stands for a feature (EAGLE-3.1). Its
    logits are multiplied by ``multiplier`` and, unless it is 0, capped at ``softcap``."""

    config_class = LlamaConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        size, read = config.hidden_size, len(config.taps) * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.fc = nn.Linear(read, size, bias=False) if getattr(config, "fc", True) else None
        apart, together, after = (bool(getattr(config, name, False)) for name in NORMS)
        mixes, each, eps = self.fc is not None, config.target_hidden_size, config.rms_norm_eps
        norms = [LlamaRMSNorm(each, eps) for _ in config.taps]
        self.fc_norm = nn.ModuleList(norms) if mixes and apart else None
        self.input_norm = LlamaRMSNorm(read, eps) if mixes and together else None
        self.normed, kinds = after, getattr(config, "layer_types", None) or [""]
        self.windowed = kinds[0] == "sliding_attention" and bool(getattr(config, "sliding_window", None))
        self.midlayer = JOINS[config.join](config)
        self.norm = nn.Identity() if config.join == "bare" else LlamaRMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()

    @property
    def inside(self) -> nn.ModuleList:
        """All but its tables."""
        return nn.ModuleList(filter(None, (self.fc, self.midlayer)))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def feature(self, streams: Sequence[Tensor]) -> Tensor:
        """What the head reads [B, S, H] of the target's streams [B, S, target_hidden_size]."""
        if self.fc is None:
            return streams[0]
        if self.fc_norm is not None:
            streams = [norm(stream) for norm, stream in zip(self.fc_norm, streams, strict=True)]
        together = torch.cat(tuple(streams), -1)
        return self.fc(together if self.input_norm is None else self.input_norm(together))

    def say(self, tokens: Tensor, features: Tensor, places: Tensor, mask: Any, cache: Any) -> tuple[Tensor, Tensor]:
        """See FeatureReader; logits of ``draft_vocab_size`` tokens."""
        embedded = self.embed_tokens(tokens)
        # By place: the cache's name is about to change.
        causal = create_sliding_window_causal_mask if self.windowed else create_causal_mask
        sees = causal(self.config, embedded, mask, cache, position_ids=places)
        own = self.midlayer(embedded, features, self.rotary_emb(embedded, places), sees, cache)
        normed = self.norm(own)
        return capped(self.lm_head(normed), self.config), normed if self.normed else own


def capped(logits: Tensor, config: Any) -> Tensor:
    """Of what a head says its logits, as its ``config`` has them."""
    if (multiplier := getattr(config, "multiplier", 1.0)) != 1.0:
        logits = logits * multiplier
    if cap := getattr(config, "softcap", 0.0):
        logits = torch.tanh(logits / cap) * cap
    return logits


def behind_head(target: PreTrainedModel) -> dict[str, float]:
    """What a target does with what its head says, as ``multiplier`` and ``softcap``. It is asked, for config.json has
    as many names for this as there are architectures, and one of them means a factor here, a divisor there."""
    small, large = 2.0**-10, 2.0**30  # one that no cap bends, one that every cap cuts

    def say(module: nn.Module, read: Any, said: Tensor) -> Tensor:
        said = torch.full_like(said, small)
        said[:, 1] = large  # of another place, not another token: there may be but one
        return said

    hook = target.get_output_embeddings().register_forward_hook(say)
    try:
        with torch.no_grad():
            logits = target(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False).logits
    finally:
        hook.remove()
    near, far = logits[0, :, 0].tolist()
    multiplier = near / small
    return {"multiplier": multiplier, "softcap": far if far < 0.5 * multiplier * large else 0.0}
