"""Shortcuts of long rows give to the bit what the whole row gives, in memory that is used again."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from leadout.errors import EngineError
from leadout.runtime.drafters.base import Draft
from leadout.runtime.judging import judge
from leadout.runtime.rules import buffers, nucleus, sampling
from leadout.runtime.rules.heads import loudest
from leadout.runtime.rules.law import Few, whole
from leadout.runtime.rules.noise import FEW, Noise, Purpose, gumbel
from leadout.runtime.rules.sampling import Chain, Sampler
from leadout.runtime.settings import Settings
from leadout.runtime.vocabulary import VocabularyMap

VOCAB = 20_000


def row(spread: float, seed: int = 0) -> np.ndarray:
    return (spread * np.random.default_rng(seed).normal(size=VOCAB)).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.2, 1.0, 1.7])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0, 30.0])
def test_the_loudest_of_few_is_the_loudest_of_all(spread: float, temperature: float) -> None:
    settings = Settings(temperature=temperature, seed=3, rule="coupled")
    sampler = Sampler("coupled", Chain(settings, VOCAB, [1], ()), Noise(3))
    for position in range(25):
        logits = row(spread, position) + np.float32(50 * (position % 3 - 1))
        logits[:: 1 + position % 4] = -np.inf if position % 2 else logits[0]
        if np.isfinite(logits.max()):
            assert sampler.choose(logits, [], position) == int(sampler.noisy(logits, [], position).argmax())


CUT = [{"top_k": 1}, {"top_k": 40}, {"top_p": 0.9}, {"top_p": 0.3, "top_k": 2000}, {"min_p": 0.05}, {"top_k": 19_999}]
PENALISED = [{"repetition_penalty": 1.3}, {"min_new_tokens": 9, "top_k": 3}, {"logit_bias": {5: 9.0, 6: -np.inf}}]


@pytest.mark.parametrize("options", CUT + PENALISED, ids=str)
def test_the_loudest_that_settings_leave_is_found_among_few(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(temperature=0.7, seed=3, rule="coupled", **options)
    for spread, position in itertools.product((0.0, 0.5, 4.0), range(12)):
        logits = row(spread, position)
        chain = Chain(settings, VOCAB, [1, 2], {int(logits.argmax())})
        wanted = int(Sampler("coupled", chain, Noise(3)).noisy(logits, [7], position).argmax())
        with monkeypatch.context() as patch:
            patch.setattr(Noise, "gumbel", None)  # that of the whole row, which takes ten times as long
            assert Sampler("coupled", chain, Noise(3)).choose(logits, [7], position) == wanted


@pytest.mark.parametrize("few", [1, 2, 3, 5, 8, 17, 100])
def test_the_noise_of_a_few_is_theirs_in_the_row_to_the_bit(few: int) -> None:
    for position in range(20):
        ids = np.sort(np.random.default_rng(position).choice(VOCAB, few, replace=False))
        noise = Noise(2**63 + 5, stream=position)
        apart = noise.gumbel_of(position, VOCAB, ids)
        assert np.array_equal(apart, noise.gumbel(position, VOCAB)[ids])


@pytest.mark.parametrize("options", [{}, *CUT], ids=str)
def test_a_trimmed_head_drafts_what_its_law_says_for_the_seed(options: dict[str, Any]) -> None:
    """Whose other tokens are impossible; the target's choice from such a row would be the same."""
    chain = Chain(Settings(temperature=0.7, seed=3, rule="coupled", **options), VOCAB, [1, 2], ())
    known = np.sort(np.random.default_rng(9).choice(VOCAB, 3000, replace=False))
    vocabulary = VocabularyMap(known, VOCAB)
    for spread, start in itertools.product((0.0, 0.5, 4.0), range(12)):
        mapped = vocabulary.row(row(spread, start)[:3000])
        wanted = Sampler("coupled", chain, Noise(3)).noisy(np.asarray(mapped), [7, 8], start + 2).argmax()
        assert Sampler("coupled", chain, Noise(3)).propose(mapped, [7, 8], start) == (wanted, None)


