"""What a draft model earns, all told: where it loses it rests, and then it does not even read the next prompt."""

from __future__ import annotations

import math

import pytest
from support_runtime import FixedCosts, collect, toy_pair
from test_mutants import Mutant, must_die
from test_policy import costs, next_length, next_round

from leadout.runtime import decoder
from leadout.runtime.controller import bill, policy, reading
from leadout.runtime.controller.bill import Bill
from leadout.runtime.controller.costs import Costs
from leadout.runtime.controller.kinds import GREEDY, Kind
from leadout.runtime.controller.policy import AutoLength, FixedLength, Pace
from leadout.runtime.controller.rounds import Round
from leadout.runtime.decoder import Decoder
from leadout.runtime.settings import Settings

DRAFT, TOKEN = 0.1, 0.02  # what a draft step takes, and each token more in a step of the target, which takes 1


def a_pace(**options):
    return Pace(costs(per_draft=DRAFT, per_token=TOKEN, **options))


def spoiled(*bills):
    for each in bills:
        for _ in range(12):
            each.record(-1.0)
        assert each.loses


def settled(pace, *promised):
    """What is put on a request's bill for rounds of three tokens and two drafts, beside guesses that promise so many
    tokens a second."""
    request, recorded = AutoLength(pace), []
    request.bill.record = recorded.append
    next_length(pace, request)
    for otherwise in promised:
        pace.settle(Round(otherwise=otherwise), [request], [3], 2, 0)
    pace.enter()
    return request, recorded


def a_bill_knows_chance():
    found = Bill()
    assert not found.loses
    for _ in range(100):
        found.record(1.0)
        found.record(-1.0)
    assert not found.loses, "as much as it takes"
    found = Bill()
    for count in range(100):
        assert not (count < 4 and found.loses), "so few say nothing"
        found.record(0.5 if count % 2 else -1.0)
    assert found.loses, "a quarter a round"
    found = Bill()
    for saved in (-1.0, -1.0, 1.0, -1.0, -1.0, -1.0):
        found.record(saved)
    assert not found.loses, "nor do six"
    found = Bill()
    for count in range(1, 7):
        found.record(-1.0)
        assert found.loses == (count > 4), "misses in a row happen to any draft"
    for _ in range(400):
        found.record(-1.0)
    for _ in range(60):
        found.record(1.0)
    assert not found.loses, "what is long ago counts less"


def prompts_are_paid_for():
    """By what the rounds saved: with certainty, once there were some."""
    found = Bill()
    found.charge(2.0)
    assert not found.loses, "no round has shown anything"
    for _ in range(6):
        found.record(0.25)
    assert not found.loses
    found.charge(2.0)
    assert found.loses


def amounts_are_right():
    """Without a guess, with one, with text to make up for, with plain steps that are shorter on their own."""
    pace, took = a_pace(), 1.0 + 2 * (DRAFT + TOKEN)
    request, recorded = settled(pace, 0.0, 2.0, 0.5)
    pace.prices.costs.record_draft(1, 1, DRAFT + 8 * 0.05, late=8)
    pace.settle(pace.tick(), [request], [3], 2, 10)
    pace.enter()
    assert recorded == pytest.approx([3.0 - took, 1.5 - took, 3.0 - took, 3.0 - took - 10 * 0.05])
    pace = a_pace(plain=0.8)
    assert settled(pace, 0.0, 2.0)[1] == pytest.approx([3 * 0.8 - took, 1.5 * 0.8 - took])


def a_draft_that_comes_at_once_is_paid_as_it_was_asked_for():
    pace = a_pace()
    request, recorded = settled(pace)
    pace.settle(Round(), [request], [3], 2, 0, 6)
    pace.settle(Round(), [request], [3], 2, 0, 1)
    pace.enter()
    took = 1.0 + 2 * (DRAFT + TOKEN)
    assert recorded == pytest.approx([3.0 - took - 4 * DRAFT, 3.0 - took]), "what was not verified cost no wider step"


def what_is_measured_is_on_no_bill():
    pace = Pace(Costs())
    request = AutoLength(pace)
    recorded = []
    request.bill.record = recorded.append
    this, length = next_round(pace, request)
    assert length > 0
    pace.settle(this, [request], [1], 4, 0)
    pace.settle(this, [FixedLength(4)], [1], 4, 0)
    pace.enter()
    assert not recorded


def rows_of_one_kind_share_a_bill():
    pace = a_pace(rows=3)
    requests = [AutoLength(pace), AutoLength(pace), AutoLength(pace, Kind(sampled=True))]
    spoiled(requests[0].bill)
    assert requests[1].bill.loses and not requests[2].bill.loses
    next_length(pace, *requests)
    assert not pace.rest.resting, "for one of them it may still pay"
    recorded = []
    requests[0].bill.record = recorded.append
    pace.settle(Round(3), requests[:2], [1, 1], 1, 0)
    pace.enter()
    assert len(recorded) == 1


