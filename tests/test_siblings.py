"""Several answers to one prompt: what they know of each other, that they stay exact, that the prompt is fed once."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support_runtime import (
    FixedCosts,
    ScriptedNoise,
    collect,
    distance,
    draw_with_coins,
    law,
    sharpened,
    target_law,
    toy_pair,
)
from test_api import PROMPT, make

from leadout.engines.base import READ_ALONE
from leadout.engines.toy import ToyEngine, mixed_law, table_law
from leadout.errors import UsageError
from leadout.runtime import admission
from leadout.runtime import decoder as decoder_module
from leadout.runtime.bench import Bench
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters import family as family_module
from leadout.runtime.drafters.family import Family
from leadout.runtime.drafters.siblings import SiblingsDrafter
from leadout.runtime.pair import Request, load
from leadout.runtime.prefill import prefill
from leadout.runtime.rules.noise import Noise, Purpose
from leadout.runtime.samples import Sample, samples
from leadout.runtime.settings import Settings
from leadout.runtime.steps import Stepper
from leadout.scripts.cli import main

REPEATS = [4, 5, 6, 4, 5, 6, 4, 5]
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=10), min_size=2, max_size=4)


class Naive:
    """Who went on how after every string: string -> {token: texts, as bits}, in the order of writing."""

    def __init__(self, prompt):
        self.votes, self.prompt = {}, ()
        for token in prompt:
            self.extend(self.prompt, token, 1)
            self.prompt += (token,)

    def extend(self, text, token, bit):
        for start in range(len(text) + 1):
            known = self.votes.setdefault(text[start:], {})
            known[token] = known.get(token, 0) | bit

    def continuation(self, text, bit, longest):
        """The longest end of ``text`` that others went on from goes where most of them went."""
        out = []
        while len(out) < longest:
            ends = (text[i:] for i in range(len(text)) if any(v & ~bit for v in self.votes.get(text[i:], {}).values()))
            if (end := next(ends, None)) is None:
                break
            others = {token: v & ~bit for token, v in self.votes[end].items() if v & ~bit}
            token = max(others, key=lambda each: others[each].bit_count())
            voters = int(np.bitwise_or.reduce(list(others.values()))).bit_count()
            votes = others[token].bit_count()
            agreement = (0 if votes == 1 else 1) if len(others) == 1 else 2 if votes > voters / 2 else 3
            length = [1, 2, 4, 8, 16, 32, 10**9]
            out.append((token, 4 * next(i for i in range(6) if length[i] <= len(end) < length[i + 1]) + agreement))
            text = (*end, token)
        return out


def written(prompt, texts, order):
    """The texts, written by turns: (family, drafters, what each has written, the slow double)."""
    family, naive = Family(prompt), Naive(prompt)
    drafters = [SiblingsDrafter(family) for _ in texts]
    done = [naive.prompt for _ in texts]
    for drafter in drafters:
        drafter.take(prompt)
    for turn in order:
        i = turn % len(texts)
        if (at := len(done[i]) - len(prompt)) < len(texts[i]):
            naive.extend(done[i], texts[i][at], 2 << i)
            done[i] += (texts[i][at],)
            drafters[i].take(done[i])
    return family, drafters, done, naive


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), TEXTS, st.lists(st.integers(0, 3), max_size=40))
def test_a_family_knows_who_went_on_how_after_every_string(prompt, texts, order):
    family, drafters, done, naive = written(prompt, texts, order)
    assert len(family.next) <= 2 * (len(prompt) + sum(map(len, texts))) + 1
    for drafter, text in zip(drafters, done, strict=True):
        assert family.length[drafter._state] == len(text)
    for string in {text[i:j] for text in done for i in range(len(text)) for j in range(i + 1, len(text) + 1)}:
        state = 0
        for token in string:
            state = family.next[state][token]
        assert family.length[family.link[state]] < len(string) <= family.length[state]
        assert list(family.votes[state].items()) == list(naive.votes.get(string, {}).items())


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), TEXTS, st.lists(st.integers(0, 3), max_size=40))
def test_an_answer_goes_on_where_most_of_the_others_went(prompt, texts, order):
    _, drafters, done, naive = written(prompt, texts, order)
    for i, drafter in enumerate(drafters):
        assert list(itertools.islice(drafter.candidates(), 7)) == naive.continuation(done[i], 2 << i, 7)


def test_the_majority_is_drafted_and_dissent_is_told_apart():
    family, prompt = Family([1, 2]), [1, 2]
    drafters = [SiblingsDrafter(family) for _ in range(5)]
    for drafter in drafters:
        drafter.take(prompt)
    assert list(drafters[4].candidates()) == [], "in step with each other, nobody knows more"
    for drafter, text in zip(drafters, ([3, 4], [3, 5], [3, 4], [6]), strict=False):
        drafter.take([*prompt, *text])
    assert list(drafters[4].candidates()) == [(3, 4 * 1 + 2), (4, 4 * 1 + 2)]
    drafters[4].take([*prompt, 6])
    assert list(drafters[4].candidates()) == []
    assert all(evidence < len(SiblingsDrafter.prior) == 24 for _, evidence in drafters[3].candidates())


def test_an_answer_that_repeats_itself_has_one_vote():
    family = Family([9])
    drafters = [SiblingsDrafter(family) for _ in range(4)]
    for drafter, text in zip(drafters, ([1, 2, 1, 2, 1, 2, 1, 2, 0], [1, 3, 0], [1, 3, 0], [7, 1]), strict=True):
        drafter.take([9])
        drafter.take([9, *text])
    assert next(drafters[3].candidates()) == (3, 2), "two of three"


def test_a_family_is_bounded_and_what_has_no_room_is_not_guessed(monkeypatch):
    monkeypatch.setattr(family_module, "_MOST", 40)
    family = Family([1, 2, 3])
    drafters = [SiblingsDrafter(family) for _ in range(2)]
    for end in range(100):
        for drafter in drafters:
            drafter.take([1, 2, 3, *range(10, 10 + end)])
    assert len(family.next) <= 40 and list(drafters[0].candidates()) == []


def test_streams_of_a_seed_are_apart_and_the_first_is_the_seed_s_own():
    for stream in (0, 1, 7):
        philox = np.random.Philox(key=np.array([5, stream], np.uint64), counter=np.array([0, 3, 2, 0], np.uint64))
        expected = np.random.Generator(philox).random(6)
        assert np.array_equal(Noise(5, stream).uniforms(3, Purpose.ACCEPT, 6), expected)
    assert np.array_equal(Noise(5).gumbel(9, 4), Noise(5, 0).gumbel(9, 4))
    streams = [tuple(Noise(seed, stream).gumbel(3, 8)) for seed in (5, 6) for stream in range(3)]
    assert len(set(itertools.chain(*streams))) == 48


def decode(requests, given=None, *, pair=None, decoder=None):
    decoder = decoder or Decoder(*(pair or toy_pair(order=2)))
    texts, last = collect(decoder.decode(requests, eos_token_ids=(3,), siblings=given), len(requests))
    return texts, [last[i].stats for i in range(len(requests))]


def answers(n, *, prompts=(REPEATS,), pair=None, **options):
    """n answers to each prompt, as one batch."""
    settings = Settings(**({"temperature": 0.8, "seed": 7, "max_new_tokens": 40} | options))
    requests = [(list(prompt), settings) for prompt in prompts for _ in range(n)]
    return decode(requests, samples(prompts, n), pair=pair)


@pytest.mark.parametrize("length", [0, 1, 4, 16, "auto"])
@pytest.mark.parametrize("draft", ["siblings", "auto", "model", "suffix"])
def test_an_answer_is_the_same_with_any_draft_and_any_number_of_siblings(draft, length):
    plain = answers(8, draft="none")[0]
    assert len(set(map(tuple, plain))) == 8
    assert answers(8, draft=draft, draft_length=length)[0] == plain
    assert answers(3, draft=draft, draft_length=length)[0] == plain[:3]
    assert answers(1, draft=draft, draft_length=length)[0] == plain[:1]
    prompts = ([1, 2], REPEATS, [9], [1, 2])  # among others, one of them asked twice
    mixed = answers(2, prompts=prompts, draft=draft, draft_length=length)[0]
    assert mixed[2:4] == plain[:2] and mixed[:2] == mixed[6:]
    assert mixed == answers(2, prompts=prompts, draft="none")[0]


@pytest.mark.parametrize(
    ("draft", "rule", "count"), [("siblings", "rejection", 4), ("siblings", "block", 3), ("auto", "block", 3)]
)
def test_two_answers_that_draft_from_each_other_are_independent_draws_from_the_law(draft, rule, count, monkeypatch):
    """The joint law of both, every branch, drafts of two: the product of the target's own."""
    target, prompt, proposed = table_law(2, seed=4), [1, 0, 0, 1, 0, 1, 1], Counter()
    laws = target, mixed_law(target, table_law(2, seed=5), 0.8)
    monkeypatch.setattr(decoder_module, "Costs", lambda: FixedCosts(per_draft=0.05))
    options = Settings(max_new_tokens=count, ignore_eos=True, temperature=0.5, draft=draft, rule=rule, draft_length=2)

    def run(branches):
        with monkeypatch.context() as patch:
            noises = {}
            patch.setattr(
                admission,
                "Noise",
                lambda seed, stream=0: noises.setdefault(stream, ScriptedNoise(branches)),
            )
            draw_with_coins(patch)
            texts, last = decode([(prompt, options)] * 2, samples([prompt], 2), decoder=Decoder(*toys(laws)))
        proposed.update(name for stats in last for name in stats.by_drafter)
        return tuple(itertools.chain(*texts))

    one = target_law(sharpened(target, prompt, power=2.0), 2, count)
    both = {(*a, *b): one[a] * one[b] for a in one for b in one}
    assert distance(law(run), both) < 1e-12
    assert proposed["siblings"] > 10 and (draft == "siblings" or proposed["model"] > 10), proposed