@pytest.mark.parametrize("size", [1, 63, 64, 5000, VOCAB])
def test_the_k_largest_are_those_that_reach_the_kth(size: int) -> None:
    drawn = row(3.0)[:size]
    many_gone = np.where(np.arange(size) % 100, np.float32(-np.inf), drawn)
    for scores in (drawn, np.sort(drawn), np.round(drawn), np.zeros(size, np.float32), many_gone):
        for k in {1, 2, 3, 50, size // 64, size // 64 + 1, size - 1, size} & set(range(1, size + 1)):
            wanted = np.flatnonzero(scores >= np.sort(scores)[-k])
            assert np.array_equal(nucleus.largest(scores, k), wanted)


class HeadRow:
    """A row on a device that sends its eight largest; ``fetched``: whether the row was asked for."""

    size = VOCAB

    def __init__(self, logits: np.ndarray) -> None:
        self.logits, self.fetched = logits, False

    def top(self) -> tuple[np.ndarray, np.ndarray]:
        ids = np.lexsort((np.arange(VOCAB), -self.logits))[:8]
        return ids, self.logits[ids]

    def __array__(self, dtype: Any = None) -> np.ndarray:
        self.fetched = True
        return self.logits


@pytest.mark.parametrize("options", [{}, {"top_p": 0.7}, {"min_new_tokens": 9}, {"presence_penalty": 0.5}], ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 5, 7, 8, 9])
def test_what_top_k_leaves_is_told_by_the_head_of_a_row_where_it_can_be(top_k: int, options: dict[str, Any]) -> None:
    for coarse, seed in itertools.product((1e-6, 0.5, 2.0), range(12)):
        logits = (np.round(row(1.0, seed) / coarse) * coarse).astype(np.float32)
        chain = Chain(Settings(temperature=0.9, top_k=top_k, **options), VOCAB, [1], {5})
        head, ordered = HeadRow(logits), np.sort(logits)[::-1]
        found = chain.masses(head)  # type: ignore[arg-type]
        assert found == chain.masses(logits) if isinstance(found, Few) else np.array_equal(found, chain.masses(logits))
        changes = {"min_new_tokens", "presence_penalty"} & options.keys()
        assert head.fetched == bool(changes or top_k > 7 or ordered[top_k - 1] == ordered[7])


@pytest.mark.parametrize("temperature", [0.01, 0.2, 1.0, 1.7, 50.0])
def test_of_tokens_that_are_all_but_equally_loud_the_loudest_is_found(temperature: float) -> None:
    """Each is within what float32 rounds a bound by: wherever the logits lie, and the likeliest above them."""
    for seed in range(600):
        rng = np.random.default_rng(seed)
        logits = (rng.choice([0.1, 1.0, 6.0]) * temperature * rng.normal(size=rng.choice([2, 3, 10]))).astype(
            np.float32
        )
        logits -= logits.min() if seed % 2 else np.float32(rng.choice([0, -20, 50, 1000]))
        scores = (logits - logits.max()) / temperature
        noise = (
            rng.choice([0, 1e-12, 1e-9, 1e-7, 1e-6]) * rng.normal(size=logits.size) - scores + rng.choice([-1, 0, 3])
        )
        uniforms = np.exp(-np.exp(-noise))
        wanted = (scores + gumbel(uniforms)).argmax()
        assert loudest(logits, temperature, uniforms, int(uniforms.argmax())) == wanted


def test_the_noise_of_a_long_text_is_not_all_kept() -> None:
    noise = Noise(3)
    for position in range(70):
        for size in (VOCAB, 50):
            noise.gumbel(position, size)
        noise.uniforms(position, Purpose.FINAL, 1)
        noise.gumbel_of(position + 100, VOCAB, np.arange(0, 4 * FEW, 4))
    assert max(map(len, (noise._raws, noise._gumbels, noise._coins))) <= 36 and len(noise._fours) <= 33 * FEW


