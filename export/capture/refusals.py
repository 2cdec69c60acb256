"""Says which architectures cannot be exported, and how long the texts of a model may be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from ...errors import ExportError, UsageError, first_line, shown
from .recurrent import is_understood

WIDENED = "mxfp4"  # gpt-oss is published in no other form, so these weights are widened and exported
TRACED_SLOTS = 64  # of the cache in the example that a model is traced with
_POSITIONS = 2**31 - 1  # that graphs can count
_ATTENTION = frozenset(("attention", "full_attention", "sliding_attention", "chunked_attention"))  # kinds of layers
_TURNS = ("default", *(kind for kind in ROPE_INIT_FUNCTIONS if kind != "dynamic"))  # ways to turn positions
_OWN_WAYS = {  # what would fail only once it is captured, without a word on why, or unseen in a long text
    "llama4_text": "it turns positions as complex numbers, and scales queries by what it believes its cache holds",
    "longcat_flash": "its mixture of experts has some that compute nothing, which no graph of Leadout can choose",
    "xlm": "it makes masks of its own, which are no longer than a step",
}
_STATES = frozenset(("linear_attention", "conv", "mamba"))  # kinds of layers that keep some, whatever their class says
_NO_ATTENTION = _STATES | {"mlp", "moe"}


def context_length(config: Any, wanted: int | None = None) -> int:
    """Tokens of context: what the checkpoint was trained for and its graph is right for, or ``wanted`` if that is less.

    Raises UsageError if ``wanted`` is outside its range, ExportError if there is none.
    """
    text = config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions")
    said = next((name for name in names if getattr(text, name, None)), None)
    limit = 2048 if said is None else int(getattr(text, said))
    limit = max(limit, _stretched(config) or limit)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # beyond this, a row's factors would depend on the rest of its batch
        limit = int(rope.get("original_max_position_embeddings") or text.original_max_position_embeddings)
    if window := _kept_window(config):  # beyond this, tokens are dropped that a graph keeps
        limit = min(limit, window)
    limit = min(limit, _POSITIONS)
    if limit < 2:
        reason = f"{said} in its config.json, the most tokens of a text, must be 2 or more, not {limit}"
        raise ExportError(f"{name_of(config)} cannot be exported: {reason}")
    if wanted is not None and not 2 <= wanted <= limit:
        raise UsageError(f"max-context must be between 2 and {limit} for {name_of(config)}, not {wanted}")
    return wanted or limit


def refusal(config: Any) -> str | None:
    """Why no canonical graph can be made of this architecture, or None."""
    kinds, window = _kinds(config), _kept_window(config)
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; Leadout runs decoders"
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        inner = config.get_text_config().model_type
        if inner in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return f"it wraps a language model ({inner}) in more than text; save that as a checkpoint, and export it"
        return "transformers has no causal language model for it"
    if _is_encoder(config):
        return "it is an encoder (is_decoder in its config.json is not true); Leadout runs decoders"
    if (way := _OWN_WAYS.get(config.get_text_config().model_type)) is not None:
        return way
    if "local" in getattr(config, "attention_layers", ()):  # GPT Neo's
        return "its local attention depends on the cache's capacity, which grows with a text"
    if config.model_type == "falcon" and config.alibi:
        return "it counts positions (ALiBi) by a mask of padding, which no graph of Leadout has"
    if (turned := rope_refusal(config)) is not None:
        return turned
    if window is not None and window < TRACED_SLOTS:
        return f"its keep_window_size, from which on it drops tokens, must be at least {TRACED_SLOTS}, not {window}"
    if kinds and kinds <= _NO_ATTENTION:
        return "all of its layers keep recurrent state; Leadout runs those that have attention beside such layers"
    if is_recurrent(config) and not is_understood(AutoModelForCausalLM._model_mapping[type(config)], kinds):
        return "it keeps recurrent state in a way of its own, which cannot be rolled back by length"
    if (method := method_of(config)) not in (None, WIDENED):
        return f"its weights are quantised ({method}); export the original checkpoint"
    return None


def rope_refusal(config: Any) -> str | None:
    """Why this configuration's rotary positions cannot be exported, or None."""
    ropes = {name: rope.get("rope_type") or "default" for name, rope in _ropes(config)}
    if "dynamic" in ropes.values():
        return "dynamic-NTK rope rescales every position as the text grows, so a cache cannot be rolled back"
    if unknown := [kind for kind in ropes.values() if kind not in _TURNS]:
        return f"rope_type {shown(unknown[0])} is none of those that transformers computes ({', '.join(_TURNS)})"
    if nested := [name for name, kind in ropes.items() if name is not None and kind == "longrope"]:
        return f"longrope in one kind of its layers ({nested[0]}) takes its factors by the longest text of a batch"
    return None


def _ropes(config: Any) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    """The rope parameters of all layers (as None) and of each kind of layer, by its name."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    yield None, rope
    yield from ((name, each) for name, each in rope.items() if isinstance(each, dict))


def _stretched(config: Any) -> int:
    """Tokens that positions were stretched to by yarn: a config.json may go on counting those before it, as that of a
    Qwen does to which its authors' lines for long texts were added. 0 where there is no yarn."""
    longest = 0
    for _, rope in _ropes(config):
        factor, first = rope.get("factor"), rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "yarn" and isinstance(factor, (int, float)) and isinstance(first, (int, float)):
            stretched = factor * first
            longest = max(longest, int(stretched) if 0 < stretched <= _POSITIONS else 0)
    return longest


def _kept_window(config: Any) -> int | None:
    """Up to how many tokens a model keeps all of them (Doge drops some beyond); None if it never drops any."""
    window = getattr(config.get_text_config(), "keep_window_size", None)
    return None if window is None else int(window)


def _is_encoder(config: Any) -> bool:
    """Whether tokens attend to later ones: classes for masked language modelling do, unless configured as decoders."""
    decodes = getattr(config.get_text_config(), "is_decoder", True)
    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not decodes


@contextlib.contextmanager
def own_code(architecture: str) -> Iterator[None]:
    """Turn whatever the code of ``architecture`` raises inside into an ExportError that names it."""
    try:
        yield
    except ExportError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ExportError(f"{architecture} cannot be exported: its code in transformers raises {reason}") from error


def method_of(config: Any) -> str | None:
    """By which method the weights are quantised; None if they are not."""
    each = (getattr(part, "quantization_config", None) for part in (config, config.get_text_config()))
    if not (quantised := next(filter(None, each), None)):
        return None
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    return str(method or "by an unknown method")


def _kinds(config: Any) -> set[str]:
    """Of layers; none where the configuration does not say."""
    return set(getattr(config.get_text_config(), "layer_types", None) or ())


def is_recurrent(config: Any) -> bool:
    """Whether some of its layers keep state: a class that may have such need not, and not every class tells."""
    if (kinds := _kinds(config)) and kinds <= _ATTENTION:
        return False
    if not _STATES.isdisjoint(kinds):
        return True
    mapping = AutoModelForCausalLM._model_mapping
    return bool(type(config) in mapping and getattr(mapping[type(config)], "_is_stateful", False))


def name_of(config: Any) -> str:
    return str((getattr(config, "architectures", None) or [config.model_type])[0])
