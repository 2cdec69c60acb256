"""The Python face over toy engines: what goes in, what comes out, what is refused."""

from __future__ import annotations

import ast
import gc
import math
import os
import threading
import time
import typing
import weakref
import zlib
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import leadout
from leadout.bundle import Bundle, Manifest, ModelEntry
from leadout.engines.toy import ToyEngine
from leadout.errors import BundleError, ContextError, EngineError, LeadoutError, UsageError
from leadout.runtime.pair import Pair, Piece, Request, Result, check_vocabulary, sampling_defaults
from leadout.runtime.prompts import is_single
from leadout.runtime.text import Codec

VOCAB, CONTEXT, END = 512, 96, 0
PROMPT = "def f(x):\n"


def law(context: NDArray[np.int64], salt: bytes = b"") -> NDArray[np.float64]:
    """A law that depends on the last two tokens; one token has more than half of the weight."""
    random = np.random.default_rng(zlib.crc32(context[-2:].tobytes()))
    weights = random.random(VOCAB)
    weights[END] = 0.0
    likely = random.integers(1, VOCAB)
    if salt and random.random() < 0.4:
        likely = random.integers(1, VOCAB)
    weights[likely] = VOCAB
    return weights / weights.sum()


def near_law(context: NDArray[np.int64]) -> NDArray[np.float64]:
    """As ``law``, except that its likeliest token differs after 40 % of contexts."""
    return law(context, b"draft")


def entry(**changes: Any) -> ModelEntry:
    values: dict[str, Any] = {
        "directory": "target",
        "architecture": "Toy",
        "precision": "fp32",
        "dialect": "slots",
        "dtype": "float32",
        "vocab_size": VOCAB,
        "max_context": CONTEXT,
        "parameters": 0,
        "cache": (),
        "eos_token_ids": (END,),
        "variants": {},
        "files": {},
    }
    return ModelEntry(**(values | changes))


def manifest(models: dict[str, ModelEntry], sampling: dict[str, float] | None = None) -> Manifest:
    return Manifest(format=1, leadout="0", models=models, files={}, sampling=sampling or {}, provenance={})


def make(
    tokenizer_file: Path, draft: bool = True, sampling: dict[str, float] | None = None, batch_size: int = 16
) -> Pair:
    models = {"target": entry()} | ({"draft": entry()} if draft else {})
    engines = [ToyEngine(each, VOCAB, max_context=CONTEXT) for each in (law, near_law)]
    bundle = Bundle(Path("toy"), manifest(models, sampling))
    codec = Codec(tokenizer_file)
    return Pair(bundle, codec, engines[0], engines[1] if draft else None, exact=True, batch_size=batch_size)


@pytest.fixture
def pair(tokenizer_file: Path) -> Iterator[Pair]:
    with make(tokenizer_file) as made:
        yield made


def test_generate_gives_one_result_for_one_prompt_and_a_list_for_a_list(pair: Pair) -> None:
    single = pair.generate(PROMPT, max_new_tokens=12)
    assert isinstance(single, Result) and len(single.token_ids) == 12
    assert single.text == pair.codec.decode(single.token_ids)
    ids = pair.codec.encode(PROMPT)
    assert pair.generate(ids, max_new_tokens=12).text == single.text
    many = pair.generate([PROMPT, ids, Request(PROMPT, max_new_tokens=3)], max_new_tokens=12)
    assert [len(result.token_ids) for result in many] == [12, 12, 3]
    assert many[0].token_ids == many[1].token_ids == single.token_ids
    assert pair.generate([]) == []


def test_result_says_what_happened(pair: Pair) -> None:
    result = pair.generate(PROMPT, max_new_tokens=40)
    assert (result.finish_reason, result.rule, result.seed, result.draft) == ("length", "greedy", None, "auto")
    assert result.lossless
    assert result.stats.tokens == 40
    drafted = pair.generate(PROMPT, max_new_tokens=40, draft="model", draft_length=3)
    assert 0 < drafted.stats.accepted < drafted.stats.tested, "the toy draft agrees partly"
    assert drafted.token_ids == result.token_ids and drafted.draft == "model"
    drawn = pair.generate(PROMPT, max_new_tokens=5, temperature=1.0)
    assert drawn.rule == "block" and drawn.seed is not None
    assert pair.generate(PROMPT, max_new_tokens=5, temperature=1.0, seed=3).rule == "coupled"


