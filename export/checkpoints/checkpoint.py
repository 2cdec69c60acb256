"""What a Hugging Face checkpoint offers, and which ones are refused before anything is written."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import logging as hub_logging
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Mxfp4Config, PreTrainedModel
from transformers.utils import cached_file, logging

from ...bundle import GENERATION_CONFIG, MANIFEST, SAMPLING, TOKENIZER
from ...errors import ExportError, first_line, shown, typed
from ..capture.kept import known_layers
from ..capture.refusals import WIDENED, context_length, method_of, name_of, own_code, refusal
from ..capture.stored import Stored, codes_in, keep_stored, narrowly, unreadable
from ..writing import TEXTS
from .conversations import MAP, in_files, keep_conversations
from .defaults import read_object
from .pairing import Vocabulary

# What a model gives beside its logits, and in which form, changes none of them: config.json may ask for what it likes.
OUTPUTS = {
    "return_dict": True,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_router_logits": False,
}
ADAPTER = "adapter_config.json"
_OF_WEIGHTS = (".safetensors", ".bin", ".json")  # or of an index of such
WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"  # the first is read where both are there
# A tokenizer's other forms: what transformers makes tokenizer.json of.
TOKENIZERS = ("tokenizer.model", "spiece.model", "tiktoken.model", "tekken.json", "vocab.json", "vocab.txt")
# Text of many kinds: a tokenizer that cuts this alike cuts alike.
PROBE = "def f(x):\n\treturn  x + 1.5e3  # it's 'été'\r\n\n   \u6f22\u5b57 \U0001f6b2 <b>&amp;</b> 2026 "


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """A causal language model, which computes in float32 (``stored.py``), and what its files say about using it.

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

    def require_finite(self) -> None:
        """Raise ExportError for a weight that is not: the few texts that graphs are compared by need not meet it."""
        for name, weight in self.model.named_parameters():
            stored = weight.narrow_form() if isinstance(weight, Stored) else weight
            if stored.numel() and not all(end.isfinite() for end in torch.aminmax(stored)):
                raise ExportError(f"'{self.source}' cannot be exported: {name} has NaN or infinity among its numbers")

    def release(self) -> None:
        """Free the memory of the weights, whoever still refers to them (torch's exporter does to what it saw last): the
        model is of no more use."""
        for weight in self.model.parameters():
            memory = weight.untyped_storage()
            weight.data = torch.empty(0)
            if isinstance(weight, Stored) and memory.resizable():  # not a file's pages, and others look at it
                memory.resize_(0)


def read_config(source: str | Path) -> Any:
    """The configuration alone, if the architecture can be exported. Reads no weights.

    ``source`` is a local directory or a hub id. Raises ExportError naming the architecture and the reason.
    """
    place = str(source)
    if Path(place).exists() and not (Path(place) / "config.json").is_file():
        raise ExportError(f"'{place}' is not a checkpoint: config.json is missing{_instead(Path(place))}")
    if _lacks_weights(Path(place)) and (instead := _instead(Path(place))):
        raise ExportError(f"'{place}' is not a checkpoint: its weights are missing{instead}")
    if (Path(place) / ADAPTER).is_file():  # transformers applies it where peft is installed, and only there
        raise ExportError(
            f"'{place}' has an adapter (LoRA) beside its weights: merge it into them, or take {ADAPTER} away to export"
            " them without it"
        )
    try:
        with quiet():
            config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    except StrictDataclassError as error:  # it says which check failed, its cause why
        raise ExportError(f"config.json of '{place}' is wrong: {first_line(error.__cause__ or error)}") from None
    except Exception as error:  # a configuration's own code raises what it likes
        if "trust_remote_code" in str(error):
            raise ExportError(
                f"'{place}' cannot be exported: its model is code of its own (auto_map in config.json), which is not"
                " run"
            ) from None
        raise ExportError(f"no checkpoint '{place}': {first_line(error)}") from None
    with own_code(name_of(config)):
        reason = refusal(config)
    if reason:
        raise ExportError(f"{name_of(config)} cannot be exported: {reason}")
    known_layers(config, name_of(config))
    return config


