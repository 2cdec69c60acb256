"""What rounds without drafts cost: when that is measured, beside what, and what it decides."""

from __future__ import annotations

import math

import pytest
from test_policy import costs, next_length

from leadout.runtime.controller.costs import Costs, Step
from leadout.runtime.controller.policy import AutoLength, Pace


def test_a_step_is_plain_once_no_draft_model_has_run_for_a_while():
    table = Costs()
    for width in (1, 2, 5):
        table.record_target(1, width, 1.0 + 0.1 * width)
        table.record_target(1, width, 2.0 + 0.2 * width, 300)
    assert table.plain(1, 1) == table.target(1)[1] == 1.1 and table.coverage.lacks_plain(1)
    for seconds in (*[1.1] * 8, 0.6, 1.0, 0.8):  # the last three count
        assert table.plain(1, 1) == 1.1 and table.coverage.lacks_plain(1), "of two the less is by chance"
        table.record_target(1, 1, seconds, drafts=False, modelled=False)
    assert table.plain(1, 1) == 0.8 and not table.coverage.lacks_plain(1) and table.coverage.lacks_plain(4)
    assert table.plain(1, 1, 300) == pytest.approx(1.6), "as much less as here"
    table.record_target(1, 5, 1.5, drafts=True, modelled=False)
    assert table.counts[Step("plain", 1, 0, 1)] == 3, "a guess was verified: no plain step"
    table.disturb()
    table.record_target(1, 1, 9.0, drafts=False, modelled=False)
    assert table.counts[Step("plain", 1, 0, 1)] == 3
    for _ in range(256):
        table.record_target(1, 5, 1.5)
    assert table.coverage.lacks_plain(1), "long ago"
    for seconds in (*[1.1] * 8, 0.7):
        table.record_target(1, 1, seconds, drafts=False, modelled=False)
    assert table.plain(1, 1) == pytest.approx(math.sqrt(0.8 * 0.7)), "once it was known, one measurement renews it"
    assert table.coverage.lacks_plain(1), "but four compare it with others"
    for _ in range(3):
        table.record_target(1, 1, 0.7, drafts=False, modelled=False)
    assert not table.coverage.lacks_plain(1)


def seasoned(pace):
    """A request whose draft model has been seen for some rounds."""
    row = AutoLength(pace)
    for _ in range(8):
        row.bill.record(0.1)
    return row


def test_plain_steps_are_not_measured_before_anything_is_known_of_the_draft():
    pace = Pace(costs(per_draft=0.5))
    pace.prices.costs.coverage._times[1, 0] = 0
    pace.prices.costs.knows_plain = False
    row = AutoLength(pace)
    assert all(next_length(pace, row) for _ in range(6))
    for _ in range(8):
        row.bill.record(0.1)
    pace.enter()
    assert 0 in [next_length(pace, row) for _ in range(4)]


def test_the_end_of_a_text_says_nothing_of_what_a_draft_is_worth():
    """Two tokens at most bring little beside what a step takes; sixteen bring enough."""
    table = costs(per_draft=0.05)
    table.doubt = lambda rows: 0.5
    pace = Pace(table)
    row = seasoned(pace)
    for _ in range(40):
        row.observe([(1.0, 0.95)] * 16)
    for limit in (16, 1):
        pace.enter()
        assert next_length(pace, row, limit=limit) > 0 and not pace.survey.unclear
    assert pace._hinges(pace._speeds([(row.tokens, 1)], 1), 1), "as far as one token goes, it would be a close question"


def test_a_plain_step_is_measured_where_it_decides():
    clear, unclear = Pace(costs(per_draft=0.05)), Pace(costs(per_draft=0.5))
    for pace in (clear, unclear):
        pace.prices.costs.coverage._times[1, 0] = 0
        pace.prices.costs.knows_plain = False
        pace.prices.costs.disturb()
        row = seasoned(pace)
        assert next_length(pace, row) > 0
        lengths = []
        for _ in range(12):
            lengths.append(next_length(pace, row))
            pace.prices.costs.record_target(1, lengths[-1] + 1, 0.5, drafts=lengths[-1] > 0, modelled=lengths[-1] > 0)
        if pace is clear:
            assert all(lengths)
        else:
            assert lengths[:10] == [0] * 10, "eight that do not count, and two"
            assert pace.prices.costs.counts[Step("plain", 1, 0, 1)] == 4 + 2 + lengths[10:].count(0), (
                "beside the first four"
            )


@pytest.mark.parametrize(("doubt", "least", "most"), [(0.3, 12, 3 * 12), (0.0, 0, 2)])
def test_plain_steps_are_compared_anew_while_a_choice_hangs_on_them(doubt, least, most):
    """At a gain that what is known of them could be off by: a wait and four steps, each 128 rounds."""
    table = costs(per_draft=0.4)
    table.doubt = lambda rows: doubt
    pace, undrafted = Pace(table), 0
    row = seasoned(pace)
    for _ in range(300):
        row.observe([(1.0, 0.8)] * 2)
        length = next_length(pace, row)
        undrafted += length == 0
        table.record_target(1, length + 1, 1.0 + 0.02 * length, drafts=length > 0, modelled=length > 0)
    assert least <= undrafted <= most


def test_a_step_beside_which_free_drafters_were_asked_is_not_plain():
    table = costs(per_draft=0.1)
    before = table.counts[Step("plain", 1, 0, 1)]
    table.record_target(1, 1, 5.0, drafts=False, modelled=False, asked=True)
    assert table.counts[Step("plain", 1, 0, 1)] == before and table.plain(1, 1) == 1.0
    table.record_target(1, 1, 1.0, drafts=False, modelled=False)
    assert table.counts[Step("plain", 1, 0, 1)] == before + 1


def test_only_a_rest_saves_what_the_host_needs_for_drafters():
    """Who is asked and has no guess has been asked: a guess is worth no more for it, to let the model rest is."""
    table = costs(per_draft=0.5, per_token=0.3)
    table.record_host(1, 0.25)
    assert table.quiet(1) == table.host(1) == 0.25, "while nothing else is known"
    for _ in range(8):
        table.record_host(1, 0.05, quiet=True)
        table.record_host(1, 0.45)
    assert table.quiet(1) == 0.05 and table.host(1) > 0.1
    prices = Pace(table).prices
    assert prices.with_model(1)[0] == pytest.approx(1.05)
    assert prices.without_model(1)[0] == pytest.approx(1.0 + table.host(1))
    assert table.counts[Step("host", 1, 0, 1)] == 17 and table.counts[Step("quiet", 1, 0, 1)] == 0, "paid once"