def test_a_drawn_seed_repeats_the_answer(pair: Pair) -> None:
    first = pair.generate(PROMPT, temperature=1.0, draft="ngram", max_new_tokens=20)
    again = pair.generate(PROMPT, temperature=1.0, draft="none", max_new_tokens=20, seed=first.seed)
    assert first.rule == again.rule == "coupled"
    assert first.token_ids == again.token_ids


def test_stream_is_generate_in_pieces(pair: Pair) -> None:
    stream = pair.stream(PROMPT, max_new_tokens=30, stop=["zzzz"], draft_length=4)
    with pytest.raises(UsageError, match="not taken to the end"):
        _ = stream.result
    pieces = list(stream)
    whole = pair.generate(PROMPT, max_new_tokens=30, stop=["zzzz"], draft_length=4)
    assert all(isinstance(piece, Piece) for piece in pieces)
    assert "".join(piece.text for piece in pieces) == whole.text == stream.result.text
    assert [token_id for piece in pieces for token_id in piece.token_ids] == whole.token_ids
    assert sum(len(piece.token_ids) for piece in pieces if piece.from_draft) == stream.result.stats.accepted > 0
    assert {piece.from_draft for piece in pieces} == {True, False}


def test_a_stream_left_early_does_not_harm_the_next_answer(pair: Pair) -> None:
    expected = pair.generate(PROMPT, max_new_tokens=20).token_ids
    stream = pair.stream(PROMPT, max_new_tokens=20)
    next(stream)
    assert pair.generate(PROMPT, max_new_tokens=20).token_ids == expected
    with pytest.raises(UsageError, match="ended by a later one"):
        list(stream)


@pytest.mark.parametrize("draft", ["auto", "model", "suffix", "none"])
def test_a_pair_that_is_dropped_is_gone_with_its_engines(tokenizer_file: Path, draft: str) -> None:
    """At once: the collector of cycles looks when Python has made many objects, not when a device's memory is short."""
    pair = make(tokenizer_file)
    pair.generate([PROMPT, "x"], draft=draft, max_new_tokens=40)
    next(pair.stream(PROMPT, draft=draft, max_new_tokens=40))
    gone = [weakref.ref(each) for each in (pair, pair.decoder, pair.target, pair.draft)]
    was = gc.isenabled()
    gc.disable()
    try:
        del pair
        assert [each() for each in gone] == [None] * 4
    finally:
        if was:
            gc.enable()


def test_threads_that_share_a_pair_wait_for_each_other(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """For whole answers, and in a stream for a round; a pair is closed between two rounds."""
    inside, forward = threading.Lock(), pair.target.forward
    prompts = [PROMPT, PROMPT[:3], "import os"]
    wanted = [pair.generate(prompt, max_new_tokens=20).token_ids for prompt in prompts]

    def alone(*args: Any) -> Any:
        assert inside.acquire(blocking=False), "two threads in one engine"
        time.sleep(0.001)
        try:
            return forward(*args)
        finally:
            inside.release()

    def close() -> None:
        assert not inside.locked(), "closed in the middle of a step"

    def streamed(prompt: str) -> list[int] | str:
        stream = pair.stream(prompt, max_new_tokens=20)
        try:
            return [token_id for piece in stream for token_id in piece.token_ids]
        except (UsageError, EngineError) as error:
            return str(error)

    monkeypatch.setattr(pair.target, "forward", alone)
    monkeypatch.setattr(pair.target, "close", close)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda prompt: pair.generate(prompt, max_new_tokens=20).token_ids, prompts))
        assert found == wanted
        for result, expected in zip(threads.map(streamed, prompts), wanted, strict=True):
            assert result == expected or "ended by a later one" in result
        running = threads.submit(streamed, PROMPT)
        while not inside.locked():
            time.sleep(0)
        pair.close()
        assert running.result() == "this pair is closed: load the bundle anew (leadout.load)"


