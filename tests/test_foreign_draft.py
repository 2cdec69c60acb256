"""Drafts with another tokenizer: the same text in other tokens, and answers that stay the target's."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_runtime import collect
from test_mutants import Mutant, must_die
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from leadout.engines.toy import ToyEngine, table_law
from leadout.errors import EngineError, ExportError
from leadout.export.checkpoints.pairing import Vocabulary
from leadout.export.drafts.other_tokenizer import is_foreign, match_bytes, require_coverage, token_bytes
from leadout.runtime import settings
from leadout.runtime.controller.costs import Costs
from leadout.runtime.controller.policy import Pace
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters import foreign_draft, retokenise
from leadout.runtime.drafters.retokenise import Tokenizers, Transcript, continuation
from leadout.runtime.samples import Sample
from leadout.runtime.settings import Settings
from leadout.runtime.vocabulary import VocabularyMap

LICENSE = (Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8")  # what no change of code changes
TEXT = " ".join(LICENSE[200:2400].split())
WORLD = "naïve café 世界 🙂🙃 " + TEXT[:300]


def byte_level(size: int, **options: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def sentence_piece(size: int) -> Tokenizer:
    """As Llama 2's: a space is a marker, unknown characters are bytes, a BOS token stands in front."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("\u2581"), "merged_with_next")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<s>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    settings = json.loads(tokenizer.to_str())
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["content"] in special]
    plain = Tokenizer.from_str(json.dumps(settings))
    plain.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return plain


@pytest.fixture(scope="module")
def target_tokenizer() -> Tokenizer:
    return byte_level(420)


@pytest.fixture(scope="module")
def draft_tokenizers() -> dict[str, Tokenizer]:
    return {"bytes": byte_level(330), "words": byte_level(600, use_regex=False), "pieces": sentence_piece(520)}


DRAFTS = ("bytes", "words", "pieces")


@pytest.mark.parametrize("name", DRAFTS)
def test_a_text_that_grows_is_read_as_if_cut_whole(
    target_tokenizer: Tokenizer, draft_tokenizers: dict[str, Tokenizer], name: str
) -> None:
    text = WORLD * 6  # settled several times over
    tokens = target_tokenizer.encode(text).ids
    draft = draft_tokenizers[name]
    transcript, opening = Transcript(Tokenizers(target_tokenizer, draft)), [0] if name == "pieces" else []
    assert transcript.own == opening
    unfinished, said = 0, ""
    for end in [*range(1, 400), len(tokens)]:
        transcript.take(tokens[:end])
        read = target_tokenizer.decode(tokens[:end])
        assert transcript.whole == (not read.endswith("\ufffd"))
        unfinished += not transcript.whole
        assert transcript.own[: len(opening)] == opening
        said = read if transcript.whole else said  # nothing of a token with half a character
        assert draft.decode(transcript.own) == said
    whole = draft.encode(text).ids
    assert unfinished > 5 and len(transcript.own) <= 1.05 * len(whole)
    if name != "words":  # without words there is no safe place to cut
        assert transcript.own == whole


@pytest.mark.parametrize("name", DRAFTS)
def test_what_the_draft_writes_becomes_the_target_s_own_tokens(
    target_tokenizer: Tokenizer, draft_tokenizers: dict[str, Tokenizer], name: str
) -> None:
    draft, before, after = draft_tokenizers[name], "what is missing of a checkpoint", " that cannot become a bundle"
    transcript = Transcript(Tokenizers(target_tokenizer, draft))
    tokens = target_tokenizer.encode(before).ids
    transcript.take(tokens)
    own = continuation(draft, before, after)
    assert [*tokens, *transcript.drafted(own)] == target_tokenizer.encode(before + after).ids
    smile = continuation(draft, before, " 🙂")
    assert target_tokenizer.decode(transcript.drafted(smile)) == " 🙂"
    assert "\ufffd" not in target_tokenizer.decode(transcript.drafted(smile[:-1]))
    assert transcript.drafted([]) == []