def _instead(place: Path) -> str:
    """What a directory without a configuration is, if that can be told, and what to do."""
    if (place / MANIFEST).is_file():
        return "; it is a bundle already"
    if (place / ADAPTER).is_file():
        return "; it is an adapter (LoRA): merge it into the model it was trained for, and export that"
    if place.suffix == ".gguf" or any(place.glob("*.gguf")):
        return "; GGUF files are not read: export the checkpoint they were made of"
    if place.suffix == ".onnx" or any(found for folder in (place, place / "onnx") for found in folder.glob("*.onnx")):
        how = f"leadout export --from-onnx {typed(place)} (as a draft: --draft-from-onnx)"
        return f"; ONNX graphs are taken with: {how}"
    return ""


def _lacks_weights(place: Path) -> bool:
    """Whether a directory has a model's configuration and no weights; what an adapter learnt are none."""
    return place.is_dir() and not any(
        found for name in ("model*", "pytorch_model*") for found in place.glob(name) if found.suffix in _OF_WEIGHTS
    )


def load(source: str | Path, max_context: int | None = None) -> Checkpoint:
    """Read a checkpoint in float32, in eval mode. Raises ExportError or UsageError as ``read_config`` and more: every
    weight must be in its files."""
    config = read_config(source)
    context = context_length(config, max_context)
    model = _read_model(str(source), config)
    if model.get_output_embeddings() is None:
        raise ExportError(f"{name_of(config)} cannot be exported: it has no language-model head")
    text = config.get_text_config()
    generation = model.generation_config
    ends = generation.eos_token_id
    vocab_size = int(model.get_output_embeddings().weight.shape[0])
    # Smaller vocabularies keep GPT-2's default of 50256 or say -1: what is no id of the model begins no text.
    bos = getattr(text, "bos_token_id", None)
    bos = bos if isinstance(bos, int) and 0 <= bos < vocab_size else None
    return Checkpoint(
        source=str(source),
        model=model.eval(),
        vocab_size=vocab_size,
        max_context=context,
        bos_token_id=bos,
        eos_token_ids=_ids(ends if ends is not None else getattr(text, "eos_token_id", None)),
        sampling=_sampling(generation),
    )


def vocabulary(source: str, config: Any) -> Vocabulary:
    """Every token's id and the number of logits. Reads ``tokenizer.json`` and no weights."""
    return Vocabulary.read(source, find_file(source, TOKENIZER), int(config.get_text_config().vocab_size))


def open_tokenizer(source: str) -> Any:
    """transformers' tokenizer of a checkpoint; None if it knows none: a class of its own, not of transformers."""
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception:  # what a tokenizer's own code raises
        return None


def save_texts(source: str, folder: Path, theirs: Any) -> None:
    """Copy what decoding needs besides weights: the tokenizer, its settings and chat template, defaults; all as it is,
    but for what ``theirs``, transformers' tokenizer, knows of conversations from elsewhere (``conversations.py``).

    Raises ExportError if there is no ``tokenizer.json``, the one form that needs no transformers.
    """
    root = Path(source)
    for name in TEXTS:
        path = find_file(source, name)
        if path is not None:
            root = path.parent
            try:
                shutil.copyfile(path, folder / name)
            except PermissionError as error:
                raise ExportError(f"'{path}' cannot be read: {error.strerror}") from None
        elif name == TOKENIZER:
            raise ExportError(f"'{source}' has no tokenizer.json; {_how_to_make_one(source)}")

    if (known := getattr(theirs, "chat_template", None)) is not None:
        templates = known if isinstance(known, dict) else {}
        keep_conversations(folder, templates, theirs.special_tokens_map, alone=True)
    elif theirs is None:
        find_file(source, MAP)  # which is where the others are, then
        keep_conversations(folder, *in_files(root))


def _how_to_make_one(source: str) -> str:
    """What to do where a checkpoint has a tokenizer in another form than ``tokenizer.json``, or none."""
    found = next((name for name in TOKENIZERS if find_file(source, name) is not None), None)
    if found is None:
        return "put that of its tokenizer into its directory"
    first = "pip install sentencepiece tiktoken, then make" if found.endswith(".model") else "make"
    saved = f"transformers.AutoTokenizer.from_pretrained({source!r}).save_pretrained(DIR)"
    return f"{first} one of its {found} with {saved}, and copy it beside that"


