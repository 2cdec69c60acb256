"""What a Hugging Face checkpoint offers, and which ones are refused before anything is written."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import cached_file, logging

from ..errors import ExportError, UsageError
from .pairing import Vocabulary

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # runtime settings of the same names
TEXTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """A causal language model in float32, and what its files say about using it.

    ``vocab_size`` counts the rows of logits (padding included); ``max_context`` counts tokens.
    ``sampling`` is empty unless the checkpoint asks to be sampled.
    """

    source: str
    model: PreTrainedModel
    vocab_size: int
    max_context: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sampling: Mapping[str, float]

    @property
    def architecture(self) -> str:
        return type(self.model).__name__


def read_config(source: str | Path) -> Any:
    """The configuration alone, if the architecture can be exported. Reads no weights.

    ``source`` is a local directory or a hub id. Raises ExportError naming the architecture and the reason.
    """
    place = str(source)
    if Path(place).exists() and not (Path(place) / "config.json").is_file():
        raise ExportError(f"'{place}' is not a checkpoint: config.json is missing")
    try:
        config = AutoConfig.from_pretrained(place)
    except (OSError, ValueError, KeyError) as error:
        raise ExportError(f"no checkpoint '{place}': {_first_line(error)}") from None
    if reason := _refusal(config):
        raise ExportError(f"{_name(config)} cannot be exported: {reason}")
    return config


def context_length(config: Any, wanted: int | None = None) -> int:
    """Tokens of context: what the checkpoint was trained for, or ``wanted`` if that is less.

    Raises UsageError if ``wanted`` is outside its range.
    """
    text = config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    limit = next((int(value) for name in names if (value := getattr(text, name, None))), 2048)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # beyond this, a row's factors would depend on the rest of its batch
        limit = int(rope.get("original_max_position_embeddings") or text.original_max_position_embeddings)
    if wanted is not None and not 2 <= wanted <= limit:
        raise UsageError(f"max-context must be between 2 and {limit} for {_name(config)}, not {wanted}")
    return wanted or limit


def load(source: str | Path, max_context: int | None = None) -> Checkpoint:
    """Read a checkpoint in float32, in eval mode. Raises ExportError or UsageError as ``read_config`` and more."""
    config = read_config(source)
    context = context_length(config, max_context)
    try:
        with _no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(str(source), dtype=torch.float32, attn_implementation="eager")
    except (OSError, ValueError, RuntimeError) as error:
        raise ExportError(f"'{source}' cannot be loaded: {_first_line(error)}") from None
    if model.get_output_embeddings() is None:
        raise ExportError(f"{_name(config)} cannot be exported: it has no language-model head")
    text = config.get_text_config()
    generation = model.generation_config
    return Checkpoint(
        source=str(source),
        model=model.eval(),
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        max_context=context,
        bos_token_id=text.bos_token_id,
        eos_token_ids=_ids(generation.eos_token_id if generation.eos_token_id is not None else text.eos_token_id),
        sampling=_sampling(generation),
    )


def vocabulary(source: str, config: Any) -> Vocabulary:
    """Every token's id and the number of logits. Reads ``tokenizer.json`` and no weights."""
    return Vocabulary.read(source, find_file(source, "tokenizer.json"), int(config.get_text_config().vocab_size))


def save_texts(source: str, folder: Path) -> None:
    """Copy what decoding needs besides weights, as it is: the tokenizer, its settings and chat template, defaults.

    Raises ExportError if there is no ``tokenizer.json``, the one form that needs no transformers.
    """
    for name in TEXTS:
        path = find_file(source, name)
        if path is not None:
            shutil.copyfile(path, folder / name)
        elif name == "tokenizer.json":
            raise ExportError(
                f"'{source}' has no tokenizer.json; make one with"
                " transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )


def find_file(source: str, name: str) -> Path | None:
    """A file of a local directory or of a hub repository (downloaded), or None if it has no such file."""
    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Progress is the caller's to show."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _refusal(config: Any) -> str | None:
    """Why no canonical graph can be made of this architecture, or None."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = set(getattr(text, "layer_types", None) or ())
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; Leadout runs decoders"
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "transformers has no causal language model for it"
    if rope.get("rope_type") == "dynamic":
        return "dynamic-NTK rope rescales every position as the text grows, so a cache cannot be rolled back"
    if "linear_attention" in kinds or "conv" in kinds or _is_recurrent(config):
        return "it keeps recurrent state, which cannot be rolled back by length"
    return None


def _is_recurrent(config: Any) -> bool:
    mapping = AutoModelForCausalLM._model_mapping
    return bool(type(config) in mapping and getattr(mapping[type(config)], "_is_stateful", False))


def _name(config: Any) -> str:
    return str((getattr(config, "architectures", None) or [config.model_type])[0])


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (int(value),)


def _sampling(generation: GenerationConfig) -> dict[str, float]:
    if not generation.do_sample:
        return {}
    found = {name: getattr(generation, name, None) for name in SAMPLING}
    # transformers samples at 1 where no temperature is given; without one here, the pair would be greedy.
    return {"temperature": 1.0} | {name: float(value) for name, value in found.items() if value is not None}


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
