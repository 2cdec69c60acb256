"""How transformers' own modelling code becomes one canonical graph: cache, attention and mask are swapped, no more.

The key-value cache is a fixed buffer of M slots a row. New rows are written at each row's own length
(``TensorScatter``), attention is one opset-24 ``Attention`` node a layer with a boolean mask made in the graph from
the rows' positions. Everything that belongs to an architecture stays in transformers; the three things swapped are
its public extension points (a cache layer, an attention function, a mask function): no table of architectures here.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx_ir as ir
import onnxscript  # noqa: F401  # torch asks for it in the midst of an export: missing, it is named before
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import AttentionMaskInterface

from ...bundle import CacheShape, Recurrence
from ...errors import ExportError
from ..graphs.experts import arrange
from ..graphs.sinks import RAW_SCORES, SCORES
from .kept import cache_name, graph_layers
from .lowerings import lowered, symbolic
from .recurrent import Memory, evenly, recurring
from .refusals import TRACED_SLOTS
from .stored import Standins
from .taps import FeatureReader, tapped
from .tracing import traced_once

OPSET = 24
NAME = "leadout_slots"
INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what modules import that compute attention by the interface
WRAPPER = "model."  # DecoderGraph's attribute, in front of every module path


@dataclasses.dataclass(slots=True)
class _Step:
    """What cache and mask need to know of the step being traced: positions [B, S] and lengths [B], both int64; and what
    recurrent layers keep."""

    position_ids: Tensor | None = None
    past_lens: Tensor | None = None
    memory: Memory = dataclasses.field(default_factory=Memory)


class DecoderGraph(nn.Module):  # type: ignore[misc]
    """The signature of the canonical graph around a causal language model of transformers.

    A ``FeatureReader`` reads ``features_in`` [B, S, D] beside its tokens. With ``reader``, the head of another, the
    graph of its target gives what that reads; last of its outputs, as a head's own are.
    """

    def __init__(self, model: PreTrainedModel, step: _Step, reader: FeatureReader | None) -> None:
        super().__init__()
        self.model, self.step, self.reader = model, step, reader

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_lens: Tensor,
        logit_index: Tensor,
        past: list[Tensor],
        trails: Sequence[Tensor] = (),
        states: Sequence[Tensor] = (),
        anchors: Tensor | None = None,
        replayed: Tensor | None = None,
        features_in: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """logits [B, L, V]; then present.i.key and present.i.value [B, Hkv, M, D] of every layer that attends, the
        buffers of ``past`` with new rows written; of others, if there are any, trails and states (``recurrent.py``);
        then, if there are any, features [B, S, D]. ``input_ids`` and ``position_ids`` are [B, S], ``past_lens`` [B],
        ``logit_index`` [B, L], all int64."""
        beside = {} if features_in is None else {"features": features_in}
        self.step.position_ids, self.step.past_lens = position_ids, past_lens
        self.step.memory.begin(past_lens, anchors, replayed, trails, states)
        spread, layers = graph_layers(self.model, past, past_lens, self.step.memory)
        # Some older models size a position bias from the mask; elsewhere it is dead code and vanishes.
        everything = torch.ones(input_ids.shape[0], past[0].shape[2], dtype=torch.long)
        taps = () if self.reader is None else self.reader.config.taps
        with _only_rows(self.model.get_output_embeddings(), logit_index), tapped(self.model, taps) as streams:
            out = self.model(
                input_ids=input_ids,
                attention_mask=everything,
                position_ids=position_ids,
                use_cache=True,
                **{cache_name(self.model): Cache(layers=spread)},
                **beside,
            )
        caches = (tensor for layer in layers for tensor in (layer.keys, layer.values))
        given = [out.hidden_states] if beside else [] if self.reader is None else [self.reader.feature(streams)]
        return (out.logits, *caches, *self.step.memory.new_trails, *self.step.memory.new_states, *given)


@contextlib.contextmanager
def _only_rows(head: nn.Module, logit_index: Tensor) -> Iterator[None]:
    """Give the LM head the positions that want logits and no others: [B, S, H] -> [B, L, H]."""

    def pick(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        shape = (*logit_index.shape, args[0].shape[-1])
        index = logit_index.unsqueeze(-1)
        return (symbolic("GatherND", (args[0], index), {"batch_dims": 1}, like=args[0], shape=shape, version=13),)

    hook = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        hook.remove()


def slot_mask(step: _Step, *args: Any, kv_length: int, mask_function: Callable[..., Tensor], **_: Any) -> Tensor:
    """transformers' own mask function (causal, sliding, chunked) at each row's positions: bool [B, 1, S, M]."""
    assert step.position_ids is not None
    rows, new = step.position_ids.shape
    row = torch.arange(rows)[:, None, None, None]
    head = torch.zeros((1, 1, 1, 1), dtype=torch.long)
    slot = torch.arange(kv_length)[None, None, None, :]
    return mask_function(row, head, step.position_ids[:, None, :, None], slot).expand(rows, 1, new, kv_length)


def _additive_mask(step: _Step, *args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor:
    mask = slot_mask(step, *args, **kwargs)
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, H, S, D], key and value [B, Hkv, M, D] -> [B, S, H, D], as one ``Attention`` node.

    Raises ExportError for what the standard operator has no input for.
    """
    sinks = kwargs.get("s_aux")
    for what, is_there in (
        ("a position bias", kwargs.get("position_bias") is not None),
        ("sinks beside capped scores", sinks is not None and softcap),
    ):
        if is_there:
            raise ExportError(f"{type(module).__name__} uses {what}, which the Attention operator cannot express")
    attributes = {"scale": float(scaling if scaling is not None else query.shape[-1] ** -0.5)}
    if softcap:
        attributes["softcap"] = float(softcap)
    if sinks is not None:
        return _beside_sinks(query, key, value, attention_mask, attributes, sinks).transpose(1, 2).contiguous(), None
    out = symbolic(
        "Attention",
        (query, key, value, attention_mask),
        attributes,
        like=query,
        shape=(*query.shape[:3], value.shape[-1]),
        version=24,
    )
    return out.transpose(1, 2).contiguous(), None  # as transformers' own: some models look at it by a view


