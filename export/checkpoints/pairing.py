"""Relates the token ids of a draft to those of its target, and refuses pairs that cut text differently."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ...bundle import TOKENIZER, VOCABULARY, FileEntry, file_entry
from ...errors import ExportError

Ids = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ids of a model's tokens (None if it brings no tokenizer) and how many logits it gives, padding included.

    ``added`` are the tokens that stand beside the tokenizer's own: they do not change how other text is cut.
    ``unknown`` are the names of special tokens that ``path`` has and the model no logit for (Gemma 3's, for images, in
    the sizes that read none): they are neither in ``ids`` nor in ``tokenizer``, where their names are text.
    """

    source: str
    ids: Mapping[str, int] | None
    logits: int
    added: frozenset[str] = frozenset()
    path: Path | None = None
    tokenizer: Any = None
    unknown: tuple[str, ...] = ()

    @classmethod
    def read(cls, source: str, path: Path | None, logits: int) -> Vocabulary:
        """``path``: the model's ``tokenizer.json``, if it has one. Raises ExportError if it is not one."""
        if path is None:
            return cls(source, None, logits)
        try:
            text = path.read_text(encoding="utf-8")
            tokenizer, unknown = _known(Tokenizer.from_str(text), text, logits)
        except Exception as error:  # tokenizers raises bare Exception
            raise ExportError(f"{path}: not a tokenizer: {error}") from None
        tokenizer.no_truncation()  # as it was used in training, where lines were cut and filled up
        tokenizer.no_padding()
        added = frozenset(token.content for token in tokenizer.get_added_tokens_decoder().values())
        ids = dict(tokenizer.get_vocab(with_added_tokens=True))
        return cls(source, ids, logits, added, path, tokenizer, unknown)

    @property
    def note(self) -> str:
        """What of the file is left out, for people; empty if nothing is."""
        names = ", ".join(map(repr, self.unknown))
        return f"no logit for special tokens of its tokenizer.json, whose names become text: {names}" if names else ""

    def save(self, place: Path) -> None:
        """Write the file, without what is ``unknown``. There must be one."""
        assert self.path is not None
        if not self.unknown:
            shutil.copyfile(self.path, place)
            return
        text = _without(self.path.read_text(encoding="utf-8"), self.unknown)
        place.write_text(text, encoding="utf-8")


def _known(tokenizer: Tokenizer, text: str, logits: int) -> tuple[Tokenizer, tuple[str, ...]]:
    """A tokenizer without the special tokens that the model has no logit for, and their names. Other tokens stay, for
    text is cut into them."""
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    unknown = tuple(token.content for i, token in added if token.special and i >= logits)
    return (Tokenizer.from_str(_without(text, unknown)) if unknown else tokenizer), unknown


def _without(text: str, names: tuple[str, ...]) -> str:
    """A ``tokenizer.json`` without added tokens of these names."""
    settings = json.loads(text)
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["content"] not in names]
    return json.dumps(settings, ensure_ascii=False)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Match:
    """How a draft's ids stand to its target's.

    ``outputs`` int64 [V_d]: the target's id of each of the draft's logits, -1 for none; ``inputs`` int64 [V_t]: the
    draft's id of each of the target's, None where they are the same; ``note``: what differs, for people;
    ``tokenizer``: the draft's, if it cuts text into other tokens.
    """

    outputs: Ids
    inputs: Ids | None
    target_logits: int
    note: str = ""
    tokenizer: Vocabulary | None = None

    @property
    def columns(self) -> Ids:
        """The draft's ids that it may say."""
        return np.flatnonzero(self.outputs >= 0)

    def save(self, folder: Path, columns: Ids) -> dict[str, FileEntry]:
        """Write the map (``runtime/vocabulary.py``) of a graph that gives the logits of ``columns``; nothing where ids
        are the same. Returns the files by name, for the manifest."""
        outputs = self.outputs[columns]
        if self.tokenizer is None and self.inputs is None and np.array_equal(outputs, np.arange(self.target_logits)):
            return {}
        arrays = {"outputs": outputs} | ({} if self.inputs is None else {"inputs": self.inputs})
        np.savez_compressed(folder / VOCABULARY, **arrays)  # type: ignore[arg-type]  # numpy's stubs confuse names and flags
        if self.tokenizer is not None:
            self.tokenizer.save(folder / TOKENIZER)
        return {name: file_entry(folder / name) for name in (VOCABULARY, TOKENIZER) if (folder / name).is_file()}