def toys(laws, vocab=2):
    return [ToyEngine(each, vocab) for each in laws]


def test_rows_of_a_round_know_as_much_of_each_other_whoever_guesses_first(monkeypatch):
    made, seen = [], []

    class Spied(SiblingsDrafter):
        def __init__(self, family):
            super().__init__(family)
            made.append(self)

        def candidates(self):
            seen.append(tuple(each._taken for each in made))
            return super().candidates()

    monkeypatch.setattr("leadout.runtime.controller.cascade.SiblingsDrafter", Spied)
    texts, stats = answers(3, draft="siblings", max_new_tokens=20)
    rounds = max(each.rounds for each in stats)
    assert len(set(seen)) == rounds, "one state of knowledge a round"
    assert [each._taken for each in made] == [len(REPEATS) + len(text) for text in texts], "the last round included"


def test_finished_answers_are_drafted_from():
    """A target that hardly ever chooses, without repetition of its own: what one wrote, the next will write."""
    sharp, prompt = ToyEngine(table_law(200, seed=1, sharpness=40.0), 200, max_context=128), [1, 2, 3]
    decoder, given = Decoder(sharp, None, costs=FixedCosts()), samples([prompt], 2)
    settings = Settings(draft="siblings", temperature=0.1, seed=3, max_new_tokens=60)
    first, later = (decode([(prompt, settings)], [each], decoder=decoder) for each in given)
    assert first[0] == later[0] and first[1][0].accepted == 0
    assert later[1][0].accepted > 40 and set(later[1][0].by_drafter) <= {"siblings", "none"}
    again = decode([(prompt, settings)], samples([prompt], 2)[1:], decoder=decoder)[1][0]
    assert again.accepted == 0, "of another call nothing is known"


