"""Answers that a grammar binds: tokenizers of a few letters, and which tokens may follow by other means than ours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from leadout.engines.toy import Law
from leadout.runtime.grammars import Grammars
from leadout.runtime.text import Codec

END = "<end>"


class Letters(Codec):
    """A byte-level tokenizer that has exactly ``tokens``, in that order; ``merges`` say how it cuts a text."""

    def __init__(self, tokens: Sequence[str], merges: Sequence[tuple[str, str]] = ()) -> None:
        self.tokens = tuple(tokens)
        self.tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(merges)))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens([AddedToken(token) for token in tokens if token.startswith("<")])


@functools.cache
def letters(tokens: str, *merges: tuple[str, str]) -> Letters:
    """``tokens`` are told apart by spaces."""
    return Letters(tokens.split(), merges)


def grammars(codec: Codec, size: int | None = None) -> Grammars:
    return Grammars(codec, codec.vocab_size() if size is None else size)


@functools.cache
def untouched(codec: Codec, name: str, text: str, ends: tuple[int, ...], size: int) -> LLMatcher:
    """llguidance itself, before the first token."""
    build: dict[str, Callable[[str], str]] = {
        "regex": LLMatcher.grammar_from_regex,
        "grammar": LLMatcher.grammar_from_lark,
        "json_schema": LLMatcher.grammar_from_json_schema,
    }
    tokenizer = LLTokenizer(codec.tokenizer.to_str(), n_vocab=size, eos_token=list(ends))
    return LLMatcher(tokenizer, build[name](text), log_level=0)


def mask_after(matcher: LLMatcher, text: Sequence[int], size: int) -> np.ndarray | None:
    """Which tokens may follow ``text``, read from its first token on by a matcher of its own; None for no such text."""
    fresh = matcher.deep_copy()
    if fresh.try_consume_tokens(list(text)) < len(text):
        return None
    mask = np.frombuffer(fresh.compute_bitmask(), np.uint8)
    return np.unpackbits(mask, bitorder="little")[:size].astype(bool)


def follows(words: Collection[str], codec: Letters, size: int, end: int) -> Callable[[tuple[int, ...]], np.ndarray]:
    """Which tokens of one letter each may follow a text, where the whole one must be among ``words``: no grammar."""

    def mask(text: tuple[int, ...]) -> np.ndarray:
        said = "".join(codec.tokens[token] for token in text)
        found = np.zeros(size, bool)
        for token, letter in enumerate(codec.tokens):
            found[token] = any(word.startswith(said + letter) for word in words)
        found[end] = said in words
        return found

    return mask


def masked(law: Law, prompt: list[int], mask: Callable[[tuple[int, ...]], np.ndarray], power: float) -> Any:
    """``support_runtime.sharpened`` where only what ``mask`` allows exists."""

    def row(text: tuple[int, ...]) -> np.ndarray:
        weights = law(np.array([*prompt, *text])) ** power
        weights[~mask(text)] = 0.0
        return weights / weights.sum()

    return row


def ended_law(
    row: Callable[[tuple[int, ...]], np.ndarray], count: int, end: int, text: tuple[int, ...] = (), chance: float = 1.0
) -> dict[tuple[int, ...], float]:
    """The law of texts of at most ``count`` tokens drawn one by one from ``row``, the last of them perhaps ``end``."""
    if len(text) == count or text[-1:] == (end,):
        return {text: chance}
    joint: dict[tuple[int, ...], float] = {}
    for token in np.flatnonzero(weights := row(text)):
        longer = (*text, int(token))
        joint |= ended_law(row, count, end, longer, chance * float(weights[token]))
    return joint