def test_the_noise_of_a_few_is_made_once_for_draft_and_target(monkeypatch: pytest.MonkeyPatch) -> None:
    noise, ids, made = Noise(3), np.array([5, 7, 900]), list[tuple[int, ...]]()
    block = Noise._block
    monkeypatch.setattr(Noise, "_block", lambda self, *counter: made.append(counter) or block(self, *counter))
    drafts = noise.gumbel_of(4, VOCAB, ids)
    assert len(made) == 2, "5 and 7 are of one block"
    targets = noise.gumbel_of(4, VOCAB, np.array([5, 901, 15_000]))
    assert len(made) == 3 and targets[0] == drafts[0] and noise.gumbel_of(5, VOCAB, ids)[0] != drafts[0]


def test_equally_loud_tokens_go_to_the_lowest_and_silence_loses() -> None:
    logits, uniforms = np.zeros(VOCAB, np.float32), np.full(VOCAB, 0.5)
    assert loudest(logits, 1.0, uniforms, 0) == 0
    uniforms[:7] = 0.0
    assert loudest(logits, 1.0, uniforms, 9) == 7
    logits[3] = 100.0
    assert loudest(logits, 1.0, uniforms, 9) == 7, "no logit is heard above silence"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_long_rows_that_are_no_numbers_are_an_engine_error(bad: float) -> None:
    logits = row(1.0)
    logits[77] = bad
    cut: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 3}, {"top_k": 3, "presence_penalty": 0.5}]
    for rule, options in itertools.product(("coupled", "rejection"), cut):
        sampler = Sampler(rule, Chain(Settings(temperature=1.0, **options), VOCAB, [], ()), Noise(0))
        with pytest.raises(EngineError, match="NaN"):
            sampler.chain.distribution(logits) if rule == "rejection" else sampler.choose(logits, [], 0)


def test_only_short_rows_are_worked_out_before_somebody_asks() -> None:
    """A rejection at the first of many long rows leaves the others alone; so does a law that depends on the draft."""
    rows = np.random.default_rng(4).normal(size=(5, 50)).astype(np.float32)
    rows[4] = np.nan  # of a row of the batch that has more drafts: nobody's
    chain = Chain(Settings(temperature=0.7), 50, [], ())
    found = chain.distributions(rows, [1, 2, 3])
    assert found is not None and len(found) == 4
    for law, logits in zip(found, rows[:4], strict=True):
        np.testing.assert_allclose(law, chain.distribution(logits), rtol=3e-7)
    assert Chain(Settings(temperature=0.7), VOCAB, [], ()).distributions(np.stack([row(1.0)] * 4), [1, 2, 3]) is None
    for options in ({"presence_penalty": 0.5}, {"top_p": 0.9}, {"min_new_tokens": 2}):
        changed = Chain(Settings(temperature=0.7, **options), 50, [], {1})  # type: ignore[arg-type]
        assert changed.distributions(rows, [1, 2, 3]) is None
    for places, bad in ((7, np.nan), (7, np.inf), (slice(None), -np.inf)):
        broken = rows.copy()
        broken[2, places] = bad
        assert chain.distributions(broken, [1, 2, 3]) is None, "whoever comes to that row will hear of it"