def _beside_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, attributes: dict[str, float], sinks: Tensor
) -> Tensor:
    """The same with a sink for each head [H], as ``sinks.py`` says: [B, H, S, D]."""
    scores_shape = (*query.shape[:3], mask.shape[-1])
    out, *_, scores = torch.onnx.ops.symbolic_multi_out(
        "Attention",
        (query, key, value, mask),
        attributes | RAW_SCORES,
        dtypes=[query.dtype] * (SCORES + 1),
        shapes=[(*query.shape[:3], value.shape[-1]), key.shape, value.shape, scores_shape],
        version=24,
    )
    seen = torch.where(mask, scores, torch.finfo(scores.dtype).min)
    axes, shape = torch.tensor([-1]), (*query.shape[:3], 1)
    total = symbolic("ReduceLogSumExp", (seen, axes), {"keepdims": 1}, like=query, shape=shape, version=18)
    attended: Tensor = out * torch.sigmoid(total - sinks.reshape(1, -1, 1, 1))
    return attended


@contextlib.contextmanager
def _swapped(model: PreTrainedModel, step: _Step, reader: FeatureReader | None) -> Iterator[None]:
    """The extension points, swapped for the time of one capture of ``model``, with what ``reader`` reads of it.

    A model that is not written against transformers' attention interface (falcon, bloom) keeps its own attention
    code; it asks for its mask under the name "eager" or "sdpa", so those two are swapped as well.
    """
    modern = type(model)._supports_attention_backend or hasattr(sys.modules[type(model).__module__], INTERFACE)
    masks, before = AttentionMaskInterface._global_mapping, dict(AttentionMaskInterface._global_mapping)
    attention = model.config._attn_implementation
    AttentionInterface.register(NAME, slot_attention)
    mask = functools.partial(slot_mask, step)
    masks.update({NAME: mask, "sdpa": mask, "eager": functools.partial(_additive_mask, step)})
    model.set_attn_implementation(NAME if modern else "sdpa" if type(model)._supports_sdpa else "eager")
    experts = _set_experts(model, "batched_mm")  # the form that can be traced: it gathers each token's experts
    try:
        with lowered(*filter(None, (model, reader))):
            yield
    finally:
        _set_experts(model, experts)
        masks.clear()
        masks.update(before)
        model.set_attn_implementation(attention)


def _set_experts(model: PreTrainedModel, name: str | None) -> str | None:
    """Choose how a mixture of experts is computed; returns what was chosen before. Does nothing without experts."""
    before = getattr(model.config, "_experts_implementation", None)
    if model._can_set_experts_implementation() and name is not None:
        model.set_experts_implementation(name)
    return before


def capture(
    model: PreTrainedModel,
    shapes: tuple[CacheShape, ...],
    recurrence: Recurrence | None = None,
    reader: FeatureReader | None = None,
) -> ir.Model:
    """Trace ``model`` (in eval mode), which keeps ``shapes`` and ``recurrence`` (``kept``), into the canonical graph;
    ``reader``: the head that drafts from its features.

    Leaves the model as it was. Raises ExportError naming the architecture if it cannot be traced.
    """
    step = _Step()
    inputs, dims = _example(shapes, recurrence)
    if isinstance(model, FeatureReader):
        inputs["features_in"] = torch.zeros(*inputs["input_ids"].shape, model.feature_size)
        dims["features_in"] = {0: "B", 1: "S"}
    names = _names(shapes, recurrence)
    given = [name.format("past", "past_key_values") for key in inputs for name in names.get(key, [key])]
    made = [name.format("present", "present") for several in names.values() for name in several]
    last = ["features"] if isinstance(model, FeatureReader) or reader is not None else []
    _pin_rope(model)
    standins = Standins()
    try:
        swapped = _swapped(model, step, reader)
        with traced_once(), torch.no_grad(), swapped, recurring(model, step.memory), standins.in_place(model), _quiet():
            program = torch.onnx.export(
                DecoderGraph(model, step, reader).eval(),
                (),
                kwargs=inputs,
                dynamic_shapes=dims,
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
                input_names=given,
                output_names=["logits", *made, *last],
            )
    except Exception as error:
        raise ExportError(f"{type(model).__name__} cannot be captured: {_root_cause(error)}") from error
    assert program is not None
    for value, name in zip(program.model.graph.inputs, given, strict=True):
        value.name = name  # torch 2.9 renames one that is given out as it came
    standins.fill(program.model.graph)
    tidy(program.model)
    arrange(program.model)
    evenly(program.model)
    return program.model


