"""Drafts that know fewer tokens, other ids or padding: what they may say, what they read, and that answers stay."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_runtime import collect, decode_law, distance, sharpened, target_law, toy_pair
from test_mutants import Mutant, must_die
from tokenizers import Tokenizer, decoders, models

from leadout.bundle import VOCABULARY, Model, ModelEntry, file_entry
from leadout.engines.toy import ToyEngine, mixed_law, table_law
from leadout.errors import BundleError, EngineError, ExportError
from leadout.export.checkpoints.pairing import Vocabulary, match
from leadout.runtime import decoder, vocabulary
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters import model_drafter, tree_drafter
from leadout.runtime.drafters.retokenise import Tokenizers
from leadout.runtime.rules import sampling
from leadout.runtime.rules.law import whole
from leadout.runtime.rules.noise import Noise
from leadout.runtime.rules.sampling import Chain, Sampler
from leadout.runtime.settings import Settings
from leadout.runtime.text import Codec
from leadout.runtime.vocabulary import VocabularyMap

OUTPUTS = np.array([4, -1, 0, 2])
ROW = np.array([1.0, 9.0, 3.0, 3.0], np.float32)


def test_a_row_is_the_draft_s_logits_in_the_target_s_ids() -> None:
    row = VocabularyMap(OUTPUTS, 6).row(ROW)
    whole = np.array([3.0, -np.inf, 3.0, -np.inf, 1.0, -np.inf])
    assert row.size == 6 and np.array_equal(np.asarray(row), whole) and np.asarray(row).dtype == np.float32
    assert row.astype(np.float64).dtype == np.float64 and [row[i] for i in range(6)] == whole.tolist()
    assert row.argmax() == 0 == whole.argmax()  # the lowest id of the target's, not of the draft's
    assert np.array_equal(row[2:5], whole[2:5])
    row.astype(np.float32)[:] = 7
    assert np.array_equal(np.asarray(row), whole)  # each asker has its own


def test_a_trimmed_row_and_the_same_ids_cost_no_more_than_they_must() -> None:
    trimmed = VocabularyMap(np.array([1, 3, 5]), 6)
    assert not trimmed.identical and trimmed.row(ROW[:3]).argmax() == 3
    assert np.shares_memory(trimmed.kept(ROW[:3]), ROW)
    assert np.shares_memory(VocabularyMap.shared(4, 2).kept(ROW), ROW)
    same = VocabularyMap.shared(4, 4)
    assert same.identical and same.row(ROW) is ROW and same.tokens([3, 1]) == [3, 1]


def test_ids_that_the_draft_lacks_are_read_as_something_it_has() -> None:
    narrow, wide = VocabularyMap.shared(3, 5), VocabularyMap.shared(5, 3)
    assert narrow.tokens([0, 2, 3, 4]) == [0, 2, 2, 2] and wide.tokens([0, 2]) == [0, 2]
    assert np.asarray(narrow.row(ROW[:3])).tolist() == [1, 9, 3, -np.inf, -np.inf]
    assert np.asarray(wide.row(np.array([*ROW, 8], np.float32))).tolist() == [1, 9, 3]
    assert VocabularyMap(np.arange(2), 4, np.array([0, 1, 1, 0])).tokens([3, 2, 1]) == [0, 1, 1]


def entry(folder: Path, vocab_size: int = 4) -> ModelEntry:
    files = {VOCABULARY: file_entry(folder / VOCABULARY)} if (folder / VOCABULARY).exists() else {}
    return ModelEntry(
        directory="draft", architecture="T", precision="fp32", dialect="slots", dtype="float32",
        vocab_size=vocab_size, max_context=8, parameters=1, cache=(), eos_token_ids=(), variants={}, files=files,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"outputs": np.array([0, 1, 1, 2])}, "none twice"),
        ({"outputs": np.array([0, 1, 6, 2])}, r"ids of the target \(0 to 5\)"),
        ({"outputs": np.array([0, 1, -2, 2])}, "or -1"),
        ({"outputs": np.full(4, -1)}, "one at least, none twice"),
        ({"outputs": np.arange(3)}, "3 ids for 4 logits"),
        ({"outputs": np.arange(4), "inputs": np.zeros(5, np.int64)}, "each of the target's 6"),
        ({"outputs": np.arange(4), "inputs": np.full(6, -1)}, "an id of the draft, from 0"),
        ({"outputs": np.arange(4.0)}, "must be int64"),
        ({"outputs": np.arange(4)[None]}, "in one dimension"),
        ({"inputs": np.arange(6)}, "outputs"),
        ({"outputs": np.arange(4), "weights": np.arange(4)}, "unknown array 'weights'"),
    ],
)
def test_maps_that_are_none_are_refused(
    tmp_path: Path, tokenizer_file: Path, arrays: dict[str, Any], message: str
) -> None:
    np.savez(tmp_path / VOCABULARY, **arrays)
    with pytest.raises(BundleError, match=f"{VOCABULARY}: not a map of vocabularies: .*{message}"):
        VocabularyMap.read(Model(tmp_path, entry(tmp_path)), 6, Codec(tokenizer_file))


def test_a_map_is_read_back(tmp_path: Path, tokenizer_file: Path) -> None:
    assert VocabularyMap.read(Model(tmp_path, entry(tmp_path)), 6, Codec(tokenizer_file)) is None
    np.savez(tmp_path / VOCABULARY, outputs=OUTPUTS, inputs=np.array([2, 0, 3, 0, 0, 0]))
    found = VocabularyMap.read(Model(tmp_path, entry(tmp_path)), 6, Codec(tokenizer_file))
    assert found is not None and found.ids.tolist() == [0, 2, 4] and found.tokens([0, 2, 4, 5]) == [2, 3, 0, 0]


IDS = {"a": 0, "b": 1, "c": 2}


def test_vocabularies_that_match() -> None:
    target = Vocabulary("t", IDS, 3)
    same = match(target, Vocabulary("d", dict(IDS), 3))
    assert same.note == "" and same.inputs is None and same.outputs.tolist() == [0, 1, 2]
    assert "no tokenizer of its own" in match(target, Vocabulary("d", None, 3)).note
    padded = match(target, Vocabulary("d", IDS, 8))
    assert padded.outputs.tolist() == [0, 1, 2, -1, -1, -1, -1, -1] and padded.inputs is None
    assert "vocabulary of 8" in padded.note and padded.columns.tolist() == [0, 1, 2]
    target_padded = match(Vocabulary("t", IDS, 5), Vocabulary("d", IDS, 3))
    assert target_padded.outputs.tolist() == [0, 1, 2] and target_padded.inputs.tolist() == [0, 1, 2, 0, 0]
    permuted = match(target, Vocabulary("d", {"a": 2, "b": 0, "c": 1}, 3))
    assert permuted.outputs.tolist() == [1, 2, 0] and permuted.inputs.tolist() == [2, 0, 1]


def test_special_tokens_may_stand_on_one_side_only() -> None:
    target = Vocabulary("t", IDS | {"<think>": 3}, 4, frozenset({"<think>"}))
    found = match(target, Vocabulary("d", IDS | {"<end>": 3}, 4, frozenset({"<end>"})))
    assert found.outputs.tolist() == [0, 1, 2, -1] and found.inputs.tolist() == [0, 1, 2, 0]
    assert "3 of them the target's too" in found.note


def test_vocabularies_that_do_not_match_are_refused() -> None:
    target = Vocabulary("t", IDS, 3)
    with pytest.raises(ExportError, match=r"another vocabulary .*: token 'c' is not there and 2 here"):
        match(target, Vocabulary("d", {"a": 0, "b": 1}, 3))
    with pytest.raises(ExportError, match="token 'd' is 3 there and not here"):
        match(target, Vocabulary("d", IDS | {"d": 3}, 4))
    with pytest.raises(ExportError, match=r"'d' has 2 logits, too few for .* its tokenizer: token 'c' is 2;"):
        match(target, Vocabulary("d", IDS, 2))
    with pytest.raises(ExportError, match=r"vocabulary of 8 and no tokenizer\.json"):
        match(target, Vocabulary("d", None, 8))
    with pytest.raises(ExportError, match=r"'t' has no tokenizer\.json"):
        match(Vocabulary("t", None, 3), target)


def joining(vocab: dict[str, int], *merges: tuple[str, str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


OTHER = joining({"a": 0, "b": 1, "c": 2}), joining({"c": 0, "ab": 1, "a": 2, "b": 3}, ("a", "b"))
MAPS = {
    "trimmed": VocabularyMap(np.array([0, 2]), 3),
    "permuted": VocabularyMap(np.array([2, 0, 1]), 3, np.array([1, 2, 0])),
    "wider": VocabularyMap(np.array([1, -1, 2, -1]), 3, np.array([0, 0, 2])),
    "another tokenizer": VocabularyMap(np.array([2, -1, 0, 1]), 3, None, Tokenizers(*OTHER)),
}
PROMPT = [1, 2, 1, 2, 1]


def mapped_law(monkeypatch: Any, name: str, **options: Any) -> float:
    """How far the exact law of three tokens of whole runs is from the target's."""
    target = table_law(3, seed=4)
    size = {"trimmed": 2, "permuted": 3}.get(name, 4)
    draft = table_law(size, seed=5)
    with monkeypatch.context() as patch:
        patch.setattr(VocabularyMap, "shared", classmethod(lambda cls, *sizes: MAPS[name]))
        engines = iter((ToyEngine(target, 3), ToyEngine(draft, size)) * 10**6)
        patch.setattr("support_runtime.ToyEngine", lambda law, vocab, **_: next(engines))
        found = decode_law((target, draft), 3, 3, monkeypatch, PROMPT, temperature=0.5, draft_length=2, **options)
    return distance(found, target_law(sharpened(target, PROMPT, power=2.0), 3, 3))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_laws_are_the_target_s_whatever_the_draft_can_say(monkeypatch: Any, name: str, rule: str) -> None:
    assert mapped_law(monkeypatch, name, rule=rule) < 1e-12


