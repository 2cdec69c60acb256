"""Ids read back: added tokens however they are normalized, and answers behind a run of tokens that say nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_foreign_draft import sentence_piece
from tokenizers import AddedToken, Tokenizer, normalizers

from leadout.runtime import text as text_module
from leadout.runtime.drafters.retokenise import Tokenizers, Transcript
from leadout.runtime.text import Codec, TextStream

NORMALIZERS: dict[str, Any] = {
    "prepend": normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
    "replace": normalizers.Replace(" ", "\u2581"),
    "lowercase": normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(" ", "\u2581")]),
}


def with_added(name: str) -> Tokenizer:
    """As Llama 2's first files: special tokens say that they are ``normalized``; and so does one that is shown."""
    settings = json.loads(sentence_piece(400).to_str())
    settings["added_tokens"] = [{**token, "normalized": True} for token in settings["added_tokens"]]
    tokenizer = Tokenizer.from_str(json.dumps(settings))
    tokenizer.normalizer = NORMALIZERS[name]
    tokenizer.add_special_tokens([AddedToken("<Turn Ends>", normalized=True)])
    tokenizer.add_tokens([AddedToken("<Tool Call>", normalized=True)])
    return Tokenizer.from_str(tokenizer.to_str())  # as it is read from a file


def read(codec: Codec, prompt: list[int], answer: list[int]) -> str:
    """The text of an answer behind a prompt, which is the same token by token."""
    whole, single = TextStream(codec, prompt), TextStream(codec, prompt)
    whole.push(answer)
    for token_id in answer:
        single.push([token_id])
        assert whole.text.startswith(single.text)
    whole.close()
    single.close()
    assert whole.text == single.text
    return whole.text


@pytest.mark.parametrize("name", NORMALIZERS)
def test_an_added_token_is_read_as_it_stands_and_a_special_one_is_not_shown(name: str) -> None:
    codec = Codec.of(with_added(name))
    end, turn, tool, letter = map(codec.tokenizer.token_to_id, ("</s>", "<Turn Ends>", "<Tool Call>", "e"))
    assert [codec.is_silent(i) for i in (end, turn, tool, letter)] == [True, True, False, False]
    assert codec.decode([letter, end, letter, tool, letter, turn]) == "ee<Tool Call>e"
    assert read(codec, [letter], [letter, tool, letter, end]) == "e<Tool Call>e"
    transcript = Transcript(Tokenizers(codec.tokenizer, sentence_piece(400)))
    transcript.take([letter, turn, letter, end])
    assert Codec.of(sentence_piece(400)).decode(transcript.own) == "ee"


def test_a_tokenizer_that_needs_no_other_to_be_read_back_is_kept_once() -> None:
    codec = Codec.of(sentence_piece(400))
    assert codec.decode([codec.tokenizer.token_to_id("e")]) == "e" and codec._speller is codec.tokenizer


def stripping() -> Codec:
    """With a decoder that takes a text's first space for its own."""
    settings = json.loads(sentence_piece(400).to_str())
    settings["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return Codec.of(Tokenizer.from_str(json.dumps(settings)))


def test_tokens_that_say_nothing_do_not_hide_the_text_before_them() -> None:
    codec = stripping()
    space, letter, end, *cycle = map(
        codec.tokenizer.token_to_id, ("\u2581", "e", "</s>", "<0xF0>", "<0x9F>", "<0x9A>", "<0xB2>")
    )
    for count in (0, 1, 7, 8, 9, 40):
        assert read(codec, [letter, *[end] * count], [space, letter]) == " e", "within a text"
        assert read(codec, [*[end] * count], [space, letter]) == "e", "at the beginning of one"
        assert read(codec, [letter, *cycle[:2], *[end] * count], [*cycle[2:], letter]) == "\N{BICYCLE}e"
    assert text_module.behind_text(codec, [letter, *[end] * 9]) == [letter, *[end] * 9]
