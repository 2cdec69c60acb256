"""How layers that keep a state a row become part of a graph whose rows are rolled back by length.

transformers hands such a layer's memory out by its cache (``update_conv_state``) and computes with it by functions that
kernels may stand in for: a causal convolution, the gated delta rule, the scan of a state space. The cache layer and
these functions are swapped, by name. What a layer takes in of each token goes to a ring, its *trail*; its state stands
at the row's *anchor*, and a step first carries it on to ``past_lens`` by what the trail has (``engines.trails``).

    past_trail.{i} / present_trail.{i}   [B, 1, R, D]          the token at position p in slot p modulo R
    past_state.{i} / present_state.{i}   [B, H, key, value]    at ``anchors``, and at ``past_lens``
    anchors                              int64 [B]
    replayed                             int64 [P]             0 .. P-1, P at least the most of past_lens - anchors

Each token is taken in by itself, in order (onnxruntime's ``LinearAttention``): bits depend neither on widths nor on
anchors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from ...bundle import CacheShape, Recurrence
from ...errors import ExportError
from ..graphs.rewrite import CONTRIB, constant, dims, node, swap
from .lowerings import symbolic

_AT_ONCE = 4  # numbers of which onnxruntime takes a Softplus together
STEP = 64  # tokens by which a prompt goes in, and the most that can be taken back


@dataclasses.dataclass(slots=True)
class Memory:
    """What the recurrent layers of a model keep, in the order in which a step comes by it. While a step is traced,
    ``trails`` [B, 1, R, D] and ``states`` [B, H, key, value] are its inputs, and become its outputs one by one; while
    it is measured there are none, and their shapes are noted."""

    past_lens: Tensor | None = None
    anchors: Tensor | None = None
    replayed: Tensor | None = None
    trails: list[Tensor] = dataclasses.field(default_factory=list)
    states: list[Tensor] = dataclasses.field(default_factory=list)
    new_trails: list[Tensor] = dataclasses.field(default_factory=list)
    new_states: list[Tensor] = dataclasses.field(default_factory=list)
    before: Tensor | None = None  # what a convolution reads before a step's first token, [B, K-1, D]
    context: int = 0

    @property
    def measures(self) -> bool:
        return self.past_lens is None

    def begin(
        self,
        past_lens: Tensor,
        anchors: Tensor | None,
        replayed: Tensor | None,
        trails: Sequence[Tensor],
        states: Sequence[Tensor],
    ) -> None:
        """A step is traced, of these inputs."""
        self.past_lens, self.anchors, self.replayed = past_lens, anchors, replayed
        self.trails, self.states = list(trails), list(states)
        self.new_trails, self.new_states = [], []

    def recurrence(self) -> Recurrence | None:
        """What was noted."""
        if not self.new_trails:
            return None
        states = tuple(CacheShape(state.shape[1], state.shape[2], state.shape[3]) for state in self.new_states)
        slots = 2 * STEP + self.context  # a step, what is taken back, and what convolutions read before that
        return Recurrence(slots, self.context, tuple(trail.shape[-1] for trail in self.new_trails), states)

    def keep(self, new: Tensor) -> Tensor:
        """Write [B, S, D] to the next trail; the trail as it was before, [B, R, D]. (No step writes over what it reads:
        ``Recurrence.widest``.)"""
        if self.measures:
            self.new_trails.append(new)
            return new
        trail = self.trails[len(self.new_trails)]
        inputs = (trail, new.unsqueeze(1), torch.remainder(self.lens, trail.shape[2]))
        self.new_trails.append(
            symbolic("TensorScatter", inputs, {"axis": 2, "mode": "circular"}, like=trail, version=24)
        )
        return trail.squeeze(1)

    def rows(self, trail: Tensor, positions: Tensor) -> Tensor:
        """What a trail [B, R, D] has of the tokens at ``positions`` [B, N]: [B, N, D]."""
        index = torch.remainder(positions, trail.shape[1]).unsqueeze(-1)
        shape = (*positions.shape, trail.shape[-1])
        return symbolic("GatherND", (trail, index), {"batch_dims": 1}, like=trail, shape=shape, version=13)

    def recur(self, rule: str, query: Tensor, key: Tensor, value: Tensor, *rates: Tensor) -> Tensor:
        """Linear attention of a step's tokens by ``rule``, a state a head. query, key [B, S, G, N], each group for as
        many neighbouring heads, value [B, S, H, M], ``rates`` (log decay and, if the rule has one, beta) [B, S, H] ->
        [B, S, H, M]."""
        shape = key.shape[2:], value.shape[2:]
        taken = [_side_by_side(key), _side_by_side(value), *rates]
        trail = self.keep(torch.cat(taken, dim=-1))
        if self.measures:
            self.new_states.append(value.new_zeros(value.shape[0], value.shape[2], key.shape[3], value.shape[3]))
            return value
        assert self.anchors is not None and self.replayed is not None
        positions = self.anchors.unsqueeze(1) + self.replayed.unsqueeze(0)
        behind = (positions < self.lens.unsqueeze(1)).unsqueeze(-1)
        old = torch.where(behind, self.rows(trail, positions), 0.0)  # zeros, a decay of exp(0) too, change nothing
        old_key, old_value, *old_rates = old.split([part.shape[-1] for part in taken], dim=-1)
        state = self.states[len(self.new_states)]
        _, state = _attend(rule, shape, old_key, old_key, old_value, state, *old_rates)
        self.new_states.append(state)
        out, _ = _attend(rule, shape, _side_by_side(query), *taken[:2], state, *rates)
        return out.reshape(value.shape)

    @property
    def lens(self) -> Tensor:
        """``past_lens`` of the step that is traced."""
        assert self.past_lens is not None
        return self.past_lens


def _side_by_side(heads: Tensor) -> Tensor:
    """[B, S, ..., N] -> [B, S, ... * N]."""
    return heads.reshape(*heads.shape[:2], -1)


def _attend(rule: str, shape: tuple[Any, Any], *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """``LinearAttention`` of query, key, value [B, S, heads * width], state and rates: what it says, and the state
    behind it. ``shape``: groups and width of the keys, heads and width of the values."""
    query, key, value, state, *rates = inputs
    (groups, width), (heads, _) = shape
    if groups != heads:
        apart = key.reshape(*key.shape[:2], groups, 1, width)
        key = _side_by_side(apart.expand(-1, -1, -1, heads // groups, -1))
    attributes = {"q_num_heads": groups, "kv_num_heads": heads, "scale": 1.0, "update_rule": rule}
    out, new = torch.onnx.ops.symbolic_multi_out(
        f"{CONTRIB}::LinearAttention",
        (query, key, value, state, *rates),
        attributes,
        dtypes=[value.dtype, state.dtype],
        shapes=[value.shape, state.shape],
        version=1,
    )
    return out, new


class TrailLayer(LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """A recurrent layer's part of transformers' cache: its convolutions' inputs are kept by ``memory``, as its states
    are. It says that it holds nothing, so that a step of any width takes one way."""

    def __init__(self, memory: Memory, number_of_states: int = 1) -> None:
        super().__init__(number_of_states)
        self.memory = memory

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: what it keeps are inputs of the graph."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Keep the inputs [B, D, S] of a convolution; what it reads before them is left in ``memory.before``."""
        assert conv_kernel_size is not None
        memory, before = self.memory, conv_kernel_size - 1
        trail = memory.keep(conv_states.transpose(1, 2))
        memory.context = max(memory.context, before)
        if not memory.measures:
            positions = memory.lens.unsqueeze(1) + torch.arange(-before, 0)
            rows = memory.rows(trail, positions)
            memory.before = torch.where((positions >= 0).unsqueeze(-1), rows, 0.0)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor | None, state_idx: int = 0, **kwargs: Any) -> None:
        """Raises ExportError for a state that was not carried on by what is known here."""
        if recurrent_states is not None:
            raise ExportError(
                "its recurrent layers compute in a way of their own, which cannot be rolled back by length"
            )