def test_a_broken_byte_behind_a_byte_is_read_as_one() -> None:
    """Where a tokenizer has bytes to fall back on, a run of them is broken as a whole for one that is."""
    target, draft = sentence_piece(400), byte_level(330)
    transcript = Transcript(Tokenizers(target, draft))
    tokens = [target.token_to_id(token) for token in ("e", "<0x0A>", "<0xF0>", "e", "<0x0A>", "e")]
    for end in range(1, len(tokens) + 1):
        transcript.take(tokens[:end])
        assert transcript.whole == (end != 3)
    assert draft.decode(transcript.own) == "e\n\ufffde\ne"


def test_special_tokens_of_the_target_are_no_text(target_tokenizer: Tokenizer) -> None:
    transcript = Transcript(Tokenizers(target_tokenizer, byte_level(330)))
    transcript.take([0])
    assert transcript.whole and transcript.own == []
    transcript.take([0, *target_tokenizer.encode("abc").ids, 0])
    assert transcript.whole and byte_level(330).decode(transcript.own) == "abc"


class Copyist:
    """A target and a draft that mostly go on with ``text`` from what they have read of it, each in its own tokens, and
    elsewhere as they like."""

    def __init__(self, target: Tokenizer, draft: Tokenizer, text: str, share: float = 0.97, context: int = 256) -> None:
        self.share, self.text = share, text
        self.engines = self._engine(target, 512), self._engine(draft, context)
        ours, theirs = target.get_vocab(), draft.get_vocab()
        outputs = np.full(max(theirs.values()) + 1, -1, np.int64)
        for token, i in theirs.items():
            outputs[i] = ours.get(token, -1)
        outputs[-1] = -1  # one they would share, had nobody left it out
        self.vocabulary = VocabularyMap(outputs, max(ours.values()) + 1, None, Tokenizers(target, draft))

    def _engine(self, tokenizer: Tokenizer, most: int) -> ToyEngine:
        size = max(tokenizer.get_vocab().values()) + 1
        noise = table_law(size, seed=size, order=1, sharpness=2.0)

        def law(context: np.ndarray) -> np.ndarray:
            read, weights = tokenizer.decode(context.tolist()), noise(context)
            if not read or (at := self.text.find(read)) < 0:
                return weights
            if rest := tokenizer.encode(self.text[at + len(read) :]).ids:
                weights = (1 - self.share) * weights
                weights[rest[0]] += self.share
            return weights

        return ToyEngine(law, size, max_context=most)


RULES: list[dict[str, Any]] = [{}, {"temperature": 1.0, "rule": "coupled", "seed": 4}]


def answers_stay(monkeypatch: Any = None) -> None:
    """Ragged batches, greedy and coupled: what the target alone writes, and the draft is of use."""
    target, text = byte_level(420), TEXT[:400]
    for draft in (byte_level(330), byte_level(600, use_regex=False)):
        for sampling in RULES:
            found = {}
            for kind in ("none", "model"):
                pair = Copyist(target, draft, text)
                requests = [
                    (target.encode(text[:n]).ids, Settings(max_new_tokens=new, draft_length=4, draft=kind, **sampling))
                    for n, new in ((30, 14), (11, 30), (60, 22))
                ]
                decoder = Decoder(*pair.engines, vocabulary=pair.vocabulary)
                found[kind], last = collect(decoder.decode(requests, eos_token_ids=(0,)), 3)
            assert found["model"] == found["none"]
            stats = [last[i].stats for i in range(3)]
            share = sum(s.accepted for s in stats) / sum(s.drafted for s in stats)
            assert share > (0.7 if not sampling else 0.2 if draft.get_vocab_size() < 400 else 0.04)


def test_answers_stay_the_target_s() -> None:
    answers_stay()