def match(target: Vocabulary, draft: Vocabulary) -> Match:
    """How the draft's ids stand to the target's. Raises ExportError unless both cut text into the same tokens.

    Ids may be permuted, padded or fewer, and tokens beside the tokenizer's own (special ones) may be on one side only:
    what the draft lacks it never proposes, and reads as the end of the same text in tokens of its own.
    """
    p, q = target.ids, draft.ids
    if p is None:
        raise ExportError(f"target '{target.source}' has no tokenizer.json; put the target's into its directory")
    if q is None and target.logits != draft.logits:
        raise ExportError(
            f"draft '{draft.source}' has a vocabulary of {draft.logits} and no tokenizer.json, target '{target.source}'"
            f" one of {target.logits}; put the draft's tokenizer.json into its directory"
        )
    if (q is None or p == q) and target.logits == draft.logits:
        note = "" if q is not None else "no tokenizer of its own: its token ids are taken to be the target's"
        return Match(np.arange(draft.logits), None, target.logits, note)
    assert q is not None
    _same_tokens(target, draft, p, q)
    shared = [(q[token], p[token]) for token in p.keys() & q.keys()]
    outputs = np.full(draft.logits, -1, np.int64)
    for theirs, ours in shared:
        if theirs < draft.logits and ours < target.logits:
            outputs[theirs] = ours
    inputs = _inputs(target, draft, p, q)
    same = np.array_equal(inputs, np.arange(target.logits))
    note = f"vocabulary of {draft.logits} in the checkpoint, {int((outputs >= 0).sum())} of them the target's too"
    return Match(outputs, None if same else inputs, target.logits, note)


def _same_tokens(target: Vocabulary, draft: Vocabulary, p: Mapping[str, int], q: Mapping[str, int]) -> None:
    either = target.added | draft.added
    differing = {token for token in p.keys() ^ q.keys() if token not in either}
    if differing:
        token = min(differing, key=lambda t: (p.get(t, len(p)), t))
        where = f"{q.get(token, 'not')} there and {p.get(token, 'not')} here"
        raise ExportError(
            f"draft '{draft.source}' has another vocabulary ({draft.logits}) than target '{target.source}'"
            f" ({target.logits}): token {token!r} is {where}; choose a draft of the same tokenizer"
        )
    if beyond := {t for t in q if t not in either and q[t] >= draft.logits}:
        token = min(beyond, key=lambda t: (q[t], t))
        raise ExportError(
            f"draft '{draft.source}' has {draft.logits} logits, too few for the vocabulary of its tokenizer: token"
            f" {token!r} is {q[token]}; choose a draft whose head knows every token"
        )


def _inputs(target: Vocabulary, draft: Vocabulary, p: Mapping[str, int], q: Mapping[str, int]) -> Ids:
    """The draft's id of each of the target's: the same token; of padding the same id; else a stand-in."""
    inputs = np.arange(target.logits)
    inputs[draft.logits :] = _stand_in(draft, None)
    for token, ours in p.items():
        if ours < target.logits:
            theirs = q.get(token, draft.logits)
            inputs[ours] = theirs if theirs < draft.logits else _stand_in(draft, token)
    return inputs


def _stand_in(draft: Vocabulary, token: str | None) -> int:
    """What the draft reads where it lacks a token: the last of its own for the same text, or its first."""
    if token is None or draft.tokenizer is None:
        return 0
    pieces = [i for i in draft.tokenizer.encode(token, add_special_tokens=False).ids if i < draft.logits]
    return int(pieces[-1]) if pieces else 0
