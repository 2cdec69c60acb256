"""Which modules become one operator instead of their many: root-mean-square norms, rotary positions, and experts.

Each replacement is compared with the code it replaces before it is used; what does not match stays as it is.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .experts import PAIRS
from .rewrite import CONTRIB

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
def lowered(model: nn.Module) -> Iterator[None]:
    """Swap in the operators that were found equal; put everything back afterwards."""
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm") and (norm := rms_norm(module)):
                module.forward = norm
                undo.callback(delattr, module, "forward")
            if is_silu_gated(module):
                module.forward = by_pairs(module)
                undo.callback(delattr, module, "forward")
        for code in {sys.modules[type(module).__module__] for module in model.modules()}:
            rotate = getattr(code, "apply_rotary_pos_emb", None)
            if code.__name__.startswith("transformers.models") and rotate and is_half_split(rotate):
                setattr(code, "apply_rotary_pos_emb", half_split)  # noqa: B010
                undo.callback(setattr, code, "apply_rotary_pos_emb", rotate)
        yield


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


def is_half_split(rotate: Rotary) -> bool:
    """Is this ``apply_rotary_pos_emb(q, k, cos, sin)`` the plain rotation of the two halves of a head?"""
    noise = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 3, 4, 8, generator=noise), torch.randn(2, 1, 4, 8, generator=noise)
    angle = torch.randn(2, 4, 4, generator=noise)
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    left, right = q.chunk(2, -1)
    expected = q * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]
    try:
        return bool(torch.allclose(rotate(q, k, cos, sin)[0], expected, atol=1e-5))
    except (TypeError, ValueError, RuntimeError, IndexError):
        return False  # another signature: it stays as it is


def half_split(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """``RotaryEmbedding`` of q and k [B, H, S, D] by cos and sin [B, S, R]; the first R of D are turned."""
    width = cos.shape[-1]
    attributes = {"interleaved": 0} | ({"rotary_embedding_dim": int(width)} if width != q.shape[-1] else {})
    cos, sin = cos[..., : width // 2], sin[..., : width // 2]
    q, k = (symbolic("RotaryEmbedding", (x, cos, sin), attributes, like=x, version=23) for x in (q, k))
    return q, k


def is_silu_gated(module: nn.Module) -> bool:
    """Are these a mixture's experts, of two products each, SiLU(half of the first one) * the other half between?"""
    plain = {"has_gate": True, "has_bias": False, "is_transposed": False, "has_post_expert_norm": False}
    if any(getattr(module, name, None) is not value for name, value in plain.items()):
        return False
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    gate, up = x.chunk(2, -1)
    with torch.no_grad():
        return bool(torch.allclose(module._apply_gate(x), nn.functional.silu(gate) * up, atol=1e-6))


def by_pairs(experts: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """``MoE`` of pairs of tokens [T, H] and each one's k experts, [T, k] and how much they count for (``experts.py``),
    with the weights as the checkpoint has them: for ``experts.interleave``."""

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens, k = top_k_index.shape
        pairs = hidden_states.repeat_interleave(k, dim=0)
        chosen = nn.functional.one_hot(top_k_index.reshape(-1), experts.gate_up_proj.shape[0]).to(pairs.dtype)
        inputs = (pairs, chosen, experts.gate_up_proj, None, experts.down_proj)
        made = symbolic(f"{CONTRIB}::MoE", inputs, PAIRS, like=pairs, version=1)
        weighted = made * top_k_weights.reshape(-1, 1)
        total: Tensor = weighted.reshape(tokens, k, hidden_states.shape[-1]).sum(dim=1)
        return total.to(hidden_states.dtype)

    return forward
