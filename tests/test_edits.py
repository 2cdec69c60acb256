"""A passage that is written again with changes: what the drafter that knows of it says, and when it is silent."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_runtime import FixedCosts, decode_law, distance, sharpened, target_law
from test_laws import RULES, TIGHT
from test_mutants import Mutant, must_die

from leadout.engines.toy import ToyEngine, mixed_law, table_law
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters import edits, suffix
from leadout.runtime.drafters.edits import EditedCopy
from leadout.runtime.drafters.suffix import OwnText
from leadout.runtime.settings import Settings


def words(text):
    return text.split()


LEAD = "this is where it begins"  # as many tokens as say that a passage is copied
PASSAGE = words(f"{LEAD} a b old c d e f old g h i j k old l m n o p b old q r s t u v old w x y z")


def copy(new, passage=PASSAGE, old="old"):
    """The passage with ``new`` tokens in the place of each ``old``."""
    return [each for token in passage for each in (new if token == old else [token])]


class Reader:
    """Words as token ids, and the drafter over a row's own text that is told of them."""

    def __init__(self, window=suffix.WINDOW):
        self.words, self.copy = [], EditedCopy()
        self.own, self.text = OwnText(window, self.copy), []

    def read(self, words, pieces=10**9):
        for begin in range(0, len(words), pieces):
            self.text += [self.id(word) for word in words[begin : begin + pieces]]
            self.own.take(self.text)
        return self

    def id(self, word):
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)

    def says(self, longest=10**9):
        return [(self.words[token], evidence) for token, evidence in islice(self.copy.candidates(), longest)]

    def guess(self, longest=10**9):
        return [word for word, _ in self.says(longest)]


def after(new, count, begun):
    """A reader of the passage and of its copy with ``new`` up to ``begun`` tokens behind the change that is its
    ``count``-th; and what is left of the copy."""
    whole = copy(["@", *new])
    places = [place for place, word in enumerate(whole) if word == "@"]
    cut = places[count - 1] + len(new) + 1 + begun
    written, rest = ([word for word in part if word != "@"] for part in (whole[:cut], whole[cut:]))
    return Reader().read(PASSAGE).read(written), rest


CHANGES = [["new"], ["two", "words"], ["longer", "than", "it", "was"], []]


@pytest.mark.parametrize("new", CHANGES, ids=len)
def test_a_change_that_was_seen_twice_is_made_again(new):
    reader, rest = after(new, 2, begun=2)
    assert reader.guess(len(rest)) == rest


@pytest.mark.parametrize(("faithful", "said"), [(11, []), (12, ["h", "i", "new", "j"])])
def test_behind_a_faithful_copy_once_is_enough(faithful, said):
    passage = [*[f"lead{n}" for n in range(faithful)], *words("old f g h i old j")]
    written = ["new" if word == "old" else word for word in passage[: faithful + 3]]
    assert Reader().read([*passage, "apart"]).read(written).guess(4) == said


@pytest.mark.parametrize("new", CHANGES, ids=len)
def test_a_change_that_was_seen_once_is_not(new):
    reader, _ = after(new, 1, begun=2)
    assert reader.says() == []


def test_several_tokens_become_one():
    reader = Reader().read(copy(["two", "words"])).read(copy(["one"])[:22])
    rest = copy(["one"])[22:]
    assert reader.guess(len(rest)) == rest


def test_a_change_into_what_stands_behind_it_is_none_that_skips():
    passage = words(f"{LEAD} a b old c d e f old g d i j k old l d m n")
    written = [*passage[:7], "d", *passage[8:12], "d", *passage[13:16]]
    assert Reader().read(passage).read(written).guess(6) == words("j k d l d m")


@pytest.mark.parametrize("written", [1, 2, 3])
def test_a_change_that_has_begun_goes_on(written):
    new = ["longer", "than", "it", "was"]
    reader, rest = after(new, 3, begun=written - len(new))
    assert rest[: len(new) - written] == new[written:]
    assert reader.guess(len(rest)) == rest
    classes = [evidence for _, evidence in reader.says(len(new) - written + 2)]
    assert classes == [*[5] * (len(new) - written), 0, 1]


