"""What a checkpoint of a head says (``eagle.FeatureHead``, ``dflash.BlockHead``), in the forms that such heads are
published in.

EAGLE-3 as its authors and SpecForge write it (``LlamaForCausalLMEagle3``, or a Llama with ``draft_vocab_size``) and as
the speculators library does (``speculators_model_type``); EAGLE and EAGLE-2 as their authors write them (a Llama of one
layer by its config.json, with weights that no Llama has: ``fc``); Leadout's own, a Llama's config.json with ``join``;
and DFlash as its authors write it (``DFlashDraftModel``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from ...errors import ExportError, first_line, shown
from ..capture.refusals import own_code, rope_refusal
from ..capture.stored import code_of, unreadable
from ..checkpoints.checkpoint import PICKLED, WEIGHTS, Checkpoint, find_file, weight_files
from ..checkpoints.defaults import read_object
from ..checkpoints.pairing import Ids, Vocabulary
from .dflash import SLIDING, BlockHead
from .eagle import JOINS, NORMS, FeatureHead, behind_head

TAPS = "eagle_aux_hidden_state_layer_ids"  # what config.json calls the layers that are read
_SAYS_NOTHING = ("t2d", "rotary_emb.inv_freq")  # what follows from the rest


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Head:
    """``weights`` under the names of ``module``; ``ids`` int64 [draft_vocab_size]: what its tokens are called. One that
    drafts a block at a time is asked for it by the token ``mask``, for ``block`` tokens at most."""

    source: str
    config: LlamaConfig | Qwen3Config
    weights: Mapping[str, Tensor]
    ids: Ids
    module: type[FeatureHead | BlockHead] = FeatureHead
    mask: int | None = None
    block: int | None = None

    def vocabulary(self, target: Vocabulary) -> Vocabulary:
        """Its tokens, which are its target's."""
        return dataclasses.replace(target, source=self.source, logits=self.config.draft_vocab_size)

    def checkpoint(self, target: PreTrainedModel, max_context: int) -> Checkpoint:
        """The head beside its target, whose tables it takes where it has none. Raises ExportError for weights that do
        not fit."""
        weights = dict(self.weights)
        for name, table in (
            ("embed_tokens.weight", target.get_input_embeddings().weight),
            ("lm_head.weight", target.get_output_embeddings().weight),
        ):
            if name not in weights:
                weights[name] = table.detach().clone()
        if getattr(self.config, "join", "") == "bare" and "lm_head.weight" not in self.weights:
            self.config.update(behind_head(target))
        with own_code(f"'{self.source}'"):
            model = self.module(self.config)
        for name, own in model.state_dict().items():
            if name in weights and weights[name].shape != own.shape:
                sizes = f"{list(weights[name].shape)}, by config.json {list(own.shape)}"
                raise ExportError(f"'{self.source}' cannot be exported: {name} is {sizes}")
            if name in weights and (code := code_of(weights[name])):
                raise ExportError(f"'{self.source}' cannot be exported: its files have integers ({code}) for {name}")
        report = model.load_state_dict(weights, strict=False)
        if report.missing_keys:
            raise ExportError(f"'{self.source}' cannot be exported: its files lack {report.missing_keys[0]}")
        if report.unexpected_keys:
            reason = f"{report.unexpected_keys[0]} is no part of a head that Leadout knows"
            raise ExportError(f"'{self.source}' cannot be exported: {reason}")
        size = self.config.draft_vocab_size
        return Checkpoint(self.source, model.float().eval(), size, max_context, None, (), {})


def read_head(source: str, target: Any) -> Head | None:
    """The head at ``source``, a directory or hub id; None for another checkpoint. ``target``: its target's
    configuration. Raises ExportError for a head of another target, or of a kind that is not known."""
    path = find_file(source, "config.json")
    if path is None:
        return None
    if (raw := read_object(path)) is None:
        return None  # who reads it as a checkpoint says what is wrong
    if _says_blocks(raw):
        return _block_head(source, raw, target.get_text_config())
    renamed = {"layers.0.": "midlayer."}
    if (found := _settings(source, raw)) is None:
        if not _is_bare(source, raw):
            return None
        past_norm = target.get_text_config().num_hidden_layers + 1
        found = {
            **raw,
            "join": "bare",
            "taps": [past_norm],
            "fc": False,
            "projection_bias": "fc.bias" in _names(source),
        }
        renamed |= {"fc.": "midlayer.eh_proj."}
    config = _checked(source, found, target.get_text_config())
    weights = _weights(source, renamed)
    return Head(source, config, weights, _ids(source, config, weights.pop("d2t", None)))


def is_head(source: str) -> bool:
    """Whether a directory or hub id has a head, of whichever target."""
    path = find_file(source, "config.json")
    raw = None if path is None else read_object(path)
    return raw is not None and (_says_blocks(raw) or _settings(source, raw) is not None or _is_bare(source, raw))


