"""Answers that a grammar binds: the target's law on what may follow, whoever drafts, and nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support_ahead import come_as_far_as
from support_features import Laws
from support_grammar import END, ended_law, follows, grammars, letters, mask_after, masked, untouched
from support_runtime import (
    Branches,
    FixedCosts,
    ScriptedNoise,
    collect,
    distance,
    draw_with_coins,
    law,
    parallel,
    toy_pair,
)
from test_block_drafter import BlockLaws
from test_foreign_draft import byte_level, sentence_piece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from leadout.engines.toy import ToyEngine, mixed_law, table_law
from leadout.errors import EngineError, UsageError
from leadout.runtime import admission
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters.forced import ForcedDrafter
from leadout.runtime.grammar import Grammar, reason
from leadout.runtime.rules.noise import Noise
from leadout.runtime.rules.sampling import Chain, Sampler
from leadout.runtime.samples import samples
from leadout.runtime.settings import GRAMMARS, Settings
from leadout.runtime.text import Codec
from leadout.runtime.vocabulary import VocabularyMap

ABC = letters(f"a b c {END}")
WORDS = {"ab", "aba", "ac", "acb", "bb", "bbb", "ca", "c"}
REGEX = "|".join(sorted(WORDS))
PROMPT = [0, 1, 0, 1, 0]
WIDE = letters(f"a b c d e f g h i j k ab gh cab {END}", ("a", "b"), ("g", "h"), ("c", "ab"))
VOCAB, LAST = len(WIDE.tokens), len(WIDE.tokens) - 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"regex": "<end>x"}, "<end>x"),
        ({"regex": "<turn>"}, "<turn>"),
        ({"json_schema": {"const": "a<turn><end>"}}, '"a<turn><end>"'),
        ({"regex": "<think>[b]</think>"}, "<think>b</think>"),
        ({"regex": r"b\[\]"}, "b[]"),
        ({"grammar": 'start: "b" <turn> "c"'}, "b<turn>c"),
        ({"grammar": 'start: "<end>" /\\/<turn>/ "\\"<think>" // <turn>'}, '<end>/<turn>"<think>'),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
@pytest.mark.parametrize("tokenizer", [byte_level(330), sentence_piece(400)], ids=["bytes", "pieces"])
def test_only_a_name_stands_for_a_special_token_and_a_text_that_spells_one_is_text(tokenizer, asked, said):
    tokenizer.add_special_tokens(["<turn>", "<end>"])
    tokenizer.add_tokens(["<think>", "</think>", "[]"])
    end, turn = map(tokenizer.token_to_id, ("<end>", "<turn>"))
    grammar = grammars(Codec.of(tokenizer)).of(Settings(**asked), [end])
    special = np.isin(np.arange(tokenizer.get_vocab_size()), [end, turn]).astype(np.float32)
    text: list[int] = []
    while (token := int(grammar.within(special, text).argmax())) != end:
        text.append(token)
        assert len(text) < 40
    assert tokenizer.decode(text, skip_special_tokens=False) == said
    assert (turn in text) == (" <turn> " in asked.get("grammar", ""))


def normalized(tokenizer):
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])


def begun_with_a_space(tokenizer):
    first = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), first])


def without_spaces(tokenizer):
    tokenizer.add_tokens([AddedToken("true", lstrip=True, rstrip=True)])


@pytest.mark.parametrize("change", [normalized, begun_with_a_space, without_spaces])
@pytest.mark.parametrize("said", ["true", "A  true 12 e\u0301 \u212b"])
@pytest.mark.parametrize("named", [False, True], ids=["text", "with a name"])
def test_a_text_that_the_tokenizer_changes_is_written_as_it_stands(change, said, named):
    tokenizer = byte_level(330)
    change(tokenizer)
    asked = {"grammar": f'start: "{said}" <end>'} if named else {"regex": said}
    grammar = grammars(Codec.of(tokenizer)).of(Settings(**asked), [0])
    row, text = np.zeros(tokenizer.get_vocab_size(), np.float32), []
    while (token := int(grammar.within(row, text).argmax())) != 0:
        text.append(token)
        assert len(text) < 40
    assert tokenizer.decode(text) == said
    grammar.extend(text)


@pytest.mark.parametrize("said", ["x<0x41>", "<0x41>", "a<0x41> \u00e9b"])
def test_a_text_that_spells_a_byte_s_name_is_text_in_unigram_s_cut_too(said):
    tokens = ["</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abx<>014A"]
    scored = [(token, -float(i % 7)) for i, token in enumerate(tokens)]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=1, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(tokens[:2])
    grammar, text = grammars(Codec.of(tokenizer)).of(Settings(regex=said), [0]), []
    while (token := int(grammar.within(np.zeros(len(tokens), np.float32), text).argmax())) != 0:
        text.append(token)
        assert len(text) < 40
    grammar.extend(text)
    assert tokenizer.decode(text) == said


@pytest.mark.parametrize("asked", [{"regex": "x.END.y"}, {"regex": "x[^b]{5}y"}, {"json_schema": {"const": "x[END]"}}])
def test_an_end_that_is_written_like_text_ends_no_text_before_it_is_complete(asked):
    """Some tokenizers have it among the added tokens, but not as a special one."""
    tokenizer = byte_level(330)
    tokenizer.add_tokens(["[END]"])
    end, b = tokenizer.token_to_id("[END]"), tokenizer.token_to_id("b")
    grammar = grammars(Codec.of(tokenizer)).of(Settings(**asked), [end])
    row = np.full(tokenizer.get_vocab_size(), -1, np.float32)
    row[[end, b]] = 1, 0
    text: list[int] = []
    while (token := int(grammar.within(row, text).argmax())) != end:
        text.append(token)
        assert len(text) < 40
    said = tokenizer.decode(text)
    assert json.loads(said) == "x[END]" if "json_schema" in asked else re.fullmatch(asked["regex"], said)


@pytest.mark.parametrize("first", [False, True], ids=["whole mask", "token"])
def test_a_letter_that_is_an_end_too_ends_only_what_is_complete(first):
    end = ABC.tokens.index("a")
    grammar = grammars(ABC).of(Settings(regex="(a|b)cb?(aa)?"), [end])
    row = np.array([2, 1, 0, 0], np.float32)
    for text, allowed in (((), [1]), ((1,), [2]), ((1, 2), [0, 1]), ((1, 2, 1), [0])):
        if first:
            assert [token for token in range(4) if grammar.allows(token, text)] == allowed
        else:
            assert np.flatnonzero(np.isfinite(grammar.within(row, text))).tolist() == allowed
    asked = grammars(ABC).of(Settings(grammar="start: /[b-c]+/ <end>"), [3])
    assert asked.allows(3, (1,)) and np.isfinite(asked.within(row, (1, 1)))[3]


def test_brackets_in_a_text_give_a_rule_no_temperature_and_ask_for_no_token():
    text = 'start: "[temperature= <[3]>" /<[ab]/ // [temperature=1] <[*]>'
    assert grammars(Codec.of(byte_level(330))).of(Settings(grammar=text), [0]) is not None


def bound_law(options, monkeypatch, words=WORDS, count=4, ends=(3,), mask_token=None):
    """The law of whole production runs, and what it must be."""
    target, vocab = table_law(4, seed=4), 4
    draft = mixed_law(target, table_law(4, seed=5), 0.8)
    found = grammars(ABC)
    settings = Settings(max_new_tokens=count, temperature=0.5, regex="|".join(sorted(words)), **options)

    def run(branches: Branches):
        with monkeypatch.context() as patch:
            patch.setattr(admission, "Noise", lambda seed, stream=0: ScriptedNoise(branches))
            draw_with_coins(patch)
            drafts = draft if mask_token is None else parallel(draft, mask_token)
            engines = ToyEngine(target, vocab), ToyEngine(drafts, vocab, mask_token=mask_token)
            decoder = Decoder(*engines, grammars=found, costs=FixedCosts(per_draft=0.05))
            (text,), _ = collect(decoder.decode([(PROMPT, settings)], eos_token_ids=ends), 1)
            return tuple(text)

    row = masked(target, PROMPT, follows(words, ABC, vocab, 3), power=2.0)
    return law(run), ended_law(row, count, 3)


LAWS = [
    {"rule": "rejection", "draft_length": 2},
    {"rule": "block", "draft_length": 2},
    {"rule": "rejection", "draft_length": 3},
    {"rule": "block", "draft_length": 3},
    {"rule": "rejection", "draft": "ngram", "draft_length": 2},
    {"rule": "rejection", "draft": "suffix", "draft_length": 2},
    {"rule": "block", "draft": "auto", "draft_length": 2},
    {"rule": "rejection", "draft": "none"},
    {"rule": "rejection", "branches": (2, 1)},
    {"rule": "rejection", "branches": (3,)},
]


@pytest.mark.parametrize("options", LAWS, ids=lambda o: "-".join(map(str, o.values())))
def test_whole_runs_have_the_target_s_law_on_what_the_grammar_allows(options, monkeypatch):
    found, truth = bound_law(options, monkeypatch)
    assert distance(found, truth) < 1e-12 and len(truth) == len(WORDS)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_draft_in_one_step_is_bound_too(rule, monkeypatch):
    found, truth = bound_law({"rule": rule, "draft_length": 3}, monkeypatch, mask_token=4)
    assert distance(found, truth) < 1e-12


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_processors_come_after_the_grammar(rule, monkeypatch):
    """Penalties, a bias, top-k and min-p see the tokens that it allows, and no others."""
    target = table_law(4, seed=4)
    options = {"temperature": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 0.7, "top_k": 2, "min_p": 0.02}
    options |= {"rule": rule, "logit_bias": {2: 0.5}, "draft_length": 2, "max_new_tokens": 4}
    allowed = follows(WORDS, ABC, 4, 3)

    def row(text):
        chain = Chain(Settings(**options), 4, PROMPT, {3})
        chain.extend(text)
        with np.errstate(divide="ignore"):
            logits = np.log(target(np.array([*PROMPT, *text])))
        return chain.distribution(np.where(allowed(text), logits, -np.inf))

    def run(branches):
        with monkeypatch.context() as patch:
            patch.setattr(admission, "Noise", lambda seed, stream=0: ScriptedNoise(branches))
            draw_with_coins(patch)
            decoder = Decoder(ToyEngine(target, 4), ToyEngine(table_law(4, seed=6), 4), grammars=grammars(ABC))
            request = PROMPT, Settings(regex=REGEX, **options)
            return tuple(collect(decoder.decode([request], eos_token_ids=[3]), 1)[0][0])

    assert distance(law(run), ended_law(row, 4, 3)) < 1e-12


BOUND = [
    {"regex": "[a-f]{3,9}(gh|hg)k{2,4}"},
    {"regex": "(cab|abc)+d(ef|gh){2}[i-k]*"},
    {"grammar": 'start: "a" part "k"\npart: /[b-e]+/ | "g" part "h"'},
    {},
    {"regex": "abcdefghijk(ab|gh)"},
    {"regex": "[a-k]+", "max_new_tokens": 9},
]
PROMPTS = [[0, 1, 2, 0, 1, 2, 0], [5], [11, 3, 11, 3, 12], [7, 7], [1, 2, 3], [0, 1, 2, 0, 1, 2, 0]]
SAMPLINGS = [
    {},
    {"temperature": 0.9, "seed": 7},
    {"temperature": 1.1, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.2},
    {"repetition_penalty": 1.3, "logit_bias": {1: 0.7}},
]
DRAFTS = [
    {"draft": "model", "draft_length": 1},
    {"draft": "model", "draft_length": 5},
    {"draft": "model"},
    {"draft": "ngram", "draft_length": 3},
    {"draft": "suffix"},
    {"draft": "recycling", "draft_length": 4},
    {"draft": "auto"},
    {"draft": "model", "branches": (2, 2, 1)},
]


def requests(**change):
    return [
        (prompt, Settings(**{"max_new_tokens": 24, **bound, **change}))
        for prompt, bound in zip(PROMPTS, BOUND, strict=True)
    ]


def written(asked, *, pair=None, **options):
    """Texts, why each ended, and the stats, of one batch."""
    decoder = Decoder(*(pair or toy_pair(VOCAB)), grammars=grammars(WIDE), **options)
    texts, last = collect(decoder.decode(asked, eos_token_ids=[LAST]), len(asked))
    return texts, [last[i].finish_reason for i in range(len(asked))], [last[i].stats for i in range(len(asked))]


def alone(asked, **options):
    """Each request on its own, with nobody drafting."""
    plain = [(prompt, dataclasses.replace(settings, draft="none", branches=())) for prompt, settings in asked]
    found = [written([one], **options) for one in plain]
    return [texts[0] for texts, _, _ in found], [reasons[0] for _, reasons, _ in found]


def is_legal(text, settings, reason_):
    """Whether llguidance itself, asked token by token, would have let it be written."""
    if settings.asked_grammar is None:
        return True
    matcher = untouched(WIDE, *settings.asked_grammar, (LAST,), VOCAB)
    steps = (mask_after(matcher, text[:i], VOCAB) for i in range(len(text)))
    legal = all(mask is not None and mask[token] for mask, token in zip(steps, text, strict=True))
    return legal and (reason_ == "length") == (text[-1] != LAST)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "coupled", "coupled and cut", "penalties"])
def test_answers_are_the_target_s_own_with_every_draft_alone_and_in_mixed_batches(sampling):
    asked = requests(**sampling)
    plain, reasons = alone(asked)
    assert all(map(is_legal, plain, (settings for _, settings in asked), reasons))
    assert {"stop"} <= set(reasons) <= {"stop", "length"}
    drafts = [draft for draft in DRAFTS if "branches" not in draft or sampling.get("top_p") is None]
    for draft in drafts:
        changed = requests(**sampling, **draft)
        assert written(changed)[:2] == (plain, reasons), draft
        for one, text in zip(changed, plain, strict=True):
            assert written([one])[0] == [text], draft


def test_whole_answers_are_words_of_the_grammar():
    patterns = [bound["regex"] for bound in BOUND if "regex" in bound]
    for pattern, seed in itertools.product(patterns, range(4)):
        settings = Settings(regex=pattern, temperature=1.5, seed=seed, max_new_tokens=60)
        (text,), (why,), _ = written([([1, 2], settings)])
        said = "".join(WIDE.tokens[token] for token in text[:-1])
        assert why == "length" or (re.fullmatch(pattern, said) and text[-1] == LAST)


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["greedy", "coupled"])
@pytest.mark.parametrize("known", [[0, 1, 2, 3, 4, 5, 6, 7], [14, 9, 8, 2, 11, 0]], ids=["lower", "mixed"])
def test_a_trimmed_draft_changes_nothing(sampling, known):
    target, draft = toy_pair(VOCAB)
    trimmed = ToyEngine(lambda context: np.full(len(known), 1 / len(known)), len(known), max_context=96)
    del draft
    vocabulary = VocabularyMap(np.array(known), VOCAB, np.arange(VOCAB) % len(known))
    asked = requests(**sampling, draft="model", draft_length=3)
    assert written(asked, pair=(target, trimmed), vocabulary=vocabulary)[:2] == alone(asked)


def test_a_draft_in_one_step_changes_nothing():
    target, draft = toy_pair(VOCAB)
    at_once = ToyEngine(parallel(draft.law, VOCAB), VOCAB, max_context=96, mask_token=VOCAB)
    for sampling in SAMPLINGS:
        asked = requests(**sampling, draft="model")
        assert written(asked, pair=(target, at_once))[:2] == alone(asked)


@pytest.mark.parametrize("laws", [Laws(VOCAB), BlockLaws(VOCAB)], ids=["token by token", "in blocks"])
def test_a_head_s_draft_changes_nothing(laws):
    for sampling in SAMPLINGS:
        asked = requests(**sampling, draft="model", draft_length=4)
        assert written(asked, pair=(laws.target(), laws.head()))[:2] == alone(asked, pair=(laws.target(), None))


def test_a_draft_made_ahead_changes_nothing():
    for sampling in SAMPLINGS:
        for one in requests(**sampling, draft="model", draft_length=3):
            assert written([one], draft_ahead=True)[:2] == alone([one])


def test_a_draft_made_ahead_copies_no_matcher(monkeypatch):
    """That would take the longer the longer the text is."""
    come_as_far_as(monkeypatch, None)
    made, init = [], Grammar.__init__
    monkeypatch.setattr(Grammar, "__init__", lambda self, compiled: made.append(self) or init(self, compiled))
    request = [1, 2, 3], Settings(regex="[a-k]{60}", max_new_tokens=60, draft="model", draft_length=3)
    written([request], draft_ahead=True)
    assert len(made) == 3, "to be checked, twice for the request"


@pytest.mark.parametrize("draft", ["auto", "siblings", "model", "none"])
def test_siblings_are_independent_answers_and_the_same_whoever_drafts(draft):
    prompt = [0, 1, 2, 0, 1]
    found = []
    for kind in ("none", draft):
        settings = Settings(temperature=1.2, seed=5, max_new_tokens=30, draft=kind, **BOUND[0])
        decoder = Decoder(*toy_pair(VOCAB), grammars=grammars(WIDE))
        rows = decoder.decode([(prompt, settings)] * 4, eos_token_ids=[LAST], siblings=samples([prompt], 4))
        texts, last = collect(rows, 4)
        assert all(is_legal(texts[i], settings, last[i].finish_reason) for i in range(4))
        found.append(texts)
    assert found[0] == found[1] and len(set(map(tuple, found[0]))) == 4


@pytest.mark.parametrize("rule", ["typical", "lenient"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lossy_rules_write_nothing_that_is_forbidden(rule, temperature):
    asked = requests(temperature=temperature, rule=rule, seed=1, draft="model", draft_length=4)
    texts, reasons, stats = written(asked)
    assert all(map(is_legal, texts, (settings for _, settings in asked), reasons))
    assert any(each.accepted for each in stats)


def test_an_answer_that_is_cut_is_a_beginning_of_one():
    for most in range(1, 9):
        texts, reasons, _ = written([([1], Settings(max_new_tokens=most, **BOUND[0], draft="model", draft_length=3))])
        assert reasons == ["length"] and len(texts[0]) == most
        said = "".join(WIDE.tokens[token] for token in texts[0])
        assert re.fullmatch("[a-f]{0,9}|[a-f]{3,9}(g|gh|h|hg)k{0,4}", said)


def test_a_stop_token_and_a_stop_matcher_cut_as_ever():
    request = [1, 2], Settings(regex="[a-f]{20}k", stop_token_ids=(3,), draft="model", draft_length=4)
    (text,), (why,), _ = written([request])
    assert why == "stop" and text[-1] == 3 and 3 not in text[:-1]


# Without an end token a text that is complete ends by itself.


def endless(regex, *, count=20, ends=(), **options):
    decoder = Decoder(*toy_pair(3), grammars=grammars(letters("a b c")))
    request = [0, 1, 0], Settings(regex=regex, max_new_tokens=count, **options)
    (text,), last = collect(decoder.decode([request], eos_token_ids=ends), 1)
    return "".join("abc"[token] for token in text), last[0].finish_reason


@pytest.mark.parametrize("draft", [{"draft": "none"}, {"draft": "model", "draft_length": 4}, {"draft": "auto"}])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 4}, {"temperature": 1.0, "rule": "rejection"}])
def test_where_no_token_ends_a_text_it_ends_when_it_is_complete(draft, sampling):
    for regex in ("(ab|ba|ca)b{2}", "a{5}", "[ab]{3,6}c", "c"):
        said, why = endless(regex, **draft, **sampling)
        assert re.fullmatch(regex, said) and why == "stop"
    assert endless("[ab]+", **draft, **sampling)[1] == "length"
    with pytest.raises(UsageError, match="regex allows the empty answer alone"):
        endless("(a?){0}", **draft)


def test_a_stop_string_and_a_complete_answer_share_a_round():
    told = []

    def matcher(new):
        told.append(list(new))
        return None

    decoder = Decoder(*toy_pair(3), grammars=grammars(letters("a b c")))
    request = [0], Settings(regex="abcab", draft="model", draft_length=6)
    (text,), last = collect(decoder.decode([request], stop_matcher_factory=lambda index: matcher), 1)
    assert text == [0, 1, 2, 0, 1] == list(itertools.chain(*told)) and last[0].finish_reason == "stop"


# The state of one answer is a function of its text.

TEXTS = st.lists(st.integers(0, VOCAB - 1), max_size=6)
PARTS = st.sampled_from(["a", "[ab]", "ab", "c?", "(gh|h)", "d*", "[a-k]{1,2}", "(cab|ca)", "b+", "g"])


def fresh(bound, text):
    """What a Grammar that has seen nothing else says."""
    made = grammars(WIDE).of(Settings(**bound), [LAST])
    assert made is not None
    made.extend(text)
    return made


def says(grammar, drafted):
    row = np.zeros(VOCAB, np.float32)
    try:
        return tuple(np.flatnonzero(np.isfinite(grammar.within(row, drafted))).tolist())
    except UsageError:
        return ()


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=4), st.lists(st.tuples(st.sampled_from("qaqef"), TEXTS), max_size=12))
def test_what_was_asked_before_changes_no_answer(parts, steps):
    """Questions about drafts, texts that go on along them or elsewhere, and copies, in any order."""
    bound, text = {"regex": "".join(parts)}, []
    grammar, random_ = grammars(WIDE).of(Settings(**bound), [LAST]), random.Random(len(steps))
    matcher = untouched(WIDE, "regex", bound["regex"], (LAST,), VOCAB)
    for kind, drafted in steps:
        mask = mask_after(matcher, text, VOCAB)
        if mask is not None and random_.random() < 0.7:  # a draft that may be said, for a while
            drafted, reach = [], list(text)
            while (mask := mask_after(matcher, reach, VOCAB)) is not None and mask.any() and len(drafted) < 5:
                token = int(random_.choice(np.flatnonzero(mask).tolist()))
                drafted, reach = [*drafted, token], [*reach, token]
        if kind == "f":
            other, longer = grammar.fork(), [*text, *drafted]
            if mask_after(matcher, longer, VOCAB) is not None or (
                LAST in drafted and mask_after(matcher, longer[: longer.index(LAST)], VOCAB) is not None
            ):
                other.extend(drafted)
                assert says(other, []) == says(fresh(bound, longer), [])
            else:
                other.extend(drafted)
                assert says(other, []) == tuple(range(VOCAB))
                with pytest.raises(UsageError, match="does not take"):
                    fresh(bound, text).extend(drafted)
        elif kind == "e" and mask_after(matcher, [*text, *drafted], VOCAB) is not None and LAST not in drafted:
            grammar.extend(drafted)
            text += drafted
        elif kind == "a":
            for token in random_.sample(range(VOCAB), 4):
                assert grammar.allows(token, drafted) == fresh(bound, text).allows(token, drafted)
                assert grammar.allows(token, drafted) == (token in says(fresh(bound, text), drafted))
        mask = mask_after(matcher, [*text, *drafted], VOCAB)
        expected = tuple(range(VOCAB) if mask is None else np.flatnonzero(mask).tolist())
        assert says(grammar, drafted) == expected


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.sets(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=6))
def test_a_mask_is_what_words_go_on_with(words):
    """By the words themselves: with tokens of one letter each, a text can be cut in one way only."""
    grammar = grammars(ABC).of(Settings(regex="|".join(sorted(words))), [3])
    mask, row = follows(words, ABC, 4, 3), np.zeros(4, np.float32)
    for text in {word[:end] for word in words for end in range(len(word) + 1)}:
        drafted = ["abc".index(letter) for letter in text]
        assert np.isfinite(grammar.within(row, drafted)).tolist() == mask(tuple(drafted)).tolist()
        assert [grammar.allows(token, drafted) for token in range(4)] == mask(tuple(drafted)).tolist()


def test_behind_what_is_forbidden_nothing_is_said_and_nothing_raised():
    grammar = fresh({"regex": "abc"}, [])
    assert [token for token in range(VOCAB) if grammar.allows(token, [])] == [11], "the tokenizer's own cut"
    row = np.arange(VOCAB, dtype=np.float32)
    for drafted in ([5], [0, 0], [11, 2, LAST, LAST], [LAST], [0, 1, 2, LAST, 4]):
        assert grammar.within(row, drafted) is row and grammar.allows(3, drafted)
    assert says(grammar, []) == (11,)
    with pytest.raises(UsageError, match="regex: llguidance allows a token of this tokenizer here that it does not"):
        fresh({"regex": "abc"}, []).extend([5, 5])
    lost = fresh({"regex": "abc"}, [])
    lost.extend([11, 2, LAST])
    lost.extend([0])
    assert says(lost, []) == says(lost, [1, 2]) == tuple(range(VOCAB)) and lost.fork().allows(3, [])
    assert says(grammar, []) == (11,)


@pytest.mark.parametrize("options", [{"draft_length": 3}, {"draft_length": 5}, {"branches": (2, 2)}], ids=str)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "rule": "rejection", "seed": 1}])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_what_cannot_be_spelled_is_an_error_where_the_text_comes_to_it_and_not_in_a_draft(
    options, sampling, ahead, monkeypatch
):
    """After "bbba" no token goes on with "bbbaz"."""
    come_as_far_as(monkeypatch, None)
    for wanted, draft in (([0.01, 0.97, 0.01, 0.01], 0), ([0.97, 0.01, 0.01, 0.01], 1)):
        laws = np.array(wanted), np.array([0.94 if token == draft else 0.02 for token in range(4)])
        engines = [ToyEngine(lambda context, weights=weights: weights, 4) for weights in laws]
        decoder = Decoder(*engines, grammars=grammars(ABC), draft_ahead=ahead)
        request = [1], Settings(regex="bbb(az|bc|bbc)", max_new_tokens=9, draft="model", **options, **sampling)
        if draft == 0:
            (text,), _ = collect(decoder.decode([request], eos_token_ids=[3]), 1)
            assert text in ([1, 1, 1, 1, 2, 3], [1, 1, 1, 1, 1, 2, 3])
        else:
            with pytest.raises(UsageError, match="regex: no token of this tokenizer goes on with the answer"):
                collect(decoder.decode([request], eos_token_ids=[3]), 1)


@pytest.mark.parametrize("length", [3, 5])
@pytest.mark.parametrize("draft", ["model", "ngram"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.01, "rule": "block", "seed": 1}])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_a_limit_of_llguidance_is_an_error_where_the_text_comes_to_it_and_not_in_a_draft(
    length, draft, sampling, ahead, monkeypatch
):
    """Rules that recurse on their right hand side: 150 of them come to it behind eight letters."""
    come_as_far_as(monkeypatch, None)
    rules = [f'x{i}: "a" x{i} | "a" | "b"' for i in range(150)]
    lark = "\n".join([f"start: {' | '.join(f'x{i}' for i in range(150))}", *rules])
    bound = grammars(ABC).of(Settings(grammar=lark), [3])
    assert bound.allows(2, [0] * 10) and not bound.allows(3, []) and not bound.allows(2, [0] * 8)
    for letters_ in (8, 99):

        def target(context, letters_=letters_):
            return np.array([0.97, 0.01, 0.01, 0.01] if len(context) < 15 + letters_ else [0.01, 0.97, 0.01, 0.01])

        engines = ToyEngine(target, 4), ToyEngine(lambda context: np.array([0.97, 0.01, 0.01, 0.01]), 4)
        decoder = Decoder(*engines, grammars=grammars(ABC), draft_ahead=ahead and draft == "model")
        settings = Settings(grammar=lark, max_new_tokens=12, draft=draft, draft_length=length, **sampling)
        events = decoder.decode([([0] * 15, settings)], eos_token_ids=[3])
        if letters_ == 8:
            assert collect(events, 1)[0] == [[0] * 8 + [1, 3]]
        else:
            with pytest.raises(UsageError, match="grammar: Parser Error: Current row has 2101 items; max is 2000"):
                collect(events, 1)


def test_columns_without_a_token_are_forbidden():
    size = VOCAB + 40
    for ends in ([LAST], []):
        grammar = grammars(WIDE, size).of(Settings(regex="[a-k]+"), ends)
        assert not any(grammar.allows(token, [0]) for token in range(VOCAB, size))
        allowed = np.flatnonzero(np.isfinite(grammar.within(np.zeros(size, np.float32), [0])))
        assert set(allowed.tolist()) == set(range(VOCAB - 1)) | set(ends)
        assert not any(grammar.allows(token, [0]) for token in range(VOCAB, size))
    with pytest.raises(UsageError, match=f"regex: the tokenizer has {VOCAB} ids, the target only 9"):
        grammars(WIDE, 9).of(Settings(regex="a"), [LAST])


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_a_long_row_s_shortcut_gives_what_the_whole_row_gives(temperature):
    size, rng = 20_000, np.random.default_rng(3)
    settings, found = Settings(temperature=temperature, seed=1, regex="[a-k]{1,4}|cab"), grammars(WIDE, 20_000)
    quick, hits = Sampler("coupled", Chain(settings, size, [0], {LAST}, found.of(settings, [LAST])), Noise(1)), 0
    for position in range(60):
        row = rng.normal(0, 3, size).astype(np.float32)
        row[: VOCAB - 1] += 14 * rng.integers(0, 2)
        drafted = [[], [0], [2], [13]][position % 4]
        whole = np.asarray(quick.chain.grammar.within(row, drafted)).astype(np.float64)
        scores = (whole - whole.max()) / temperature + Noise(1).gumbel(position, size)
        assert quick.choose(row, drafted, position) == scores.argmax()
        hits += int(row.argmax()) < VOCAB
    assert 10 < hits < 50


def test_a_law_in_one_pass_is_the_law_of_the_whole_chain():
    settings = Settings(temperature=0.7, rule="rejection", **BOUND[0])
    chain = Chain(settings, VOCAB, [0], {LAST}, fresh(BOUND[0], []))
    row = np.random.default_rng(1).normal(0, 2, VOCAB).astype(np.float32)
    for drafted in ([], [0, 1, 2], [0, 1, 2, 6]):
        scores = chain.scores(row, drafted)
        slow = np.exp(scores) / np.exp(scores).sum()
        assert np.abs(chain.distribution(row, drafted) - slow).max() < 1e-6
        assert (chain.distribution(row, drafted) > 0).tolist() == (slow > 0).tolist()
        assert chain.best(row, drafted) == scores.argmax()
    with pytest.raises(EngineError, match="no finite maximum"):
        chain.distribution(np.full(VOCAB, np.nan, np.float32))
    row[:6] = row[11] = row[13] = -np.inf
    for ask in (chain.best, chain.distribution, chain.scores):
        with pytest.raises(UsageError, match="regex: no token that it allows here is possible"):
            ask(row, [])


# Who drafts what is forced.


def test_what_is_forced_is_guessed_with_its_end():
    grammar = fresh({"regex": "abcdefghij(ab|gh)k"}, [])
    drafter = ForcedDrafter(grammar)
    drafter.take([11, 2])  # a prompt that could begin an answer
    whole = [token for token, _ in drafter.candidates()]
    assert "".join(WIDE.tokens[token] for token in whole) == "abcdefghij"
    drafter.take([11, 2, *whole])
    assert list(drafter.candidates()) == list(drafter.candidates()) == []
    drafter.take([11, 2, *whole, 11])
    assert [token for token, _ in drafter.candidates()] == [10, LAST]
    drafter.take([11, 2, *whole[:3]])
    assert [token for token, _ in drafter.candidates()] == whole[3:]


def test_auto_drafts_what_is_forced_for_requests_with_a_grammar_alone():
    def run(**bound):
        decoder = Decoder(*toy_pair(VOCAB), grammars=grammars(WIDE), costs=FixedCosts())
        request = [1], Settings(draft="auto", max_new_tokens=40, **bound)
        return collect(decoder.decode([request], eos_token_ids=[LAST]), 1)

    (text,), last = run(regex="abcdefghijkabcdefghijk")
    share = last[0].stats.by_drafter["forced"]
    assert share["accepted"] == share["drafted"] == 16 and len(text) == 19
    assert "forced" not in run()[1][0].stats.by_drafter


def test_rows_with_a_grammar_teach_others_nothing():
    decoder = Decoder(*toy_pair(VOCAB), grammars=grammars(WIDE))
    collect(decoder.decode([([1], Settings(draft="auto", **BOUND[4]))], eos_token_ids=[LAST]), 1)
    (kind,) = decoder._admission.commons._experiences
    assert kind.bound and not kind.sampled


# What is refused, and what is kept.


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_new_tokens": 2}, "min_new_tokens and {} exclude each other"),
        ({"ignore_eos": True}, "ignore_eos and {} exclude each other"),
        ({"logit_bias": {3: -math.inf}}, "a logit_bias of -inf and {} exclude each other"),
    ],
)
def test_what_could_leave_nothing_to_be_said_is_refused_by_name(name, change, message):
    texts = {"json_schema": {"type": "string"}, "regex": "a", "grammar": 'start: "a"'}
    with pytest.raises(UsageError, match=message.format(name)):
        Settings(**change, **{name: texts[name]})
    assert Settings(logit_bias={3: -1e12}, **{name: texts[name]}).asked_grammar[0] == name


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"regex": "a", "grammar": "b"}, "regex and grammar exclude each other"),
        ({"json_schema": {}, "regex": "b"}, "json_schema and regex exclude each other"),
        ({"regex": ""}, "regex must be text of at least one character, not ''"),
        ({"regex": 5}, "regex must be text of at least one character, not 5"),
        ({"grammar": "\ud800"}, "grammar must be text of whole characters"),
        ({"json_schema": [1]}, r"json_schema must be a JSON object, or text of one, not \[1\]"),
        ({"json_schema": "{"}, "json_schema must be a JSON object, or text of one: "),
        ({"json_schema": {"a": {1, 2}}}, "json_schema must be a JSON object, or text of one: "),
        ({"json_schema": {"a": math.nan}}, "json_schema must be a JSON object, or text of one: "),
        ({"json_schema": "[" * 99_999}, "json_schema must be a JSON object: this one is nested too deep"),
    ],
)
def test_settings_that_are_no_grammar_are_refused(given_, message):
    with pytest.raises(UsageError, match=message) as caught:
        Settings(**given_)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"regex": "("}, 'regex cannot be compiled: .*invalid regex "\\(" .*unclosed group'),
        ({"regex": "(?=a)a"}, "regex cannot be compiled: .*look-around"),
        ({"grammar": 'foo: "a"'}, "grammar cannot be compiled: no start rule found"),
        ({"grammar": 'start: "a'}, "grammar cannot be compiled: .*lexer error"),
        ({"json_schema": {"type": "strung"}}, "json_schema cannot be compiled: Invalid type: strung"),
        ({"json_schema": {"not": {}}}, 'json_schema cannot be compiled: Unimplemented keys: \\["not"\\]'),
        (
            {"grammar": 'start: t "b"\nt[stop="c"]: /a+/'},
            "grammar cannot be used where drafts are taken back: roll",
        ),
        ({"grammar": "start: t\nt[temperature=0.5]: /a+/"}, "grammar: a rule has no temperature of its own"),
        ({"grammar": 'start: "a" <[3]>'}, r"grammar: <\[3\]> asks for a token that is text by its number: write"),
        ({"grammar": 'start: ("a" <[13,13-13]>)+ "b"'}, r"grammar: <\[13\]> asks for a token that is text"),
        ({"regex": "z"}, "regex: no token of this tokenizer goes on with the answer"),
        ({"regex": "zab"}, "regex: llguidance allows a token of this tokenizer here that it does not take"),
        ({"grammar": 'start: "a" start'}, "grammar: parser error: Too many items"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason_before_anything_runs(given_, message):
    target, draft = toy_pair(VOCAB)
    decoder = Decoder(target, draft, grammars=grammars(WIDE))
    with pytest.raises(UsageError, match=message) as caught:
        decoder.decode([([1], Settings()), ([1], Settings(**given_))], eos_token_ids=[LAST])
    assert "\n" not in str(caught.value) and not target.calls


def test_who_has_no_tokenizer_or_no_llguidance_is_told_so(monkeypatch):
    with pytest.raises(UsageError, match="regex: this decoder has no tokenizer"):
        Decoder(*toy_pair(4)).decode([([1], Settings(regex="a"))])
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(EngineError, match=r"regex needs llguidance.*: pip install 'leadout\[grammar\]'"):
        grammars(ABC).of(Settings(regex="a"), [3])


def test_a_grammar_is_compiled_once_kept_and_forgotten(monkeypatch):
    made = grammars(WIDE)
    compiled, compile_ = [], type(made)._compile
    monkeypatch.setattr(type(made), "_compile", lambda self, *key: compiled.append(key[1]) or compile_(self, *key))
    decoder = Decoder(*toy_pair(VOCAB), grammars=made)
    asked = Settings(regex="ab+", temperature=1.0, draft="auto")
    for _ in range(3):
        collect(decoder.decode([([1], asked)] * 4, eos_token_ids=[LAST]), 4)
    assert compiled == ["ab+"]
    decoder.forget()
    collect(decoder.decode([([1], asked)], eos_token_ids=[LAST]), 1)
    assert compiled == ["ab+"] * 2
    for count in range(1, 41):
        made.of(Settings(regex=f"a{{{count}}}"), [LAST])
    assert len(made._kept) == 32
    # the latest; the oldest, until now; another; and again
    for regex in ("a{40}", "a{9}", "b", "a{9}"):
        made.of(Settings(regex=regex), [LAST])
    assert len(compiled) == 43


def test_a_tokenizer_that_llguidance_fails_over_is_refused():
    """It has a place for each token; for one of an id beyond their number it panics, which is no Exception."""
    settings = json.loads(byte_level(330).to_str())
    settings["model"]["vocab"]["far"] = 340
    tokenizer = Tokenizer.from_str(json.dumps(settings))
    tokenizer.add_tokens(["far"])
    for bound in ({"regex": "a"}, {"grammar": 'start: "a"'}):
        with pytest.raises(UsageError, match=rf"{next(iter(bound))}: llguidance cannot read this tokenizer: panic: "):
            grammars(Codec.of(tokenizer)).of(Settings(**bound), [0])


def test_a_message_is_one_line_without_what_it_is_about():
    message = "at 1(8): bad\n    (\n    ^\nerror: open\n   1 | start: /(/\n              ^\n<state>\nTokens\n"
    assert reason(message) == "at 1(8): bad ( error: open"
    assert reason("rollback: no\n<state>\nTokens: x") == "rollback: no"
    assert reason("panic: out of range\n<backtrace>\n 0: <unknown>\n") == "panic: out of range"
    assert len(reason("x" * 999)) == 303
