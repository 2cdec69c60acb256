"""Decides how a head learns to draft from its target's features (EAGLE-3, Li et al. 2503.01840): by drafting. From
some tokens of a text on it reads its own output where it would have none of the target's ("training-time test").

The text's steps come first, all at once: they are the past of every draft. Then the drafts go on side by side, a step
of all of them at a time, each seeing the text up to its own beginning and itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from ..export.capture.taps import tapped
from ..export.drafts.eagle import FeatureHead
from .pair_depth import FADE, ByDepth, Divergence, accepted_by_depth, some_anchors
from .pruning import best_layers, with_layers

DEPTH = 4  # tokens of a draft; taught so, a head's fifth and sixth are accepted as often as its first
SHARE = 4  # one draft for so many tokens of text
OF_TARGET = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
)

Step = tuple[torch.Tensor, torch.Tensor]


@torch.no_grad()
def head_for(target: LlamaForCausalLM, taps: Sequence[int], text: torch.Tensor) -> tuple[FeatureHead, int]:
    """A head that begins as the target with one of its layers, that which alone agrees with it best on ``text`` [B, S],
    and that reads no feature yet; and which layer that is.

    Its join is a projection: a small model's few value heads are a narrow way for the token, which EAGLE-3's attention
    would have to bring along (after as much training, half a million tokens, the mean acceptance was 0.58 and 0.44).
    """
    given = target.config
    config = LlamaConfig(**{name: getattr(given, name) for name in OF_TARGET}, num_hidden_layers=1)
    config.update(
        {
            "architectures": ["FeatureHead"],
            "join": "projection",
            "taps": list(taps),
            "fc": len(taps) > 1,
            "draft_vocab_size": given.vocab_size,
            "target_hidden_size": given.hidden_size,
        }
    )
    (best,) = best_layers(target, 1, text)
    head, layer, size = FeatureHead(config), with_layers(target, [best]).model.layers[0], given.hidden_size
    head.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    head.lm_head.weight.copy_(target.lm_head.weight)
    head.norm.weight.copy_(target.model.norm.weight)
    if head.fc is not None:
        head.fc.weight.zero_()[:, -size:] += torch.eye(size)
    mixed = head.midlayer
    for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"):
        getattr(mixed, name).load_state_dict(getattr(layer, name).state_dict())
    loudness = target.model.embed_tokens.weight.square().mean(-1).sqrt().mean()
    mixed.enorm.weight.fill_(loudness)
    mixed.hnorm.weight.fill_(loudness)
    mixed.eh_proj.weight.zero_()[:, :size] += torch.eye(size)
    return head, best


def read(target: LlamaForCausalLM, text: torch.Tensor, taps: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The target's laws p [B, L, V] of a text [B, L], and its streams [B, L, H] at ``taps``."""
    with torch.no_grad(), tapped(target, taps) as streams:
        logits = cast(Any, target)(input_ids=text, use_cache=False).logits
        return logits.float().softmax(-1), streams


def drafts(
    head: FeatureHead, text: torch.Tensor, streams: Sequence[torch.Tensor], anchors: torch.Tensor
) -> Iterator[Step]:
    """(places [n], log q [B, n, V]) of the text's own tokens, all but the first, and then of the drafts that go on from
    ``anchors`` [A], step after step: the target's law at a place is what log q there should be."""
    cache, places = DynamicCache(config=head.config), torch.arange(text.shape[1] - 1)
    sees = places[:, None] >= places[None]
    out = step(head, text[:, 1:], head.feature(streams)[:, :-1], places, sees, cache)
    yield places + 1, out.logits.float().log_softmax(-1)
    sees, itself = places[None] <= anchors[:, None], torch.eye(len(anchors), dtype=torch.bool)
    features = out.hidden_states[:, anchors]
    for ahead in range(1, DEPTH):
        sees = torch.cat([sees, itself], 1)
        out = step(head, text[:, anchors + 1 + ahead], features, anchors + ahead, sees, cache)
        features = out.hidden_states
        yield anchors + 1 + ahead, out.logits.float().log_softmax(-1)


def step(
    head: FeatureHead,
    tokens: torch.Tensor,
    features: torch.Tensor,
    places: torch.Tensor,
    sees: torch.Tensor,
    cache: DynamicCache,
) -> Any:
    """Tokens [B, n] beside features [B, n, H], at places [n]; sees [n, slots so far and n]."""
    rows = len(tokens)
    masked = {"attention_mask": sees.expand(rows, 1, -1, -1), "past_key_values": cache}
    return head(tokens, features, position_ids=places.expand(rows, -1), **masked)


def head_loss(
    head: FeatureHead,
    target: LlamaForCausalLM,
    divergence: Divergence,
    seed: int,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The loss of a batch [B, L + 1], p = target, q = draft: the mean ``divergence`` of the text's tokens, and that of
    drafted tokens, the less the deeper."""
    rng = np.random.default_rng(seed)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        text = batch[:, :-1]
        anchors = some_anchors(rng, text.shape[1], DEPTH, SHARE)
        p, streams = read(target, text, head.config.taps)
        means = (divergence(p[:, at], log_q).mean() for at, log_q in drafts(head, text, streams, anchors))
        return cast(torch.Tensor, sum(FADE**depth * mean for depth, mean in enumerate(means)))

    return loss


@torch.no_grad()
def acceptance_by_depth(head: FeatureHead, target: LlamaForCausalLM, rows: torch.Tensor, seed: int = 0) -> ByDepth:
    """``accepted_by_depth`` of drafts in texts ``rows`` int64 [N, L]."""
    rng = np.random.default_rng(seed)

    def laws(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        anchors = some_anchors(rng, len(row), DEPTH, SHARE)
        p, streams = read(target, row[None], head.config.taps)
        (_, first), *rest = drafts(head, row[None], streams, anchors)
        q = torch.stack([first[0, anchors], *(log_q[0] for _, log_q in rest)], 1).exp()
        return p[0, anchors[:, None] + 1 + torch.arange(DEPTH)], q

    return accepted_by_depth(map(laws, rows))
