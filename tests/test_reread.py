"""What a draft model reads again of its own drafts has a price: told from what a draft takes, promised, and weighed
where somebody is chosen. On a clock that only prices move."""

from __future__ import annotations

import pytest
from support_runtime import FixedCosts, collect, parallel, toy_pair
from test_mutants import Mutant, must_die

from leadout.engines.base import ANY
from leadout.engines.priced import Clock, Priced
from leadout.engines.toy import ToyEngine
from leadout.runtime import decoder, stats, tune
from leadout.runtime.controller import cascade, costs, policy, prices
from leadout.runtime.controller.cascade import Cascade, Commons
from leadout.runtime.controller.costs import Costs
from leadout.runtime.controller.joint import beside
from leadout.runtime.controller.policy import AutoLength, Pace
from leadout.runtime.controller.rounds import Round
from leadout.runtime.settings import Settings

VOCAB = MASK = 13  # the mask is an id that no text has
DRAFT, TOKEN, TARGET, WIDER = 0.4, 0.08, 1.0, 0.02  # milliseconds of steps, and of each token more in them
PROMPTS = [[(3 * i * i + i * first) % VOCAB for i in range(12)] for first in (1, 5, 8)]


def engines(clock):
    """A target, and a draft that says all in one step and then reads what was accepted of it."""
    target, draft = toy_pair(VOCAB, order=2, share=0.3, context=400)
    draft = ToyEngine(parallel(draft.law, MASK), VOCAB, max_context=400, mask_token=MASK)
    return (
        Priced(target, clock, lambda rows, width: TARGET + WIDER * (width - 1)),
        Priced(draft, clock, lambda rows, width: DRAFT + TOKEN * rows * (width - 1)),
    )


def texts(making, clock, **how):
    """Statistics of the prompts' rounds, one prompt after the other."""
    settings = Settings(max_new_tokens=150, ignore_eos=True, draft="model", **how)
    with clock.told((decoder, stats)):
        return [collect(making.decode([(prompt, settings)]), 1)[1][0].stats for prompt in PROMPTS]


def a_round_takes_what_was_promised(*_):
    for how in ({}, {"temperature": 1.0, "seed": 3, "rule": "rejection"}):
        clock, plain = Clock(), Costs()
        pair = engines(clock)
        plain.record_target(1, 1, 1e-3 * TARGET)
        sweep = tune.Sweep(*pair, exact=False)
        found = tune.promise(plain, sweep.costs, texts(sweep, clock, **how), 1, 80, ANY, rereads=sweep.rereads)
        accepted = 0.0
        for length in (1, 2, 4, 6):
            seen = texts(decoder.Decoder(*pair, exact=False), clock, draft_length=length, **how)
            rounds, spent = sum(each.rounds for each in seen), sum(sum(each.seconds.values()) for each in seen)
            read = sum(each.seconds["prefill"] for each in seen)
            assert 1e3 * (spent - read) / rounds == pytest.approx(found.round_ms[length], rel=0.03), (how, length)
            accepted = sum(each.accepted for each in seen) / rounds
        assert accepted > 1.2, "a round of six would else take a tenth less"


def it_is_told_from_what_a_draft_takes(*_):
    """By rounds that read nothing again, a little, and much, in any order; and they add up to what was paid."""
    table, paid = Costs(), 0.0
    for again in (0, 3, 1, 5, 0, 2, 4, 1, 0, 6, 2, 3):
        for steps in (2, 4):
            seconds = 0.1 * steps + 0.03 * again
            table.record_draft(1, steps, seconds, 0, again)
            paid += seconds
    assert table.drafts(1)[2:5:2] == pytest.approx([0.2, 0.4], rel=0.02)
    assert table.catch_up(1, 10) == pytest.approx(0.3, rel=0.02)
    for again in (0, 5, 5, 1, 0, 1, 1, 1):  # in batches a token may take another time
        table.record_draft(4, 2, 0.5 + 0.04 * 4 * again, 0, again)
        paid += 0.5 + 0.04 * 4 * again
    assert table.drafts(4)[2] == pytest.approx(0.5, rel=0.02) and table.catch_up(4, 1) == pytest.approx(0.16, rel=0.02)
    assert sum(table.price(table.counts).values()) == pytest.approx(paid, rel=0.02)