def sampled_drafts_have_a_law(monkeypatch: Any = None) -> None:
    """Every q is a law on tokens of both, and the draft was drawn from where it is positive."""
    target, draft, text = byte_level(420), byte_level(600, use_regex=False), TEXT[:400]
    pair = Copyist(target, draft, text)
    decoder, seen = Decoder(*pair.engines, vocabulary=pair.vocabulary), []
    model = decoder._model
    assert isinstance(model, foreign_draft.ForeignDrafter)
    propose = model.propose

    def spy(rows: Any, lengths: Any, watch: Any) -> Any:
        seen.append(propose(rows, lengths, watch))
        if fed := seen[-1][0].tokens[:-1]:  # what was drafted is fed back in the draft's own ids
            assert draft.decode(model._cached[0][-len(fed) :]) == target.decode(fed)
        return seen[-1]

    model.propose = spy  # type: ignore[method-assign]
    settings = Settings(max_new_tokens=30, draft_length=4, temperature=1.0, rule="block", seed=2)
    (_tokens,), last = collect(decoder.decode([(target.encode(text[:20]).ids, settings)]), 1)
    known = np.zeros(pair.vocabulary.size, bool)
    known[pair.vocabulary.ids] = True
    drafts = [d for (d,) in seen if d.tokens]
    assert len(drafts) > 4 and last[0].stats.accepted > 4
    for each in drafts:
        assert each.q is not None and len(each.q) == len(each.tokens)
        for token, q in zip(each.tokens, each.q, strict=True):
            assert q.shape == known.shape and q.sum() == pytest.approx(1) and not q[~known].any() and q[token] > 0


def test_sampled_drafts_have_a_law() -> None:
    sampled_drafts_have_a_law()


def test_nothing_is_read_for_a_row_that_others_draft_for() -> None:
    target = byte_level(420)
    pair = Copyist(target, byte_level(330), TEXT[:400])
    decoder, ids = Decoder(*pair.engines, vocabulary=pair.vocabulary), target.encode(TEXT[:60]).ids
    rows = [
        decoder._admission.row(i, list(ids), Settings(draft=kind), Sample(), (), None)
        for i, kind in enumerate(settings.DRAFTS)
    ]
    model = decoder._model
    assert isinstance(model, foreign_draft.ForeignDrafter)
    model.reset(rows)
    assert model.unread(rows) == 2 * (len(ids) - 1), "of auto's and of model's"


