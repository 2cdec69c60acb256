"""What of a checkpoint's ``generation_config.json`` becomes the bundle's: nothing is dropped without a word."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...bundle import GENERATION_CONFIG, SAMPLING, read_json
from ...errors import BundleError, shown
from ..writing import Progress

# What changes which tokens transformers writes, and has no default in a bundle.
WITHOUT_DEFAULT = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "dola_layers",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "num_beams",
    "penalty_alpha",
    "sequence_bias",
    "stop_strings",
    "suppress_tokens",
    "typical_p",
)
_OFF: tuple[object, ...] = (None, False, 0, 1, [], {})


def keep_readable(folder: Path, progress: Progress) -> None:
    """Remove the copy in ``folder`` if it is not what transformers can read: it takes its own defaults then."""
    path = folder / GENERATION_CONFIG
    if path.is_file() and read_object(path) is None:
        path.unlink()
        progress(f"target: {GENERATION_CONFIG} is not a JSON object and is left out, with the defaults in it")


def choose_sampling(folder: Path, sampling: Mapping[str, float], progress: Progress) -> dict[str, float]:
    """Those of the checkpoint's ``sampling`` defaults that a request may have; the others, and what else the file in
    ``folder`` asks for that no answer will get, are named to ``progress``."""
    kept = {}
    for name, value in sampling.items():
        legal, holds = SAMPLING[name]
        if holds(value):
            kept[name] = value
        else:
            progress(f"target: {GENERATION_CONFIG}: {name} must be {legal}, not {shown(value)}; left out")
    path = folder / GENERATION_CONFIG
    asked = (read_object(path) if path.is_file() else None) or {}
    if said := unmet(GENERATION_CONFIG, asked, sampling):
        progress(f"target: {said}")
    return kept


def unmet(file: str, asked: Mapping[str, object], sampling: Mapping[str, float]) -> str:
    """What a ``file`` of defaults asks for that no answer will get, whose ``sampling`` a bundle has; empty where there
    is nothing."""
    names = WITHOUT_DEFAULT if sampling else (*WITHOUT_DEFAULT, "repetition_penalty")
    found = sorted(name for name in names if asked.get(name) not in _OFF)
    return f"{file} asks for {', '.join(found)}: not among the bundle's defaults" if found else ""


def read_object(path: Path) -> dict[str, object] | None:
    """What a JSON file holds; None unless that is an object."""
    try:
        found = read_json(path, "an object")
    except BundleError:
        return None
    return found if isinstance(found, dict) else None
