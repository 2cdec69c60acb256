"""A model's own layers for multi-token prediction (MTP: DeepSeek-V3, 2412.19437, section 2.2), as the head that drafts
for it.

They lie in its checkpoint, behind the layers that write text, and transformers knows how they are read and computed
(``MtpModel``): an ordinary layer of that model, which mixes a token with what the model's own head reads of the token
before it. What it says of a token that it drafted itself is, behind its own norm, the feature of that token, as in
vLLM. Of several such layers, one for each token ahead, the first drafts them all.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from ...errors import ExportError, first_line
from ..capture.stored import Stored, keep_stored, narrowly
from ..capture.taps import FeatureReader
from ..checkpoints.checkpoint import Checkpoint, quiet, weight_files
from ..checkpoints.pairing import Ids, Vocabulary

_COUNTS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")  # what config.json calls how many
_APART = r"^(?:model\.|language_model\.)*mtp(?:_\w+)?\."  # weights of them that have a place of their own
_LAYER = r"^(?:model\.|language_model\.)*layers\.(\d+)\."  # of any layer


class MtpHead(FeatureReader, PreTrainedModel):  # type: ignore[misc]
    """The draft: the first of a model's layers for multi-token prediction, and tables as the model has them."""

    _supports_sdpa = _supports_attention_backend = True

    def __init__(self, own: MtpModel, tap: int) -> None:
        """``own`` is taken over, all but its first layer let go of; ``tap``: behind the model's last norm."""
        config = own.config
        config.num_hidden_layers, config.taps = 1, [tap]
        for name in ("layer_types", "mlp_layer_types"):
            if kinds := getattr(config, name, None):
                setattr(config, name, kinds[:1])
        super().__init__(config)
        del own.layers[1:]
        own.embed_tokens, own.shared_head = _with_own_weights(own.embed_tokens), _with_own_weights(own.shared_head)
        self.own = own

    def get_input_embeddings(self) -> nn.Module:
        return self.own.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.own.shared_head

    def say(self, tokens: Tensor, features: Tensor, places: Tensor, mask: Any, cache: Any) -> tuple[Tensor, Tensor]:
        """See FeatureReader."""
        own = self.own.forward_layer(0, features, places, cache, input_ids=tokens)
        return self.own._project_to_logits(own), own

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class OwnLayers:
    """What the checkpoint ``source`` has for multi-token prediction beside the model that ``config`` is of: ``count``
    layers, whose weights have names that ``patterns`` find."""

    source: str
    config: Any
    count: int
    patterns: frozenset[str]

    @property
    def ids(self) -> Ids:
        """int64 [V]: what its tokens are called."""
        return np.arange(self.config.get_text_config().vocab_size)

    def vocabulary(self, target: Vocabulary) -> Vocabulary:
        """Its tokens, which are its model's."""
        return target

    def checkpoint(self, target: PreTrainedModel, max_context: int) -> Checkpoint:
        """The head beside ``target``, the model itself. Raises ExportError for weights that do not fit."""
        text = target.config.get_text_config()
        text.num_mtp_layers = self.count
        for kinds in ("layer_types", "mlp_layer_types"):
            if (own := getattr(text, kinds, None)) and not getattr(text, f"mtp_{kinds}", None):
                setattr(text, f"mtp_{kinds}", ["full_attention" if "full_attention" in own else own[-1]] * self.count)
        target._keys_to_ignore_on_load_unexpected = set(self.patterns)  # by which transformers finds them
        try:
            with quiet(), narrowly(weight_files(self.source)):
                own = MtpModel.from_pretrained(target)
        except Exception as error:  # transformers raises what it likes
            reason = first_line(error)
            raise ExportError(f"'{self.source}': its layers for multi-token prediction: {reason}") from None
        head = MtpHead(own, text.num_hidden_layers + 1).eval()
        keep_stored(head)
        size = head.get_output_embeddings().weight.shape[0]
        return Checkpoint(self.source, head, size, max_context, None, (), {})


def own_layers(source: str, config: Any) -> OwnLayers:
    """The layers for multi-token prediction at ``source``, a directory or hub id, whose model ``config`` is of. Reads
    no weight. Raises ExportError where there are none."""
    if not (patterns := _patterns(source, config)):
        raise ExportError(
            f"'{source}' has no layers for multi-token prediction among its weights: draft 'mtp' is for models that are"
            " published with them (Qwen 3.5, GLM 4.5 and others)"
        )
    counts = (getattr(config.get_text_config(), name, None) for name in _COUNTS)
    return OwnLayers(source, config, next((int(count) for count in counts if count), 1), patterns)


def has_own_layers(source: str, config: Any) -> bool:
    """Whether there are any."""
    return bool(_patterns(source, config))


def _patterns(source: str, config: Any) -> frozenset[str]:
    """By which the names of their weights are found; none where there are no such weights."""
    try:
        names = [name for path in weight_files(source) for name in _names(path)]
    except (SafetensorError, OSError, ValueError):
        return frozenset()  # who reads the model says what is wrong
    layers = {int(index) for name in names for index in re.findall(_LAYER, name)}
    behind = {index for index in layers if index >= config.get_text_config().num_hidden_layers}
    apart = {_APART} if any(re.search(_APART, name) for name in names) else set()
    return frozenset(apart | {_LAYER.replace(r"(\d+)", str(index)) for index in behind})


def _names(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return list(file.keys())


def _with_own_weights(table: nn.Module) -> nn.Module:
    """The same table, whose weights stay when its model lets go of them."""
    memo = dict[int, nn.Parameter]()
    for weight in table.parameters():
        kept = weight.detach()
        if isinstance(weight, Stored) and weight.untyped_storage().resizable():
            kept = weight.narrow_form().clone().as_subclass(Stored)
        memo[id(weight)] = nn.Parameter(kept, requires_grad=False)
    return copy.deepcopy(table, memo)
