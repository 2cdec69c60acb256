"""How long to draft, from given costs: no clock is read here."""

from __future__ import annotations

import numpy as np
import pytest

from leadout.engines.base import FROM_TWO
from leadout.runtime.controller.acceptance import Acceptance
from leadout.runtime.controller.costs import Costs, context_bucket
from leadout.runtime.controller.gain import cap, pays
from leadout.runtime.controller.kinds import GREEDY
from leadout.runtime.controller.policy import AutoLength, FixedLength, Pace
from leadout.runtime.controller.rounds import Round
from leadout.runtime.rules.verify import happened
from leadout.runtime.settings import MAX_DRAFT_LENGTH, MAX_GUESS_LENGTH


def costs(*, per_draft, per_token=0.02, rows=1, plain=1.0):
    """A target step of width S costs 1 + per_token * (S - 1), one without drafts ``plain``; start-up measurement
    over."""
    table = Costs()
    for width in 2 * list(range(1, MAX_DRAFT_LENGTH + 2)):
        table.record_target(rows, width, 1 + per_token * (width - 1))
    for _ in range(12):
        table.record_target(rows, 1, plain, drafts=False, modelled=False)
    table.record_draft(rows, 4, 4 * per_draft)
    table.doubt = lambda rows: 0.0
    return table


def trained(acceptance, table, *, rounds=400, seed=0, **options):
    """A request and its pace after ``rounds`` rounds with independent acceptance."""
    pace, rng = Pace(table, **options), np.random.default_rng(seed)
    policy = AutoLength(pace)
    for _ in range(rounds):
        length = next_length(pace, policy)
        accepted = next((i for i in range(length) if rng.random() >= acceptance), length)
        policy.observe(happened(min(accepted + 1, length), accepted))
    return pace, policy


def next_round(pace, *policies, limit=MAX_DRAFT_LENGTH):
    """A new round, and the length of its drafts, the same for all requests."""
    this = pace.tick(len(policies))
    lengths = pace.lengths(this, policies, [limit] * len(policies))
    assert len(set(lengths)) == 1
    return this, lengths[0]


def next_length(pace, *policies, limit=MAX_DRAFT_LENGTH):
    """The length of a new round."""
    return next_round(pace, *policies, limit=limit)[1]


# Optimal lengths for independent acceptance at a marginal cost d a token (draft + verify), from the closed form.
@pytest.mark.parametrize(
    ("acceptance", "per_draft", "best"),
    [(0.5, 0.03, 3), (0.7, 0.08, 4), (0.8, 0.08, 6), (0.8, 0.28, 3), (0.9, 0.28, 5)],
)
def test_lengths_come_close_to_the_optimum(acceptance, per_draft, best):
    pace, policy = trained(acceptance, costs(per_draft=per_draft))
    lengths = [next_length(pace, policy) for _ in range(5)]
    speed = lambda k: (1 - acceptance ** (k + 1)) / (1 - acceptance) / (1 + k * (per_draft + 0.02))  # noqa: E731
    assert speed(lengths[-1]) > 0.95 * speed(best) and speed(best) == max(map(speed, range(17)))


def test_an_expensive_useless_draft_is_switched_off_and_tried_ever_more_rarely():
    pace = Pace(costs(per_draft=0.5))
    policy, lengths = AutoLength(pace), []
    for _ in range(1000):
        lengths.append(next_length(pace, policy))
        policy.observe(happened(min(lengths[-1], 1), 0))
    assert lengths[-1] == 0 and sum(length > 0 for length in lengths[100:]) <= 5
    assert max(lengths[20:]) <= 2


def test_a_draft_that_becomes_good_is_switched_on_again():
    pace = Pace(costs(per_draft=0.2))
    policy = AutoLength(pace)
    for _ in range(100):
        policy.observe(happened(min(next_length(pace, policy), 1), 0))
    later = []
    for _ in range(900):
        later.append(next_length(pace, policy))
        policy.observe(happened(later[-1], later[-1]))
    assert 0 in later[:50] and min(later[-100:]) >= 4


