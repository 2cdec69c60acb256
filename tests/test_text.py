"""Text as it grows: characters split over tokens, stop strings over rounds, special tokens never shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_foreign_draft import sentence_piece
from test_mutants import Mutant, must_die
from tokenizers import Tokenizer

from leadout.errors import BundleError
from leadout.export.checkpoints.pairing import Vocabulary
from leadout.runtime import text as text_module
from leadout.runtime.text import Codec, Spelling, TextStream

END = 0


@pytest.fixture(scope="module")
def codec(tokenizer_file: Path) -> Codec:
    return Codec(tokenizer_file)


def in_rounds(ids: list[int], sizes: list[int]) -> list[list[int]]:
    rounds, at = [], 0
    for size in sizes * (len(ids) + 1):
        if at >= len(ids):
            break
        rounds.append(ids[at : at + size])
        at += size
    return rounds


def written(codec: Codec, prompt: str, rounds: list[list[int]], **options: object) -> tuple[list[int], str, list[str]]:
    """Feed rounds as the decoder does; the kept ids, the final text, and what was visible after each round."""
    stream = TextStream(codec, codec.encode(prompt), **options)  # type: ignore[arg-type]
    kept: list[int] = []
    shown = []
    for new in rounds:
        keep = stream.push(new)
        kept += new if keep is None else new[:keep]
        shown.append(stream.text[: stream.visible])
        if keep is not None:
            break
    stream.close()
    return kept, stream.text[: stream.visible], shown


@given(ids=st.lists(st.integers(1, 511), min_size=1, max_size=40), sizes=st.lists(st.integers(1, 5), min_size=1))
def test_any_ids_in_any_rounds_give_the_decoded_text(codec: Codec, ids: list[int], sizes: list[int]) -> None:
    kept, text, shown = written(codec, "x =", in_rounds(ids, sizes))
    assert kept == ids
    assert text == codec.decode(ids)
    for earlier, later in zip(shown, [*shown[1:], text], strict=True):
        assert later.startswith(earlier)


def test_a_character_split_over_tokens_is_shown_whole(codec: Codec) -> None:
    ids = codec.encode("a\N{BICYCLE}b")
    stream = TextStream(codec, [])
    seen = []
    for token_id in ids:
        stream.push([token_id])
        seen.append(stream.text)
    assert stream.text == "a\N{BICYCLE}b"
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in seen)
    assert len(ids) > 3


def test_a_character_that_stays_unfinished_is_shown_as_replacement(codec: Codec) -> None:
    ids = codec.encode("a\N{BICYCLE}")[:-1]
    _, text, _ = written(codec, "", [ids])
    assert text == codec.decode(ids) == "a\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("sizes", [[1], [2], [3], [2, 5], [40]])
def test_a_stop_string_over_rounds_cuts_ids_and_text_at_one_place(codec: Codec, sizes: list[int]) -> None:
    ids = codec.encode("def f(self):\n    return 1\n\n\ndef g(self):\n")
    kept, text, shown = written(codec, "", in_rounds(ids, sizes), stop=["\n\n\ndef"])
    assert text == "def f(self):\n    return 1"
    assert codec.decode(kept).startswith(text + "\n\n\ndef")
    assert "\n\n\ndef" not in codec.decode(kept[:-1]), "ids end with the token that completed the stop string"
    assert all(text.startswith(part) for part in shown), "nothing of the stop string was shown"


def test_what_might_become_a_stop_string_is_held_and_then_let_go(codec: Codec) -> None:
    stream = TextStream(codec, [], ["END"])
    stream.push(codec.encode("x E"))
    assert stream.text[: stream.visible] == "x "
    stream.push(codec.encode("N"))
    assert stream.text[: stream.visible] == "x "
    stream.push(codec.encode("C"))
    assert stream.text[: stream.visible] == "x ENC"
    stream.push(codec.encode("E"))
    stream.close()
    assert stream.text[: stream.visible] == "x ENCE"


def test_a_stop_string_of_any_length_is_looked_for_as_soon(codec: Codec) -> None:
    stream = TextStream(codec, [], ["x END" * 1_000_000])
    stream.push(codec.encode("x END or x E"))
    assert stream.text[: stream.visible] == "x END or "


@given(text=st.text("ab", max_size=12), stop=st.text("ab", min_size=1, max_size=8))
def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string(text: str, stop: str) -> None:
    ends = [n for n in range(len(stop)) if text.endswith(stop[:n])]
    assert text_module.overlap(text, stop) == ends[-1]


def test_few_places_of_a_text_are_looked_at_for_a_long_stop_string() -> None:
    class Stop(str):
        looks = 0

        def startswith(self, *given: Any) -> bool:
            Stop.looks += 1
            return super().startswith(*given)

    text = "abc" * 3000
    assert text_module.overlap(text + "x", Stop("x" + text)) == 1
    assert text_module.overlap(text, Stop("x" + text)) == 0 and Stop.looks == 1


def test_the_earliest_of_several_stop_strings_counts(codec: Codec) -> None:
    _, text, _ = written(codec, "", [codec.encode("one two three")], stop=["three", "two", "e t"])
    assert text == "on"


def test_a_stop_string_within_the_minimum_does_not_count(codec: Codec) -> None:
    ids = codec.encode(";a;b;c")
    _, text, _ = written(codec, "", [ids], stop=[";"], min_tokens=len(codec.encode(";a;")))
    assert text == ";a;b"


def test_a_stop_string_in_the_prompt_does_not_count(codec: Codec) -> None:
    kept, text, _ = written(codec, "stop", [codec.encode(" here")], stop=["stop"])
    assert text == " here" and codec.decode(kept) == " here"


WILD = st.lists(st.sampled_from("a \ufffd🙂é\n'x"), max_size=12).map("".join)


@given(text=WILD, cut=st.integers(0, 40), sizes=st.lists(st.integers(1, 4), min_size=1), kept=st.integers(0, 40))
def test_an_answer_never_holds_what_the_prompt_said(
    codec: Codec, text: str, cut: int, sizes: list[int], kept: int
) -> None:
    """Wherever a prompt ends: behind U+FFFD, or within a character, which then is the answer's that finishes it."""
    ids = codec.encode(text + "🙂é\ufffd.")
    cut = min(cut, len(ids) - 1)
    prompt, answer = ids[:cut], ids[cut:]
    whole, before = (codec.decode(each[-(8 + len(answer)) :] if each is ids else each[-8:]) for each in (ids, prompt))
    stream = TextStream(codec, prompt)
    shown = ""
    for new in in_rounds(answer, sizes):
        stream.push(new)
        assert stream.text[: stream.visible].startswith(shown)
        shown = stream.text[: stream.visible]
    stream.keep(kept)
    stream.push(answer[kept:])
    assert stream.text == shown, "a round that was cut and came again"
    stream.close()
    said = whole[: len(whole) - len(stream.text)]
    assert said + stream.text == whole and before.startswith(said) and not before[len(said) :].strip("\ufffd")
    assert all(end <= len(stream.text) for end in stream.ends) and stream.ends[-1] == len(stream.text)