def test_whoever_asks_a_closed_pair_is_told_what_to_do(pair: Pair) -> None:
    begun, made, several = pair.stream(PROMPT), pair.stream(PROMPT), pair.answers([PROMPT])
    done = pair.generate(PROMPT, max_new_tokens=3)
    next(begun)
    pair.close()
    pair.close()
    pair.forget()
    asked = [lambda: pair.generate(PROMPT), lambda: pair.stream(PROMPT), lambda: pair.answers([PROMPT])]
    asked += [lambda: next(begun), lambda: next(made), lambda: next(several), lambda: pair.settings({})]
    for ask in asked:
        with pytest.raises(EngineError, match=r"^this pair is closed: load the bundle anew \(leadout\.load\)$"):
            ask()
    assert len(done.token_ids) == 3 and pair.token_ids(PROMPT)


def test_a_stream_that_holds_the_turn_is_taken_to_its_end(pair: Pair) -> None:
    prompts = [PROMPT, PROMPT[:3], "import os", PROMPT]
    wanted = [pair.generate(prompt, max_new_tokens=30).token_ids for prompt in prompts]

    def streamed(prompt: str) -> list[int]:
        with pair.turn:
            return [token_id for piece in pair.stream(prompt, max_new_tokens=30) for token_id in piece.token_ids]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(streamed, prompts)) == wanted


@pytest.mark.parametrize("draft", ["model", "ngram", "none"])
def test_a_stop_string_cuts_text_and_ids_alike_for_every_draft(pair: Pair, draft: str) -> None:
    free = pair.generate(PROMPT, max_new_tokens=30, draft="none")
    half = len(free.text) // 2
    ends = (free.text[at : at + 4] for at in range(half, len(free.text) - 4))
    stop = next(each for each in ends if "\ufffd" not in each)  # a byte that is half a character may become one
    result = pair.generate(PROMPT, max_new_tokens=30, draft=draft, stop=stop)
    assert result.finish_reason == "stop"
    assert result.text == free.text[: free.text.index(stop)]
    assert result.token_ids == free.token_ids[: len(result.token_ids)]
    assert stop in pair.codec.decode(result.token_ids)
    assert stop not in pair.codec.decode(result.token_ids[:-1])


def test_a_stop_token_ends_the_answer_and_is_kept(pair: Pair) -> None:
    free = pair.generate(PROMPT, max_new_tokens=30)
    result = pair.generate(PROMPT, max_new_tokens=30, stop_token_ids=[free.token_ids[9]])
    cut = free.token_ids.index(free.token_ids[9]) + 1
    assert result.finish_reason == "stop" and result.token_ids == free.token_ids[:cut]


@pytest.mark.parametrize("draft", ["model", "ngram", "none"])
def test_the_name_of_a_special_token_stops_at_the_token(pair: Pair, draft: str) -> None:
    """It is never in a text, so nothing would stop at <|im_end|> where a model says it and does not end with it."""
    ids = pair.token_ids(PROMPT)
    free = pair.generate(ids, max_new_tokens=30)
    name = pair.codec.tokenizer.id_to_token(free.token_ids[9])
    pair.codec.tokenizer.add_special_tokens([name])
    pair.codec = Codec.of(pair.codec.tokenizer)
    for settings in ({"stop": name}, {"stop": ["zzzz", name], "stop_token_ids": [free.token_ids[9]]}):
        result = pair.generate(ids, max_new_tokens=30, draft=draft, **settings)
        cut = free.token_ids.index(free.token_ids[9]) + 1
        assert result.finish_reason == "stop" and result.token_ids == free.token_ids[:cut]
        assert result.text == pair.codec.decode(free.token_ids[: cut - 1])
    assert pair.settings({"stop": [name, name + "z", "zzzz"]}).stop_token_ids == (free.token_ids[9],)
    assert pair.settings({"stop": ["zzzz"]}).stop_token_ids == ()


def test_the_context_ends_an_answer(pair: Pair) -> None:
    ids = pair.codec.encode(PROMPT)
    result = pair.generate(ids, max_new_tokens=1000)
    assert result.finish_reason == "context"
    assert len(ids) + len(result.token_ids) == CONTEXT
    with pytest.raises(ContextError, match=f"at most {CONTEXT - 1}"):
        pair.generate([5] * CONTEXT)
    with pytest.raises(ContextError):
        pair.stream([5] * CONTEXT)


