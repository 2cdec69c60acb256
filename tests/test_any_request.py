"""Whatever is asked of whoever drafts, greedy and seeded answers are those of the target alone: requests at random
(with fixed seeds), one after the other by one decoder, which learns from each."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from support_features import BlockLaws, Laws
from support_runtime import collect, parallel, toy_pair
from test_foreign_draft import Copyist, byte_level, sentence_piece

from leadout.engines.toy import ToyEngine
from leadout.runtime.decoder import Decoder
from leadout.runtime.settings import MAX_DRAFT_LENGTH, Settings
from leadout.runtime.vocabulary import VocabularyMap

VOCAB, CONTEXT = 13, 160
DECODERS, CALLS = 15, 20
Making = tuple[Any, Any, VocabularyMap | None]


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


def drawn(rng: random.Random, vocab: int, room: int) -> tuple[list[int], Settings]:
    """A prompt of one token up to nearly the context, often of few different ones, and what is asked of it."""
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
