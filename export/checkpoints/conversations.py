"""What a bundle keeps of conversations: a checkpoint's chat templates and special tokens, whichever files they are in.

The runtime reads ``chat_template.jinja`` and ``tokenizer_config.json`` and no others. What transformers reads from more
files, or knows of a tokenizer's class, is written into the bundle's copy of the latter. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ...bundle import CHAT_TEMPLATE, DEFAULT_TEMPLATE, TOKENIZER_CONFIG, named_templates, special_tokens
from ...errors import ExportError
from .defaults import read_object

MAP, MORE = "special_tokens_map.json", "additional_chat_templates"


def keep_conversations(
    folder: Path, templates: Mapping[str, str], tokens: Mapping[str, str], *, alone: bool = False
) -> None:
    """Let the copies in ``folder`` say ``templates``, by name, if there are several, and ``tokens``, by name; with
    ``alone`` no other tokens. Where there is no template, nothing is changed."""
    path = folder / TOKENIZER_CONFIG
    said = read_object(path) if path.is_file() else {}
    if said is None:  # whoever reads it says so
        return
    settings = dict(said)
    if templates.keys() - {DEFAULT_TEMPLATE}:
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
        (folder / CHAT_TEMPLATE).unlink(missing_ok=True)
    elif not (settings.get("chat_template") or (folder / CHAT_TEMPLATE).is_file()):
        return
    ours = special_tokens(settings)
    for name in ours.keys() - tokens.keys() if alone else ():
        del settings[name]
    settings |= {name: text for name, text in tokens.items() if ours.get(name) != text}
    if settings != said:
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def in_files(root: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The templates of the checkpoint in ``root``, by name, and those special tokens that the settings of its tokenizer
    do not name as such: for where transformers is not, or knows no such tokenizer. Raises ExportError for a template
    that cannot be read."""
    settings, listed = (read_object(root / name) or {} for name in (TOKENIZER_CONFIG, MAP))
    templates = (
        {DEFAULT_TEMPLATE: _read(root / CHAT_TEMPLATE)}
        if (root / CHAT_TEMPLATE).is_file()
        else named_templates(settings.get("chat_template"))
    )
    templates |= {path.name.removesuffix(".jinja"): _read(path) for path in sorted((root / MORE).glob("*.jinja"))}
    tokens = dict[str, str]()
    for more in (listed, settings.get("extra_special_tokens"), listed.get("extra_special_tokens")):
        tokens = (special_tokens(more) if isinstance(more, dict) else {}) | tokens
    return templates, {name: text for name, text in tokens.items() if name not in special_tokens(settings)}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ExportError(f"'{path}' cannot be read: {error.strerror}") from None