def test_a_stop_string_and_a_replacement_character_in_the_prompt_do_not_count(codec: Codec) -> None:
    prompt = codec.encode("text = 'caf\ufffd")
    stream = TextStream(codec, prompt, ("text", "caf"))
    assert stream.push(codec.encode("x = 1")) is None
    stream.close()
    assert stream.text == "x = 1"
    emoji = codec.encode("'🙂")
    stream = TextStream(codec, emoji[:-1])
    stream.push([emoji[-1], *codec.encode("!")])
    assert stream.text == "🙂!", "what finishes a character shows it"


def test_special_tokens_are_never_shown(codec: Codec) -> None:
    _, text, _ = written(codec, "", [[*codec.encode("a"), END], [*codec.encode("b"), END]])
    assert text == "ab"


def test_tokens_that_the_decoder_cut_are_forgotten(codec: Codec) -> None:
    ids = codec.encode("one two stop")
    stream = TextStream(codec, [], ["stop"])
    assert stream.push(ids) == len(ids)
    stream.keep(1)
    assert stream.text[: stream.visible] == codec.decode(ids[:1])
    assert stream.push(ids[1:]) == len(ids) - 1, "and can come again"


def test_a_damaged_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="missing"):
        Codec(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(BundleError, match="not a tokenizer"):
        Codec(tmp_path / "tokenizer.json")


def test_a_tokenizer_saved_as_it_was_used_in_training_cuts_nothing_off(tokenizer_file: Path, tmp_path: Path) -> None:
    """Some checkpoints say how long the lines of their training were, and with what shorter ones were filled up."""
    text = "def f(self):\n    return 1\n"
    expected = Codec(tokenizer_file).encode(text)
    saved = Tokenizer.from_file(str(tokenizer_file))
    saved.enable_truncation(max_length=4)
    saved.enable_padding(length=64, pad_id=7, pad_token="x")
    saved.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids == expected[:4] + [7] * 60
    assert Codec(tmp_path / "tokenizer.json").encode(text) == expected
    assert Vocabulary.read("saved", tmp_path / "tokenizer.json", 512).tokenizer.encode(text).ids == expected


def test_an_unfinished_character_at_the_end_may_complete_a_stop_string(codec: Codec) -> None:
    first = codec.encode("\N{BICYCLE}")[0]  # a byte of several
    ids = [*codec.encode("ab"), first]
    assert written(codec, "x =", [ids])[1] == "ab\ufffd"
    for stop, text in (("\ufffd", "ab"), ("b\ufffd", "a"), ("c\ufffd", "ab\ufffd")):
        kept, shown, _ = written(codec, "x =", [ids], stop=(stop,))
        assert (kept, shown) == (ids, text)
    stream = TextStream(codec, [], ("\ufffd",), min_tokens=len(ids))
    stream.push(ids)
    stream.close()
    assert not stream.stopped and stream.text == "ab\ufffd", "no stop before there are so many"


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Codec:
    """As Llama 2's and Mistral's: characters that it does not know are bytes, a token each."""
    path = tmp_path_factory.mktemp("bytewise") / "tokenizer.json"
    sentence_piece(400).save(str(path))
    return Codec(path)


@given(data=st.data(), text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), min_size=1, max_size=30))
def test_any_text_is_read_on_from_any_prompt_in_bytes_that_no_token_stands_for(
    bytewise: Codec, data: st.DataObject, text: str
) -> None:
    ids = bytewise.encode(text)
    cut = data.draw(st.integers(0, len(ids) - 1))
    finished = next(n for n in range(cut, -1, -1) if not bytewise.decode(ids[:n]).endswith("\ufffd"))
    stream = TextStream(bytewise, ids[:cut])
    stream.push(ids[cut:])
    stream.close()
    assert stream.text == bytewise.decode(ids)[len(bytewise.decode(ids[:finished])) :]