def tried(pace, request, saved, rounds=400):
    """In which of these rounds it drafts, each of which puts ``saved`` on its bill."""
    found = []
    for number in range(rounds):
        if next_length(pace, request):
            found.append(number)
            request.bill.record(saved)
    return found


def it_rests_and_is_tried():
    pace = a_pace()
    request = AutoLength(pace)
    assert next_length(pace, request) > 0
    spoiled(request.bill)
    found = tried(pace, request, -1.0)
    begun = [number for number in found if number - 1 not in found]
    assert len(found) == 5 * len(begun), "a try is as many rounds as one that only loses is known after"
    assert begun[0] > 32 * 5 * (TOKEN + DRAFT), "and rest pays for all of them"
    assert len(begun) == 3
    first, second, third = begun
    assert 1.7 * first < second - first < 0.6 * (third - second), "each that failed makes the next one rarer"


def a_verdict_ends():
    """Prices that were taken in a bad moment are put right while it rests: then its rounds show what it is worth."""
    pace = a_pace()
    request = AutoLength(pace)
    spoiled(request.bill)
    first, *others = tried(pace, request, 1.0)
    assert len(others) == 399 - first, "from the first try on"
    request.bill.clear()
    spoiled(request.bill)
    pace.read([request], 100, 2.0)
    pace.start()
    pace.rest.tick(128 * (2.0 + 5 * 2 * (TOKEN + DRAFT)))
    assert not pace.abstains([request], 100) and not request.bill.loses, "the next text may be the try"
    assert next_length(pace, request) > 0


def a_try_forgets_no_gain():
    pace = a_pace()
    request, cleared = AutoLength(pace), []
    request.bill.clear = lambda: cleared.append(request)
    pace.rest.begin()
    assert tried(pace, request, 1.0) and not cleared


def a_try_that_is_due_comes_at_the_beginning_of_a_text():
    """There the draft model has read all there is. Rounds later it would have to catch up first."""
    for late, tries in ((0, True), (1000, False)):
        pace = Pace(costs(per_draft=2.0))
        pace.read([], 100, 1.0)  # so that a token it missed has a price
        request = AutoLength(pace)
        assert next_length(pace, request) == 0 and pace.rest.resting, "so dear that it seems not to pay"
        pace.rest.tick(32 * 2 * (TOKEN + 2.0) + 1.0)
        pace.start()
        this = pace.tick()
        pace.lengths(this, [request], [16], lambda late=late: late)
        assert (this.why == "tried") == tries == (this.length == 2)


def a_prompt_that_stalled_is_no_reason_to_rest():
    """Something else held the machine for ten minutes: it is neither on the bill nor the price of the next one."""
    pace = a_pace()
    request, charged = AutoLength(pace), []
    request.bill.charge = charged.append
    for seconds in (2.0, 2.0, 600.0):
        pace.read([request], 100, seconds)
        pace.settle(Round(), [request], [4], 2, 0)
        pace.start()
    assert charged == pytest.approx([2.0, 6.0]) and pace.prices.reading == pytest.approx(0.06)


def a_prompt_is_not_read_for_nothing():
    pace = a_pace()
    request = AutoLength(pace)
    recorded = []
    record, request.bill.record = request.bill.record, lambda saved: (recorded.append(saved), record(saved))
    pace.read([request], 100, 2.0)
    pace.start()
    assert not recorded, "the first was a measurement"
    pace.read([request], 100, 2.0)
    pace.start()
    pace.start()
    assert not pace.abstains([request], 100) and recorded == [-2.0], "once"
    pace.read([request], 100, 2.0)
    pace.settle(Round(), [request], [4], 2, 0)
    charged, request.bill.charge = [], lambda seconds: charged.append(seconds)
    pace.start()
    pace.start()
    assert not pace.abstains([request], 100) and min(recorded[1:]) > 0, "it was of use"
    assert charged == [2.0], "and is paid for, once"
    spoiled(request.bill)
    assert pace.abstains([request], 100) and not pace.abstains([request, AutoLength(pace, Kind(sampled=True))], 100)
    assert not pace.abstains([FixedLength(4)], 100) and not pace.abstains([request, FixedLength(4)], 100)
    pace.rest.tick(32 * (2.0 + 5 * 2 * (TOKEN + DRAFT)))
    assert pace.abstains([request], 101) and not pace.abstains([request], 100), "it rested for that and for a try"


def a_model_that_abstains_reads_nothing():
    target, draft = toy_pair(share=0.1)
    both = Decoder(target, draft, costs=FixedCosts())
    ask = lambda how="model": collect(  # noqa: E731
        both.decode([([1, 2, 3, 4], Settings(max_new_tokens=20, draft=how))], eos_token_ids=()), 1
    )
    (text,), _ = ask("none")
    draft.calls.clear()
    spoiled(both._pace.seen(GREEDY).bill)
    both._pace.prices.reading = math.inf
    assert ask()[0] == [text] and (1, 3) not in draft.calls, "it may be tried later, and makes up for all then"
    for _ in range(40):
        both._pace.seen(GREEDY).bill.record(1.0)
    draft.calls.clear()
    texts, last = ask()
    assert texts == [text] and draft.calls[0] == (1, 3) and last[0].stats.accepted > 8