def test_more_prompts_than_the_batch_run_in_groups_with_the_same_answers(tokenizer_file: Path) -> None:
    prompts = [PROMPT + "x" * n for n in range(5)]
    wide, narrow = make(tokenizer_file), make(tokenizer_file, batch_size=2)
    expected = [result.token_ids for result in wide.generate(prompts, max_new_tokens=9)]
    assert [result.token_ids for result in narrow.generate(prompts, max_new_tokens=9)] == expected
    assert max(rows for rows, _ in narrow.target.calls) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("one", [PROMPT, [5, 6], None, 5, {"a": 1}, {"a"}, Request(PROMPT)])
def test_answers_are_to_a_list_of_prompts(pair: Pair, one: Any) -> None:
    with pytest.raises(UsageError, match="a list of"):
        pair.answers(one)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_who_bans_every_token_is_told_so_and_the_pair_goes_on(pair: Pair, temperature: float) -> None:
    every = dict.fromkeys(range(pair.target.spec.vocab_size), -math.inf)
    for draft in ("none", "model"):
        with pytest.raises(UsageError, match="leave no token"):
            pair.generate(PROMPT, logit_bias=every, draft=draft, temperature=temperature)
    assert pair.generate(PROMPT, max_new_tokens=3).finish_reason == "length"