def test_equal_prompts_of_a_batch_are_siblings_without_being_asked_for_together():
    options = {"draft": "siblings", "draft_length": 3, "temperature": 0.3, "max_new_tokens": 60}
    settings = [Settings(seed=seed, **options) for seed in range(4)]
    _, stats = decode([(REPEATS, each) for each in settings])
    assert sum(each.accepted for each in stats) > 0
    _, apart = decode([([i, *REPEATS], each) for i, each in enumerate(settings)])
    assert sum(each.drafted for each in apart) == 0
    family = {id(each.family) for each in samples([[1], [2], [1], [3, 4]], 1)}
    assert len(family) == 2 and None in {each.family for each in samples([[1], [2]], 1)}
    given = samples([[1], [1], [2]], 3)
    assert [each.number for each in given] == [0, 1, 2] * 3
    assert len({each.seed for each in given}) == 3 and len({id(each.family) for each in given}) == 2


PROMPTS = [[5, 6, 7, 8], [1, 2], [5, 6, 7, 8], [3], [1, 2], [9] * 40, [5, 6, 7, 8], [3]]


def test_equal_prompts_are_fed_once():
    """The toy engine reads its context from its cache: a wrong copy would give another text."""
    for draft in ("none", "model", "auto"):
        batch = [(p, Settings(draft=draft, seed=i, temperature=1.0, max_new_tokens=9)) for i, p in enumerate(PROMPTS)]
        pair = toy_pair(order=None)
        together = decode(batch, pair=pair)[0]
        assert together == [decode([request], pair=toy_pair(order=None))[0][0] for request in batch]
        fed = [pair[0].calls[0]] if draft == "none" else [engine.calls[0] for engine in pair]
        assert fed == [(4, 39)] * len(fed), "[3] has nothing to feed, yet its row is one of the distinct"
        assert all(width < 39 for engine in pair for _, width in engine.calls[1:])