def test_what_is_put_in_is_put_in_before_the_same_two_tokens_alone():
    passage = words(f"{LEAD} a ( b ) c d ( b ) e f ( b ) g h i ( j ) k l m n ( b ) o p q")
    written = words(f"{LEAD} a ( b , x ) c d ( b , x ) e")
    rest = words("f ( b , x ) g h i ( j ) k l m n ( b , x ) o p q")
    assert Reader().read(passage).read(written).guess(len(rest)) == rest


def test_the_same_token_is_changed_by_what_stands_before_it():
    """And where it never stood before, as it was changed last."""
    passage = words(f"{LEAD} a b old c d e b old g h i f old j k l f old m n o b old p q f old r s t u old v w")
    written = words(f"{LEAD} a b one c d e b one g h i f two j k l f two m n")
    rest = words("o b one p q f two r s t u two v w")
    assert Reader().read(passage).read(written).guess(len(rest)) == rest


def test_a_change_that_is_no_longer_made_is_forgotten():
    """Twice seen, twice left alone: the rest is copied as it is, and after two more it is made again."""
    passage = words(f"{LEAD} a b old c d e f old g h i j k old l m n o p old q r s t old u v w x old y z")
    places = [place for place, word in enumerate(passage) if word == "old"]
    reader = Reader().read(passage)
    now = [*passage]
    for place in places[:2]:
        now[place] = "new"
    reader.read(now[: places[3] + 1])
    assert reader.guess(4) == now[places[3] + 1 : places[3] + 5] and "new" not in reader.guess(12)


def test_another_change_of_the_same_token_counts_anew():
    """Changed into "one" twice, then into "two": neither is sure now."""
    reader = Reader().read(PASSAGE)
    reader.read(words(f"{LEAD} a b one c d e f one g h i j k two l m"))
    assert reader.guess(6) == words("n o p b old q")


def test_classes_say_how_much_was_copied_and_what_was_changed():
    reader, rest = after(["new"], 2, begun=2)  # two tokens after the second change
    said = reader.says(len(rest))
    assert [word for word, _ in said] == rest
    expected, run = [], 2
    for word in rest:
        run += 1
        expected.append(5 if word == "new" else min(run.bit_length(), 5) - 1)
    assert [evidence for _, evidence in said] == expected


@pytest.mark.parametrize(("ahead", "speaks"), [(62, True), (63, False)])
def test_where_nothing_is_changed_for_as_long_as_a_guess_it_is_silent(ahead, speaks):
    """Twelve tokens behind a change; the next one is the last that a guess may reach, or the first that it may not."""
    passage = [*PASSAGE[:16], *[f"same{n}" for n in range(9 + ahead)], "old", "end"]
    reader = Reader().read(passage).read(copy(["new"], passage)[: 16 + 8])  # eleven
    assert len(reader.guess()) > ahead
    reader.read(["same8"])
    assert bool(reader.says()) == speaks


def test_behind_a_change_that_is_new_as_many_tokens_are_passed_over():
    reader, _ = after(["new"], 2, begun=2)  # i j k, says the passage
    reader.read(["else"])
    assert reader.says(2) == [("j", 6), ("k", 0)]
    reader.read(["more"])
    assert reader.says(2) == [("k", 6), ("new", 5)]


def test_a_copy_that_is_lost_is_silent_until_one_is_found():
    reader, _ = after(["new"], 3, begun=2)
    reader.read([f"fresh{n}" for n in range(12)])
    for word in words("e f new g"):
        assert reader.says() == []
        reader.read([word])
    assert reader.says() == []
    reader.read(["h"])  # the fifth token that stood in the copy
    assert reader.guess(2) == ["i", "j"]


def test_the_latest_copy_is_copied():
    """It alone goes on with "after"."""
    apart = [f"fresh{n}" for n in range(12)]
    reader = Reader().read([*PASSAGE, *PASSAGE, *apart, *PASSAGE, "after", *apart[::-1]])
    assert reader.read(copy(["new"])[:-1]).guess(2) == ["z", "after"]


def test_a_copy_that_parted_goes_on_where_eight_tokens_stood_before():
    other = words("A B C D E F G H I J K")
    reader = Reader().read(other)
    reader.read(PASSAGE).read(copy(["new"])[:17])
    assert reader.guess(1) == ["k"]
    reader.read(other[:7])
    assert reader.guess(1) != ["H"]
    reader.read(other[7:8])
    assert reader.guess(3) == ["I", "J", "K"]