def trimmed_pair(vocab: int = 11) -> tuple[ToyEngine, ToyEngine, VocabularyMap]:
    """A target whose draft knows every token but 3 and 7, under other ids, and agrees for the most part."""
    target, draft = toy_pair(vocab, order=2)
    kept = np.array([i for i in range(vocab) if i not in (3, 7)])
    outputs = np.roll(kept, 4)
    inputs = np.zeros(vocab, np.int64)
    inputs[outputs] = np.arange(outputs.size)
    ours = mixed_law(target.law, draft.law, 0.5)

    def law(context: np.ndarray) -> np.ndarray:
        weights = ours(outputs[context])[outputs]
        return weights / weights.sum()

    return target, ToyEngine(law, outputs.size, max_context=96), VocabularyMap(outputs, vocab, inputs)


def answers_stay(monkeypatch: Any = None) -> None:
    """Greedy and coupled answers of a ragged batch are those of the target alone; the drafts are of use."""
    options: dict[str, Any] = {"max_new_tokens": 30, "draft_length": 4}
    accepted = 0
    for sampled in ({}, {"temperature": 1.0, "seed": 5}, {"repetition_penalty": 1.3, "min_new_tokens": 20}):
        texts = {}
        for draft in ("none", "model"):
            target, model, ids = trimmed_pair()
            settings = Settings(draft=draft, **options, **sampled)
            decoding = Decoder(target, model, vocabulary=ids).decode(
                [([1, 3, 7], settings), ([3] * 9, settings), ([5], settings)], eos_token_ids=(3,)
            )
            texts[draft], last = collect(decoding, 3)
        assert texts["model"] == texts["none"]
        accepted += sum(last[i].stats.accepted for i in range(3))
    assert accepted > 25, "drafts are hardly ever right"


