"""Structured answers through the Python face, the command line and prompt files, over toy engines."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_api import CONTEXT, END, PROMPT, VOCAB, entry, manifest
from test_foreign_draft import TEXT, Copyist, byte_level
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from leadout.bundle import Bundle
from leadout.engines.toy import ToyEngine, mixed_law, table_law
from leadout.errors import UsageError
from leadout.runtime.decoder import Decoder
from leadout.runtime.grammars import Grammars
from leadout.runtime.pair import Pair, Request
from leadout.runtime.settings import Settings
from leadout.runtime.text import Codec
from leadout.scripts.options import given, read_prompts

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "flags": {"type": "array", "items": {"enum": ["read", "write"]}, "maxItems": 2},
    },
    "required": ["name", "count", "flags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}]


@pytest.fixture
def pair(tokenizer_file: Path) -> Iterator[Pair]:
    """A pair whose every token has a chance, the end, too."""
    target = table_law(VOCAB, seed=3, order=3, sharpness=2.0)
    draft = mixed_law(target, table_law(VOCAB, seed=4, order=3, sharpness=2.0), 0.2)
    engines = [ToyEngine(law, VOCAB, max_context=CONTEXT) for law in (target, draft)]
    bundle = Bundle(Path("toy"), manifest({"target": entry(), "draft": entry()}))
    with Pair(bundle, Codec(tokenizer_file), *engines, exact=True, batch_size=4) as made:
        yield made


def check(text: str) -> None:
    """That it is what SCHEMA says."""
    row = json.loads(text)
    assert list(row) == ["name", "count", "flags"]
    assert isinstance(row["name"], str) and len(row["name"]) <= 6
    assert type(row["count"]) is int and 0 <= row["count"] <= 99
    assert len(row["flags"]) <= 2 and set(row["flags"]) <= {"read", "write"}


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "coupled"])
def test_answers_are_json_of_the_schema_and_the_same_whoever_drafts(pair: Pair, sampling: dict[str, Any]) -> None:
    for prompt in (PROMPT, "a = ", "import json\n"):
        plain = pair.generate(prompt, json_schema=SCHEMA, draft="none", **sampling)
        check(plain.text)
        assert plain.finish_reason == "stop" and plain.token_ids[-1] == END and plain.lossless
        for draft in ("auto", "model", "suffix", "recycling", "ngram"):
            result = pair.generate(prompt, json_schema=json.dumps(SCHEMA), draft=draft, **sampling)
            assert (result.text, result.token_ids, result.rule) == (plain.text, plain.token_ids, plain.rule), draft


def test_several_answers_batches_and_streams(pair: Pair) -> None:
    for result in pair.generate(PROMPT, n=6, temperature=1.0, json_schema=SCHEMA):
        check(result.text)
    prompts = [
        Request(PROMPT, json_schema=SCHEMA),
        "a = 1",
        Request("b", regex="(yes|no)!{3}"),
        Request(PROMPT, seed=1),
    ]
    found = pair.generate(prompts, temperature=0.7, seed=2, max_new_tokens=40)
    check(found[0].text)
    assert re.fullmatch("(yes|no)!{3}", found[2].text)
    for prompt, result in zip(prompts, found, strict=True):
        assert pair.generate(prompt, temperature=0.7, seed=2, max_new_tokens=40, draft="none").text == result.text
    pieces = list(pair.stream(PROMPT, json_schema=SCHEMA, temperature=0.0))
    check("".join(piece.text for piece in pieces))


def test_a_cut_answer_begins_one_and_a_stop_string_cuts(pair: Pair) -> None:
    whole = pair.generate(PROMPT, json_schema=SCHEMA, temperature=0.0)
    cut = pair.generate(PROMPT, json_schema=SCHEMA, temperature=0.0, max_new_tokens=9)
    assert cut.finish_reason == "length" and whole.token_ids[:9] == cut.token_ids
    assert whole.text.startswith(cut.text.rstrip("\ufffd")), "it may be cut within a character"
    stopped = pair.generate(PROMPT, json_schema=SCHEMA, temperature=0.0, stop=['"count"'])
    assert stopped.finish_reason == "stop" and whole.text.startswith(stopped.text + '"count"')


@pytest.mark.parametrize("settings", [{}, {"stop": ["b c"]}, {"draft": "suffix", "temperature": 1.0}])
def test_a_space_that_an_answer_must_begin_with_is_given_out(settings: dict[str, Any], tmp_path: Path) -> None:
    """Whether the prompt has text or not: a decoder as Llama 2's takes the first space of a text for its own."""
    tokens = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abc", "\u2581a", "\u2581b"]
    merges = [("\u2581", letter) for letter in "ab"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, byte_fallback=True))
    tokenizer.add_special_tokens(tokens[:2])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    spaces = decoders.Replace("\u2581", " ")
    tokenizer.decoder = decoders.Sequence(
        [spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", left=1, right=0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    size = len(tokens)
    engine = ToyEngine(table_law(size, seed=3, order=3, sharpness=2.0), size, max_context=CONTEXT)
    found = dataclasses.replace(entry(), vocab_size=size, eos_token_ids=(1,))
    bundle = Bundle(Path("toy"), manifest({"target": found}))
    with Pair(bundle, Codec(tmp_path / "tokenizer.json"), engine, None, exact=True, batch_size=4) as pair:
        for prompt in ([0], [0, 1] * 8, "a", [0, 258]):
            for spelt in (" [ab]{3} c", "  a", "[ab]{3}"):
                stream = pair.stream(prompt, regex=spelt, **settings)
                text = "".join(piece.text for piece in stream)
                whole = spelt if "stop" not in settings else spelt.replace("b]{3} c", "b]{2}(a c|)")
                assert re.fullmatch(whole, text) and stream.result.text == text
                batch = pair.generate([prompt, prompt], regex=spelt, draft="none")
                assert all(re.fullmatch(spelt, result.text) for result in batch)


def test_a_conversation_goes_on_and_forgets(pair: Pair) -> None:
    ids, compiled = pair.codec.encode(PROMPT), pair.grammars
    for turn in range(3):
        result = pair.generate(ids, regex="[a-z]{4}!", temperature=1.0, seed=turn)
        assert re.fullmatch("[a-z]{4}!", result.text)
        ids = [*ids, *result.token_ids[:-1], *pair.codec.encode("\nx")]
    assert len(compiled._kept) == 1
    pair.forget()
    assert len(compiled._kept) == 0 and pair.generate(ids, regex="[a-z]{4}!").text


def test_what_a_bundle_cannot_take_is_refused_before_anything_runs(pair: Pair) -> None:
    for settings, message in (
        ({"regex": "("}, "regex cannot be compiled"),
        ({"json_schema": {"type": "strung"}}, "json_schema cannot be compiled: Invalid type: strung"),
        ({"regex": "a", "min_new_tokens": 1}, "min_new_tokens and regex exclude each other"),
        ({"regexp": "a"}, "did you mean 'regex'"),
    ):
        with pytest.raises(UsageError, match=message):
            pair.settings(settings)
        with pytest.raises(UsageError, match=message):
            pair.stream(PROMPT, **settings)
    with pytest.raises(UsageError, match="json_schema and regex exclude each other"):
        pair.generate([Request(PROMPT, regex="a")], json_schema=SCHEMA)
    assert pair.target.calls == []  # type: ignore[attr-defined]


def test_options_name_files_and_lines_carry_objects(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA), encoding="utf-8")
    (tmp_path / "words.lark").write_text('start: "a"', encoding="utf-8")
    assert given({"json_schema": str(tmp_path / "schema.json")}) == {"json_schema": json.dumps(SCHEMA)}
    assert given({"json_schema": ' {"type": "null"}'}) == {"json_schema": ' {"type": "null"}'}
    assert given({"grammar": str(tmp_path / "words.lark"), "regex": "a"}) == {"grammar": 'start: "a"', "regex": "a"}
    for name in ("json_schema", "grammar"):
        with pytest.raises(UsageError, match="cannot read"):
            given({name: str(tmp_path / "nowhere")})
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "x", "json_schema": SCHEMA}) + "\n", encoding="utf-8")
    assert read_prompts(str(path))[0].settings == {"json_schema": SCHEMA}
    with pytest.raises(UsageError, match="'json_schema' is a setting; bench takes settings as options"):
        read_prompts(str(path), "bench")


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 4}, {"temperature": 1.0, "rule": "rejection"}])
def test_a_draft_with_another_tokenizer_is_bound_and_of_use(sampling: dict[str, Any]) -> None:
    target, draft, text = byte_level(420), byte_level(600, use_regex=False), TEXT[:400]
    pair, codec = Copyist(target, draft, text), Codec.__new__(Codec)
    codec.tokenizer, found, accepted = target, {}, 0
    for kind in ("none", "model"):
        settings = Settings(max_new_tokens=60, draft=kind, draft_length=4, regex="[A-Za-z ,]{20,50}[,.]", **sampling)
        decoder = Decoder(*pair.engines, vocabulary=pair.vocabulary, grammars=Grammars(codec, 420))
        for start in (20, 47):
            events = list(decoder.decode([(target.encode(text[:start]).ids, settings)], eos_token_ids=[0]))
            tokens = [token for event in events for token, _ in event.tokens]
            assert re.fullmatch("[A-Za-z ,]{20,50}[,.]", target.decode(tokens)) and tokens[-1] == 0
            found.setdefault(kind, []).append(tokens)
            assert events[-1].stats is not None
            accepted += events[-1].stats.accepted
    assert accepted > 5 and (sampling.get("rule") or found["none"] == found["model"])