@pytest.mark.parametrize("pieces", [1, 3, 10**9])
def test_it_does_not_matter_in_what_pieces_a_text_comes(pieces):
    whole = [*PASSAGE, *copy(["new"]), *copy(["two", "words"])[:30]]
    assert Reader().read(whole, pieces).says() == Reader().read(whole).says() != []


def test_places_are_those_of_the_text_where_older_text_is_forgotten():
    """The window holds 40 tokens, and 40 before them: the passage and its copy begin in the third."""
    reader = Reader(window=40).read([f"earlier{n}" for n in range(83)])
    reader.read(words(f"{LEAD} a b old c d e f old g h i j k old l m"))
    reader.read(words(f"{LEAD} a b new c d e f new g h"))
    assert reader.guess(6) == words("i j k new l m")


TEXTS = st.lists(st.integers(0, 3), max_size=120)


@given(TEXTS, st.lists(st.integers(1, 9), max_size=40))
def test_on_any_text_it_says_tokens_of_it_and_changes_nothing(text, pieces):
    copied = EditedCopy()
    own, at = OwnText(copy=copied), 0
    for piece in [*pieces, 10**9]:
        at += piece
        own.take(text[:at])
        said = list(islice(copied.candidates(), 200))
        assert said == list(islice(copied.candidates(), 200))
        assert {token for token, _ in said} <= set(text) and {evidence for _, evidence in said} <= set(range(7))
    assert len(copied.prior) == 7


# ---- in a round ------------------------------------------------------------------------------------------------------
def dictated(text, vocab_size):
    """An engine that writes ``text``, whatever its context says otherwise."""

    def law(context):
        chances = np.full(vocab_size, 1e-6)
        chances[text[len(context)] if len(context) < len(text) else 0] = 1.0
        return chances / chances.sum()

    return ToyEngine(law, vocab_size, max_context=len(text) + 80)


def test_an_edit_is_written_in_fewer_rounds(monkeypatch):
    """The third copy, its changes unlike those of the second: with the drafter that knows of changes, and without."""
    reader = Reader().read(PASSAGE)
    first, begun, rest = copy(["one"]), copy(["two", "more"])[:20], copy(["two", "more"])[20:]
    prompt = [reader.id(word) for word in [*PASSAGE, *first, *begun]]
    answer = [reader.id(word) for word in rest]

    def run():
        engine = dictated([*prompt, *answer], len(reader.words))
        decoder = Decoder(engine, None, costs=FixedCosts())
        settings = Settings(max_new_tokens=len(answer), temperature=0, draft="suffix")
        events = list(decoder.decode([(prompt, settings)]))
        assert [token for event in events for token, _ in event.tokens] == answer
        return len(events), events[-1].stats.by_drafter

    rounds, by = run()
    assert by["edits"]["accepted"] > 10
    monkeypatch.setattr(EditedCopy, "candidates", lambda copy: iter(()))
    assert run()[0] > rounds + 3


@pytest.mark.parametrize("rule", RULES)
def test_the_law_is_the_target_s_where_a_change_is_drafted(rule, monkeypatch):
    """Three tokens, every branch, behind a passage of tokens 0 to 3 that is copied without its 3s."""
    target, other = table_law(4, seed=4), table_law(4, seed=5)
    prompt = [0, 1, 0, 2, 1, 2, 3, 2, 1, 3, 0, 3, 0, 0, 2, 0, 1, 0, 2, 1, 2, 1, 2, 1, 1, 0]
    options = {"rule": rule, "draft": "suffix", "draft_length": 2, "temperature": 0.5}
    proposed = set()

    def watch(event):
        proposed.update(event.stats.by_drafter if event.stats is not None else ())

    laws = target, mixed_law(target, other, 0.8)
    found = decode_law(laws, 4, 3, monkeypatch, prompt, watch, **options)
    assert distance(found, target_law(sharpened(target, prompt, power=2.0), 4, 3)) < TIGHT
    assert "edits" in proposed


