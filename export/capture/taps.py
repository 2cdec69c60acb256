"""How a head taps its target: at which layers, and what it makes of what flows there."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...errors import ExportError


class FeatureReader:
    """A draft that reads, beside each token, a feature vector [D] of the one ``lag`` before it, which its target's
    graph gives. ``config.taps`` are the layers of the target before which its stream is read, counted from 0: as many
    as there are layers means behind the last, one more behind the norm, too (what the target's own head reads)."""

    config: Any
    lag = 1

    @property
    def feature_size(self) -> int:
        """D."""
        return int(self.config.hidden_size)

    def feature(self, streams: Sequence[Tensor]) -> Tensor:
        """What is read [B, S, D] of the target's streams [B, S, target_hidden_size] at ``config.taps``."""
        return streams[0]

    @abstractmethod
    def say(self, tokens: Tensor, features: Tensor, places: Tensor, mask: Any, cache: Any) -> tuple[Tensor, Tensor]:
        """Of tokens [B, S], read beside features [B, S, D], the logits [B, S, V]; and the features of the tokens
        themselves, as this guesses them."""

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """What ``say`` says, as ``logits`` and ``hidden_states``; without ``features`` all of them are 0."""
        given = torch.zeros(*input_ids.shape, self.feature_size) if features is None else features
        cache = DynamicCache(config=self.config) if use_cache and past_key_values is None else past_key_values
        places = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        logits, own = self.say(input_ids, given, places, attention_mask, cache)
        return CausalLMOutputWithPast(logits=logits, hidden_states=own, past_key_values=cache)


def blocks(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's layers. Raises ExportError where they cannot be told."""
    count = model.config.get_text_config().num_hidden_layers
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(found) != 1:
        raise ExportError(f"{type(model).__name__}: which of its modules are its {count} layers cannot be told")
    return found[0]


@contextlib.contextmanager
def tapped(model: PreTrainedModel, taps: Sequence[int]) -> Iterator[list[Tensor]]:
    """When a step of ``model`` has run inside, the list holds its streams [B, S, H] at ``taps``, in that order. Raises
    ExportError, in that step, where layers pass on several side by side (Gemma 3n)."""
    layers = [*blocks(model), model.get_decoder()] if taps else []
    streams = [torch.empty(0)] * len(taps)

    def keep(place: int) -> Any:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            streams[place] = stream = out if isinstance(out, Tensor) else out[0]
            if stream.dim() != 3:
                several = f"its layers pass on {len(stream)} streams side by side"
                raise ExportError(f"{type(model).__name__}: no head can read it: {several}")

        return hook

    with contextlib.ExitStack() as stack:
        for place, tap in enumerate(taps):
            stack.callback(layers[tap - 1].register_forward_hook(keep(place)).remove)
        yield streams