@pytest.mark.parametrize("variant", ["nonpad", "auto"])
def test_a_copied_row_has_the_bits_of_one_that_was_fed(tiny_bundle, variant):
    """That is, together: a long prompt that is read alone has its own in the graph for one row (test_prompts)."""
    rows = [[(7 * i + j) % 512 for j in range(length)] for i, length in enumerate((31, 3, READ_ALONE - 2))]
    with load(tiny_bundle, variant=variant) as pair:
        stepper = Stepper(pair.target, "target", exact=True)
        for prompts in ([rows[i] for i in (0, 1, 0, 2, 1, 0)], [[5]] * 6):
            found = []
            for feed in (prefill, lambda stepper, prompts: stepper.last_logits(prompts, [0] * len(prompts))):
                pair.target.reset(len(prompts))
                feed(stepper, prompts)
                found.append(np.array(stepper.all_logits([[1, 2, 3]] * len(prompts), [len(row) for row in prompts])))
            assert np.array_equal(*found)
            assert np.array_equal(found[0][0], found[0][5])


def test_a_real_pair_answers_several_times(tiny_bundle):
    """Groups of three: the last two answers follow alone, and draft from what is finished."""
    prompt = "def f(x):\n    return x\n\n\ndef g(x):\n"
    options = {"temperature": 0.7, "seed": 7, "max_new_tokens": 30, "ignore_eos": True}
    with load(tiny_bundle, variant="nonpad", batch_size=3) as pair:
        plain = [result.token_ids for result in pair.generate(prompt, n=8, draft="none", **options)]
        assert plain[0] == pair.generate(prompt, draft="none", **options).token_ids
        for draft in ("siblings", "auto"):
            found = pair.generate(prompt, n=8, draft=draft, **options)
            assert [result.token_ids for result in found] == plain and [each.sample for each in found] == list(range(8))


def test_samples_that_have_no_seed_share_the_one_that_was_drawn():
    given = samples([[1], [2]], 4)
    assert len({each.seed for each in given[:4]}) == 1 and given[0].seed != given[4].seed
    assert Sample().seed != Sample().seed


SAMPLING = {"temperature": 1.0, "max_new_tokens": 12}


