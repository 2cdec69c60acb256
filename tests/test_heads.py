"""What the head of a row tells is to the bit what the row tells, or it says nothing."""

from __future__ import annotations

import numpy as np
import pytest

from leadout.runtime.rules.heads import winner
from leadout.runtime.rules.noise import Noise
from leadout.runtime.rules.sampling import Chain, Sampler
from leadout.runtime.settings import Settings


class Headed:
    """A row that knows its head and counts how often the whole of it is asked for."""

    def __init__(self, row: np.ndarray, k: int) -> None:
        self.row, self.k, self.whole = row, k, 0
        self.size = row.size

    def top(self) -> tuple[np.ndarray, np.ndarray] | None:
        ids = np.argsort(-self.row, kind="stable")[: self.k]
        return (ids, self.row[ids]) if np.isfinite(self.row).all() else None

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        self.whole += 1
        return self.row


def rows(count: int, vocab: int = 400) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=vocab) * rng.choice([0.1, 1.0, 4.0])).astype(np.float32) for _ in range(count)]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_a_choice_from_the_head_is_the_row_s_own(temperature: float) -> None:
    settings, told = Settings(temperature=temperature, seed=3, rule="coupled"), 0
    for position, row in enumerate(rows(300)):
        sampler = Sampler("coupled", Chain(settings, row.size, [1], ()), Noise(3))
        headed = Headed(row, 32)
        assert sampler.choose(headed, [], position) == sampler.choose(row, [], position)
        told += not headed.whole
    assert 40 < told < 300, "some rows are told from their head, flat ones are not"


def test_what_stands_behind_the_head_may_win() -> None:
    noise = np.zeros(5)
    ids, tops = np.array([2, 0]), np.array([3.0, 1.0], np.float32)
    assert winner(ids, tops, 1.0, noise) == 2
    noise[4] = 1.9
    assert winner(ids, tops, 1.0, noise) == 2
    noise[4] = 2.0
    assert winner(ids, tops, 1.0, noise) is None, "at the bound another token may be as good, and of a lower id"


def test_the_lowest_id_wins_among_equals() -> None:
    assert winner(np.array([4, 1, 0]), np.array([2.0, 2.0, 1.0], np.float32), 0.5, np.zeros(5)) == 1
    assert winner(np.arange(3), np.array([2.0, 1.0, 0.0], np.float32), 1.0, np.zeros(3)) == 0, "all of the row"


@pytest.mark.parametrize(
    "more", [{"top_k": 399}, {"top_p": 0.5}, {"min_p": 0.2}, {"logit_bias": {3: 4.0}}, {"min_new_tokens": 2}]
)
def test_processors_want_the_row(more: dict[str, object]) -> None:
    settings = Settings(temperature=1.0, seed=3, rule="coupled", **more)  # type: ignore[arg-type]
    for position, row in enumerate(rows(5)):
        sampler = Sampler("coupled", Chain(settings, row.size, [1], (2,)), Noise(3))
        headed = Headed(4 * row, 399)
        assert sampler.choose(headed, [], position) == sampler.choose(4 * row, [], position) and headed.whole


class Odd:
    """A grammar of odd tokens."""

    def within(self, logits: np.ndarray, drafted: object) -> np.ndarray:
        return np.where(np.arange(logits.size) % 2, np.asarray(logits), np.float32(-np.inf))

    def allows(self, token: int, drafted: object) -> bool:
        return token % 2 == 1


def test_a_grammar_wants_the_row() -> None:
    for position, row in enumerate(rows(20)):
        chain = Chain(Settings(temperature=1.0, seed=3, rule="coupled"), row.size, [1], (2,), Odd())  # type: ignore[arg-type]
        sampler, headed = Sampler("coupled", chain, Noise(3)), Headed(4 * row, 399)
        chosen = sampler.choose(headed, [], position)
        assert chosen % 2 == 1 and chosen == sampler.choose(4 * row, [], position) and headed.whole
