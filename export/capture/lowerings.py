"""Lets some modules become one operator instead of many: root-mean-square norms, rotary positions and experts; and
replaces what torch's exporter does not take: attention that shares heads, positions as complex numbers.

Each replacement is compared with the code it replaces before it is used; what does not match stays as it is.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..graphs.experts import PAIRS, SILU
from ..graphs.rewrite import CONTRIB

Rotary = Callable[..., tuple[Tensor, Tensor]]


def symbolic(
    op: str,
    inputs: Sequence[Tensor | None],
    attributes: Mapping[str, Any],
    *,
    like: Tensor,
    version: int,
    shape: Sequence[Any] | None = None,
) -> Tensor:
    """One ONNX node of one output, with the dtype of ``like`` and its shape unless another is given."""
    out: Tensor = torch.onnx.ops.symbolic(
        op,
        inputs,
        dict(attributes),
        dtype=like.dtype,
        shape=tuple(like.shape if shape is None else shape),
        version=version,
    )
    return out


@contextlib.contextmanager
def lowered(*models: nn.Module) -> Iterator[None]:
    """Swap in the operators that were found equal; put everything back afterwards."""
    modules = [module for model in models for module in model.modules()]
    with contextlib.ExitStack() as undo:
        for module in modules:
            if type(module).__name__.endswith("RMSNorm") and (norm := rms_norm(module)):
                module.forward = norm
                undo.callback(delattr, module, "forward")
            if (cut := gaussian_cut(module)) is not None:
                module._gaussian_topk = cut
                undo.callback(delattr, module, "_gaussian_topk")
            if (gate := gate_of(module)) is not None:
                module.forward = by_pairs(module, gate)
                undo.callback(delattr, module, "forward")
        for code in {sys.modules[type(module).__module__] for module in modules}:
            if not code.__name__.startswith("transformers.models"):
                continue
            if (turn := getattr(code, "apply_rotary_emb", None)) is not None and is_complex_turn(turn):
                for place, name, ours in ((code, "apply_rotary_emb", turned), (torch, "polar", polar)):
                    undo.callback(setattr, place, name, getattr(place, name))
                    setattr(place, name, ours)
            if (rotate := getattr(code, "apply_rotary_pos_emb", None)) is None:
                continue
            for whole in (True, False):
                if is_half_split(rotate, whole=whole):
                    setattr(code, "apply_rotary_pos_emb", functools.partial(half_split, whole=whole))  # noqa: B010
                    undo.callback(setattr, code, "apply_rotary_pos_emb", rotate)
        attend = nn.functional.scaled_dot_product_attention
        nn.functional.scaled_dot_product_attention = sharing_heads(attend)
        undo.callback(setattr, nn.functional, "scaled_dot_product_attention", attend)
        yield


def sharing_heads(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``attend``, torch's ``scaled_dot_product_attention``, which its exporter does not take where fewer heads of keys
    than of queries are broadcast (Falcon's multi-query attention): that becomes ``Attention``."""

    @functools.wraps(attend)
    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        if attn_mask is None or key.shape[1] == query.shape[1]:
            return attend(query, key, value, attn_mask, **kwargs)
        attributes, shape = {"scale": query.shape[-1] ** -0.5}, (*query.shape[:3], value.shape[-1])
        return symbolic("Attention", (query, key, value, attn_mask), attributes, like=query, shape=shape, version=24)

    return attention