def convolve(
    memory: Memory,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """transformers' ``causal_conv1d_fn`` of [B, D, S], channel by channel, with weight [D, K]."""
    if memory.measures:
        return hidden_states
    before, memory.before = memory.before, None
    assert before is not None
    rows, width = torch.cat([before, hidden_states.transpose(1, 2)], dim=1), hidden_states.shape[2]
    # A product a tap: a fifth of the time that onnxruntime's CausalConvWithState takes.
    taps = [rows[:, i : i + width] * weight[:, i] for i in range(weight.shape[1])]
    out = sum(taps[1:], taps[0] if bias is None else taps[0] + bias)
    return (out if activation is None else ACT2FN[activation](out)).transpose(1, 2)


def gated_delta_rule(
    memory: Memory,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' ``torch_chunk_gated_delta_rule`` (Yang et al. 2412.06464, equation 10)."""
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6) for x in (query, key))
    return memory.recur("gated_delta", query * query.shape[-1] ** -0.5, key, value, g, beta), None


def scan(
    memory: Memory,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor | tuple[Tensor, None]:
    """transformers' ``mamba2_chunk_scan`` (Dao and Gu 2405.21060): the state takes in dt x under the key B, decays by
    exp(A dt), and is read by C."""
    dt = dt if dt_bias is None else dt + dt_bias
    dt = nn.functional.softplus(dt) if dt_softplus else dt
    dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])
    out = memory.recur("gated", C, B, hidden_states * dt.unsqueeze(-1), A * dt)
    if D is not None:
        out = out + D.unsqueeze(-1) * hidden_states
    return (out, None) if return_final_states else out


