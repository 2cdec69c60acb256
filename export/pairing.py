"""May these two models speak to each other? Token ids must mean the same to both."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from ..errors import ExportError


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ids of a model's tokens (None if it brings no tokenizer) and how many logits it gives, padding included."""

    source: str
    ids: Mapping[str, int] | None
    logits: int


def read_ids(path: Path) -> dict[str, int]:
    """Every token's id in a ``tokenizer.json``. Raises ExportError if it is not one."""
    try:
        return dict(Tokenizer.from_str(path.read_text(encoding="utf-8")).get_vocab(with_added_tokens=True))
    except Exception as error:  # tokenizers raises bare Exception
        raise ExportError(f"{path}: not a tokenizer: {error}") from None


def same_vocabulary(target: Vocabulary, draft: Vocabulary) -> str:
    """Raise ExportError unless draft and target share their token ids; else a note on what differs, or nothing.

    Two tokenizers must give every token the same id. The number of logits may differ by padding, which the draft's
    graph then cuts or adds.
    """
    p, q = target.ids, draft.ids
    if p is None:
        raise ExportError(f"target '{target.source}' has no tokenizer.json; put the target's into its directory")
    if q is not None and p != q:
        token = min((t for t in p.keys() | q.keys() if p.get(t) != q.get(t)), key=lambda t: (p.get(t, len(p)), t))
        raise ExportError(
            f"draft '{draft.source}' has another vocabulary than target '{target.source}': token {token!r} is"
            f" {q.get(token)} there and {p.get(token)} here; choose a draft of the same tokenizer"
        )
    if target.logits == draft.logits:
        return "" if q is not None else "no tokenizer of its own: its token ids are taken to be the target's"
    if q is None or min(target.logits, draft.logits) <= max(p.values()):
        raise ExportError(
            f"draft '{draft.source}' has a vocabulary of {draft.logits}, target '{target.source}' of {target.logits};"
            " choose a draft of the same tokenizer"
        )
    return f"vocabulary of {draft.logits} in the checkpoint; the graph gives the target's {target.logits}"