# ---- bugs that must be found -----------------------------------------------------------------------------------------
def everything(monkeypatch):
    for new in CHANGES:
        test_a_change_that_was_seen_twice_is_made_again(new)
        test_a_change_that_was_seen_once_is_not(new)
    test_behind_a_faithful_copy_once_is_enough(11, [])
    test_behind_a_faithful_copy_once_is_enough(12, ["h", "i", "new", "j"])
    for written in (1, 2, 3):
        test_a_change_that_has_begun_goes_on(written)
    test_what_is_put_in_is_put_in_before_the_same_two_tokens_alone()
    test_the_same_token_is_changed_by_what_stands_before_it()
    test_a_change_that_is_no_longer_made_is_forgotten()
    test_another_change_of_the_same_token_counts_anew()
    test_classes_say_how_much_was_copied_and_what_was_changed()
    test_behind_a_change_that_is_new_as_many_tokens_are_passed_over()
    for ahead in ((62, True), (63, False)):
        test_where_nothing_is_changed_for_as_long_as_a_guess_it_is_silent(*ahead)
    test_several_tokens_become_one()
    test_a_change_into_what_stands_behind_it_is_none_that_skips()
    test_the_latest_copy_is_copied()
    test_a_copy_that_is_lost_is_silent_until_one_is_found()
    test_a_copy_that_parted_goes_on_where_eight_tokens_stood_before()
    test_places_are_those_of_the_text_where_older_text_is_forgotten()


C = EditedCopy
MUTANTS = [
    Mutant("a change is made at once", edits.Change, "proven", ">= _PROVEN", ">= 1"),
    Mutant("it always speaks", C, "candidates", "elif copied >= _FAITHFUL", "elif copied < 0"),
    Mutant("it is silent at once", C, "candidates", "elif copied >= _FAITHFUL", "elif copied >= 1"),
    Mutant("it looks a token less far", C, "candidates", "at + MAX_GUESS_LENGTH", "at + MAX_GUESS_LENGTH - 1"),
    Mutant("a faithful copy is like any", C, "_learn", ">= _FAITHFUL", "> 10**9"),
    Mutant("any copy is faithful", C, "_learn", ">= _FAITHFUL", ">= 0"),
    Mutant("what is left alone changes nothing", C, "_left_alone", "change.times - 1", "change.times"),
    Mutant("another change keeps the count", C, "_learn", "old, new, 0", "old, new, change.times"),
    Mutant("what was put in is put in anywhere", C, "_learn", "_ANYWHERE] if old", "_ANYWHERE] if True"),
    Mutant("what was put in takes the place of a token", C, "_learn", "[*new, first]", "new"),
    Mutant("anywhere before here", C, "_known", "(before, _ANYWHERE)", "(_ANYWHERE, before)"),
    Mutant("here alone", C, "_known", "(before, _ANYWHERE)", "(before,)"),
    Mutant("a change begins anew", C, "candidates", "change.new[len(written) :]", "change.new"),
    Mutant("whatever was written was the change", C, "candidates", " == written", " != written"),
    Mutant("a new change took no place", C, "candidates", "at := at + len(written)", "at := at"),
    Mutant("a changed token is copied, too", C, "candidates", "at += len(change.old)", "at += 0 * len(change.old) + 1"),
    Mutant("the count goes on behind a change", C, "candidates", "copied = 0", "pass"),
    Mutant("a lost copy is never lost", C, "_meets", "written > _LONGEST", "written > 10**9"),
    Mutant("they meet at the first token alike", C, "_meets", "2 if skipped < 4", "1 if skipped < 4"),
    Mutant("they meet where they parted", C, "_meets", "source + skipped, written", "source, written"),
    Mutant("what was learnt is one token more", C, "_meets", "parted : parted + new", "parted : parted + new + 1"),
    Mutant("it goes on where they met", C, "_meets", "meets, None, needed", "at, None, needed"),
    Mutant("any place is a copy's", C, "follow", "_FOUND if", "1 if"),
    Mutant("no other place is a copy's", C, "follow", "else _ELSEWHERE", "else 10**9"),
    Mutant("places of the window", OwnText, "take", "self._begins + grown", "grown"),
    Mutant("the first place", suffix.SuffixAutomaton, "_learn", "self.place[state] = self.size", "pass"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_every_mutant_dies(mutant, monkeypatch):
    must_die(mutant, [everything], monkeypatch)
