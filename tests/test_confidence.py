"""When a draft in the making is cut: the rule itself from given costs, and that no cut changes a text or a law."""

from __future__ import annotations

import numpy as np
import pytest
from support_runtime import FixedCosts, collect, decode_law, distance, sharpened, target_law, toy_pair

from leadout.engines.toy import mixed_law, table_law
from leadout.runtime import decoder as decoder_module
from leadout.runtime.controller.kinds import Kind
from leadout.runtime.controller.policy import AutoLength, Pace
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters import confidence, model_drafter
from leadout.runtime.drafters.confidence import GREEDY_PRIOR, SAMPLED_PRIOR, Sureness, Watch, chance_of, sureness
from leadout.runtime.drafters.free import Calibration
from leadout.runtime.rules.verify import happened
from leadout.runtime.settings import Settings

LINE = [1 + 0.1 * length for length in range(17)]


def watch(*rows, seconds=LINE, price=2.0):
    """A watch of rows (rate, limit); every class's chance is its own tenth."""
    chances = [[each / 10 for each in range(10)] for _ in rows]
    return Watch(chances, [rate for rate, _ in rows], [limit for _, limit in rows], seconds, price)


def logits_of(probability, vocab=8):
    """A row whose top probability, at token 2, is that."""
    row = np.log(np.full(vocab, (1 - probability) / (vocab - 1)))
    row[2] = np.log(probability)
    return row.astype(np.float32) + 3.0


def test_classes_are_stretches_of_the_top_probability():
    probabilities = (0.2, 0.35, 0.55, 0.85, 0.97, 0.999)
    assert [sureness(chance_of(logits_of(p), 2)) for p in probabilities] == [0, 1, 3, 6, 8, 9]
    assert chance_of(logits_of(0.93), 5) == pytest.approx(0.01)
    assert chance_of(np.array([200.0, 0.0], np.float32), 1) == 0.0, "beyond what an exponential can say"

    class OnDevice:
        def __array__(self, dtype=None):
            raise AssertionError("the row was fetched")

    assert chance_of(OnDevice(), 2) is None


def test_a_draft_goes_on_while_another_token_is_worth_its_time():
    for probability, goes_on in ((0.92, True), (0.55, True), (0.45, False), (0.2, False)):
        each = watch((0.8, 16))
        each.saw(0, probability)
        assert each.more(1) is goes_on, "class / 10 x 0.8 against 2 x 0.1"
    assert not watch((0.8, 3)).more(3), "nothing beyond the limit"
    assert not watch((0.8, 16)).more(16)


def test_a_stair_is_climbed_if_what_stands_on_it_pays():
    stairs = [1.0 + 0.5 * (length >= 3) for length in range(17)]
    assert watch((0.9, 16), seconds=stairs, price=1.8).more(2), "one token does not pay for the stair, three do"
    assert not watch((0.4, 16), seconds=stairs, price=1.8).more(2)
    assert not watch((0.9, 3), seconds=stairs, price=1.8).more(2), "they are beyond the limit"


def test_rows_that_share_a_step_go_on_together():
    unsure, sure = (0.1, 16), (0.9, 16)
    assert not watch(unsure, price=2.0).more(1) and watch(unsure, sure, price=2.0).more(1)
    assert not watch(unsure, (0.9, 1), price=2.0).more(1), "the sure one is at its limit"


def test_chances_are_counted_per_class_and_shared():
    shared = Calibration(GREEDY_PRIOR)
    row = Sureness(shared)
    for _ in range(200):
        row.record([9, 0, 5], happened(tested=2, accepted=1), seconds=0.5)
    assert row.chances[9] > 0.98 and row.chances[0] < 0.1 and row.chances[5] == GREEDY_PRIOR[5], (
        "class 5 was never tested"
    )
    assert Sureness(shared).chances[0] < 0.1
    assert row.tokens / row.rounds == pytest.approx(2.0) and row.seconds / row.rounds == pytest.approx(0.5)


def test_nothing_is_watched_where_a_length_is_measured_or_tried():
    pace = Pace(FixedCosts(per_draft=0.02))
    policy = AutoLength(pace)
    this = pace.tick()
    assert pace.lengths(this, [policy], [16])[0] > 0
    assert pace.watch(this, [policy]).limits == [16]
    pace.prices.costs.coverage._times.clear()
    this = pace.tick()
    assert pace.lengths(this, [policy], [16]) == [4] and pace.watch(this, [policy]) is None


