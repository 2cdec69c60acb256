"""Drafting ahead beside watched drafts, other vocabularies, lossy rules, other answers to the prompt, and trees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support_ahead import come_as_far_as
from support_graphs import Shape, entry
from support_runtime import FixedCosts, collect, toy_pair
from test_foreign_draft import TEXT, Copyist, byte_level
from test_vocabulary import trimmed_pair

from leadout.errors import UsageError
from leadout.runtime import ahead as ahead_module
from leadout.runtime import decoder as decoder_module
from leadout.runtime.ahead import check_ahead
from leadout.runtime.controller.policy import AutoLength
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters.confidence import Watch
from leadout.runtime.drafters.model_drafter import ModelDrafter
from leadout.runtime.samples import Sample
from leadout.runtime.settings import Settings

PROMPT = [1, 3, 7, 0]
MODEL = entry(Shape(), "fp32", {})


def rounds_of(draft_ahead: Any, settings: Settings, engines: Any = None, sample: Sample | None = None) -> Any:
    """What each round committed, and who drafted ahead."""
    target, draft, *ids = engines or toy_pair(11, share=0.1)
    decoder = Decoder(target, draft, vocabulary=ids[0] if ids else None, draft_ahead=draft_ahead)
    events = decoder.decode([(PROMPT, settings)], siblings=[sample or Sample(seed=1)])
    return [event.tokens for event in events], decoder.ahead


@pytest.mark.parametrize("most", [1, 2, None])
def test_watched_drafts_write_the_same_text(most: int | None, monkeypatch: Any) -> None:
    """A draft made ahead may be as long as nobody would have watched it grow, and may grow on: the text stays. What
    nobody saw teaches nothing about sureness; what was seen does."""
    come_as_far_as(monkeypatch, most)
    monkeypatch.setattr(decoder_module, "Costs", lambda: FixedCosts(per_draft=0.1))
    missed, taught = [], []
    miss, observe = Watch.missed, AutoLength.observe
    monkeypatch.setattr(Watch, "missed", lambda self, place, count: (missed.append(count), miss(self, place, count)))

    def spy(self: AutoLength, outcomes: Any, classes: Any = (), rows: int = 1) -> None:
        if outcomes:  # the last token needs no draft
            taught.append((len(outcomes), len(classes)))
        observe(self, outcomes, classes, rows)

    monkeypatch.setattr(AutoLength, "observe", spy)
    settings = Settings(draft="model", max_new_tokens=80, ignore_eos=True)
    alone, _ = rounds_of(False, Settings(draft="none", max_new_tokens=80, ignore_eos=True))
    taught.clear()
    rounds, who = rounds_of(True, settings)
    assert [token for tokens in rounds for token, _ in tokens] == [token for tokens in alone for token, _ in tokens]
    assert len(missed) == len(taught), "every draft was watched"
    assert (max(missed) > 0) == (most != 1) and bool(who.kept) == (most != 1)
    for made_ahead, (tested, classes) in zip(missed, taught, strict=True):
        assert classes == 0 if made_ahead else classes >= tested


def test_what_was_made_ahead_counts_by_the_row_s_rate() -> None:
    watch = Watch([[0.5] * 10], [0.8], [8], [1.0 + 0.3 * n for n in range(17)], 1.0)
    assert watch.more(1), "0.8 for 0.3"
    watch.missed(0, 4)
    assert watch.more(1), "0.8 ** 5 is 0.33"
    watch.missed(0, 1)
    assert not watch.more(1), "0.26"


def test_a_resumed_draft_asks_before_it_grows() -> None:
    target, model = toy_pair(11)
    decoder = Decoder(target, model)
    row = decoder._admission.row(0, PROMPT, Settings(draft="model"), Sample(), (), None)
    drafter = decoder._model
    assert isinstance(drafter, ModelDrafter)
    drafter.reset([row])
    (draft,) = drafter.propose([row], [2])
    assert (len(draft.tokens), drafter.steps) == (2, 2)
    for price, length in ((1e9, 2), (0.0, 5)):
        watch = Watch([[0.5] * 10], [0.8], [8], [1.0 + n for n in range(17)], price)
        drafter.resume(row, 5, draft, watch)
        assert (len(draft.tokens), drafter.steps) == (length, length - 2) and not draft.classes
    drafter.reset([row])
    assert draft.tokens == drafter.propose([row], [5])[0].tokens, "in one piece"


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "seed": 5, "rule": "block"},
        {"repetition_penalty": 1.3, "min_new_tokens": 20},
    ],
    ids=["greedy", "coupled", "block", "penalties"],
)
def test_drafts_of_other_ids_are_the_same_as_without(sampling: dict[str, Any], monkeypatch: Any) -> None:
    come_as_far_as(monkeypatch, None)
    settings = Settings(draft="model", max_new_tokens=60, draft_length=2, **sampling)
    rounds, who = rounds_of(True, settings, trimmed_pair())
    assert rounds == rounds_of(False, settings, trimmed_pair())[0]
    assert who.tried > who.kept > 0


@pytest.mark.parametrize(("rule", "temperature"), [("typical", 0.9), ("lenient", 0.9), ("lenient", 0.0)])
def test_lossy_rules_lose_no_more(rule: str, temperature: float, monkeypatch: Any) -> None:
    come_as_far_as(monkeypatch, None)
    sampling: dict[str, Any] = {"rule": rule, "temperature": temperature, "seed": 3}
    settings = Settings(draft="model", max_new_tokens=60, draft_length=3, **sampling)
    rounds, who = rounds_of(True, settings)
    assert rounds == rounds_of(False, settings)[0] and who.kept > 0


def test_other_answers_to_the_prompt_have_noise_of_their_own(monkeypatch: Any) -> None:
    """The guess at the bonus token takes the row's stream: with another, a twin would hardly ever be right."""
    come_as_far_as(monkeypatch, None)
    settings = Settings(draft="model", max_new_tokens=60, draft_length=3, temperature=1.0, seed=9)
    texts = []
    for number in (0, 1):
        twins = toy_pair(11)[0], toy_pair(11)[0]
        rounds, who = rounds_of(True, settings, twins, Sample(number))
        assert who.kept == who.tried > 10
        texts.append(rounds)
    assert texts[0] != texts[1]