@given(ids=st.lists(st.integers(0, 399), min_size=1, max_size=40), cut=st.integers(0, 39))
def test_broken_bytes_cost_what_stands_beside_them_at_most(bytewise: Codec, ids: list[int], cut: int) -> None:
    """Random ids hold runs of bytes that no text has: such a byte is shown as U+FFFD, or as what it is."""
    cut = min(cut, len(ids))
    stream, shown = TextStream(bytewise, ids[:cut]), [""]
    for token_id in ids[cut:]:
        stream.push([token_id])
        shown.append(stream.text)
    stream.close()
    assert all(later.startswith(earlier) for earlier, later in pairwise([*shown, stream.text]))
    tokens = [bytewise.tokenizer.id_to_token(token_id) for token_id in ids[cut:]]
    letters = "".join(token for token in tokens if not token.startswith("<"))
    assert Counter(filter(str.isalpha, letters)) <= Counter(stream.text), "no letter that stands for itself is lost"


def test_a_byte_that_was_shown_stays_where_the_next_one_is_broken(bytewise: Codec) -> None:
    newline, broken, letter = (bytewise.tokenizer.token_to_id(token) for token in ("<0x0A>", "<0xF0>", "e"))
    assert bytewise.decode([newline, broken, letter]) == "\ufffd\ufffde", "what is said of a whole run"
    stream = TextStream(bytewise, bytewise.encode("x"))
    for token_id, text in ((newline, "\n"), (broken, "\n"), (letter, "\n\ufffde")):
        stream.push([token_id])
        assert stream.text == text
    stream.close()
    assert stream.text == "\n\ufffde"