def what_was_not_read_is_made_up_for(monkeypatch):
    monkeypatch.setattr(Pace, "abstains", lambda *_: True)
    target, draft = toy_pair(share=0.1)
    both = Decoder(target, draft, costs=FixedCosts())
    prompts = [[1, 2, 3, 4], [5, 6]]
    ask = lambda how: collect(  # noqa: E731
        both.decode([(p, Settings(max_new_tokens=20, draft=how)) for p in prompts], eos_token_ids=()), 2
    )
    texts, _ = ask("none")
    draft.calls.clear()
    again, last = ask("model")
    assert again == texts and draft.calls[0] == (2, 4) and last[0].stats.accepted > 8


CHECKS = [
    a_bill_knows_chance,
    prompts_are_paid_for,
    amounts_are_right,
    a_draft_that_comes_at_once_is_paid_as_it_was_asked_for,
    what_is_measured_is_on_no_bill,
    rows_of_one_kind_share_a_bill,
    it_rests_and_is_tried,
    a_verdict_ends,
    a_try_forgets_no_gain,
    a_try_that_is_due_comes_at_the_beginning_of_a_text,
    a_prompt_that_stalled_is_no_reason_to_rest,
    a_prompt_is_not_read_for_nothing,
    a_model_that_abstains_reads_nothing,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_bill(check):
    check()


def test_what_was_not_read_is_made_up_for(monkeypatch):
    what_was_not_read_is_made_up_for(monkeypatch)


MUTANTS = [
    Mutant(
        "no chance",
        bill.Bill,
        "loses",
        "-_SURE * chance",
        "0.0",
    ),
    Mutant("few rounds tell as much as many", bill.Bill, "loses", "_FEW / max(1.0, self._rounds)", "0.0"),
    Mutant("nothing is forgotten", bill.Bill, "record", "_DECAY * self._saved", "self._saved"),
    Mutant("guesses are no alternative", policy.Pace, "_settle", "step * this.otherwise", "0.0"),
    Mutant("plain steps are as any", policy.Pace, "_settle", "* plain /", "* step /"),
    Mutant("what was asked for and not verified is free", policy.Pace, "settle", "max(length, steps)", "length"),
    Mutant("what was asked for is thought verified", policy.Pace, "_settle", "- unverified ", ""),
    Mutant("what it missed is free", policy.Pace, "_settle", "+ prices.catch_up(rows, late)", ""),
    Mutant("measuring is paid for", policy.Pace, "settle", 'this.why != "measured"', "True"),
    Mutant("one bill for all", policy.AutoLength, "__init__", "pace.seen(kind)", "pace.seen(GREEDY)"),
    Mutant("one loses, all rest", policy, "lose", "all(", "any("),
    Mutant("a verdict is for good", policy.Pace, "_attempt", "bill.clear()", "pass"),
    Mutant("what works is begun anew", policy.Pace, "_attempt", "if lose(bills)", "if True"),
    Mutant("a text is no try", policy.Pace, "abstains", "self._attempt(bills)", "pass"),
    Mutant("a try is one round", policy.Pace, "_trial", "TRIAL if lose(bills) else 1", "1"),
    Mutant("a promise is a success", policy.Pace, "_joint", "any(bill.is_new", "any(False and bill.is_new"),
    Mutant("nobody looks at the bill", policy.Pace, "_joint", "self.rest.begin()", "pass"),
    Mutant("no text begins with a try", policy.Pace, "_joint", "self._tries(this, bills, late):  #", "False:  #"),
    Mutant("catching up is free", policy.Pace, "_tries", "+ self.prices.catch_up(this.rows, late())", ""),
    Mutant("reading is free", reading.Reading, "end", "bill.record(-seconds)", "pass"),
    Mutant("reading is free where it was of use", reading.Reading, "end", "bill.charge(seconds)", "pass"),
    Mutant("its price is measured at its cost", reading.Reading, "begin", "if self._prices.reading else []", ""),
    Mutant("reading is chance", reading.Reading, "end", "bill.charge(seconds)", "bill.record(-seconds)"),
    Mutant("a charge is a gain", bill.Bill, "charge", "-= seconds", "+= seconds"),
    Mutant("no round is enough", bill.Bill, "loses", "not self.is_new and", ""),
    Mutant(
        "it is never read again", policy.Pace, "abstains", "if not self.rest.affords", "if True or self.rest.affords"
    ),
    Mutant("each row pays", policy, "bills_of", "list(dict.fromkeys(bills))", "bills"),
    Mutant("fixed lengths rest, too", policy, "bills_of", "if len(bills) == len(policies) else []", ""),
    Mutant("all prompts are read", decoder.Decoder, "_start", "not self._pace.abs", "True or self._pace.abs"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, [lambda _, check=check: check() for check in CHECKS], monkeypatch)