def test_all_prompts_are_checked_before_any_runs(tokenizer_file: Path) -> None:
    with make(tokenizer_file, batch_size=1) as narrow, pytest.raises(ContextError):
        narrow.generate([PROMPT, [5] * CONTEXT])
    assert narrow.target.calls == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5] * CONTEXT, f"prompts[2]: the prompt has {CONTEXT} tokens"),
        ("", "prompts[2]: a prompt must have at least one token"),
        (leadout.Chat([{"role": "user", "content": "x"}]), "prompts[2]: "),
        (Request(PROMPT, top_p=7), "prompts[2]: top_p must be"),
    ],
)
def test_the_prompt_of_a_list_that_is_refused_is_named(tokenizer_file: Path, prompt: Any, message: str) -> None:
    with make(tokenizer_file, batch_size=1) as narrow:
        for ask in (narrow.generate, narrow.answers):
            with pytest.raises(LeadoutError) as caught:
                ask([PROMPT, [5, 6], prompt, [7]])
            assert str(caught.value).startswith(message)
            with pytest.raises(LeadoutError) as caught:
                ask([prompt])
            assert "prompts[" not in str(caught.value), "it is the only one"
        for wanted in ({"n": 2}, {"draft": "siblings"}):
            with pytest.raises(UsageError, match=r"^prompts\[1\]: "):  # greedy, and the only one of its kind
                narrow.generate([Request(PROMPT, temperature=1.0, draft="model"), [5, 6]], **wanted)
        with pytest.raises(UsageError, match=r"^top_p must be"):  # of all of them
            narrow.generate([PROMPT, [5, 6]], top_p=7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_token": 3}, "did you mean 'max_new_tokens'"),
        ({"zzz": 3}, "unknown setting 'zzz' .known: max_new_tokens"),
        ({"temperature": -1.0}, "temperature must be 0 or a number from 1e-06 to 1000000, not -1.0"),
        ({"top_p": 0.0}, "top_p"),
        ({"rule": "greedy", "temperature": 1.0}, "rule 'greedy' needs temperature 0"),
        ({"draft_length": 99}, "draft_length"),
        ({"draft": "oracle"}, "draft 'oracle' is unknown"),
        ({"self": 1}, "unknown setting 'self'"),
        ({"a\nb": 1}, r"unknown setting 'a\\nb'"),
        ({"stop_token_ids": "ab"}, "stop_token_ids must be a list or tuple of token ids, not 'ab'"),
    ],
)
def test_illegal_settings_are_refused_before_anything_runs(pair: Pair, settings: dict[str, Any], message: str) -> None:
    for call in (pair.generate, pair.stream):
        with pytest.raises(UsageError, match=message):
            call(PROMPT, **settings)
    with pytest.raises(UsageError, match=message):
        pair.generate([Request(PROMPT, **settings)])
    assert pair.target.calls == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "a prompt must have at least one token, not 0"),
        ([[5], []], "a prompt must have at least one token, not 0"),
        (np.array([], int), "a prompt must have at least one token, not 0"),
        ([VOCAB], f"a token id in a prompt must be an integer from 0 to {VOCAB - 1}, not {VOCAB}"),
        ([-1], "a token id in a prompt .*, not -1"),
        ([10**5000], "a token id in a prompt .*, not int"),
        ([None], "a token id in a prompt .*, not None"),
        ([1, "a"], "a token id in a prompt .*, not 'a'"),
        ([[[1]]], r"a token id in a prompt .*, not \[1\]"),
        ([1.7], "a token id in a prompt .*, not 1.7"),
        ([True, False], "a token id in a prompt .*, not True"),
        (np.array([1.5, 2.0]), "a token id in a prompt .*, not 1.5"),
        (np.array([[1, 2], [3, 4]]), "a prompt of token ids must be an array of 1 dimension, not 2"),
        ("a\ud800", r"a prompt must be text of whole characters, not with a lone surrogate \(U\+D800 at 1\)"),
        (os.fsdecode(b"a\xff"), r"a prompt must be .*, not with a byte that is no character \(0xFF at 1\)"),
        (None, "a prompt must be text, token ids, a Chat or a Request, or a list of these, not None"),
        (5, "a prompt must be text, token ids, a Chat or a Request, or a list of these, not 5"),
        (b"abc", "a prompt must be text, .*, not b'abc'"),
        (memoryview(b"abc"), "a prompt must be text, .*, not <memory"),
        ({1: 2}, "a prompt must be text, .*, not {1: 2}"),
        ((token_id for token_id in (1, 2)), "a prompt must be text, .*, not <generator"),
        (["a", None], "a prompt must be text, token ids, a Chat or a Request, not None"),
        ([b"abc"], "a prompt must be text, token ids, a Chat or a Request, not b'abc'"),
    ],
)
def test_prompts_without_meaning_are_refused(pair: Pair, prompt: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pair.generate(prompt)
    with pytest.raises(UsageError, match="prompt"):
        pair.stream(prompt)
    assert pair.target.calls == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("prompt", [["a"], [[1], [2]], [np.array([1, 2])], []])
def test_what_takes_one_prompt_says_so(pair: Pair, prompt: Any) -> None:
    with pytest.raises(UsageError, match=r"stream takes one prompt .*, not a list"):
        pair.stream(prompt)
    with pytest.raises(UsageError, match="a Request takes one prompt, text, token ids or a Chat, not"):
        Request(prompt)


def test_settings_are_names_and_values(pair: Pair) -> None:
    for given in (None, 5, b"x", ["seed"], {"seed"}):
        with pytest.raises(UsageError, match="settings must be a mapping of names to values, not "):
            pair.settings(given)  # type: ignore[arg-type]
    for name in (None, 5, b"seed"):
        with pytest.raises(UsageError, match=f"unknown setting {name!r}"):
            pair.settings({name: 1})  # type: ignore[dict-item]


@pytest.mark.parametrize("prompt", [None, Request("x"), [1.5], "\ud800", b"abc"])
def test_a_request_is_refused_where_it_is_made(prompt: Any) -> None:
    with pytest.raises(UsageError, match="prompt"):
        Request(prompt)


def test_ids_of_any_kind_are_a_prompt(pair: Pair) -> None:
    expected = pair.generate([3, 4], max_new_tokens=5).token_ids
    for prompt in (np.array([3, 4]), np.array([3, 4], np.uint16), (np.int32(3), 4), range(3, 5), array("i", [3, 4])):
        assert pair.generate(prompt, max_new_tokens=np.int64(5)).token_ids == expected
        assert pair.generate(Request(prompt), max_new_tokens=5).token_ids == expected
        assert pair.token_ids(prompt) == pair.token_ids(Request(prompt, seed=3)) == [3, 4]
        assert [each.token_ids for each in pair.generate([prompt, [3, 4]], max_new_tokens=5)] == [expected] * 2
    assert len(pair.generate([3, 4], n=np.int64(2), temperature=np.float32(1), max_new_tokens=2)) == 2


def test_a_limit_may_be_as_high_as_one_likes(pair: Pair) -> None:
    assert pair.generate(PROMPT, max_new_tokens=10**400).finish_reason == "context"
    assert len(pair.generate(PROMPT, max_new_tokens=2, min_new_tokens=9).token_ids) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"batch_size": value}, "batch_size must be an integer of at least 1, not") for value in (1.5, "2", None)),
        *(({"threads": value}, "threads must be an integer from 1 to 1024, not") for value in (1.5, "2", 10**12)),
        ({"draft_threads": True}, "draft_threads must be an integer from 1 to 1024, not True"),
        ({"provider": ["cpu"]}, r"provider \['cpu'\] is unknown \(one of: cpu, cuda, "),
        ({"draft_provider": ""}, r"draft_provider '' is unknown \(one of: cpu, cuda, "),
        ({"variant": ["gqa"]}, r"variant must be 'auto' or the name of a graph of the bundle, not \['gqa'\]"),
        ({"exact": "no"}, "exact must be True or False, not 'no'"),
        *(({"bundle": value}, "bundle must be the path of a directory") for value in (None, 5, b"x", "a\0b", "\ud800")),
    ],
)
def test_what_a_pair_is_loaded_with_is_checked_first(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        leadout.load(**({"bundle": "nowhere"} | options))


def test_a_path_that_is_too_long_holds_no_bundle() -> None:
    with pytest.raises(BundleError, match="no bundle at"):
        leadout.load("a" * 5000)


def test_without_a_draft_model_the_free_ones_draft(tokenizer_file: Path) -> None:
    with make(tokenizer_file, draft=False) as single:
        assert single.generate(PROMPT, max_new_tokens=4).draft == "auto"
        with pytest.raises(UsageError, match=r"\(possible: auto, suffix, siblings, recycling, ngram, none\)"):
            single.generate(PROMPT, draft="model")


def test_the_bundle_s_sampling_defaults_apply_unless_given(tokenizer_file: Path) -> None:
    with make(tokenizer_file, sampling={"temperature": 0.8, "top_k": 5.0}) as sampling:
        assert sampling.settings({}).temperature == 0.8
        assert sampling.settings({}).top_k == 5 and isinstance(sampling.settings({}).top_k, int)
        assert sampling.generate(PROMPT, max_new_tokens=3).rule == "block"
        assert sampling.generate(PROMPT, max_new_tokens=3, temperature=0.0).rule == "greedy"
    with pytest.raises(BundleError, match="unknown option 'temprature'"):
        sampling_defaults(manifest({}, {"temprature": 1.0}))


def test_different_vocabularies_are_refused(tokenizer_file: Path) -> None:
    codec = Codec(tokenizer_file)
    with pytest.raises(BundleError, match=r"target 512, draft 600"):
        check_vocabulary(Bundle(Path(), manifest({"target": entry(), "draft": entry(vocab_size=600)})), codec)
    with pytest.raises(BundleError, match="512 ids, the target only 500"):
        check_vocabulary(Bundle(Path(), manifest({"target": entry(vocab_size=500)})), codec)


def test_what_counts_as_one_prompt() -> None:
    assert is_single("text") and is_single([1, 2]) and is_single(Request("x")) and is_single((np.int64(3),))
    assert is_single(np.array([1, 2])) and is_single(np.array([], int)) and not is_single([np.array([1, 2])])
    assert not is_single(["text"]) and not is_single([[1]]) and not is_single([]) and not is_single([Request("x")])


def test_the_face_is_exactly_what_it_says() -> None:
    for name in leadout.__all__:
        assert getattr(leadout, name) is not None
    assert set(dir(leadout)) == set(leadout.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = leadout.nothing


def test_what_a_caller_is_given_or_gives_has_a_public_name() -> None:
    """An application annotates what it keeps of a call."""
    met = {typing.get_type_hints(Result)["stats"], typing.get_type_hints(Pair.stream)["prompt"]}
    met |= {typing.get_type_hints(getattr(Pair, name))["return"] for name in ("stream", "settings")}
    assert met <= {getattr(leadout, name) for name in leadout.__all__}


def test_types_allow_what_may_be_given_and_no_misspelt_name(root: Path) -> None:
    """An array is a prompt to a type checker, too, and a module with a ``__getattr__`` would have every name."""
    ids = NDArray[np.integer[Any]]
    allowed = [typing.get_type_hints(each)["prompt"] for each in typing.get_overloads(Pair.generate)]
    assert sum(ids in typing.get_args(each) for each in allowed) == 2  # with n and without
    for each in (Pair.stream, Pair.token_ids, Request.__init__):
        assert ids in typing.get_args(typing.get_type_hints(each)["prompt"])
    known = ast.parse((root / "__init__.py").read_text(encoding="utf-8")).body
    assert "__getattr__" not in [each.name for each in known if isinstance(each, ast.FunctionDef)]