def paces(price=0.1):
    """Two, one where what was accepted is read again."""
    for rereads in (False, True):
        pace = Pace(FixedCosts(per_draft=0.2, per_token=0.0))
        pace.prices.costs.catch_up = lambda rows, late, guess=0.0: price * rows * late
        pace.prices.rereads = rereads
        yield pace


def rounds_pay_for_what_they_leave_to_be_read(*_):
    once, again = paces()
    assert [once.prices.again(2, written) for written in (1.0, 3.0)] == [0.0, 0.0]
    assert [again.prices.again(2, written) for written in (1.0, 3.0)] == pytest.approx([0.0, 0.4])
    assert [once.prices.missed(1, written) for written in (1.0, 3.0)] == pytest.approx([0.0, 0.2])
    assert [again.prices.missed(1, written) for written in (1.0, 3.0)] == pytest.approx([0.1, 0.3])
    promised = [beside(2.0, 3.0, pace.prices.missed(1, 3.0)) for pace in (once, again)]
    assert promised == pytest.approx([3 / 1.7, 3 / 1.8])


def who_rereads_promises_less(*_):
    """Drafts of two, all accepted, take 1.4 seconds a round, and what one model reads again of them 0.2."""
    for pace, took in zip(paces(), (1.4, 1.6), strict=True):
        request = AutoLength(pace)
        request.tokens = [1.0, 2.0, 3.0]
        assert request.speed(2, 1) == pytest.approx(3.0 / took) == pace._speeds([(request.tokens, 16)], 1)[2]
    rests = []
    for pace in (*paces(0.0), *paces(0.6)):
        request = AutoLength(pace)
        for _ in range(100):
            request.observe([(1.0, 0.5)])
        rests.append(not pace.lengths(Round(), [request], [16])[0])
    assert rests == [False, False, False, True], "one that is right half of the time"


def its_drafts_beside_guesses_weigh_it(*_):
    """Where drafts of two or three are worth the same, what is left to be read says which is better."""
    chosen = []
    for pace in paces(1.0):
        request = AutoLength(pace)
        request.tokens = [1.0, 2.2, 2.6]
        made = Cascade(Settings(draft="auto"), Commons(), pace, request)
        seconds = pace.prices.with_model(1)
        seconds[1:3] = 1.5, 1.7
        length, speed = made._where_it_is_as_easy(Round(), 1.0, 2, 2)
        chosen.append((length, speed))
    assert chosen == [(2, pytest.approx(2.6 / 1.7)), (1, pytest.approx(2.2 / (1.5 + 1.2)))]


CHECKS = [
    it_is_told_from_what_a_draft_takes,
    rounds_pay_for_what_they_leave_to_be_read,
    who_rereads_promises_less,
    its_drafts_beside_guesses_weigh_it,
    a_round_takes_what_was_promised,
]
C, P = costs.Costs, prices.Prices
MUTANTS = [
    Mutant("all of it is the draft's", C, "record_draft", "late <= _FEW", "True"),
    Mutant("a little of it is the draft's", C, "record_draft", "seconds - apart", "seconds"),
    Mutant("rows pay one row's price", C, "record_draft", "self.catch_up(rows, late)", "self.catch_up(1, tokens)"),
    Mutant("a little of it is nobody's", C, "record_draft", "if apart:", "if False:"),
    Mutant("a little says what a token takes", C, "record_draft", "late <= _FEW", "not late"),
    Mutant("nothing is left to be read", P, "again", "if self.rereads", "if False"),
    Mutant("all leave something to be read", P, "again", "if self.rereads", "if True"),
    Mutant("it reads what it never missed", P, "missed", "if self.rereads", "if True"),
    Mutant("it missed as little as others", P, "missed", "if self.rereads", "if False"),
    Mutant("a length is weighed without it", policy.Pace, "_speeds", "prices.again(rows, max(tokens))", "0.0"),
    Mutant("a speed is said without it", policy.AutoLength, "speed", "prices.again(rows, tokens)", "0.0"),
    Mutant("beside guesses it is not weighed", cascade.Cascade, "_where_it_is_as_easy", "prices.again(1, mean)", "0.0"),
    Mutant("nothing of it is promised", tune, "promise", "if rereads:", "if False:"),
    Mutant("the target's token is promised, too", tune, "promise", "(written - 1.0)", "written"),
    Mutant("nobody says that it rereads", tune.Sweep, "rereads", "self._pace.prices.rereads", "False"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_healthy_code_passes(check):
    check()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, CHECKS, monkeypatch)