def test_answers_stay_the_target_s() -> None:
    answers_stay()


def drafts_read_their_own_ids(monkeypatch: Any = None) -> None:
    """What the draft model is fed are its own ids, and every draft is its likeliest token after them."""
    target, model, ids = trimmed_pair()
    fed, forward = [], target.forward

    def spy(tokens: np.ndarray, past: np.ndarray, index: Any = None) -> np.ndarray:
        if index is None or index.shape[1] > 1:
            fed.append(([*target._cache[0, : past[0]], tokens[0, 0]], tokens[0, 1:].tolist()))
        return forward(tokens, past, index)

    target.forward = spy  # type: ignore[method-assign]
    settings = Settings(max_new_tokens=20, draft_length=3)
    collect(Decoder(target, model, vocabulary=ids).decode([([1, 3, 7, 0], settings)]), 1)
    assert len(fed) > 3
    for context, drafted in fed[:-3]:
        for token in drafted:
            assert token == ids.row(model.law(np.array(ids.tokens(context)))).argmax()
            context = [*context, token]


def test_drafts_read_their_own_ids() -> None:
    drafts_read_their_own_ids()


def a_draft_that_may_say_nothing_is_silent(monkeypatch: Any = None) -> None:
    """The draft knows two tokens, and the request bans both: plain decoding. Broken numbers stay errors."""
    target = ToyEngine(table_law(5, seed=1), 5)
    ids = VocabularyMap(np.array([1, 2]), 5)
    both: dict[str, Any] = {"max_new_tokens": 9, "logit_bias": {1: -np.inf, 2: -np.inf}, "seed": 1}
    drafts: tuple[dict[str, Any], ...] = ({"draft_length": 3}, {"branches": (2, 1)})
    for drawn, draft in itertools.product(({}, {"temperature": 1.0}), drafts):
        settings, plain = Settings(**both, **drawn, **draft), Settings(**both, **drawn, draft="none")
        pair = Decoder(target, ToyEngine(table_law(2), 2), vocabulary=ids)
        (text,), last = collect(pair.decode([([0], settings)]), 1)
        assert [text] == collect(Decoder(target, None).decode([([0], plain)]), 1)[0]
        assert last[0].stats.drafted == 0
    broken = ToyEngine(lambda context: np.array([np.nan, 1.0]), 2)
    for draft, bias in itertools.product(drafts, ({}, {1: 1.0})):
        refused = ""
        try:
            list(Decoder(target, broken, vocabulary=ids).decode([([0], Settings(logit_bias=bias, **draft))]))
        except EngineError as error:
            refused = str(error)
        assert "no finite maximum" in refused


