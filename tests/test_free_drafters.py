"""What free drafters know: each structure against a slow and obvious one, bounded, and scored right."""

from __future__ import annotations

from itertools import count, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from leadout.runtime.drafters import suffix
from leadout.runtime.drafters.free import Calibrated, Record
from leadout.runtime.drafters.ngram import NgramDrafter
from leadout.runtime.drafters.recycling import RecyclingDrafter, Successors
from leadout.runtime.drafters.suffix import Cursor, EarlierTexts, OwnText, SuffixAutomaton, SuffixPool

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=25)


class Naive:
    """A growing text, and for each of its substrings where it ends and what followed it: (token, confidence)."""

    def __init__(self, text=()):
        self.text, self.ends, self.known = (), {(): [0]}, {}
        for token in text:
            self.extend(token)

    def extend(self, token):
        for start in range(len(self.text) + 1):
            known, confidence = self.known.get(self.text[start:], (token, 0))
            if known == token:
                self.known[self.text[start:]] = token, confidence + 1
            else:
                self.known[self.text[start:]] = (known, confidence // 2) if confidence > 1 else (token, 1)
        self.text += (token,)
        for start in range(len(self.text) + 1):
            self.ends.setdefault(self.text[start:], []).append(len(self.text))

    def repeated(self):
        """The longest end of the text that stands elsewhere too."""
        return next(self.text[i:] for i in range(1, len(self.text) + 1) if self.shorter(self.text[i:], self.text))

    def shorter(self, end, whole):
        return not end or self.ends[end] != self.ends[whole]

    def next_shorter(self, matched):
        """The longest end of ``matched`` that stands elsewhere, too."""
        return next(matched[i:] for i in range(1, len(matched) + 1) if self.shorter(matched[i:], matched))

    def dissenters(self, matched, token):
        count = 0
        for _ in range(3):
            matched = self.next_shorter(matched)
            if not matched:
                break
            count += self.known[matched][0] != token
        return count

    def continuation(self, matched, longest):
        """What followed ``matched``; where nothing ever did, its longest end that stands elsewhere goes on."""
        out = []
        while len(out) < longest:
            while matched and matched not in self.known:
                matched = self.next_shorter(matched)
            if not matched or self.known[matched][0] < 0:
                break
            token, confidence = self.known[matched]
            out.append((token, suffix._evidence(len(matched), self.dissenters(matched, token), confidence)))
            matched += (token,)
        return out


@pytest.fixture
def patient(monkeypatch):
    """Every context learns, not the longest eight alone."""
    monkeypatch.setattr(suffix, "_HOPS", 10**9)


def automaton_of(text):
    automaton = SuffixAutomaton()
    for token in text:
        automaton.extend(token)
    return automaton


@pytest.mark.usefixtures("patient")
@hypothesis_settings(max_examples=60, deadline=None)
@given(TEXTS)
def test_an_automaton_knows_every_substring_and_what_followed_it(text):
    automaton, naive = automaton_of(text), Naive(text)
    assert len(automaton.next) <= 2 * len(text) + 1
    for substring in {tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, len(text) + 1)}:
        state = 0
        for token in substring:
            state = automaton.next[state][token]
        assert automaton.length[automaton.link[state]] < len(substring) <= automaton.length[state]
        assert (automaton.successor[state], automaton.confidence[state]) == naive.known.get(substring, (-1, 0))


@pytest.mark.usefixtures("patient")
@hypothesis_settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(1, 12))
def test_a_row_s_own_text_goes_on_as_the_slow_search_says(text, longest):
    drafter = OwnText()
    for end in range(1, len(text) + 1, 3):
        drafter.take(text[:end])
        naive = Naive(text[:end])
        assert list(islice(drafter.candidates(), longest)) == naive.continuation(naive.repeated(), longest)


@pytest.mark.usefixtures("patient")
@hypothesis_settings(max_examples=60, deadline=None)
@given(TEXTS, TEXTS, st.lists(st.booleans(), min_size=80, max_size=80))
def test_a_cursor_is_at_the_longest_end_that_stands_in_a_text_that_grows_meanwhile(text, reader, order):
    automaton, read, written = SuffixAutomaton(), [], []
    cursor = Cursor(automaton)
    for turn in order:
        if turn and len(written) < len(text):
            written.append(text[len(written)])
            automaton.extend(written[-1])
        elif len(read) < len(reader):
            read.append(reader[len(read)])
            cursor.step(read[-1])
            # a match that began before the text grew may be longer by now: the cursor claims too little, never too much
            assert tuple(read[len(read) - cursor.matched :]) in Naive(written).ends
            assert automaton.length[automaton.link[cursor.state]] < cursor.matched or not cursor.state
    fresh = Cursor(automaton)
    for i, token in enumerate(read):
        fresh.step(token)
        found = Naive(written).ends
        assert fresh.matched == max(len(read[j : i + 1]) for j in range(i + 2) if tuple(read[j : i + 1]) in found)