def other_reading(theirs: Any, own: Vocabulary) -> str | None:
    """What ``theirs``, transformers' tokenizer of a checkpoint, reads otherwise than its ``tokenizer.json``, by which a
    bundle goes (tokens that are nowhere but in ``tokenizer_config.json``, say); None if nothing was found, or there is
    none to compare with."""
    try:
        with quiet():
            text = PROBE + " ".join(token for token in theirs.get_added_vocab() if token not in own.unknown)
            found = theirs(text)["input_ids"]
    except Exception:  # a class of its own
        return None
    encoding = own.tokenizer.encode(text)
    if list(found) == encoding.ids:
        return None
    pairs = zip(encoding.ids, found, encoding.offsets, strict=False)
    start = next((start for ours, its, (start, _) in pairs if ours != its), len(text))
    where = repr(text[start : start + 16]) if start < len(text) else "the end of a text"
    return (
        f"transformers' {type(theirs).__name__} reads {where} as other tokens than tokenizer.json, by which the bundle"
        " goes"
    )


def find_file(source: str, name: str) -> Path | None:
    """A file of a local directory or of a hub repository (downloaded), or None if it has no such file."""
    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def weight_files(source: str, name: str = WEIGHTS) -> list[Path]:
    """The safetensors of a checkpoint that transformers reads, one (``name``) or else the parts that its index names;
    empty if it has none. Raises ExportError for an index that is none, or names a part that is not there."""
    if (whole := find_file(source, name)) is not None:  # an index beside it was left by an older save
        return [whole]
    index = find_file(source, f"{name}.index.json")
    found = {} if index is None else {name: find_file(source, name) for name in _indexed(source, index)}
    if index is not None and (missing := [name for name, path in found.items() if path is None]):
        raise ExportError(f"'{source}' cannot be loaded: {index.name} names {missing[0]}, which is not there")
    return [path for path in found.values() if path is not None]


def _indexed(source: str, index: Path) -> list[str]:
    """The names of the files that an index is of."""
    found = (read_object(index) or {}).get("weight_map")
    names = list(found.values()) if isinstance(found, dict) else []
    if isinstance(found, dict) and all(isinstance(name, str) for name in names):
        return sorted(set(names))
    reason = "it must be a JSON object with a weight_map of names of tensors to names of files"
    raise ExportError(f"'{source}' cannot be loaded: {index.name} is no index: {reason}")


def _read_model(source: str, config: Any) -> PreTrainedModel:
    """The model, all of it from its files. Raises ExportError."""
    defaults, more = find_file(source, GENERATION_CONFIG), dict[str, Any]()
    if defaults is not None and read_object(defaults) is None:  # transformers takes no other JSON than objects
        more["generation_config"] = GenerationConfig.from_model_config(config)
    if method_of(config) == WIDENED:
        more["quantization_config"] = Mxfp4Config(dequantize=True)
    try:
        with quiet(), narrowly(weight_files(source)):
            model, report = AutoModelForCausalLM.from_pretrained(
                source,
                trust_remote_code=False,
                dtype=torch.float32,
                attn_implementation="eager",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                **more,
            )
    except SafetensorError as error:
        raise ExportError(
            f"'{source}' cannot be loaded: its weights are incomplete or a git-lfs pointer ({first_line(error)});"
            " download them again"
        ) from None
    except ExportError:
        raise
    except Exception as error:  # an architecture's own code raises what it likes
        reason = unreadable(weight_files(source) or weight_files(source, PICKLED)) or first_line(error)
        raise ExportError(f"'{source}' cannot be loaded: {reason}") from None
    own = [name for name, _ in model.named_parameters()]
    if fault := _fault(report, list(model.state_dict()), config) or _coded(source, own):
        raise ExportError(f"'{source}' cannot be exported: {fault}")
    for each in (model.config, model.config.get_text_config()):
        for name, value in OUTPUTS.items():
            if hasattr(each, name):
                setattr(each, name, value)
    keep_stored(model)
    return model