def settled(monkeypatch, **options):
    """Decoders whose costs are known: drafts are watched from the first round on."""
    monkeypatch.setattr(decoder_module, "Costs", lambda: FixedCosts(**options))


def test_watched_drafts_change_no_text_and_stop_at_many_lengths(monkeypatch):
    settled(monkeypatch, per_draft=0.1)
    lengths, more = set(), Watch.more

    def spy(self, length):
        goes_on = more(self, length)
        lengths.update(() if goes_on else (length,))
        return goes_on

    monkeypatch.setattr(Watch, "more", spy)
    requests = [([1, 2, 3], 60), ([4, 5], 35), ([6] * 9, 50)]
    texts = {}
    for draft in ("none", "model", "auto"):
        batch = [(prompt, Settings(draft=draft, max_new_tokens=count)) for prompt, count in requests]
        alone = [collect(Decoder(*toy_pair(7, order=2)).decode([each]), 1)[0][0] for each in batch]
        texts[draft] = collect(Decoder(*toy_pair(7, order=2)).decode(batch), 3)[0]
        assert texts[draft] == alone
    assert texts["model"] == texts["auto"] == texts["none"] and len(lengths) >= 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_length_that_was_asked_for_is_drafted_whoever_drafts(monkeypatch, temperature):
    """Also by the cascade, and beside a row whose length is its own to choose; sure drafts would go on for long."""
    settled(monkeypatch, per_draft=0.02)
    given = {"draft": "auto", "max_new_tokens": 40, "temperature": temperature, "seed": 1}
    for length in (1, 2, 4):
        fixed = ([1, 2, 3], Settings(draft_length=length, **given))
        for batch in ([fixed], [fixed, ([4, 5], Settings(**given))]):
            stats = collect(Decoder(*toy_pair(7, order=2, share=0.0)).decode(batch), len(batch))[1][0].stats
            assert stats.by_drafter["model"]["rounds"] > 0
            assert len(stats.tested_per_position) == length


def test_what_sampled_tokens_teach_is_no_news_of_greedy_ones(monkeypatch):
    settled(monkeypatch, per_draft=0.02)
    decoder = Decoder(*toy_pair(7, order=2))
    collect(decoder.decode([([1, 2, 3], Settings(draft="model", temperature=0.8, rule="block", max_new_tokens=60))]), 1)
    greedy, sampled = (decoder._pace.seen(Kind(drawn)).sureness for drawn in (False, True))
    assert greedy.rates == list(GREEDY_PRIOR) and sampled.rates != list(SAMPLED_PRIOR)


def law_of(monkeypatch, rule):
    settled(monkeypatch, per_draft=0.02, per_token=0.01)
    monkeypatch.setattr(confidence, "_EDGES", (0.5,))
    target, other = table_law(3, seed=4), table_law(3, seed=5)
    laws, prompt = (target, mixed_law(target, other, 0.8)), [1, 2, 1, 2, 1]
    found = decode_law(laws, 3, 3, monkeypatch, prompt, temperature=0.5, rule=rule, draft="model")
    return distance(found, target_law(sharpened(target, prompt, power=2.0), 3, 3))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_sampled_draft_may_end_after_any_of_its_tokens(rule, monkeypatch):
    """Two tokens long after a likely one, one after an unlikely one: the law is the target's all the same."""
    answers = set()

    def more(self, length):
        goes_on = self.classes[0][-1] == 1
        answers.add(goes_on)
        return goes_on

    monkeypatch.setattr(Watch, "more", more)
    assert law_of(monkeypatch, rule) < 1e-12
    assert answers == {True, False}


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_it_would_be_biased_if_a_token_were_dropped(rule, monkeypatch):
    """The mutant: a draft ends before an unlikely token that was drawn."""
    monkeypatch.setattr(Watch, "more", lambda self, length: False)
    propose = model_drafter.ModelDrafter.propose

    def dropping(self, rows, lengths, watched=None):
        drafts = propose(self, rows, lengths, watched)
        for draft in drafts:
            if watched is not None and draft.classes and draft.classes[-1] == 0:
                draft.tokens.pop()
                draft.q.pop()
        return drafts

    monkeypatch.setattr(model_drafter.ModelDrafter, "propose", dropping)
    assert law_of(monkeypatch, rule) > 1e-3