@pytest.mark.parametrize("prompts", [1, 2])
def test_a_text_whose_prompt_it_did_not_read_is_drafted_once_it_is_asked(
    prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had lost on the texts before, so this one began without it; what it then reads late is not a draft's price."""
    late: list[int] = []
    monkeypatch.setattr(Pace, "abstains", lambda self, policies, tokens: True)
    monkeypatch.setattr(Costs, "record_draft", lambda self, *given: late.append(given[-1]))
    target = byte_level(420)
    pair = Copyist(target, byte_level(330), TEXT[:400])
    decoder, asked = Decoder(*pair.engines, vocabulary=pair.vocabulary), Settings(max_new_tokens=30, draft_length=4)
    _, last = collect(decoder.decode([(target.encode(TEXT[:60]).ids, asked)] * prompts), prompts)
    assert all(each.stats is not None and each.stats.accepted > 10 for each in last.values())
    assert late[0] > 10 > max(late[1:])


def caches_hold_the_text(monkeypatch: Any = None) -> None:
    """After each round a row's slots are what was fed, and the next step starts where the text parts from it."""
    target, text = byte_level(420), TEXT[:400]
    draft = byte_level(600, use_regex=False)
    pair = Copyist(target, draft, text, share=0.7)
    decoder, fed = Decoder(*pair.engines, vocabulary=pair.vocabulary), []
    engine = pair.engines[1]
    forward = engine.forward

    def spy(tokens: Any, past: Any, index: Any = None) -> Any:
        result = forward(tokens, past, index)
        fed.append((past.tolist(), tokens.tolist(), engine._cache.copy()))
        return result

    engine.forward = spy  # type: ignore[method-assign]
    for sampling in RULES:
        requests = [
            (target.encode(text[:n]).ids, Settings(max_new_tokens=new, draft_length=3, **sampling))
            for n, new in ((30, 9), (10, 25))
        ]
        for _ in decoder.decode(requests):
            model = decoder._model
            for place, cached in enumerate(model._cached[: engine.batch]):  # type: ignore[union-attr]
                assert engine._cache[place, : len(cached)].tolist() == cached
    drafted = [past for past, _, _ in fed]
    assert any(b[0] < a[0] for a, b in itertools.pairwise(drafted)), "never rolled back"
    # a step of a draft that has begun is one token wide: nothing is read twice
    assert sum(len(row) for _, rows, _ in fed for row in rows) < 40 * len(fed)


def test_caches_hold_the_text() -> None:
    caches_hold_the_text()


def watch_moves(decoder: Decoder, moved: list[tuple[int, int]]) -> None:
    """Note where a row's cache began that moves, and where it begins then."""
    drafter: Any = decoder._model
    move = drafter.move

    def spy(source: int, destination: int) -> None:
        began = drafter._begins[source]
        move(source, destination)
        moved.append((began, drafter._begins[destination]))

    drafter.move = spy


def the_end_of_a_text_is_enough(monkeypatch: Any = None) -> None:
    """Of long prompts and of what was written at rest; and where a text has outgrown the draft's context."""
    target, draft, text = byte_level(420), byte_level(330), TEXT[:1500]
    prompts = [target.encode(text[:n]).ids for n in (600, 20, 400)]
    counts = (40, 16, 40)  # the row between them leaves, the last takes its place
    for sampling in RULES:
        found: list[Any] = []
        moved: list[tuple[int, int]] = []
        for context, reach, first in (
            (1024, 1024, 315),
            (1024, 40, 210),
            (150, 1024, 74),
            (60, 1024, 29),
            (150, 40, 74),
        ):
            pair = Copyist(target, draft, text, context=context)
            decoder = Decoder(*pair.engines, vocabulary=pair.vocabulary)
            decoder._pace.reach = lambda *_, reach=reach: reach  # type: ignore[method-assign, misc]
            watch_moves(decoder, moved)
            rows = [Settings(max_new_tokens=n, draft="model", draft_length=4, **sampling) for n in counts]
            texts, last = collect(decoder.decode(list(zip(prompts, rows, strict=True)), eos_token_ids=()), 3)
            stats = [last[i].stats for i in range(3)]
            assert pair.engines[1].calls[0] == (3, first)
            found.append((texts, [(s.drafted, s.accepted) for s in stats]))
            assert all(s.drafted > 2.5 * s.rounds for s in stats), "to the end"
        assert all(each == found[0] for each in found)
        assert any(one for one, _ in moved) and all(one == other for one, other in moved)
        alone = [(prompts[i], Settings(max_new_tokens=n, draft="none", **sampling)) for i, n in enumerate(counts)]
        plain = Decoder(pair.engines[0], None)
        assert collect(plain.decode(alone, eos_token_ids=()), 3)[0] == found[0][0]


def test_the_end_of_a_text_is_enough() -> None:
    the_end_of_a_text_is_enough()


def drafts_are_silent_where_they_must(monkeypatch: Any = None) -> None:
    """In the middle of a character, and without text; and a context of next to nothing changes no answer."""
    target, draft = byte_level(420), byte_level(330)
    pair = Copyist(target, draft, "x")
    settings = Settings(max_new_tokens=6, draft_length=4)
    model = pair.engines[1]
    narrow = ToyEngine(model.law, model.spec.vocab_size, max_context=12)
    smile = target.encode("a🙂").ids
    for prompt, engine in ((smile[:-1], model), ([0], model), (target.encode("a" * 40).ids, narrow)):
        decoder = Decoder(pair.engines[0], engine, vocabulary=pair.vocabulary)
        texts, _ = collect(decoder.decode([(prompt, settings)]), 1)
        alone, _ = collect(
            Decoder(pair.engines[0], None).decode([(prompt, Settings(max_new_tokens=6, draft="none"))]), 1
        )
        assert texts == alone
    assert all(width <= 12 for _, width in narrow.calls)
    broken = ToyEngine(lambda context: np.full(330, np.nan), 330)
    refused = ""
    try:
        list(Decoder(pair.engines[0], broken, vocabulary=pair.vocabulary).decode([(smile, settings)]))
    except EngineError as error:
        refused = str(error)
    assert "no finite maximum" in refused


def test_drafts_are_silent_where_they_must() -> None:
    drafts_are_silent_where_they_must()


CHECKS = [
    answers_stay,
    sampled_drafts_have_a_law,
    caches_hold_the_text,
    drafts_are_silent_where_they_must,
    the_end_of_a_text_is_enough,
]
MUTANTS = [
    Mutant("the cache is not rolled back", foreign_draft.ForeignDrafter, "_lacking", "del cached[valid:]", "pass"),
    Mutant("old ids are taken for the text's", foreign_draft.ForeignDrafter, "_lacking", "agreement(cached, own)",
           "len(cached)"),
    Mutant("all is read", foreign_draft.ForeignDrafter, "_lacking", "> self._reach", "> 10**9"),
    Mutant("a context is never full", foreign_draft.ForeignDrafter, "_lacking", "> self._context + 1", "> 10**9"),
    Mutant("it begins where the text is still cut anew", foreign_draft.ForeignDrafter, "_anew", "<= transcript.settled",
           "<= 10**9"),
    Mutant("what is still cut anew is read at any price", foreign_draft.ForeignDrafter, "_anew",
           "max(transcript.settled, size - self._half)", "transcript.settled"),
    Mutant("a row that moves begins where another did", foreign_draft.ForeignDrafter, "move",
           ", self._begins[destination]", ", _"),
    Mutant("a moved row leaves its cache behind", foreign_draft.ForeignDrafter, "move",
           "self._stepper.copy_row(source, destination)", "pass"),
    Mutant("drafted tokens are fed as the target's ids", foreign_draft.TokenWriter, "take",
           "self._vocabulary.column(self.draft.tokens[-1])", "min(self.draft.tokens[-1], 329)"),
    Mutant("drafts in the draft's own ids", retokenise.Transcript, "drafted",
           "return continuation(self._tokenizers.target,", "return list(own) or continuation(self._tokenizers.target,"),
]  # fmt: skip


def test_tokens_are_the_same_if_their_bytes_are(draft_tokenizers: dict[str, Tokenizer]) -> None:
    target, pieces = byte_level(420), draft_tokenizers["pieces"]
    found = token_bytes(vocabulary_of(pieces))
    ids = pieces.get_vocab()
    assert found[b" the"] == ids["\u2581the"] and found[b"\xe4"] == ids["<0xE4>"] and found[b"e"] == ids["e"]
    assert found["<s>"] == 0 and b"<s>" not in found
    matched = match_bytes(vocabulary_of(target), vocabulary_of(pieces))
    assert is_foreign(vocabulary_of(target), vocabulary_of(pieces))
    for i, target_id in enumerate(matched.outputs.tolist()):
        if target_id >= 0 and (text := pieces.decode([i])) and "\ufffd" not in text:
            assert target.decode([target_id]) == text
    assert (matched.outputs >= 0).sum() > 256 and matched.outputs[0] == -1
    assert not is_foreign(vocabulary_of(target), vocabulary_of(byte_level(420)))
    with pytest.raises(ExportError, match="neither byte-level nor SentencePiece"):
        token_bytes(vocabulary_of(Tokenizer(models.WordPiece())))


def test_added_tokens_are_the_text_that_they_are_shown_as() -> None:
    """Gemma's runs of spaces are added tokens, in its marker; those of byte-level tokenizers may be spaces."""
    user = "<\uff5cUser\uff5c>"
    runs = {"\u2581\u2581": b"  ", "<tool>": b"<tool>"}, {"  ": b"  ", user: user.encode()}
    for tokenizer, added in zip((sentence_piece(400), byte_level(330)), runs, strict=True):
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
        found = token_bytes(vocabulary_of(tokenizer))
        for token, what in added.items():
            i = tokenizer.token_to_id(token)
            assert found[what] == i and tokenizer.decode([i]).encode() == what
    target, draft = sentence_piece(400), byte_level(330)
    target.add_tokens([AddedToken("\u2581\u2581", normalized=False)])
    draft.add_tokens(["  "])
    matched = match_bytes(vocabulary_of(target), vocabulary_of(draft))
    assert matched.outputs[draft.token_to_id("  ")] == target.token_to_id("\u2581\u2581")


def test_a_share_that_is_too_small_is_not_said_to_be_enough() -> None:
    logits = np.log(np.array([[0.797, 0.203]], np.float32))
    with pytest.raises(ExportError, match="has with 79% of its probability, needed are 80%"):
        require_coverage("it", logits, np.array([0]))


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    added = frozenset(token.content for token in tokenizer.get_added_tokens_decoder().values())
    return Vocabulary("it", tokenizer.get_vocab(), tokenizer.get_vocab_size(), added, None, tokenizer)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutants_die(mutant: Mutant, monkeypatch: Any) -> None:
    must_die(mutant, CHECKS, monkeypatch)