def unmasked(memory: Memory, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
    """transformers' ``apply_mask_to_padding_states``, where padding stands behind all that is read."""
    return hidden_states


# What transformers' models call these, each in its own module.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolve,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "mamba2_chunk_scan": scan,
    "apply_mask_to_padding_states": unmasked,
}
_SCANS = frozenset(("torch_chunk_gated_delta_rule", "mamba2_chunk_scan"))


def evenly(model: ir.Model) -> None:
    """Let each token's Softplus round like that of every other, in place: onnxruntime computes four numbers at a time
    and what is left over in another way, so rows become multiples of four."""
    for n in [n for n in model.graph if n.op_type == "Softplus"]:
        width = dims(n.inputs[0])[-1]
        if isinstance(width, int) and width % _AT_ONCE:
            sizes = constant(model, f"softplus.{width}", np.array([0, -width % _AT_ONCE], np.int64))
            axes = constant(model, "softplus.last", np.array([-1], np.int64))
            padded = node(model, n, "Pad", [n.inputs[0], sizes, None, axes], like=n.inputs[0])
            made = node(model, n, "Softplus", [padded])
            ends = constant(model, f"softplus.{width}.ends", np.array([width], np.int64))
            first = constant(model, "softplus.first", np.array([0], np.int64))
            swap(n.outputs[0], node(model, n, "Slice", [made, first, ends, axes]))
            model.graph.remove(n, safe=True)


def is_understood(model_class: type, kinds: Collection[str]) -> bool:
    """Whether layers of these ``kinds`` of a class of models carry states on by functions that are known here, or are
    convolutions alone (``kept`` looks closer)."""
    code = vars(sys.modules[model_class.__module__])
    return not _SCANS.isdisjoint(code) or ("conv" in kinds and "causal_conv1d_fn" in code)


@contextlib.contextmanager
def recurring(model: PreTrainedModel, memory: Memory) -> Iterator[None]:
    """Swap the functions that recurrent layers compute with; put them back afterwards."""
    with contextlib.ExitStack() as undo:
        for code in _code_of(model):
            for name, function in _FUNCTIONS.items():
                if (theirs := getattr(code, name, None)) is not None:
                    setattr(code, name, functools.partial(function, memory))
                    undo.callback(setattr, code, name, theirs)
        yield


def _code_of(model: nn.Module) -> set[Any]:
    """The modules of transformers whose classes the model is made of."""
    found = {sys.modules[type(module).__module__] for module in model.modules()}
    return {code for code in found if code.__name__.startswith("transformers.models")}