def _says_blocks(raw: Mapping[str, Any]) -> bool:
    return "dflash_config" in raw or "DFlash" in _architecture(raw)


def _is_bare(source: str, raw: Mapping[str, Any]) -> bool:
    """EAGLE and EAGLE-2: a layer of a model, behind one that joins."""
    return raw.get("num_hidden_layers") == 1 and "fc.weight" in _names(source)


def _ids(source: str, config: Any, offsets: Tensor | None) -> Ids:
    """The target's ids of the head's tokens: ``offsets`` (d2t) are the differences from 0, 1, 2, ... Raises
    ExportError."""
    size, ids = config.draft_vocab_size, np.arange(config.draft_vocab_size)
    if offsets is None and size != config.vocab_size:
        raise ExportError(f"'{source}': it says {size} tokens, but has no d2t that names them")
    if offsets is not None:
        rounded = offsets.is_floating_point() and offsets.dtype.itemsize < 4
        ids = ids[:0] if rounded or offsets.shape != ids.shape else ids + offsets.long().numpy()
    if np.unique(ids[(ids >= 0) & (ids < config.vocab_size)]).size < size:
        its = "" if offsets is None else f", not {list(offsets.shape)} of {str(offsets.dtype).removeprefix('torch.')}"
        raise ExportError(f"'{source}': d2t must name {size} different tokens of the target{its}")
    return ids