def test_long_contexts_learn_in_text_that_only_repeats():
    automaton = automaton_of([7] * 300)
    assert [automaton.confidence[automaton.next[0][7]], automaton.confidence[automaton.last]] == [suffix._HOPS, 0]
    drafter = OwnText()
    drafter.take([7] * 300)
    assert [token for token, _ in islice(drafter.candidates(), 20)] == [7] * 20


def test_a_period_goes_on():
    for drafter in (OwnText(), NgramDrafter()):
        drafter.take([9, 1, 2, 3, 1, 2, 3, 1])
        assert [token for token, _ in islice(drafter.candidates(), 7)] == [2, 3, 1, 2, 3, 1, 2]


def test_an_edit_in_the_middle_of_a_copy_is_got_over():
    """A function again, one name replaced: from the second token after the change on, the copy goes on."""
    body = list(range(10, 60))
    drafter = OwnText()
    drafter.take([*body, *body[:20], 5, *body[21:24]])
    assert [token for token, _ in islice(drafter.candidates(), 10)] == body[24:34]


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=12), TEXTS)
def test_a_pool_never_matches_across_texts_nor_guesses_their_end(texts, row):
    pool = SuffixPool(window=64)
    for text in texts:
        pool.add(text)
        assert len(pool.generations) <= 2 and all(each.size <= 64 for each in pool.generations)
        assert all(len(each.next) <= 2 * 64 + 1 for each in pool.generations)
    drafter = EarlierTexts(pool)
    drafter.take(row)
    known = [tuple(text) for text in texts]
    guess = tuple(token for token, _ in islice(drafter.candidates(), 10))
    assert -1 not in guess
    if guess:  # the match and what follows it stand in one text
        matched = max(cursor.matched for cursor in drafter._cursors)
        both = tuple(row[len(row) - matched :]) + guess[:1]
        assert any(text[i : i + len(both)] == both for text in known for i in range(len(text)))


def test_the_pool_drops_the_oldest_and_keeps_the_latest():
    pool = SuffixPool(window=50)
    texts = [[100 + 20 * i + j for j in range(20)] for i in range(9)]
    for text in texts:
        pool.add(text)
    found = []
    for text in texts:
        drafter = EarlierTexts(pool)
        drafter.take(text[:4])
        found.append([token for token, _ in drafter.candidates()] == text[4:])
    assert found[-3:] == [True] * 3 and not any(found[:5])
    pool.add(list(range(500)))  # longer than the window: its end is kept
    drafter = EarlierTexts(pool)
    drafter.take([490, 491])
    assert [token for token, _ in islice(drafter.candidates(), 3)] == [492, 493, 494]
    assert max(each.size for each in pool.generations) <= 50


def test_of_texts_that_nobody_looked_for_only_those_are_indexed_that_are_kept(monkeypatch):
    """Free drafters that slept through many requests wake to the last of their texts, not to all of them."""
    extended, extend = [], SuffixAutomaton.extend
    monkeypatch.setattr(SuffixAutomaton, "extend", lambda self, token: extended.append(token) or extend(self, token))
    pool, texts = SuffixPool(window=50), [[100 + 20 * i + j for j in range(20)] for i in range(200)]
    for text in texts:
        pool.add(text)
    drafter = EarlierTexts(pool)
    drafter.take(texts[-1][:4])
    assert [token for token, _ in drafter.candidates()] == texts[-1][4:]
    assert 50 < sum(each.size for each in pool.generations) <= len(extended) <= 2 * 50 + 21


def test_an_interrupt_while_a_text_is_taken_in_drops_the_texts_and_no_more(monkeypatch):
    pool = SuffixPool(window=50)
    for text in ([1, 2, 3, 1, 2, 4], [5, 6, 7]):
        pool.add(text)
    assert pool.generations[-1].size == 11
    pool.add([1, 2, 3])
    with monkeypatch.context() as patch:
        patch.setattr(SuffixAutomaton, "_state", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.generations  # noqa: B018
    pool.add([8, 9, 8, 9])
    drafter = EarlierTexts(pool)
    drafter.take([1, 2, 8])
    assert next(drafter.candidates())[0] == 9


def interrupted(automaton, following, *_):
    """Half a state."""
    automaton.next.append(following)
    raise KeyboardInterrupt


def test_a_row_s_own_text_is_bounded_and_reaches_into_the_generation_before():
    drafter = OwnText(window=30)
    text = list(range(40)) + [1000 + i for i in range(15)]
    drafter.take(text)
    assert drafter._automaton.size <= 30 and drafter._older is not None and drafter._older.automaton.size == 30
    drafter.take([*text, 10, 11, 12])  # stood in the first generation
    assert [token for token, _ in islice(drafter.candidates(), 5)] == [13, 14, 15, 16, 17]
    drafter.take([*text, 10, 11, 12, *range(2000, 2060), 10, 11, 12])  # which is gone by now
    assert not list(islice(drafter.candidates(), 1)) or next(drafter.candidates())[0] != 13


@hypothesis_settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(1, 9))
def test_prompt_lookup_finds_the_latest_place_of_the_longest_match(text, longest):
    drafter = NgramDrafter()
    for end in range(1, len(text) + 1):
        drafter.take(text[:end])
        tokens = text[:end]
        places = (
            (n, at)
            for n in (4, 3, 2, 1)
            for at in range(end - 1, n - 1, -1)
            if tokens[at - n : at] == tokens[end - n :]
        )
        n, source = next(places, (0, 0))
        expected = [tokens[source + i % (end - source)] for i in range(longest)] if n else []
        assert [token for token, _ in islice(drafter.candidates(), longest)] == expected


