"""How long to draft, from given costs: no clock is read here."""

from __future__ import annotations

import numpy as np
import pytest

from leadout.runtime.policy import AutoLength, Costs, FixedLength
from leadout.runtime.settings import MAX_DRAFT_LENGTH


def costs(*, per_draft, per_token=0.02, rows=1):
    """A target step of width S costs 1 + per_token * (S - 1); start-up measurement over."""
    table = Costs()
    for width in 2 * list(range(1, MAX_DRAFT_LENGTH + 2)):
        table.record_target(rows, width, 1 + per_token * (width - 1))
    table.record_draft(rows, 4, 4 * per_draft)
    return table


def trained(acceptance, table, *, rounds=400, seed=0, **options):
    """A policy that has seen ``rounds`` rounds with independent acceptance."""
    policy, rng = AutoLength(table, **options), np.random.default_rng(seed)
    for _ in range(rounds):
        length = policy.length(MAX_DRAFT_LENGTH, 1)
        accepted = next((i for i in range(length) if rng.random() >= acceptance), length)
        policy.observe(min(accepted + 1, length), accepted)
    return policy


# Optimal lengths for independent acceptance at a marginal cost d a token (draft + verify), from the closed form.
@pytest.mark.parametrize(
    ("acceptance", "per_draft", "best"),
    [(0.5, 0.03, 3), (0.7, 0.08, 4), (0.8, 0.08, 6), (0.8, 0.28, 3), (0.9, 0.28, 5)],
)
def test_lengths_come_close_to_the_optimum(acceptance, per_draft, best):
    policy = trained(acceptance, costs(per_draft=per_draft))
    lengths = [policy.length(MAX_DRAFT_LENGTH, 1) for _ in range(5)]
    speed = lambda k: (1 - acceptance ** (k + 1)) / (1 - acceptance) / (1 + k * (per_draft + 0.02))  # noqa: E731
    assert speed(lengths[-1]) > 0.95 * speed(best) and speed(best) == max(map(speed, range(17)))


def test_an_expensive_useless_draft_is_switched_off_and_tried_ever_more_rarely():
    policy = AutoLength(costs(per_draft=0.5))
    lengths = []
    for _ in range(1000):
        lengths.append(policy.length(MAX_DRAFT_LENGTH, 1))
        policy.observe(min(lengths[-1], 1), 0)
    assert lengths[-1] == 0 and sum(length > 0 for length in lengths[100:]) <= 5
    assert max(lengths[20:]) <= 2


def test_a_draft_that_becomes_good_is_switched_on_again():
    policy = AutoLength(costs(per_draft=0.2))
    for _ in range(100):
        policy.observe(min(policy.length(16, 1), 1), 0)
    later = []
    for _ in range(900):
        later.append(policy.length(16, 1))
        policy.observe(later[-1], later[-1])
    assert 0 in later[:50] and min(later[-100:]) >= 4


def test_censored_positions_are_not_counted_as_rejected():
    policy = AutoLength(costs(per_draft=0.1))
    for _ in range(200):
        policy.observe(1, 0)  # the first is always refused: nothing is known of the second
    assert policy.acceptances()[0] < 0.05
    lucky = AutoLength(costs(per_draft=0.1))
    for i in range(200):
        lucky.observe(*((4, 4) if i % 2 else (1, 0)))
    assert lucky.acceptances()[:2] == pytest.approx([0.5, 0.95], abs=0.1)


def test_limits_hold_and_fixed_lengths_are_fixed():
    table = Costs()
    policy = AutoLength(table)
    for limit in (-3, 0, 1, 5, 40):
        for _ in range(12):
            assert 0 <= policy.length(limit, 1) <= min(max(limit, 0), MAX_DRAFT_LENGTH)
    assert [FixedLength(4).length(limit, 1) for limit in (-1, 0, 2, 9)] == [0, 0, 2, 4]


def test_costs_are_middles_and_between_widths_lines():
    table = Costs()
    assert table.target(1) is None and table.draft(1) == 0.0
    for seconds in (9.0, 1.1, 1.0):  # the first call is slow
        table.record_target(1, 2, seconds)
    table.record_target(1, 6, 3.1)
    curve = table.target(1)
    assert [curve[width] for width in (1, 2, 4, 6, 9)] == pytest.approx([1.1, 1.1, 2.1, 3.1, 3.1])
    assert table.target(7) == curve
    table.record_draft(1, 0, 5.0)
    table.record_draft(1, 2, 5.0)
    assert table.draft(1) == table.draft(3) == 2.5


def test_the_start_up_measures_each_width_twice():
    table, lengths = Costs(), []
    while (length := table.first_length(16)) is not None:
        lengths.append(length)
        table.record_target(1, length + 1, 1.0)
    assert lengths == [4, 4, 8, 8, 2, 2, 1, 1]
    assert Costs().first_length(3) == 2 and Costs().first_length(0) is None


def test_free_drafts_cost_only_their_verification_and_padding_is_priced():
    table = costs(per_draft=10.0, per_token=0.3)
    assert AutoLength(table).speeds(1)[2] < AutoLength(table, free=True).speeds(1)[2]
    assert AutoLength(table, narrowest=2).speeds(1)[0] == pytest.approx(1 / 1.3)
    assert AutoLength(table).speeds(1)[0] == pytest.approx(1.0)


def test_a_narrow_step_is_never_thought_dearer_than_a_wide_one():
    costs = Costs()
    for width, seconds in ((2, 8.0), (3, 5.0), (5, 6.0)):
        costs.record_target(1, width, seconds)
    table = costs.target(1)
    assert table is not None and table[2] == table[3] == 5.0 and table[5] == 6.0
