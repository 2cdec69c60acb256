"""What is measured before anything is known, and what it is allowed to cost."""

from __future__ import annotations

import math

import pytest
from support_runtime import FixedCosts, collect, toy_pair
from test_mutants import Mutant, must_die
from test_policy import next_round

from leadout.runtime import costs, coverage, drafters, policy, prices, typical
from leadout.runtime.costs import Costs, Step
from leadout.runtime.decoder import Decoder
from leadout.runtime.policy import AutoLength, Pace
from leadout.runtime.settings import Settings
from leadout.runtime.verify import happened


def measured(*, per_draft, kept, rows=1):
    """The lengths that a first text asks for of a draft of which the target keeps the first ``kept`` tokens."""
    table, lengths = Costs(), []
    pace = Pace(table)
    requests = [AutoLength(pace) for _ in range(rows)]
    for _ in range(14):
        this, length = next_round(pace, *requests)
        if this.explores:
            lengths.append(length)
            table.record_target(rows, length + 1, 1.0 + 0.02 * length)
            table.record_draft(rows, length, per_draft * length)
            for request in requests:
                request.observe(happened(tested=min(kept + 1, length), accepted=min(kept, length)))
    return lengths


def only_what_may_be_the_best_is_measured():
    assert measured(per_draft=1.5, kept=0) == [4, 4, 0, 0], "two lengths say that nothing can pay"
    assert measured(per_draft=0.01, kept=16) == [4, 4, 0, 0, 8, 8], "and that only long drafts can be the best"
    assert 8 not in measured(per_draft=0.3, kept=1)


def a_batch_asks_for_less():
    assert measured(per_draft=1.5, kept=0, rows=16) == [1, 0]
    assert measured(per_draft=0.01, kept=16, rows=16) == [1, 0, 3]


def all_is_measured_where_nobody_says_what_is_best():
    table, lengths = Costs(), []
    while (length := table.coverage.first_length(3)) is not None:
        lengths.append(length)
        table.record_target(1, length + 1, 1.0)
    assert lengths == [0, 0, 2, 2, 1, 1, 3, 3]


def one_measurement_renews_what_a_plain_step_takes():
    """Half of what is known is what was: one step more or less unusual must not decide that no draft pays."""
    table = Costs()
    for _ in range(12):
        table.record_target(1, 1, 2.0, drafts=False, modelled=False)
    for _ in range(300):
        table.record_target(1, 5, 1.5)
    assert table.coverage.lacks_plain(1) and table.plain(1, 1) == 2.0
    while table.counts[Step("plain", 1, 0, 1)] < 5:
        table.record_target(1, 1, 1.0, drafts=False, modelled=False)
    assert table.plain(1, 1) == pytest.approx(math.sqrt(2.0))
    table.record_target(1, 1, 1.0, drafts=False, modelled=False)
    assert table.plain(1, 1) == 1.0, "little is left of what was long ago"


def one_measurement_is_enough_to_learn_that_a_width_is_fast_now():
    table = Costs()
    for _ in range(12):
        table.record_target(1, 5, 2.0)
    for _ in range(300):
        table.record_target(1, 1, 0.5)
    table.record_target(1, 5, 1.0)
    assert table.target(1)[5] == pytest.approx(1.0)


def tries(reading):
    """Rounds in which a draft is tried that does not pay, lacks ever more, and takes ``reading`` a prompt's token."""
    pace = Pace(FixedCosts(per_draft=5.0))
    request = AutoLength(pace)
    pace.read([request], 10, 10 * reading)
    found = []
    for number in range(400):
        this = pace.tick(late=lambda number=number: number)
        found += [number] if pace.lengths(this, [request], [16])[0] else []
        if found:
            request.observe(happened(1, 0))
    return found


def what_was_missed_has_a_price_before_it_was_measured():
    assert tries(0.001) and not tries(1.0)


def test_a_few_tokens_do_not_say_what_a_prompt_s_take():
    pace, prices = Pace(FixedCosts()), []
    for tokens, seconds in ((0, 1.0), (3, 6.0), (20, 10.0), (3, 6.0), (0, 1.0)):
        pace.read([], tokens, seconds)
        prices.append(pace.prices.reading)
    assert prices == [0.0, 2.0, 0.5, 0.5, 0.5]


def equal_prompts_are_read_once():
    one = Decoder(*toy_pair(9))
    one._prefill_draft = lambda rows: 12.0
    prompts = [[1, 2, 3, 4, 5]] * 3 + [[1, 2, 3]]
    collect(one.decode([(prompt, Settings(max_new_tokens=2, draft="model")) for prompt in prompts]), len(prompts))
    assert one._pace.prices.reading == 2.0


CHECKS = [
    only_what_may_be_the_best_is_measured,
    a_batch_asks_for_less,
    all_is_measured_where_nobody_says_what_is_best,
    one_measurement_renews_what_a_plain_step_takes,
    one_measurement_is_enough_to_learn_that_a_width_is_fast_now,
    what_was_missed_has_a_price_before_it_was_measured,
    equal_prompts_are_read_once,
]
C = coverage.Coverage
MUTANTS = [
    Mutant("all lengths are measured", C, "first_length", "best is not None and", "False and"),
    Mutant("one length says it all", C, "first_length", ">= _ROUGHLY", ">= 1"),
    Mutant("the nearest length is the first", C, "first_length", "abs(length - seems)", "length"),
    Mutant("what is known is measured again", C, "first_length", "[near] if near in lacking else []", "[near]"),
    Mutant("what was long ago outvotes what is", typical.Typical, "fade", "[self.seconds]", "[self.seconds] * 4"),
    Mutant("one bad moment ends all drafting", costs.Costs, "record_target", "even=plain", "even=False"),
    Mutant("one bad moment is half of the truth", costs.Costs, "record_target", "even=plain", "even=True"),
    Mutant("what is long ago holds", C, "renews", "return stale", "return False"),
    Mutant("nothing is hoped for", policy.Pace, "_seems_best", "requests, rows, _HOPE", "requests, rows, -4.0"),
    Mutant("what it missed is free until then", prices.Prices, "catch_up", ", self.reading", ""),
    Mutant(
        "equal prompts are read anew",
        drafters.ModelDrafter,
        "unread",
        "{tuple(row.sequence.tokens[:-1]) for row in rows if self._reads(row)}",
        "[row.sequence.tokens[:-1] for row in rows]",
    ),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_healthy_code_passes(check):
    check()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, [lambda _, check=check: check() for check in CHECKS], monkeypatch)
