"""May these two models speak to each other? Token ids must mean the same to both."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from ..errors import ExportError


def same_vocabulary(target: str, draft: str, target_config: Any, draft_config: Any) -> str:
    """Raise ExportError unless draft and target share their token ids; else a note on what differs, or nothing.

    Two tokenizers must give every token the same id. The number of logits may differ by padding, which the draft's
    graph then cuts or adds.
    """
    p, q = _ids(target), _ids(draft)
    p_size, q_size = (config.get_text_config().vocab_size for config in (target_config, draft_config))
    if p is None:
        raise ExportError(f"target '{target}' has no tokenizer; its directory needs a tokenizer.json")
    if q is not None and p != q:
        token = min((token for token in p.keys() | q.keys() if p.get(token) != q.get(token)), key=lambda t: p.get(t, 0))
        raise ExportError(
            f"draft '{draft}' has another vocabulary than target '{target}': token {token!r} is {q.get(token)} there"
            f" and {p.get(token)} here; choose a draft of the same tokenizer"
        )
    if p_size == q_size:
        return "" if q is not None else "no tokenizer of its own: its token ids are taken to be the target's"
    if q is None or min(p_size, q_size) <= max(p.values()):
        raise ExportError(
            f"draft '{draft}' has a vocabulary of {q_size}, target '{target}' of {p_size};"
            " choose a draft of the same tokenizer"
        )
    return f"vocabulary padded to {q_size} in the checkpoint; its graph gives the target's {p_size}"


def _ids(source: str) -> dict[str, int] | None:
    """Every token's id, or None if ``source`` has no tokenizer."""
    try:
        return dict(AutoTokenizer.from_pretrained(source).get_vocab())
    except (OSError, ValueError, KeyError):
        return None
