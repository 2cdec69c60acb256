"""Keeps one text in the tokens of two tokenizers: it grows in the target's, and is cut anew into the draft's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers import Tokenizer

from ..text import CONTEXT_IDS, Codec, Spelling

_TAIL = 256  # characters that are cut anew each round, at least; what is before them is settled
_ANCHOR = 48  # characters of context, at least, from which a tokenizer cuts as in the middle of a text
_WORD = re.compile(r"(?<=\S)(?=\s)")  # where hardly any tokenizer joins what is left and right of it


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of target and draft, with a Codec of each that is made once for all texts."""

    target: Tokenizer
    draft: Tokenizer

    @cached_property
    def said(self) -> tuple[Codec, Codec]:
        """The codecs of target and draft."""
        return Codec.of(self.target), Codec.of(self.draft)


class Transcript:
    """One request's text. ``own`` are the draft's ids of it, its opening ones (a BOS token) first; of special tokens
    of the target there is no text."""

    def __init__(self, tokenizers: Tokenizers) -> None:
        self._tokenizers = tokenizers
        self._spelling = Spelling(tokenizers.said[0], ())
        self._settled = opening(tokenizers.draft)
        self._seen = 0
        self._anchor = self._tail = ""
        self.own = list(self._settled)

    def take(self, tokens: Sequence[int]) -> None:
        """The text is now ``tokens`` (the target's ids), which begin with what they were before."""
        if len(tokens) == self._seen:
            return
        for token in tokens[self._seen :]:
            self._tail += self._spelling.next(token)
        self._seen = len(tokens)
        if len(self._tail) > 2 * _TAIL:
            self._settle()
        self.own = self._settled + continuation(self._tokenizers.draft, self._anchor, self._tail)

    @property
    def whole(self) -> bool:
        """Whether no character is unfinished."""
        return not self._spelling.waits

    @property
    def settled(self) -> int:
        """How many of ``own``, from the first on, will stay."""
        return len(self._settled)

    def drafted(self, own: Sequence[int]) -> list[int]:
        """The target's tokens of what the draft wrote in ``own`` ids after the text; an unfinished character is left
        out (2502.05202, algorithm 2: with look-back, for tokens depend on what is before them)."""
        before = [*self.own[-CONTEXT_IDS:]]
        decode = self._tokenizers.said[1].decode
        new = decode([*before, *own])[len(decode(before)) :].rstrip("\ufffd")
        return continuation(self._tokenizers.target, _anchor(self._anchor + self._tail), new) if new else []

    def _settle(self) -> None:
        """Leave a tail of _TAIL characters and a bit, from the start of a word."""
        if (cut := _last_word(self._tail, len(self._tail) - _TAIL)) > 0:
            self._settled = self._settled + continuation(self._tokenizers.draft, self._anchor, self._tail[:cut])
            self._anchor, self._tail = _anchor(self._anchor + self._tail[:cut]), self._tail[cut:]


def continuation(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """The ids of ``text`` where it follows ``before``; by itself, where a token would reach across."""
    head: list[int] = tokenizer.encode(before, add_special_tokens=False).ids if before else []
    whole: list[int] = tokenizer.encode(before + text, add_special_tokens=False).ids
    if whole[: len(head)] == head:
        return whole[len(head) :]
    alone: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return alone


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that stand for no text."""
    return frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def opening(tokenizer: Tokenizer) -> list[int]:
    """The special ids that the tokenizer puts before a text."""
    encoding, special = tokenizer.encode("a"), special_ids(tokenizer)
    first = next((i for i, token in enumerate(encoding.ids) if token not in special), 0)
    return list(encoding.ids[:first])


def _last_word(text: str, limit: int) -> int:
    """The last place up to ``limit`` where a word starts, with the space before it; 0 for none."""
    return max((found.start() for found in _WORD.finditer(text, 0, max(limit, 0))), default=0)


def _anchor(text: str) -> str:
    return text[_last_word(text, len(text) - _ANCHOR) :]