def test_rows_that_share_a_step_rest_and_try_together():
    pace = Pace(costs(per_draft=0.5, rows=2))
    policies, lengths = [AutoLength(pace), AutoLength(pace)], []
    for _ in range(200):
        lengths.append(next_length(pace, *policies))
        for policy in policies:
            policy.observe(happened(min(lengths[-1], 1), 0))
    assert sum(length > 0 for length in lengths[40:]) <= 4, "one try for both, not one each"


def test_one_length_serves_the_rows_of_a_step():
    table = costs(per_draft=0.08, rows=2)
    (pace, good), poor = trained(0.9, table), AutoLength(Pace(table))
    for _ in range(60):
        poor.observe(happened(1, 0))
    alone = pace.lengths(Round(2), [good], [16])[0]
    both = pace.lengths(Round(2), [good, poor], [16, 16])
    assert both[0] == both[1] and 0 < both[0] <= alone
    assert pace.lengths(Round(2), [good, good], [16, 2])[1] == 2
    assert pace.lengths(Round(2), [FixedLength(3), good], [16, 16])[0] == 3


def test_a_new_request_starts_from_what_the_earlier_ones_showed():
    pace, _ = trained(0.3, costs(per_draft=0.02))
    fresh = AutoLength(pace)
    assert fresh.tokens[1] - 1 == pytest.approx(0.3, abs=0.06)
    for _ in range(30):
        fresh.observe(happened(4, 4))
    assert fresh.tokens[1] - 1 > 0.85


def test_censored_positions_are_not_counted_as_rejected():
    refused = Acceptance(0.95)
    for _ in range(200):
        refused.observe(happened(1, 0))  # the first is always refused: nothing is known of the second
    assert refused.at_positions()[0] < 0.05
    lucky = Acceptance(0.95)
    for i in range(200):
        lucky.observe(happened(*((4, 4) if i % 2 else (1, 0))))
    assert lucky.at_positions()[:2] == pytest.approx([0.5, 0.95], abs=0.1)


def test_limits_hold_and_fixed_lengths_are_fixed():
    pace = Pace(Costs())
    policy = AutoLength(pace)
    for limit in (-3, 0, 1, 5, 40):
        for _ in range(12):
            assert 0 <= next_length(pace, policy, limit=limit) <= min(max(limit, 0), MAX_DRAFT_LENGTH)
    assert [next_length(pace, FixedLength(4), limit=limit) for limit in (-1, 0, 2, 9)] == [0, 0, 2, 4]


def test_costs_are_middles_and_between_widths_lines():
    table = Costs()
    assert table.target(1) is None and table.draft(1) == 0.0
    for seconds in (9.0, 1.1, 1.0):  # the first call is slow
        table.record_target(1, 2, seconds)
    table.record_target(1, 6, 3.1)
    curve = table.target(1)
    assert [curve[width] for width in (1, 2, 4, 6, 9)] == pytest.approx([1.1, 1.1, 2.1, 3.1, 4.6]), "beyond, on"
    assert table.target(7) == curve
    table.record_draft(1, 0, 5.0)
    table.record_draft(1, 2, 5.0)
    assert table.draft(1) == table.draft(3) == 2.5


def test_the_start_up_measures_each_width_twice():
    table, lengths = Costs(), []
    while (length := table.coverage.first_length(16)) is not None:
        lengths.append(length)
        table.record_target(1, length + 1, 1.0)
    assert lengths == [4, 4, 0, 0, 2, 2, 1, 1, 3, 3, 8, 8]
    assert Costs().coverage.first_length(3) == Costs().coverage.first_length(0) == 0


def test_a_length_that_was_not_used_for_long_is_measured_anew_ever_more_rarely():
    table = Costs()
    while (length := table.coverage.first_length(16)) is not None:
        table.record_target(1, length + 1, 9.0)
    asked = []
    for i in range(2000):
        length = table.coverage.first_length(16)
        asked += [] if length is None else [(length, i)]
        table.record_target(1, 1 + (length or 0), 1.0)
    assert [length for length, _ in asked] == [4, 2, 1, 3, 8] * 3, "no draft at all is used all the time"
    gaps = [round_ - before for (_, before), (_, round_) in zip(asked, asked[5:], strict=False)]
    for time, rest in enumerate((512, 1024)):
        assert all(rest < gap < rest + 25 for gap in gaps[5 * time : 5 * time + 5])
    assert table.usual(1.0) == pytest.approx(table.target(1)[5]), "the device is faster now, in every step"