def _fault(report: Mapping[str, Any], names: Sequence[str], config: Any) -> str | None:
    """What is wrong with the tensors of the files, or None: transformers fills a tensor that is missing or of another
    shape with noise, and leaves out layers, biases and scales that the configuration does not count. ``names``: the
    model's own."""
    if missing := sorted(report["missing_keys"]):
        return f"its files lack {_some(missing)}"
    if mismatched := sorted(report["mismatched_keys"]):
        name, theirs, ours = mismatched[0]
        sizes = f"{list(theirs)}, by its config.json {list(ours)}"
        return f"{name} is {sizes}" + (f" (and {len(mismatched) - 1} more)" if mismatched[1:] else "")
    if further := sorted(name for name in report["unexpected_keys"] if _is_further_layer(name, names, config)):
        return f"its files have more layers than its config.json counts: {_some(further)}"
    if left := sorted(name for name in report["unexpected_keys"] if _belongs_to_weight(name, names)):
        return f"its files have what its config.json leaves out: {_some(left)}"
    if errors := report["error_msgs"]:
        return str(errors[0]).strip().splitlines()[0]
    return None


def _is_further_layer(name: str, names: Sequence[str], config: Any) -> bool:
    """Whether a tensor is of a layer behind the model's last. Not those that predict more tokens ahead, which a
    configuration counts apart; nor buffers, other heads and towers, which are of no such list."""
    parts = re.fullmatch(r"(.*?\.)(\d+)\..*", name)
    if parts is None:
        return False
    own = re.compile(rf"(?:.*\.)?{re.escape(parts[1])}(\d+)\..*")
    layers = {int(found[1]) for each in names if (found := own.fullmatch(each))}
    ahead = getattr(config.get_text_config(), "num_nextn_predict_layers", None) or 0
    return bool(layers) and int(parts[2]) > max(layers) + ahead


def _belongs_to_weight(name: str, names: Sequence[str]) -> bool:
    """Whether a tensor stands beside a weight of the model, as its bias or, of fewer bits, its scale; not what training
    notes there (``_extra_state``)."""
    module, _, last = name.rpartition(".")
    weight = f"{module}.weight"
    beside = last != "weight" and not last.startswith("_")
    return beside and any(each == weight or each.endswith(f".{weight}") for each in names)


def _coded(source: str, names: Sequence[str]) -> str | None:
    """Which weights of a checkpoint are no numbers, or None: transformers takes codes of a quantisation that nothing
    tells of for what they look like. ``names``: the model's own parameters."""
    ends = {name.split(".", skipped)[-1] for name in names for skipped in range(3)}  # files leave out model prefixes
    codes = {
        name: kind
        for path in weight_files(source) or weight_files(source, PICKLED)
        for name, kind in codes_in(path).items()
        if name.endswith(".weight") or name in ends
    }
    if not codes:
        return None
    kind = codes[min(codes)]
    return f"its files have integers ({kind}) for {_some(sorted(codes))}; export the checkpoint it was quantised from"


def _some(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more tensors" if names[1:] else "")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Progress is the caller's to show, and what transformers and the hub's library report is judged, not printed."""
    shown, verbosity, hub = logging.is_progress_bar_enabled(), logging.get_verbosity(), hub_logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hub_logging.set_verbosity(hub)
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def _ids(value: Any) -> tuple[int, ...]:
    """One id, a list of them, or none. Raises ExportError for anything else."""
    found = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(each) is not int for each in found):
        raise ExportError(
            f"generation_config.json: eos_token_id must be a token id or a list of them, not {shown(value)}"
        )
    return tuple(found)


def _sampling(generation: GenerationConfig) -> dict[str, float]:
    if not generation.do_sample:
        return {}
    found = {name: getattr(generation, name, None) for name in SAMPLING}
    # transformers samples at 1 where no temperature is given; without one here, the pair would be greedy.
    numbers = {name: value for name, value in found.items() if value is not None}
    for name, value in numbers.items():
        if not isinstance(value, (int, float)):
            raise ExportError(f"generation_config.json: {name} must be a number, not {shown(value)}")
    return {"temperature": 1.0} | {name: float(value) for name, value in numbers.items()}