def test_a_row_that_is_no_law_behind_a_rejected_draft_is_nobody_s() -> None:
    rows = np.zeros((3, 50), np.float32)
    rows[0, 7], rows[2] = -np.inf, np.nan
    q = [np.full(50, 0.02), np.full(50, 0.02)]
    sampler = Sampler("rejection", Chain(Settings(temperature=0.7, rule="rejection"), 50, [], ()), Noise(1))
    asked = SimpleNamespace(sampler=sampler, sequence=SimpleNamespace(length=4), settings=sampler.chain.settings)
    assert judge(asked, Draft([7, 1], q), rows).accepted == 0  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="NaN"):
        judge(asked, Draft([1, 1], [law * 0.5 for law in q]), rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.999, 0.9999999])
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0, 10.0])
def test_the_nucleus_of_a_flat_row_is_exact(spread: float, top_p: float) -> None:
    logits = row(spread)
    probs = Chain(Settings(temperature=1.0), VOCAB, [], ()).distribution(logits)
    kept = Chain(Settings(temperature=1.0, top_p=top_p), VOCAB, [], ()).distribution(logits) > 0
    least, tight = probs[kept].min(), 1e-6
    mass = probs[kept].sum(dtype=np.float64)
    assert mass >= top_p - tight
    assert mass - least * (probs == least).sum() < top_p + tight
    assert kept.all() or probs[~kept].max() < least


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 3.0, 6.0])
def test_a_nucleus_that_was_looked_for_is_the_sorted_one(
    spread: float, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few are looked at first, and wherever they say it should be."""
    weights = np.exp(row(spread).astype(kind))
    for few, top_p in itertools.product((2048, 300, 80), (1e-9, 0.05, 0.5, 0.9, 0.99, 0.9999)):
        monkeypatch.setattr(nucleus, "_FEW", VOCAB)
        whole = nucleus.nucleus_edge(weights, top_p)
        monkeypatch.setattr(nucleus, "_FEW", few)
        found = nucleus.nucleus_edge(weights, top_p)
        near = weights[(weights >= min(found, whole)) & (weights < max(found, whole))]
        assert near.sum() < 1e-6 * weights.sum(), "a sum in another order may end at the next weight"


@pytest.mark.parametrize("top_p", [1e-9, 0.5, 2 / 3, 0.667, 1 - 1e-8, 1 - 1e-9])
def test_a_nucleus_ends_between_two_weights_that_most_tokens_share(top_p: float) -> None:
    """Where it does, no sample comes between them; and sums of float32 may fall short of a share of nearly all."""
    weights = np.where(np.arange(VOCAB - VOCAB % 2) % 2, 1.0, 0.5).astype(np.float32)
    assert nucleus.nucleus_edge(weights, top_p) == (1.0 if top_p <= 2 / 3 else 0.5)
    scattered = np.random.default_rng(4).choice(np.array([1.0, 0.3, 0.2999], np.float32), 24904)
    edge = nucleus.nucleus_edge(scattered, top_p)
    mass = scattered.astype(np.float64)
    assert mass[scattered >= edge].sum() >= (top_p - 1e-6) * mass.sum() > mass[scattered > edge].sum() - 1e-6 * VOCAB


def test_rows_of_one_round_keep_their_numbers() -> None:
    """Laws that are alive at once share no memory; those that are gone leave theirs to the next."""
    chain = Chain(Settings(temperature=0.7), VOCAB, [], ())
    laws = [chain.distribution(row(1.0, seed)) for seed in range(3)]
    for seed, law in enumerate(laws):
        assert np.array_equal(law, Chain(Settings(temperature=0.7), VOCAB, [], ()).distribution(row(1.0, seed)))
    del law
    places = {law.ctypes.data for law in laws}
    laws.clear()
    assert len(places) == 3 and buffers.empty(VOCAB, np.float32).ctypes.data in places


def test_masses_are_the_law_up_to_a_factor() -> None:
    for options in ({}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01}, {"top_k": 500}):
        chain = Chain(Settings(temperature=0.9, **options), VOCAB, [], ())  # type: ignore[arg-type]
        masses = whole(chain.masses(row(2.0)), VOCAB)
        np.testing.assert_allclose(masses / masses.sum(), chain.distribution(row(2.0)), rtol=3e-7)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_p": 0.8, "min_p": 0.1}], ids=str)
@pytest.mark.parametrize("top_k", [0, 1, 60, 700])
@pytest.mark.parametrize("spread", [0.1, 4.0])
def test_few_tokens_have_the_masses_that_they_have_in_a_row(
    spread: float, top_k: int, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(Settings(temperature=0.9, top_k=top_k, **options), VOCAB, [], ())  # type: ignore[arg-type]
    some = chain.masses(row(spread))
    monkeypatch.setattr(sampling, "FEW", 0)
    every = chain.masses(row(spread))
    assert isinstance(every, np.ndarray)
    kept = np.flatnonzero(every)
    assert isinstance(some, Few) == (kept.size <= FEW)
    np.testing.assert_allclose(whole(some, VOCAB), every, rtol=2e-6)  # in float32, of scores up to 20
    if isinstance(some, Few):
        assert list(some) == kept.tolist() and some.item(int(np.argmin(every))) == 0.0