def rms_norm(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """``RMSNormalization`` if it equals ``module`` with its weight, or one plus its weight, as the scale."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not isinstance(eps, float) or weight is None:
        return None
    x = torch.randn(2, 3, weight.shape[-1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = module(x)
        unit = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        scale = next((s for s in (weight, 1 + weight) if torch.allclose(unit * s, expected, atol=1e-5)), None)
    if scale is None:
        return None
    attributes = {"axis": -1, "epsilon": eps, "stash_type": 1}
    return lambda x: symbolic("RMSNormalization", (x, scale), attributes, like=x, version=23)


def gaussian_cut(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """A replacement for the function of Gemma 3n's sparse layers that keeps the activations [..., N] above a threshold.
    The threshold is a quantile of the normal distribution, which torch's exporter does not take, but the share is
    known, so it is a constant. None for other modules."""
    share, theirs = getattr(module, "activation_sparsity", None), getattr(module, "_gaussian_topk", None)
    if theirs is None or not share:
        return None
    deviations = float(torch.distributions.Normal(0, 1).icdf(torch.tensor(share)))

    def cut(inputs: Tensor) -> Tensor:
        spread = inputs.std(dim=-1, keepdim=True, unbiased=False)
        return nn.functional.relu(inputs - (inputs.mean(dim=-1, keepdim=True) + spread * deviations))

    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    return cut if torch.allclose(cut(x), theirs(x), atol=1e-5) else None


def is_half_split(rotate: Rotary, *, whole: bool = True) -> bool:
    """Is this ``apply_rotary_pos_emb(q, k, cos, sin)`` the plain rotation of the two halves of a head? ``whole``: cos
    and sin are as wide as a head, their halves alike; else they are such a half."""
    noise = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 3, 4, 8, generator=noise), torch.randn(2, 1, 4, 8, generator=noise)
    angle = torch.randn(2, 4, 4, generator=noise)
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    left, right = q.chunk(2, -1)
    expected = q * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]
    try:
        tables = (cos, sin) if whole else (cos[..., :4], sin[..., :4])
        return bool(torch.allclose(rotate(q, k, *tables)[0], expected, atol=1e-5))
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False  # another signature: it stays as it is


def half_split(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, whole: bool = True, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """``RotaryEmbedding`` of q and k [B, H, S, D] by cos and sin [B, S, R], or not ``whole`` [B, S, R/2]; the first R
    of D are turned."""
    width = cos.shape[-1] if whole else 2 * cos.shape[-1]
    attributes = {"interleaved": 0} | ({"rotary_embedding_dim": int(width)} if width != q.shape[-1] else {})
    cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    q, k = (symbolic("RotaryEmbedding", (x, cos, sin), attributes, like=x, version=23) for x in (q, k))
    return q, k


def is_complex_turn(turn: Rotary) -> bool:
    """Is this ``apply_rotary_emb(q, k, turns)`` the product of neighbours in a head, as complex numbers, with complex
    ``turns`` [B, S, D/2]? torch's exporter does not take these."""
    noise = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 3, 4, 8, generator=noise), torch.randn(2, 1, 4, 8, generator=noise)
    angle = torch.randn(2, 4, 4, generator=noise)
    size = torch.ones_like(angle)
    try:
        found = turn(q, k, torch.polar(size, angle))
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False  # another signature: it stays as it is
    pairs = zip(found, turned(q, k, polar(size, angle)), strict=True)
    return all(one.shape == other.shape and torch.allclose(one, other, atol=1e-5) for one, other in pairs)


def polar(size: Tensor, angle: Tensor) -> Tensor:
    """``torch.polar``, real and imaginary part side by side: [..., 2]."""
    return torch.stack((size * angle.cos(), size * angle.sin()), dim=-1)


def turned(q: Tensor, k: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """q and k [B, H, S, D], neighbours taken as complex numbers, times ``turns`` [B, S, D/2, 2]."""
    cos, sin = turns.unsqueeze(1).unbind(-1)

    def turn(x: Tensor) -> Tensor:
        real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1).flatten(-2)

    return turn(q), turn(k)


def gate_of(module: nn.Module) -> dict[str, float] | None:
    """The attributes of ``MoE`` for the gate between the two products of a mixture's experts: SiLU(gate) times what it
    gates, or gpt-oss' form, with a slope, an offset and limits. None for other modules and other gates."""
    if not getattr(module, "has_gate", False) or getattr(module, "has_post_expert_norm", True):
        return None
    kinds, (slope, limit) = [SILU], (getattr(module, name, None) for name in ("alpha", "limit"))
    if slope is not None and limit is not None:
        kinds.append({"activation_alpha": float(slope), "activation_beta": 1.0, "swiglu_limit": float(limit)})
    x = 10.0 * torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    halves = x.chunk(2, -1) if module.is_concatenated else (x[..., ::2], x[..., 1::2])
    with torch.no_grad():
        made = module._apply_gate(x)
    return next((kind for kind in kinds if torch.allclose(made, _gated(*halves, **kind), atol=1e-5)), None)


def _gated(
    gate: Tensor, up: Tensor, *, activation_alpha: float, activation_beta: float, swiglu_limit: float = math.inf
) -> Tensor:
    gate, up = gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
    return gate * torch.sigmoid(activation_alpha * gate) * (up + activation_beta)


def by_pairs(experts: nn.Module, gate: Mapping[str, float]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A ``forward`` for ``experts`` that is one ``MoE`` node over pairs of a token and one of its k experts
    (``experts.py``): tokens [T, H], expert ids and weights [T, k]. The expert weights are laid out as in the
    checkpoint; ``experts.arrange`` reorders them."""
    layout = {"concatenated": int(experts.is_concatenated), "transposed": int(experts.is_transposed)}

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens, k = top_k_index.shape
        biases = [experts.gate_up_proj_bias, experts.down_proj_bias] if experts.has_bias else [None, None]
        width = hidden_states.shape[-1]
        pairs = hidden_states.unsqueeze(1).expand(tokens, k, width).reshape(tokens * k, width)
        chosen = (top_k_index.reshape(-1, 1) == torch.arange(experts.gate_up_proj.shape[0])).to(pairs.dtype)
        inputs = (pairs, chosen, experts.gate_up_proj, biases[0], experts.down_proj, biases[1])
        attributes = {**PAIRS, **gate, **layout}
        made = symbolic(f"{CONTRIB}::MoE", inputs, attributes, like=pairs, version=1)
        weighted = made * top_k_weights.reshape(-1, 1)
        total: Tensor = weighted.reshape(tokens, k, width).sum(dim=1)
        return total.to(hidden_states.dtype)

    return forward