def _settings(source: str, raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """What config.json says of a head, in the words of FeatureHead's configuration; None if it is no head's."""
    if (kind := raw.get("speculators_model_type")) is not None:
        if kind != "eagle3" or not isinstance(layer := raw.get("transformer_layer_config"), dict):
            raise ExportError(f"'{source}' is a speculator of kind {shown(kind)}; Leadout knows eagle3")
        own = {
            name: raw[name]
            for name in ("draft_vocab_size", "norm_before_residual", "target_hidden_size", *NORMS)
            if name in raw
        }
        return {**layer, **own, "join": "attention", "taps": raw.get(TAPS)}
    if "join" in raw:
        return dict(raw)
    if "Eagle3" in _architecture(raw) or "draft_vocab_size" in raw:
        # SpecForge counts the layers whose output is read, all others those that read it.
        own = raw.get("eagle_config") or {}
        of = (own.get(TAPS) if isinstance(own, dict) else own) or None
        taps = [tap + 1 if isinstance(tap, int) else tap for tap in of] if isinstance(of, list) else of
        norms = {name: own[name] for name in NORMS if name in own} if isinstance(own, dict) else {}
        return {**raw, **norms, "join": "attention", "taps": taps or raw.get(TAPS)}
    return None


def _checked(source: str, found: dict[str, Any], target: Any) -> LlamaConfig:
    """The configuration, with what follows from ``target`` filled in. Raises ExportError."""
    size, layers = target.hidden_size, target.num_hidden_layers + (found.get("join") == "bare")
    found = {name: value for name, value in found.items() if value is not None}
    found = {"target_hidden_size": size, "vocab_size": target.vocab_size, **found}
    taps = found.setdefault("taps", [2, layers // 2, layers - 3])  # EAGLE-3's
    says = found.setdefault("draft_vocab_size", found["vocab_size"])
    fits = isinstance(taps, list) and all(isinstance(tap, int) and 1 <= tap <= layers for tap in taps)
    if not fits or not taps:
        raise ExportError(
            f"'{source}': the layers it reads must be from 1 to {layers}, its target's, not {shown(taps)}"
        )
    if str(join := found.get("join")) not in JOINS:
        raise ExportError(f"'{source}': join must be one of {', '.join(JOINS)}, not {shown(join)}")
    if (count := found.get("num_hidden_layers", 1)) != 1:
        raise ExportError(f"'{source}': a head of {count} layers cannot be exported, only of 1")
    _check_target(source, {name: found[name] for name in ("vocab_size", "target_hidden_size")}, target)
    _check_range(source, "draft_vocab_size", says, 1, target.vocab_size)
    if not found.get("fc", True) and (len(taps) > 1 or found.get("hidden_size") != size):
        raise ExportError(f"'{source}': without fc it must read one layer, and be {size} wide as its target is")
    return _configuration(source, LlamaConfig, found)


def _check_target(source: str, its: Mapping[str, Any], target: Any) -> None:
    """Raise ExportError for a head that was made for another target."""
    for name, value in its.items():
        if value != (theirs := getattr(target, name.removeprefix("target_"))):
            raise ExportError(f"'{source}' is no head of this target: {name} is {value}, the target's {theirs}")


def _block_head(source: str, raw: Mapping[str, Any], target: Any) -> Head:
    """The same of a head that drafts a block at a time (DFlash)."""
    said = _block_settings(source, raw, target)
    config = _configuration(source, Qwen3Config, {**raw, "taps": [tap + 1 for tap in said["target_layer_ids"]]})
    causal, kinds = said.get("is_causal", said.get("causal")), config.layer_types or ()
    config.update(
        {
            "target_hidden_size": target.hidden_size,
            "draft_vocab_size": config.vocab_size,
            "mask_token_id": said["mask_token_id"],
            "causal": [kind == SLIDING if causal is None else bool(causal) for kind in kinds],
            "scale": _number(source, said, "input_embedding_scale", 1.0),
            "multiplier": _number(source, said, "output_multiplier", 1.0),
            "softcap": _number(source, said, "final_logit_softcapping", 0.0),
        }
    )
    weights, ids = _weights(source, {}), np.arange(config.vocab_size)
    return Head(source, config, weights, ids, BlockHead, said["mask_token_id"], said["block_size"] - 1)


def _block_settings(source: str, raw: Mapping[str, Any], target: Any) -> dict[str, Any]:
    """What config.json says of how blocks are made, where it says it. Raises ExportError."""
    own = raw.get("dflash_config") or {}
    kind = _architecture(raw) if not isinstance(own, dict) else own.get("projector_type") or _architecture(raw)
    said = {"block_size": 16, "vocab_size": target.vocab_size, **raw, **(own if isinstance(own, dict) else {})}
    if kind not in ("DFlashDraftModel", "dflash") or said.get("attention_mode") not in (None, "gqa", "mha"):
        raise ExportError(f"'{source}': a head of kind {shown(kind)} cannot be exported, only a DFlashDraftModel")
    _check_target(source, {"vocab_size": said["vocab_size"]}, target)
    layers, listed = target.num_hidden_layers, said.get("target_layer_ids")
    taps = listed if isinstance(listed, list) and listed else [None]
    if said.get("num_target_layers", layers) != layers:
        its = f"num_target_layers is {said['num_target_layers']}, the target's {layers}"
        raise ExportError(f"'{source}' is no head of this target: {its}")
    for name, value, least, most in (
        *((f"target_layer_ids[{i}]", tap, 0, layers - 1) for i, tap in enumerate(taps)),
        ("mask_token_id", said.get("mask_token_id"), 0, target.vocab_size - 1),
        ("block_size", said["block_size"], 2, 1 << 16),
    ):
        _check_range(source, name, value, least, most)
    return said


def _check_range(source: str, name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ExportError(f"'{source}': config.json: {name} must be from {least} to {most}, not {shown(value)}")


def _number(source: str, said: Mapping[str, Any], name: str, default: float) -> float:
    """Raises ExportError for what is neither a number nor null, which is what is not said."""
    value = said.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise ExportError(f"'{source}': config.json: {name} must be a number, not {shown(value)}")
    return default if value is None else float(value)


def _configuration(source: str, kind: type[Any], found: Mapping[str, Any]) -> Any:
    """A configuration of this ``kind`` that says what was ``found``. Raises ExportError."""
    drop = ("architectures", "auto_map", "torch_dtype", "dtype", "model_type")
    if (theirs := found.get("model_type", kind.model_type)) != kind.model_type:
        reason = f"a head whose layer is a {theirs}'s cannot be exported, only a {kind.model_type}'s"
        raise ExportError(f"'{source}': {reason}")
    try:
        made = kind(**{name: value for name, value in found.items() if name not in drop})
    except Exception as error:  # a configuration's own checks raise what they like
        raise ExportError(f"config.json of '{source}' is wrong: {first_line(error.__cause__ or error)}") from None
    if (turned := rope_refusal(made)) is not None:
        raise ExportError(f"'{source}' cannot be exported: {turned}")
    return made


def _architecture(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _files(source: str) -> list[Path]:
    """Those of a head's weights: safetensors, in one or in parts, or else PyTorch's own. Raises ExportError for an
    index that is none, or parts that are not there."""
    if found := weight_files(source):
        return found
    path = find_file(source, PICKLED)
    return [] if path is None else [path]


def _names(source: str) -> set[str]:
    """Of a head's tensors; none where they cannot be read: who loads them says so."""
    found = set[str]()
    for path in _files(source):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt") as file:
                    found |= set(file.keys())
            else:
                found |= set(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        except Exception:  # pickle and safetensors raise what they like
            return set()
    return {name.removeprefix("model.") for name in found}


def _weights(source: str, renamed: Mapping[str, str]) -> dict[str, Tensor]:
    """All tensors of a head's files, ``renamed`` as its module has them. Raises ExportError."""
    if not (files := _files(source)):
        raise ExportError(f"'{source}' has no weights (one of: {WEIGHTS}, {PICKLED})")
    tensors = dict[str, Tensor]()
    for path in files:
        try:
            safe = path.suffix == ".safetensors"
            tensors |= load_file(path) if safe else torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # pickle and safetensors raise what they like
            raise ExportError(f"'{source}' cannot be loaded: {unreadable([path]) or first_line(error)}") from None
    named = {key.removeprefix("model."): value for key, value in tensors.items() if not key.endswith(_SAYS_NOTHING)}
    for theirs, ours in renamed.items():
        named = {key.replace(theirs, ours): value for key, value in named.items()}
    return named
