"""Whatever is asked of whoever drafts, greedy and seeded answers are those of the target alone: requests at random
(with fixed seeds), one after the other by one decoder, which learns from each."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from support_ahead import come_as_far_as
from support_features import BlockLaws, Laws
from support_grammar import END, grammars, letters
from support_runtime import collect, parallel, toy_pair
from test_foreign_draft import Copyist, byte_level, sentence_piece

from leadout.engines.toy import ToyEngine
from leadout.runtime.decoder import Decoder
from leadout.runtime.grammars import Grammars
from leadout.runtime.settings import MAX_DRAFT_LENGTH, Settings
from leadout.runtime.text import Codec
from leadout.runtime.vocabulary import VocabularyMap

VOCAB, CONTEXT = 13, 160
DECODERS, CALLS = 15, 20
LETTERS = letters(f"{END} a b c d e f g h i ab gh cab", ("a", "b"), ("g", "h"), ("c", "ab"))  # VOCAB of them
Making = tuple[Any, Any, VocabularyMap | None]
OF_LETTERS: list[dict[str, Any]] = [
    {"regex": "[a-f]{3,9}(gh|hg)i{2,4}"},
    {"regex": "(cab|abc)+d(ef|gh){2}[g-i]*"},
    {"regex": "(a|ab)(c|bcd)*d{0,3}"},
    {"regex": "abcdefghi(ab|gh)"},
    {"grammar": 'start: "a" part "i"\npart: /[b-e]+/ | "g" part "h"'},
    {"grammar": "start: /[ab]+/ <end>"},
]
OF_WORDS: list[dict[str, Any]] = [
    {"regex": "[A-Za-z ,]{20,50}[,.]"},
    {"regex": "( become a bundle\\.)+"},
    {"regex": "(\u00e9|\u4e16|\U0001f642| )+x"},
    {"json_schema": {"type": "array", "items": {"enum": ["what is", 12, None]}, "minItems": 1}},
    {"json_schema": {"type": "object", "properties": {"is": {"type": "string"}}, "required": ["is"]}},
    {"grammar": 'start: (WORD " ")+ "."\nWORD: /[a-z]+/'},
]


def a_model() -> Making:
    return *toy_pair(VOCAB, order=3, context=CONTEXT), None


def one_of_a_short_context() -> Making:
    target, draft = toy_pair(VOCAB, order=3, context=CONTEXT)
    return target, ToyEngine(draft.law, VOCAB, max_context=24), None


def one_with_masks() -> Making:
    target, draft = toy_pair(VOCAB, order=3, context=CONTEXT)
    return target, ToyEngine(parallel(draft.law, VOCAB), VOCAB, max_context=CONTEXT, mask_token=VOCAB), None


def a_head() -> Making:
    laws = Laws(VOCAB)
    return laws.target(CONTEXT), laws.head(CONTEXT), None


def a_head_of_a_short_context() -> Making:
    laws = Laws(VOCAB)
    return laws.target(CONTEXT), laws.head(40), None


def a_head_for_blocks() -> Making:
    laws = BlockLaws(VOCAB)
    return laws.target(CONTEXT), laws.head(CONTEXT), None


def another_tokenizer() -> Making:
    pair = Copyist(sentence_piece(400), byte_level(330), "what is missing of a checkpoint cannot become a bundle. " * 3)
    return *pair.engines, pair.vocabulary


def drawn(
    rng: random.Random, vocab: int, room: int, forms: list[dict[str, Any]] | None = None
) -> tuple[list[int], Settings]:
    """A prompt of one token up to nearly the context, often of few different ones, and what is asked of it, one of
    ``forms`` among it."""
    length = rng.choice((1, 2, rng.randint(1, 20), rng.randint(30, 70), rng.randint(1, room - 2)))
    some = [rng.randrange(vocab) for _ in range(rng.choice((1, 4, vocab)))]
    chosen: dict[str, Any] = {
        "draft": rng.choice(("auto", "auto", "model", "model", "suffix", "recycling", "ngram")),
        "draft_length": rng.choice(("auto", rng.randint(0, MAX_DRAFT_LENGTH))),
        "max_new_tokens": rng.choice((1, 2, rng.randint(1, 40))),
    }
    if rng.random() < 0.5:
        chosen |= {"temperature": rng.choice((0.3, 1.0, 1.7)), "rule": "coupled", "seed": rng.randrange(99)}
        chosen |= rng.choice(({}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}))
    chosen |= rng.choice(({}, {}, {"repetition_penalty": 1.4}, {"frequency_penalty": 0.7}, {"logit_bias": {3: 2.0}}))
    chosen |= rng.choice(({}, {}, {"stop_token_ids": (5,)}, {"stop_token_ids": (2, 7), "min_new_tokens": 1}))
    if forms:
        chosen |= {"min_new_tokens": 0} | rng.choice(forms)
    return [rng.choice(some) for _ in range(length)], Settings(**chosen)


@pytest.mark.parametrize(
    "drafting",
    [
        a_model,
        one_of_a_short_context,
        one_with_masks,
        a_head,
        a_head_of_a_short_context,
        a_head_for_blocks,
        another_tokenizer,
    ],
)
def test_answers_are_the_target_s_own(drafting: Any) -> None:
    rng = random.Random(drafting.__name__)
    alone = Decoder(drafting()[0], None)
    for _ in range(DECODERS):
        target, draft, vocabulary = drafting()
        made = Decoder(target, draft, vocabulary=vocabulary)
        for _ in range(CALLS):
            requests = [drawn(rng, target.spec.vocab_size, CONTEXT) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
            texts, last = collect(made.decode(requests, eos_token_ids=(0,)), len(requests))
            for i, (prompt, settings) in enumerate(requests):
                plainly = dataclasses.replace(settings, draft="none")
                (wanted,), ended = collect(alone.decode([(prompt, plainly)], eos_token_ids=(0,)), 1)
                assert texts[i] == wanted, (prompt, settings)
                assert last[i].finish_reason == ended[0].finish_reason
            if rng.random() < 0.2:
                made.forget()


@pytest.mark.parametrize("ends", [(0,), ()], ids=["", "without an end"])
@pytest.mark.parametrize("drafting", [a_model, one_of_a_short_context, another_tokenizer])
def test_answers_of_a_form_are_the_target_s_own(drafting: Any, ends: tuple[int, ...], monkeypatch: Any) -> None:
    """A draft model's with another tokenizer too, and those of one that drafts ahead, however far that comes."""
    rng = random.Random(f"{drafting.__name__} {ends}")
    accepted = 0
    for _ in range(DECODERS // 3):
        target, draft, vocabulary = drafting()
        foreign, size = drafting is another_tokenizer, target.spec.vocab_size
        forms, codec = (OF_WORDS, Codec.of(sentence_piece(400))) if foreign else (OF_LETTERS, LETTERS)
        compiled: Grammars = grammars(codec, size)
        alone = Decoder(target, None, grammars=compiled)
        made = Decoder(target, draft, vocabulary=vocabulary, grammars=compiled, draft_ahead=not foreign)
        for _ in range(CALLS // 2):
            come_as_far_as(monkeypatch, rng.choice((None, 0, 1, 2, 3, 5, 8)))
            requests = [drawn(rng, size, CONTEXT, forms) for _ in range(rng.choice((1, 1, 1, 3)))]
            texts, last = collect(made.decode(requests, eos_token_ids=ends), len(requests))
            accepted += sum(each.stats.accepted for each in last.values())
            for i, (prompt, settings) in enumerate(requests):
                plainly = dataclasses.replace(settings, draft="none")
                (wanted,), ended = collect(alone.decode([(prompt, plainly)], eos_token_ids=ends), 1)
                assert (texts[i], last[i].finish_reason) == (wanted, ended[0].finish_reason), (prompt, settings)
            if rng.random() < 0.2:
                made.forget()
    assert accepted > 20