def test_a_draft_that_may_say_nothing_is_silent() -> None:
    a_draft_that_may_say_nothing_is_silent()


def few_logits_are_as_good_as_all(monkeypatch: Any = None) -> None:
    """A token and its q from the draft's own logits, and from a row of all the target's: bit for bit the same token."""
    rng = np.random.default_rng(3)
    ids = VocabularyMap(np.array([7, 3, -1, 11, 4, 0]), 12)
    options: list[dict[str, Any]] = [
        {},
        {"top_k": 3},
        {"top_k": 9},
        {"top_p": 0.6},
        {"min_p": 0.3},
        {"min_new_tokens": 3},
    ]
    for given, rule in itertools.product(options, ("rejection", "block", "coupled")):
        settings = Settings(temperature=0.8, rule=rule, seed=1, **given)
        sampler = Sampler(rule, Chain(settings, 12, [1], {3}), Noise(1))
        for start in range(40):
            row = ids.row(rng.normal(size=6).astype(np.float32))
            token, q = sampler.propose(row, [5, 5], start)
            other, other_q = sampler.propose(np.asarray(row), [5, 5], start)
            assert token == other
            if q is not None:
                assert other_q is not None
                assert whole(q, 12).shape == (12,) and np.abs(whole(q, 12) - whole(other_q, 12)).max() < 3e-7


def test_few_logits_are_as_good_as_all() -> None:
    few_logits_are_as_good_as_all()


def laws_hold(monkeypatch: Any) -> None:
    for name, rule in itertools.product(("trimmed", "another tokenizer"), ("rejection", "block")):
        assert mapped_law(monkeypatch, name, rule=rule) < 1e-12


def rows_hold(monkeypatch: Any) -> None:
    test_a_row_is_the_draft_s_logits_in_the_target_s_ids()
    test_a_trimmed_row_and_the_same_ids_cost_no_more_than_they_must()


CHECKS = [
    rows_hold,
    few_logits_are_as_good_as_all,
    answers_stay,
    drafts_read_their_own_ids,
    a_draft_that_may_say_nothing_is_silent,
    laws_hold,
]
MUTANTS = [
    Mutant("tokens unknown to the draft keep a chance", vocabulary.MappedRow, "astype", "-math.inf", "-9.0"),
    Mutant("the row stays in the draft's ids", vocabulary.MappedRow, "argmax",
           "self.ids[self.kept.argmax()]", "self.kept.argmax()"),
    Mutant("the draft is fed the target's ids", vocabulary.VocabularyMap, "tokens",
           "self._inputs[np.asarray(target_ids, np.int64)].tolist()", "list(target_ids)"),
    Mutant("q over the draft's own ids", model_drafter.ModelDrafter, "_choose", "self._vocabulary.row(logits)",
           "logits"),
    Mutant("ties go to the draft's order", vocabulary.VocabularyMap, "__init__", 'np.argsort(outputs, kind="stable")',
           "np.r_[np.flatnonzero(outputs < 0), np.flatnonzero(outputs >= 0)]"),
    Mutant("broken logits are a silence", sampling, "nothing_left", "if not np.isfinite(np.asarray(logits).max())",
           "if 0"),
    Mutant("a banned vocabulary is an error", model_drafter.ModelDrafter, "_choose", "self._vocabulary.identical and",
           "True and"),
    Mutant("no branch is an error", tree_drafter.TreeDrafter, "_grow", "self._vocabulary.identical and", ""),
    Mutant("noise by the draft's order", sampling.Sampler, "_heard",
           "few if ids is None else ids[few]", "few"),
    Mutant("q over few tokens only", sampling.Sampler, "_propose_among",
           "buffers.spread(row.ids, q, row.size, 0.0)", "q"),
    Mutant("places for tokens", sampling.Sampler, "_propose_among", "row.ids[list(q)].tolist()", "q"),
    Mutant("an early end is not banned", sampling.Chain, "looks_at_ids", "is not None or", "is not None and"),
    Mutant("the map is lost on the way", decoder.Decoder, "__init__", "vocabulary = vocabulary or", "vocabulary ="),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutants_die(mutant: Mutant, monkeypatch: Any) -> None:
    must_die(mutant, CHECKS, monkeypatch)
