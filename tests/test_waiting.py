"""Requests that wait for others: they are checked when they are asked for, and begin with what those before showed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from support_runtime import FixedCosts, collect, toy_pair
from test_bill import a_pace, spoiled
from test_mutants import Mutant, must_die

from leadout.engines.base import FROM_TWO
from leadout.runtime import decoder as decoder_module
from leadout.runtime.controller import policy
from leadout.runtime.controller.costs import Costs
from leadout.runtime.controller.policy import AutoLength
from leadout.runtime.controller.prices import Prices
from leadout.runtime.decoder import Decoder
from leadout.runtime.settings import Settings
from leadout.runtime.stats import Stats

PROMPTS = ([1, 2], [3, 4, 5], [6], [7, 8])


def written(runs: Iterable[Any]) -> list[tuple[list[int], int, int]]:
    found = []
    for run in runs:
        texts, last = collect(run, 1)
        stats = last[0].stats
        assert isinstance(stats, Stats)
        found.append((texts[0], stats.rounds, stats.drafted))
    return found


def a_list_is_written_like_one_after_the_other() -> None:
    request = Settings(draft="model", max_new_tokens=30)
    listed, looped = (Decoder(*toy_pair(share=0.6), costs=FixedCosts(per_draft=0.3)) for _ in range(2))
    begun = [listed.decode([(list(prompt), request)]) for prompt in PROMPTS]
    one_by_one = (looped.decode([(list(prompt), request)]) for prompt in PROMPTS)
    assert written(begun) == written(one_by_one)


def a_try_costs_what_it_takes_for_the_rows_that_come() -> None:
    pace, asked = a_pace(), list[int]()
    requests = [AutoLength(pace) for _ in range(3)]
    spoiled(requests[0].bill)
    pace._trial = lambda bills, rows: asked.append(rows) or 0.0  # type: ignore[method-assign, assignment, func-returns-value]
    pace.abstains(requests, 10)
    assert asked == [3]


CHECKS = [a_list_is_written_like_one_after_the_other, a_try_costs_what_it_takes_for_the_rows_that_come]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_requests_that_wait(check: Any) -> None:
    check()


def test_prices_are_of_the_width_that_the_target_steps_with_now() -> None:
    costs = Costs()
    for _ in range(2):
        for width, took in ((1, 1.0), (2, 5.0), (3, 6.0)):
            costs.record_target(1, width, took)
    prices = Prices(costs)
    assert prices.steps(1)[0] == 1.0
    prices.begin(FROM_TWO)
    assert prices.steps(1)[0] == prices.steps(1)[1] == 5.0
    kept = prices.steps(1)
    prices.begin(FROM_TWO)
    assert prices.steps(1) is kept


@pytest.mark.parametrize(
    "mutant",
    [
        Mutant(
            "all begin at once", decoder_module.Decoder, "decode", "self._run(admitted)", "self._run([admitted()].pop)"
        ),
        Mutant("a try of the last rows", policy.Pace, "abstains", "len(policies)", "self._rows"),
    ],
    ids=lambda mutant: mutant.bug,
)
def test_mutant_is_killed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_die(mutant, [lambda _, check=check: check() for check in CHECKS], monkeypatch)