def test_trees_are_let_alone(monkeypatch: Any) -> None:
    """A tree is not worked on ahead; a chain in the next text of the same decoder is, from a clean cache."""
    come_as_far_as(monkeypatch, None)
    tree = Settings(draft="model", max_new_tokens=30, branches=(2, 2))
    chain = Settings(draft="model", max_new_tokens=30, draft_length=3)
    found = {}
    for mode in (True, False):
        decoder = Decoder(*toy_pair(11, share=0.1), draft_ahead=mode)
        tried = []
        found[mode] = []
        for settings in (chain, tree, chain):
            found[mode] += collect(decoder.decode([(PROMPT, settings)]), 1)[0]
            tried.append(decoder.ahead.tried if decoder.ahead else 0)
        assert (tried[0] == tried[1] < tried[2]) == mode
    assert found[True] == found[False]


def test_a_draft_with_another_tokenizer_is_refused_or_left_as_it_is() -> None:
    target = byte_level(420)
    pair = Copyist(target, byte_level(330), TEXT[:400])
    with pytest.raises(UsageError, match="draft_ahead: a draft with another tokenizer"):
        Decoder(*pair.engines, vocabulary=pair.vocabulary, draft_ahead=True)
    with pytest.raises(UsageError, match="draft_ahead: a draft with another tokenizer"):
        check_ahead(True, {"cpu"}, draft=MODEL, vocabulary=pair.vocabulary)
    assert check_ahead("auto", {"cuda", "cpu"}, draft=MODEL, vocabulary=pair.vocabulary) == "auto"
    decoder = Decoder(*pair.engines, vocabulary=pair.vocabulary, draft_ahead="auto")
    assert decoder.ahead is None
    settings = Settings(draft="model", max_new_tokens=10, draft_length=4)
    text, last = collect(decoder.decode([(target.encode(TEXT[:40]).ids, settings)], eos_token_ids=(0,)), 1)
    assert text and last[0].stats.accepted > 0


def test_supposing_copies_a_row_and_shares_its_noise() -> None:
    decoder = Decoder(*toy_pair(11))
    settings = Settings(draft="model", temperature=1.0, seed=4, presence_penalty=0.5)
    row = decoder._admission.row(3, [1, 2], settings, Sample(7), (), None)
    other = ahead_module.suppose(row, [5, 6])
    assert other.sequence.tokens == [1, 2, 5, 6] and row.sequence.tokens == [1, 2]
    assert other.sampler.noise is row.sampler.noise and other.sampler.chain is not row.sampler.chain
    assert (other.sampler.chain.generated, row.sampler.chain.generated) == (2, 0)
    logits = np.zeros(11, np.float32)
    assert not np.array_equal(other.sampler.chain.scores(logits), row.sampler.chain.scores(logits))