def test_a_batch_is_measured_for_itself_at_each_doubling():
    table, lengths = Costs(), []
    for rows in (1, 16, 9, 8, 5, 2):
        while (length := table.coverage.first_length(16, rows, FROM_TWO)) is not None:
            lengths.append((rows, length))
            table.record_target(rows, max(length + 1, 2), 1.0)
    measured = [(rows, length) for rows in (16, 9, 5, 2) for length in (3, 3, 0, 0)]
    assert lengths[10:] == measured, "a draft of one is no wider than none"


def test_a_round_pays_its_host_and_its_padding():
    table = costs(per_draft=0.5, per_token=0.3)
    assert Pace(table).prices.with_model(1)[:3] == pytest.approx([1.0, 1.8, 2.6])
    assert Pace(table, FROM_TWO).prices.with_model(1)[0] == pytest.approx(1.3)
    table.record_host(1, 0.25)
    assert Pace(table).prices.with_model(1)[:3] == pytest.approx([1.25, 2.05, 2.85])
    nothing = Pace(Costs()).prices.with_model(1)
    assert len(nothing) == MAX_GUESS_LENGTH + 1 and nothing[:3] == pytest.approx([1.0, 1.1, 1.2])


def test_a_narrow_step_is_never_thought_dearer_than_a_wide_one():
    """Where one seems to be, both are thought to take the mean of what was measured."""
    table = Costs()
    for width, seconds in ((2, 8.0), (3, 5.0), (3, 5.0), (5, 7.0)):
        table.record_target(1, width, seconds)
    assert [table.target(1)[width] for width in (1, 2, 3, 4, 5)] == pytest.approx([6.0, 6.0, 6.0, 6.5, 7.0])
    table.record_target(1, 6, 4.0)
    assert [table.target(1)[width] for width in (2, 3, 5, 6)] == pytest.approx([(8 + 2 * 5 + 7 + 4) / 5] * 4)


def test_a_long_draft_of_one_row_is_cut_where_the_others_pay_for_it():
    seconds = [1 + 0.2 * length for length in range(17)]
    sure, unsure = [1 + 0.99 * length for length in range(17)], [1.0, 1.3]

    def longest(plans, fixed=0):
        return cap(plans, lambda width: seconds[max(width, fixed)], 0.8)[1]

    assert longest([(sure, 16)]) == 16
    assert longest([(sure, 16), *[(unsure, 1)] * 7]) == 1, "the seven wait for nothing else"
    assert longest([(sure, 16), *[(unsure, 1)] * 2]) == 16
    assert longest([([1.0, 1.25], 1)] * 4) == 1, "alone or equal, any gain is one"
    ahead, none = ([1.0, 2.1], 1), ([1.0], 0)
    assert longest([ahead, *[none] * 3]) == 1 and longest([ahead, *[none] * 4]) == 0, "(1.1 * 0.8 + n) / 1.2 > n"
    assert longest([(sure, 16), *[(unsure, 1)] * 7], 12) == 12, "a fixed draft has made the step that wide"
    assert cap([(sure, 16)], seconds.__getitem__, 0.8)[0] == pytest.approx(sure[16] / seconds[16])


def test_contexts_cost_alike_up_to_each_doubling():
    assert [context_bucket(past) for past in (0, 127, 128, 255, 256, 1023, 1024)] == [0, 0, 1, 1, 2, 3, 4]
    table = Costs()
    for past, seconds in ((10, 1.0), (200, 1.5), (900, 4.0)):
        table.record_target(1, 2, seconds, past)
        table.record_draft(1, 2, seconds, past)
    assert [table.target(1, past)[2] for past in (0, 130, 600, 5000)] == [1.0, 1.5, 4.0, 4.0]
    assert [table.draft(1, past) for past in (0, 130, 600, 5000)] == [0.5, 0.75, 2.0, 2.0]


