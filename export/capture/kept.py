"""What a model keeps of a text: which layers of transformers' cache it uses, what replaces them in a graph, and how
large all of it is."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
)

from ...bundle import CacheShape, Recurrence
from ...errors import ExportError
from .lowerings import symbolic
from .recurrent import Memory, TrailLayer, recurring
from .refusals import own_code

Uncached: type = getattr(cache_utils, "DummyLayer", type(None))  # a layer that keeps nothing (transformers 5.24)


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's buffer, [B, Hkv, M, D]; ``update`` writes the new rows at each row's own length."""

    def __init__(self, keys: Tensor, values: Tensor, past_lens: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.past_lens = keys, values, past_lens
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the buffers are inputs of the graph."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self._write(self.keys, key_states), self._write(self.values, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return 0  # positions always come from position_ids

    def get_max_length(self) -> int:
        return -1

    def _write(self, buffer: Tensor, new: Tensor) -> Tensor:
        return symbolic(
            "TensorScatter", (buffer, new, self.past_lens), {"axis": 2, "mode": "linear"}, like=buffer, version=24
        )


class SlotAndTrailLayer(SlotLayer, TrailLayer):
    """A layer that attends and keeps a state, side by side."""

    def __init__(self, keys: Tensor, values: Tensor, past_lens: Tensor, memory: Memory, number_of_states: int) -> None:
        TrailLayer.__init__(self, memory, number_of_states)
        SlotLayer.__init__(self, keys, values, past_lens)


class _MeasuredLayer(DynamicLayer, TrailLayer):  # type: ignore[misc]
    """A layer that attends and keeps a state, while the shapes of a model's cache are measured."""

    def __init__(self, memory: Memory, number_of_states: int) -> None:
        TrailLayer.__init__(self, memory, number_of_states)
        DynamicLayer.__init__(self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        DynamicLayer.lazy_initialization(self, *args, **kwargs)


def graph_layers(
    model: PreTrainedModel, past: list[Tensor], past_lens: Tensor, memory: Memory
) -> tuple[list[Any], list[SlotLayer]]:
    """The layers of a cache in a graph, on the buffers ``past`` and what ``memory`` has; and those of them that
    attend."""
    buffers = iter(zip(past[::2], past[1::2], strict=True))
    spread = list[Any]()
    for kind in _layers(model.config):
        if isinstance(kind, Uncached):
            spread.append(kind)
        elif not isinstance(kind, LinearAttentionCacheLayerMixin):
            spread.append(SlotLayer(*next(buffers), past_lens))
        elif isinstance(kind, CacheLayerMixin):
            spread.append(SlotAndTrailLayer(*next(buffers), past_lens, memory, kind.number_of_states))
        else:
            spread.append(TrailLayer(memory, kind.number_of_states))
    spread += [SlotLayer(*pair, past_lens) for pair in buffers]  # those that it adds as it goes
    return spread, [layer for layer in spread if isinstance(layer, SlotLayer)]


def known_layers(config: Any, name: str) -> list[Any]:
    """Those of transformers' cache of a model of this configuration, which ``name`` stands for. Reads no weights.
    Raises ExportError for layers that keep more of a text than a graph does."""
    with own_code(name):
        layers = _layers(config)
    for i, layer in enumerate(layers):
        if _holds_more(layer):
            raise ExportError(
                f"{name}: layer {i} keeps a {type(layer).__name__}, with more in it than keys, values and states (keys"
                " by which it chooses what to attend to, say); a graph keeps no more than these"
            )
    return layers


def kept(model: PreTrainedModel) -> tuple[tuple[CacheShape, ...], Recurrence | None]:
    """What the model keeps of a text, measured with one eager step: the cache of each layer that attends (except layers
    that read another one's, as in Gemma 3n and 4), and what recurrent layers keep. Raises ExportError for a cache that
    cannot be rolled back by length, and where transformers' own code fails."""
    memory, layers = Memory(), known_layers(model.config, type(model).__name__)
    for i, layer in enumerate(layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            kind = _MeasuredLayer if isinstance(layer, CacheLayerMixin) else TrailLayer
            layers[i] = kind(memory, layer.number_of_states)
    cache, tokens = Cache(layers=layers) if layers else DynamicCache(), torch.zeros(1, 2, dtype=torch.long)
    with own_code(type(model).__name__), torch.no_grad(), recurring(model, memory):
        model(input_ids=tokens, use_cache=True, **{cache_name(model): cache})
    if all(getattr(layer, "keys", None) is None for layer in cache.layers if isinstance(layer, DynamicLayer)):
        raise ExportError(f"{type(model).__name__} keeps no key-value cache; there is nothing to roll back")
    _require_positions(model, tokens)
    shapes = []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, Uncached) or type(layer) is TrailLayer:
            continue
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.shape[-2] != 2:
            raise ExportError(
                f"{type(model).__name__}: layer {index} keeps a {type(layer).__name__}, which cannot be rolled back"
                " by length; speculation needs a model that attends to all of its past"
            )
        shapes.append(CacheShape(keys.shape[1], keys.shape[3], values.shape[3]))
    return tuple(shapes), memory.recurrence()


def _require_positions(model: PreTrainedModel, tokens: Tensor) -> None:
    """Raise ExportError for a model that has positions of its own: a graph tells it those of each row, from 0 on, and
    its cache says that it holds nothing. ``tokens``: any two, [1, 2]."""
    for module in model.get_decoder().modules():
        if hasattr(module, "embed_positions") and "position_ids" not in inspect.signature(module.forward).parameters:
            raise ExportError(
                f"{type(model).__name__} cannot be exported: its {type(module).__name__} counts positions by what its"
                " cache holds and cannot be told them, but rows of a graph have different lengths"
            )
    with own_code(type(model).__name__), torch.no_grad():
        own = model(input_ids=tokens, use_cache=False).logits
        told = model(input_ids=tokens, position_ids=torch.arange(2)[None], use_cache=False).logits
    if not torch.allclose(told, own, rtol=1e-3, atol=1e-3):
        raise ExportError(
            f"{type(model).__name__} cannot be exported: its positions do not count tokens from 0 on (RoBERTa's begin"
            " behind the id of its padding), as a graph's do"
        )


def _holds_more(layer: Any) -> bool:
    """Whether a layer of transformers' cache is told more of a text than a layer of a graph can be."""
    told = {name for name in dir(layer) if name.startswith("update")}
    return not isinstance(layer, Uncached) and any(not hasattr(SlotAndTrailLayer, name) for name in told)


def cache_name(model: nn.Module) -> str:
    """What the model's ``forward`` calls its cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _layers(config: Any) -> list[Any]:
    """The layers that transformers' own cache of such a model has; none where it makes them as it goes."""
    return list(DynamicCache(config=config.get_text_config(decoder=True)).layers)