class AllAgain(Spelling):
    """The same, but all ids that wait are read again with each one that comes."""

    def next(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._codec.decode(self._ids)
        if text == self._text or text.endswith("\ufffd"):
            return ""
        new = self.rest()
        del self._ids[: self._said]
        self._said, self._text, self._before = len(self._ids), self._codec.decode(self._ids), ""
        return new


PIECES = ["\N{BICYCLE}", "\u4e2d", "\u00e9", "\ufffd", "e", "\n"]
BROKEN = [b"\xf0", b"\xf0\x9f", b"\x80", b"\xff", b"\xed\xa0\x80", b"\xe4" + "\u4e2d".encode()]
RUNS = st.lists(
    st.tuples(st.sampled_from([*(piece.encode() for piece in PIECES), *BROKEN, None]), st.integers(1, 40)),
    min_size=1,
    max_size=5,
)


def byte_ids(codec: Codec) -> list[int]:
    """The token of each byte: spelled out, or the character that stands for it where a vocabulary is of bytes."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    letters = {byte: chr(byte) if byte in printed else chr(256 + others.index(byte)) for byte in range(256)}
    known = codec.tokenizer.get_vocab()
    return [known.get(f"<0x{byte:02X}>", known.get(letter)) for byte, letter in letters.items()]


@pytest.mark.parametrize("name", ["codec", "bytewise"])
@settings(deadline=None)
@given(data=st.data(), runs=RUNS, more=st.lists(st.integers(0, 600), max_size=5))
def test_what_waits_is_read_as_if_all_was_read_again(
    name: str, codec: Codec, bytewise: Codec, data: st.DataObject, runs: list[tuple[bytes | None, int]], more: list[int]
) -> None:
    read = {"codec": codec, "bytewise": bytewise}[name]
    of = byte_ids(read)
    ids = [token for piece, n in runs for token in ([0] if piece is None else [of[byte] for byte in piece]) * n] + more
    cut = data.draw(st.integers(0, len(ids)))
    old, new = (made(read, text_module.context_of(read, ids[:cut])) for made in (AllAgain, Spelling))
    assert "".join(map(new.next, ids[cut:])) + new.rest() == "".join(map(old.next, ids[cut:])) + old.rest()


@pytest.mark.parametrize("name", ["codec", "bytewise"])
@pytest.mark.parametrize("piece", [None, b"\xf0", b"\x80", b"\xf0\x9f", b"\xe4" + "\u4e2d".encode() * 400])
def test_a_token_is_read_as_soon_however_many_wait(
    name: str, piece: bytes | None, codec: Codec, bytewise: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = {"codec": codec, "bytewise": bytewise}[name]
    of = byte_ids(read)
    ids = ([END] if piece is None else [of[byte] for byte in piece]) * 1000
    stream, decode, counts = TextStream(read, read.encode("x")), Codec.decode, [0]

    def counted(codec: Codec, token_ids: Sequence[int]) -> str:
        counts[-1] += len(token_ids)
        return decode(codec, token_ids)

    monkeypatch.setattr(Codec, "decode", counted)
    for token_id in ids[:1000]:
        stream.push([token_id])
        assert bool(stream.text) or piece is None or len(counts) <= 16, "what is known of broken bytes is shown"
        counts.append(0)
    assert max(counts) < 1000 and sum(counts) < 40 * len(counts)


def spell(codec: Codec, prompt: list[int], answer: list[int], **options: Any) -> list[str]:
    """What stands there after each token, and at the end."""
    stream, shown = TextStream(codec, prompt, **options), list[str]()
    for token_id in answer:
        stream.push([token_id])
        shown.append(stream.text)
    stream.close()
    return [*shown, stream.text[: stream.visible]]


def what_is_read_in_bytes(codec: Codec) -> None:
    def of(text: str) -> list[int]:
        return [codec.tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]

    newline, (lead, *_), letter = of("\n"), of("\N{BICYCLE}"), codec.tokenizer.token_to_id("e")
    assert spell(codec, codec.encode("x"), [*newline, lead, letter]) == ["\n", "\n", "\n\ufffde", "\n\ufffde"]
    syllables = "\ubdc1\ubdc2\ubdc3\ubdc4"
    assert spell(codec, codec.encode("x " + syllables), [*of("\ubdc5"), letter])[2:] == ["\ubdc5", *["\ubdc5e"] * 2]
    assert spell(codec, codec.encode("x"), [*of("\ubdc1"), lead, letter])[-1] == "\ubdc1\ufffde"
    for before in ("x", "x " + syllables):
        begun = [*codec.encode(before), *of("\N{BICYCLE}")[:2]]
        assert spell(codec, begun, of("\N{BICYCLE}")[2:])[-1] == "\N{BICYCLE}"
    assert spell(codec, [*codec.encode("x"), lead], [letter, *newline]) == ["e", "e\n", "e\n"], (
        "what is broken stays so"
    )
    assert spell(codec, codec.encode("x"), [letter, lead], stop=("e\ufffd",))[-1] == ""
    run = [lead, *of("\u4e2d" * 9)]  # broken as a whole
    assert spell(codec, codec.encode("x"), [*run, letter])[-1] == "\ufffd" * 28 + "e"
    assert 12 <= len(spell(codec, codec.encode("x"), run)[-2]) < 28, "and shown before it ends"
    assert spell(codec, [lead] * 30, [*run, letter])[-1] == "\ufffd" * 28 + "e"


@pytest.mark.parametrize(
    "mutant",
    [
        Mutant("a context is as it comes", text_module, "context_of", ".startswith(_UNFINISHED)", " is None"),
        Mutant("what was said is said anew", Spelling, "_beyond", "text.startswith(self._text)", "True"),
        Mutant("what the prompt left is said", Spelling, "_say", "agreement(new, self._before)", "0"),
        Mutant("what is kept reads alone", Spelling, "_settle", "text[said:] == part[read:]", "True"),
        Mutant("it ends where it ends", Spelling, "_settle", "- _LONGEST_CHARACTER, -1", "- 1, -1"),
        Mutant("the prompt left the first of it", Spelling, "_say", "self._before[known:] if", "'' if"),
        Mutant("many wait on and on", Spelling, "next", "else self._settle()", "else ''"),
        Mutant("nothing waits", Spelling, "next", "or text.endswith(_UNFINISHED)", ""),
        Mutant("the last character stops nothing", TextStream, "close", "self._find_stop(length)", "pass"),
        Mutant("the rest is lost", TextStream, "close", "self._spelling.rest()", "''"),
    ],
    ids=lambda mutant: mutant.bug,
)
def test_mutant_is_killed(mutant: Mutant, bytewise: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    what_is_read_in_bytes(bytewise)
    must_die(mutant, [lambda _: what_is_read_in_bytes(bytewise)], monkeypatch)
