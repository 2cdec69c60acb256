"""What rounds show is entered every fourth round, all of it, in order, and sooner where the next round has to know."""

from __future__ import annotations

import pytest
from support_runtime import FixedCosts, collect, toy_pair
from test_mutants import Mutant, must_die
from test_policy import costs, next_length, next_round

from leadout.runtime import decoder
from leadout.runtime.controller import ledger, policy, survey
from leadout.runtime.controller.costs import Costs
from leadout.runtime.controller.ledger import Ledger
from leadout.runtime.controller.policy import AutoLength, Pace
from leadout.runtime.decoder import Decoder
from leadout.runtime.settings import Settings


def in_order_every_fourth_round():
    book, found = Ledger(), []
    book.tick()
    for number in range(1, 10):
        book.note(found.append, number)
        assert book.tick() == (number % 4 == 0)
        assert found == list(range(1, number // 4 * 4 + 1))
    book.due = True
    assert book.tick() and found == list(range(1, 10)) and not book.due
    book.note(found.extend, [10])
    book.enter()
    book.enter()
    assert found == list(range(1, 11)), "once"


def all_is_entered_when_a_row_ends():
    """Rows of a batch that ends at different times, and a text that somebody left."""
    target, draft = toy_pair(share=0.1)
    table = Costs()
    both = Decoder(target, draft, costs=table)
    requests = [([1, 2, 3], Settings(max_new_tokens=n, draft="model", draft_length=2)) for n in (5, 60)]

    def entered(part, rows=None):
        return sum(times for step, times in table.counts.items() if step.part in part and rows in (None, step.rows))

    def rounds(last):
        return [event.stats.rounds for event in last.values()]

    _, last = collect(both.decode(requests, eos_token_ids=()), 2)
    assert entered(("target", "plain")) == entered(("host",)) == max(rounds(last)) > 16
    assert entered(("host",), rows=2) == min(rounds(last))
    stream = both.decode(requests[1:], eos_token_ids=())
    for _ in range(2):
        next(stream)
    _, again = collect(both.decode(requests[1:], eos_token_ids=()), 1)
    assert entered(("host",)) == max(rounds(last)) + 2 + max(rounds(again))


def a_length_stands_until_what_was_noted_is_entered():
    pace = Pace(costs(per_draft=0.05))
    request = AutoLength(pace)
    for _ in range(24):
        request.observe([(1.0, 0.95)] * next_length(pace, request))
    asked = []
    pace._speeds = lambda *a, whole=pace._speeds: asked.append(pace._rounds) or whole(*a)
    lengths = [next_length(pace, request) for _ in range(8)]
    assert len(set(lengths)) == 1 and lengths[0] > 4 and len(asked) == 2, "worked out twice in eight rounds"
    assert next_length(pace, request, limit=2) == 2 < next_length(pace, request), "where there is no room for more"
    for _ in range(120):
        pace.ledger.note(request.observe, [(1.0, 0.0)])
        next_length(pace, request)
    assert not next_length(pace, request), "what was noted is learnt"


def what_is_measured_is_known_at_once():
    """Each length of the start-up measurement is asked for as often as it counts, whoever asks."""
    pace, measured = Pace(Costs()), []
    request = AutoLength(pace)
    pace._rounds = 100
    while (this := next_round(pace, request)[0]).explores:
        measured.append(pace.lengths(this, [request], [16])[0])
        pace.ledger.note(pace.prices.costs.record_target, 1, measured[-1] + 1, 1.0 + 0.02 * measured[-1])
        pace.ledger.note(pace.prices.costs.record_draft, 1, measured[-1], 0.02 * measured[-1])
        assert len(measured) < 20
    assert len(set(measured)) >= 3 and all(measured.count(length) == 2 for length in measured)
    pace = Pace(Costs())
    for _ in range(2):
        pace.prices.costs.record_target(1, 5, 1.0)
    pace._rounds = 100
    pace.tick()
    assert not pace.ledger.due and pace.survey.wants_plain(16, 1) and pace.ledger.due


def a_bill_is_of_its_own_round():
    """Guesses that promised much in one round promise nothing in the next."""
    pace = Pace(costs(per_draft=0.1))
    request, recorded = AutoLength(pace), []
    request.bill.record = recorded.append
    for _ in range(21):
        this, _ = next_round(pace, request)
    this.otherwise = 2.0
    pace.settle(this, [request], [3], 2, 0)
    this, _ = next_round(pace, request)
    assert this.otherwise == 0.0
    pace.settle(this, [request], [3], 2, 0)
    pace.enter()
    assert recorded[0] < recorded[1]


def texts_do_not_depend_on_it():
    target, draft = toy_pair(share=0.3)
    request = [([1, 2, 3, 4], Settings(max_new_tokens=60))]
    texts = []
    for _ in range(2):
        both = Decoder(target, draft, costs=FixedCosts())
        texts.append(collect(both.decode(request, eos_token_ids=()), 1)[0])
        both._pace.ledger.tick = lambda: True
        texts.append(collect(both.decode(request, eos_token_ids=()), 1)[0])
    assert all(text == texts[0] for text in texts)


CHECKS = [
    in_order_every_fourth_round,
    all_is_entered_when_a_row_ends,
    a_length_stands_until_what_was_noted_is_entered,
    what_is_measured_is_known_at_once,
    a_bill_is_of_its_own_round,
    texts_do_not_depend_on_it,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_healthy_code_passes(check):
    check()


MUTANTS = [
    Mutant("the last first", ledger.Ledger, "enter", "in waiting", "in reversed(waiting)"),
    Mutant("entered twice", ledger.Ledger, "enter", "self._waiting, []", "self._waiting, self._waiting"),
    Mutant("every round", ledger.Ledger, "tick", "% _ROUNDS == 0", "% 1 == 0"),
    Mutant("whatever is due", ledger.Ledger, "tick", "if entered:", "if self._rounds % _ROUNDS == 1:"),
    Mutant("not when a row ends", decoder.Decoder, "_retire", "len(live) < len(rows)", "False"),
    Mutant("a text that was left is lost", policy.Pace, "start", "self.enter()", "self.ledger.__init__()"),
    Mutant("once chosen", policy.Pace, "tick", "self._standing.clear()", "pass"),
    Mutant("any room", policy.Pace, "_choose", "min(limit, MAX_DRAFT_LENGTH) for", "0 for"),
    Mutant("measured at leisure", survey.Survey, "first_length", "self._ledger.due |= first is not None", "pass"),
    Mutant("plain at leisure", survey.Survey, "wants_plain", "self._ledger.due |= wants", "pass"),
    Mutant("another round's guesses", policy.Pace, "tick", "Round(rows)", "Round(rows, otherwise=2.0)"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, [lambda _, check=check: check() for check in CHECKS], monkeypatch)