def _names(shapes: tuple[CacheShape, ...], recurrence: Recurrence | None) -> dict[str, list[str]]:
    """What the graph calls a step's lists of tensors, before and (in braces) after it."""
    trails, states = ((), ()) if recurrence is None else (recurrence.trails, recurrence.states)
    return {
        "past": [f"{{1}}.{i}.{part}" for i in range(len(shapes)) for part in ("key", "value")],
        "trails": [f"{{0}}_trail.{i}" for i in range(len(trails))],
        "states": [f"{{0}}_state.{i}" for i in range(len(states))],
    }


def _example(shapes: tuple[CacheShape, ...], recurrence: Recurrence | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Example inputs of the trace, and which of their dimensions are free."""
    batch, new, slots = 2, 3, TRACED_SLOTS
    ids = torch.ones(batch, new, dtype=torch.long)
    past = [torch.zeros(batch, s.heads, slots, d) for s in shapes for d in (s.key_dim, s.value_dim)]
    inputs = {
        "input_ids": ids,
        "position_ids": 4 + torch.arange(new).expand(batch, new).contiguous(),
        "past_lens": torch.full((batch,), 4),
        "logit_index": torch.zeros(batch, 2, dtype=torch.long),
        "past": past,
    }
    dims: dict[str, Any] = {
        "input_ids": {0: "B", 1: "S"},
        "position_ids": {0: "B", 1: "S"},
        "past_lens": {0: "B"},
        "logit_index": {0: "B", 1: "L"},
        "past": [{0: "B", 2: "M"}] * len(past),
    }
    if recurrence is not None:
        inputs["trails"] = [torch.zeros(batch, 1, recurrence.slots, width) for width in recurrence.trails]
        dims["trails"] = [{0: "B"}] * len(recurrence.trails)
    if recurrence is not None and recurrence.states:
        inputs["states"] = [torch.zeros(batch, s.heads, s.key_dim, s.value_dim) for s in recurrence.states]
        dims["states"] = [{0: "B"}] * len(recurrence.states)
        inputs |= {"anchors": torch.full((batch,), 2), "replayed": torch.arange(4)}
        dims |= {"anchors": {0: "B"}, "replayed": {0: "P"}}
    return inputs, dims


def _pin_rope(model: PreTrainedModel) -> None:
    """Longrope picks its factors by the longest row of a batch; keep the short ones, which the context is cut to."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            module.rope_type, rope = "default", module.config.rope_parameters
            if (scale := rope.get("short_mscale")) is not None:  # PhiMoE asks its configuration for a scale as well
                module.config = copy.deepcopy(module.config)
                module.config.rope_parameters = rope | {"rope_type": "default", "attention_factor": float(scale)}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch's exporter reports on torchvision and on itself, and prints graphs that it gave up; what matters comes as
    an exception."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def tidy(model: ir.Model) -> None:
    """Name nodes and weights after the modules they come from; drop the exporter's metadata."""
    graph = model.graph
    nodes: set[str] = set()
    for name, value in list(graph.initializers.items()):
        _rename(graph, value, name.removeprefix(WRAPPER) if name.startswith(WRAPPER) else f"\0{name}")
    for node in graph:
        module = _module_path(node)
        node.name = _unused("/".join(filter(None, (module, node.op_type))), nodes)
        for value in node.inputs:
            if value is not None and value.is_initializer() and (value.name or "").startswith("\0"):
                kind = "weight" if value.dtype is not None and value.dtype.is_floating_point() else "constant"
                _rename(graph, value, ".".join(filter(None, (module, kind))))
        for holder in (node, *node.outputs):
            holder.metadata_props.clear()
        node.doc_string = None
    for holder in (model, graph, *graph.inputs, *graph.initializers.values()):
        holder.metadata_props.clear()


def _module_path(node: ir.Node) -> str:
    """``model.layers.0.mlp.up_proj``, or nothing for what belongs to no module."""
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
    path = [scope for scope in ast.literal_eval(scopes)[:-1] if scope] if scopes else []
    return path[-1].removeprefix(WRAPPER) if path and path[-1].startswith(WRAPPER) else ""


def _rename(graph: ir.Graph, value: ir.Value, name: str) -> None:
    value.name = _unused(name, set(graph.initializers))


def _unused(name: str, taken: set[str]) -> str:
    count, free = 1, name
    while free in taken:
        count, free = count + 1, f"{name}.{count}"
    taken.add(free)
    return free