def test_n_gives_a_list_of_answers_in_place_of_each(tokenizer_file):
    with make(tokenizer_file, batch_size=3) as pair:
        one = pair.generate(PROMPT, seed=5, **SAMPLING)
        many = pair.generate(PROMPT, n=5, seed=5, **SAMPLING)
        assert [each.sample for each in many] == [0, 1, 2, 3, 4] and one.sample == 0
        assert many[0].token_ids == one.token_ids and len({tuple(each.token_ids) for each in many}) == 5
        assert {each.seed for each in many} == {5} and {each.rule for each in many} == {"coupled"}
        assert max(rows for rows, _ in pair.target.calls) == 3
        for prompts in ([PROMPT, pair.codec.encode("x = 1")], [Request(PROMPT), Request("x = 1", temperature=1.0)]):
            several = pair.generate(prompts, n=2, seed=5, **SAMPLING)
            assert [[each.sample for each in group] for group in several] == [[0, 1], [0, 1]]
            assert [each.token_ids for each in several[0]] == [each.token_ids for each in many[:2]]
        drawn = pair.generate(Request(PROMPT, temperature=1.0), n=3, max_new_tokens=12)
        assert len({each.seed for each in drawn}) == 1 and {each.rule for each in drawn} == {"block"}
        assert [len(pair.generate(PROMPT, n=1, **options)) for options in (SAMPLING, {"max_new_tokens": 3})] == [1, 1]
        assert pair.generate([], n=3) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0, **SAMPLING}, "n must be an integer from 1 to 1024, not 0"),
        ({"n": True, **SAMPLING}, "n must be an integer from 1 to 1024, not True"),
        ({"n": 1.5, **SAMPLING}, "n must be an integer from 1 to 1024, not 1.5"),
        ({"n": 100_000_000, **SAMPLING}, "n must be an integer from 1 to 1024, not 100000000"),
        ({"n": 8}, "n 8 at temperature 0 would be the same answer 8 times"),
        ({"draft": "siblings", **SAMPLING}, "draft 'siblings' needs other answers to the same prompt"),
        ({"draft": "siblings", "n": 1, **SAMPLING}, "draft 'siblings' needs other answers to the same prompt"),
    ],
)
def test_calls_that_make_no_sense_are_refused_before_anything_runs(tokenizer_file, options, message):
    with make(tokenizer_file) as pair:
        with pytest.raises(UsageError, match=message):
            pair.generate([PROMPT, "x"], **options)
        assert pair.target.calls == []


def test_n_belongs_to_a_call(tokenizer_file):
    with make(tokenizer_file) as pair:
        for call in (
            lambda: pair.stream(PROMPT, n=2, **SAMPLING),
            lambda: Request(PROMPT, n=2),
        ):
            with pytest.raises(UsageError, match="'n' is no setting of a request, nor of a stream"):
                call()
        with pytest.raises(UsageError, match="draft 'siblings' needs other answers"):
            pair.stream(PROMPT, draft="siblings", **SAMPLING)
        with pytest.raises(UsageError, match="draft 'siblings' needs other answers"):
            Bench(pair, {"draft": "siblings"})


@pytest.mark.slow
def test_the_command_line_writes_an_object_an_answer(tiny_bundle):
    options = ["--draft", "siblings", "--temperature", "1", "--seed", "7", "--max-new-tokens", "9"]
    words = ["generate", str(tiny_bundle), "-p", "x = 1", "-p", "def f(x):", "--n", "3", *options]
    rows = [json.loads(line) for line in CliRunner().invoke(main, [*words, "--json"]).stdout.splitlines()]
    assert [row["sample"] for row in rows] == [0, 1, 2] * 2
    with load(tiny_bundle) as pair:
        wanted = pair.generate(["x = 1", "def f(x):"], n=3, temperature=1.0, seed=7, max_new_tokens=9, draft="none")
    assert [row["token_ids"] for row in rows] == [each.token_ids for group in wanted for each in group]
    shown = CliRunner().invoke(main, [*words[:4], *words[6:]])
    assert shown.stdout == "".join(each.text + "\n" for each in wanted[0]) and shown.stderr.count("\n") == 3
    assert CliRunner().invoke(main, [*words[:4], "--n", "2"]).exit_code == 2