def test_what_a_place_of_the_table_lacks_is_scaled_from_its_neighbour():
    table = Costs()
    for width, seconds in ((2, 1.0), (5, 1.5), (9, 2.0)):
        table.record_target(1, width, seconds)
    table.record_target(1, 5, 3.0, 300)  # twice what it is on short contexts
    table.record_target(4, 2, 4.0)
    assert [table.target(1, 300)[width] for width in (2, 5, 9)] == pytest.approx([2.0, 3.0, 4.0])
    assert [table.target(4)[width] for width in (2, 5, 9)] == pytest.approx([4.0, 6.0, 8.0])
    assert [table.target(1)[width] for width in (2, 5, 9)] == pytest.approx([1.0, 1.5, 2.0])


def test_a_table_on_disk_stands_in_for_the_start_up_until_it_is_outvoted():
    first = costs(per_draft=0.1)
    first.record_host(1, 0.25)
    again = Costs(first.entries())
    assert again.coverage.first_length(16) is None and not again.counts
    assert (again.target(1), again.draft(1), again.host(1)) == (first.target(1), first.draft(1), first.host(1))
    again.record_host(1, 1.0)
    again.record_host(1, 0.25)
    assert again.host(1) == 0.25, "an outlier"
    for _ in range(100):
        again.record_host(1, 1.0)
    assert 0.9 < again.host(1) <= 1.0


def test_a_bill_is_what_was_counted_at_what_it_costs():
    table = Costs()
    for seconds in (1.0, 2.0, 9.0):
        table.record_target(1, 5, seconds, 300)
    table.record_draft(1, 4, 2.0)
    table.record_host(1, 0.25)
    bill = {"target": 6.0, "plain": 0.0, "draft": 2.0, "catch-up": 0.0, "host": 0.25, "quiet": 0.0}
    assert table.price(table.counts) == pytest.approx(bill)


def test_a_draft_longer_than_anything_is_expected_of_it_adds_nothing() -> None:
    assert cap([([1.0, 1.4], 8), ([1.0, 1.9, 2.6], 2)], lambda k: 1.0 + 0.01 * k, 0.8)[1] == 2


def test_what_drafting_costs_counts_for_more_than_it_is():
    assert pays(1.6 / 1.2, 1.2) and not pays(1.21 / 1.2, 1.2), "0.2 more must bring 0.22 more tokens"
    assert pays(1.01, 1.0), "what costs nothing may promise anything"
    assert not pays(1.0, 1.0)


@pytest.mark.parametrize(("per_draft", "drafts"), [(0.58, True), (0.66, False)])
def test_a_draft_model_that_promises_hardly_more_than_it_costs_rests(per_draft, drafts):
    """Accepted 7 times in 10, at best one draft pays: 1.7 tokens for 1.6 to 1.68."""
    pace = Pace(costs(per_draft=per_draft))
    row = AutoLength(pace)
    assert next_length(pace, row), "so little is known that it may be better than it looks"
    for _ in range(100):
        row.observe([(1.0, 0.7)])
    assert bool(next_length(pace, row)) is drafts


@pytest.mark.parametrize(("rows", "drafted"), [(1, 5), (4, 4), (16, 3)])
def test_a_bad_beginning_is_no_reason_to_rest_for_a_whole_text(rows, drafted):
    """A draft that rested must catch up. Two rounds that go wrong after a hundred that went well say little; and what
    all rows say together is known better than what each says."""
    pace = Pace(costs(rows=rows, per_draft=0.5))
    for _ in range(100):
        pace.seen(GREEDY).acceptance.observe([(1.0, 0.9)] * 2)
    each = [AutoLength(pace) for _ in range(rows)]
    lengths = []
    for _ in range(16):
        lengths.append(next_length(pace, *each))
        for row in each:
            row.observe([(1.0, 0.0)] if lengths[-1] else [])
    assert all(lengths[:drafted]) and not any(lengths[drafted:])