class NaiveCounter:
    """The two-bit counter of every token, spelled out as its table of transitions."""

    def __init__(self):
        self.state = {}

    def record(self, token, successor):
        known, certainty = self.state.get(token, (None, 0))
        same = {0: (successor, 1), 1: (known, 2), 2: (known, 3), 3: (known, 3)}
        other = {0: (successor, 1), 1: (successor, 1), 2: (known, 1), 3: (known, 2)}
        self.state[token] = (same if successor == known else other)[certainty]


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_successors_are_two_bit_counters_one_a_token(pairs):
    successors, naive = Successors(), NaiveCounter()
    for pair in pairs:
        successors.record(*pair)
        naive.record(*pair)
    assert {token: successors.get(token) for token in naive.state} == naive.state
    assert len(successors) == len(naive.state) <= 4


def test_a_round_teaches_its_committed_tokens_and_the_maxima_behind_the_rejection():
    successors, rows = Successors(), np.full((5, 12), -1.0, np.float32)
    for row, likeliest in enumerate((11, 11, 8, 9, 11)):  # the first two rows' tokens were committed: not looked at
        rows[row, likeliest] = 1.0
    successors.record_round(fed=[1, 2, 3, 4], new=[2, 7], rows=rows)
    assert [successors.get(token) for token in (1, 2, 3, 4, 7)] == [(2, 1), (7, 1), (8, 1), (9, 1), None]
    whole = Successors()
    whole.record_round(fed=[1, 2], new=[2, 5], rows=rows)  # all accepted: the bonus follows the last draft
    assert [whole.get(token) for token in (1, 2, 5)] == [(2, 1), (5, 1), None]


def test_recycling_walks_from_token_to_token_and_says_how_sure_it_is():
    successors = Successors()
    drafter = RecyclingDrafter(successors)
    drafter.take([1, 2, 3, 1, 2, 3, 1, 2, 4, 1])
    assert list(islice(drafter.candidates(), 4)) == [(2, 2), (3, 3 + 0), (1, 6 + 1), (2, 6 + 2)]
    drafter.take([1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 9])
    assert list(drafter.candidates()) == []
    assert all(evidence < len(drafter.prior) for _, evidence in islice(drafter.candidates(), 50))


class Script:
    """A free drafter that says what it is told."""

    name, prior = "script", (0.5, 0.25)

    def __init__(self, steps):
        self._steps = steps

    def take(self, tokens):
        pass

    def candidates(self):
        return iter(self._steps)


def scripted(steps, shared=None):
    return Calibrated(Script(steps), shared or Record(Script.prior))


def test_scores_on_a_scripted_text_count_what_was_reached():
    """Guess 5 6 7 8 with classes 0 1 0 1; in the text 5 6 9 8 the first three are reached, two of them right."""
    shared = Record(Script.prior)
    drafter = scripted([(5, 0), (6, 1), (7, 0), (8, 1)], shared)
    guess = drafter.look([1], 4, 0.0)
    assert guess.tokens == [5, 6, 7, 8] and guess.survivals == [0.5, 0.125, 0.0625, 0.015625]
    assert drafter.score([5, 6, 9, 8]) == 2
    for record, decay in ((shared.calibration, 0.998), (drafter._own, 0.98)):
        assert record.rates == pytest.approx([(decay * 1 + 8 * 0.5) / (1 + decay + 8), (1 + 8 * 0.25) / 9])
    assert drafter.score([5]) == 1, "what stands behind the committed text is not known, and not a miss"
    assert shared.calibration.rates[1] == pytest.approx(3 / 9)


def test_a_guess_goes_on_one_token_beyond_the_floor_and_no_further():
    steps = [(i, 0) for i in range(20)]
    assert len(scripted(steps).look([1], 16, 0.2).tokens) == 3
    assert len(scripted(steps).look([1], 2, 0.2).tokens) == 2
    assert len(scripted(steps).look([1], 16, 0.0).tokens) == 16
    assert len(scripted([(0, 1)]).look([1], 16, 0.9).tokens) == 1, "the first is always scored: rates can recover"


@pytest.mark.parametrize("rate", [0.1, 0.6, 0.95])
def test_records_come_to_the_true_rate_and_rows_start_from_the_shared_one(rate):
    shared, rng = Record((0.5,)), np.random.default_rng(0)
    found = []
    for i in count():
        shared.calibration.record(0, rng.random() < rate)
        found += shared.calibration.rates if i > 200 else []
        if i == 4000:
            break
    assert np.mean(found) == pytest.approx(rate, abs=0.05)
    row = Calibrated(Script([(1, 0)]), shared)
    assert row.look([1], 1, 0.0).survivals == shared.calibration.rates
