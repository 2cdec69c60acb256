"""What the controller gains and loses where steps take what a table says: no noise, so that 0.97 is 0.97."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from leadout.engines.base import Logits
from leadout.engines.priced import Clock, Priced, Prices
from leadout.engines.toy import ToyEngine, mixed_law, table_law
from leadout.engines.wrapped import Wrapped
from leadout.errors import UsageError
from leadout.runtime import ahead, bench, decoder, stats, tune
from leadout.runtime.controller import cascade
from leadout.runtime.controller.costs import Costs
from leadout.runtime.decoder import Decoder
from leadout.runtime.settings import Settings
from leadout.runtime.steps import Stepper

VOCAB, TEXTS, LENGTH = 61, 3, 96
CELLS = [(device, rows) for device in ("demo-int8", "grown-int8") for rows in (1, 4, 16)]
CELLS += [("demo-int8-busy", 1), ("demo-int8-busy", 4)]


@pytest.fixture
def clock():
    with ExitStack() as stack:
        made = Clock()
        stack.enter_context(made.told((ahead, bench, cascade, decoder, stats)))
        yield made


@pytest.fixture
def prices(root: Path):
    return lambda name: Prices.read(root / "benchmarks" / "devices.json", name)


@pytest.fixture(scope="module")
def once():
    """What depends on a device alone, and how it is asked, is computed once."""
    found = {}

    def of(compute, *key):
        if (compute.__name__, *key) not in found:
            found[compute.__name__, *key] = compute(*key)
        return found[compute.__name__, *key]

    return of


@pytest.fixture
def plain(clock, prices, once):
    """The speed without a draft."""

    def plain(device, rows, temperature):
        return speed(clock, prices(device), draft="none", rows=rows, temperature=temperature)

    return lambda device, rows=1, temperature=0.0: once(plain, device, rows, temperature)


@pytest.fixture
def tuned(clock, prices, once):
    """What a device keeps that was so many times ``slower`` when it was measured."""

    def table(device):
        return measured(clock, prices(device))

    def scaled(device, slower):
        return [dataclasses.replace(cost, seconds=slower * cost.seconds) for cost in once(table, device)]

    return scaled


def engines(clock, prices, share):
    """A target, and a draft that agrees with it but for ``share``."""
    laws = [table_law(VOCAB, seed=seed, order=2, sharpness=3.0, rows=4001) for seed in (1, 2)]
    target = Priced(ToyEngine(laws[0], VOCAB, max_context=256), clock, prices.target, beside=prices.beside)
    return target, Priced(ToyEngine(mixed_law(*laws, share), VOCAB, max_context=256), clock, prices.drafts)


def measured(clock, prices):
    """What a device keeps."""
    target, model = engines(clock, prices, 0.1)
    sweep, plain = tune.Sweep(target, model, exact=False), Decoder(target, None, exact=False)
    for text in range(6):
        for decoding, draft in ((plain, "none"), (sweep, "model")):
            settings = Settings(draft=draft, max_new_tokens=LENGTH, ignore_eos=True)
            list(decoding.decode([([1, 2, text], settings)]))
    return tune.kept(sweep.costs, plain.costs)


def speed(
    clock, prices, *, draft="auto", share=0.1, rows=1, temperature=0.0, length="auto", texts=TEXTS, warm=1, known=()
):
    """Tokens per second after ``warm`` texts: of a draft that agrees with its target but for ``share``."""
    target, model = engines(clock, prices, share)
    decode = Decoder(target, None if draft == "none" else model, exact=False, costs=Costs(known)).decode
    options = {"draft": draft, "draft_length": length, "temperature": temperature}
    if temperature and draft != "none":
        options["rule"] = "block"
    tokens = seconds = 0.0
    for text in range(texts + warm):
        each = [Settings(max_new_tokens=LENGTH, ignore_eos=True, seed=10 * text + i, **options) for i in range(rows)]
        for event in decode([([1, 2, text, i], settings) for i, settings in enumerate(each)]):
            if text >= warm and event.stats is not None:
                tokens += event.stats.tokens
                seconds += event.stats.total_seconds - event.stats.seconds["prefill"]
    return tokens / seconds


@pytest.mark.parametrize(("device", "rows"), CELLS)
@pytest.mark.parametrize("draft", ["model", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_draft_however_bad_makes_anyone_slower(clock, prices, plain, device, rows, draft, temperature):
    given = {"rows": rows, "temperature": temperature}
    for share in (0.1, 0.6, 1.0):
        assert speed(clock, prices(device), draft=draft, share=share, **given) > 0.95 * plain(device, **given), share


@pytest.mark.parametrize(("device", "rows"), CELLS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_useless_draft_costs_a_first_text_little(clock, prices, device, rows, temperature):
    given = {"rows": rows, "temperature": temperature, "texts": 1, "warm": 0}
    plain = speed(clock, prices(device), draft="none", **given)
    assert speed(clock, prices(device), draft="model", share=1.0, **given) > 0.9 * plain


@pytest.mark.parametrize(("rows", "gain"), [(1, 2.4), (4, 1.5), (16, 1.1)])
def test_a_good_draft_pays_in_any_batch_of_a_large_target(clock, prices, plain, rows, gain):
    given = {"rows": rows, "temperature": 1.0}
    assert speed(clock, prices("grown-int8"), **given) > gain * plain("grown-int8", **given)


@pytest.mark.parametrize(("device", "share"), [("demo-int8", 0.1), ("grown-int8", 0.2), ("grown-int8", 0.3)])
def test_auto_comes_close_to_the_best_length(clock, prices, device, share):
    given = {"share": share, "temperature": 1.0, "texts": 8}
    fixed = [speed(clock, prices(device), draft="model", length=n, **given) for n in (1, 2, 3, 4, 6, 8)]
    assert speed(clock, prices(device), draft="model", **given) > 0.95 * max(fixed)


@pytest.mark.parametrize("device", ["demo-int8", "grown-int8"])
def test_a_table_of_another_hour_serves_as_well(clock, prices, plain, tuned, device):
    """A device is a few times as fast or slow as when it was tuned: what its steps take beside each other counts."""
    fresh = speed(clock, prices(device), known=tuned(device, 1.0), warm=0)
    assert fresh > 1.2 * plain(device)
    for slower in (0.125, 0.25, 4.0, 8.0):
        assert speed(clock, prices(device), known=tuned(device, slower), warm=0) > 0.85 * fresh, slower


@pytest.mark.parametrize(("part", "factor"), [("draft", 2.5), ("draft", 4.0), ("plain", 0.6), ("target", 1.4)])
def test_a_table_that_is_wrong_about_drafting_is_soon_found_out(clock, prices, tuned, once, part, factor):
    """A process begins with a table in which a part of a round takes ``factor`` times as long as it does beside the
    others (of the target, the steps that verify drafts)."""
    right = tuned("demo-int8", 1.0)
    least = 2 if part == "target" else 1
    wrong = [
        dataclasses.replace(cost, seconds=factor * cost.seconds) if cost.part == part and cost.width >= least else cost
        for cost in right
    ]
    given = {"temperature": 1.0, "warm": 8, "texts": 8}

    def told(device):
        return speed(clock, prices(device), known=right, **given)

    assert speed(clock, prices("demo-int8"), known=wrong, **given) > 0.95 * once(told, "demo-int8")


def test_prices_are_between_and_beyond_what_is_known_lines(prices, root):
    grown = prices("grown-int8")
    assert grown.target(1, 1) == 4.25 and grown.bare(1, 1) == 4.1 and grown.bare(2, 1) == grown.target(2, 1) == 5.53
    assert grown.target(1, 4) == pytest.approx((5.17 + 5.9) / 2) and grown.target(3, 1) == pytest.approx(6.385)
    assert grown.target(1, 17) == pytest.approx(7.5 + 8 * 0.4)
    assert grown.drafts(1, 1) == grown.drafts(1, 2) == 0.3 and grown.drafts(4, 12) == pytest.approx(0.88 + 40 * 0.0625)
    with pytest.raises(UsageError, match=r"no prices of 'nothing'.*demo-int8, grown-int8, demo-int8-busy"):
        Prices.read(root / "benchmarks" / "devices.json", "nothing")


def test_a_wrapped_engine_is_the_engine_and_is_charged_for_every_step(clock):
    toy = ToyEngine(table_law(VOCAB), VOCAB)
    wrapped = Priced(toy, clock, lambda rows, width: 10.0 * rows + width)
    wrapped.reset(2)
    wrapped.reserve(8)
    assert (wrapped.batch, wrapped.capacity, wrapped.spec) == (2, toy.capacity, toy.spec)
    before = clock.now
    found = wrapped.forward(np.array([[1, 2, 3], [4, 5, 6]]), np.array([0, 0]))
    assert clock.now - before == pytest.approx(0.023) and toy.calls == [(2, 3)]
    wrapped.copy_row(0, 1)
    sees = np.tile(np.tri(2, dtype=np.bool_), (2, 1, 1))
    tree = np.array(wrapped.forward_tree(np.array([[7, 8], [7, 8]]), np.array([3, 3]), sees))
    assert clock.now - before == pytest.approx(0.045) and np.array_equal(tree[0], tree[1])
    wrapped.compact(0, 3, [1])
    assert found.shape == (2, 3, VOCAB) and wrapped.row_logits is None, "a toy has none"
    wrapped.close()
    assert toy.capacity == 0


def test_a_target_that_follows_a_draft_takes_longer_the_first_step_above_all(clock):
    draft = Priced(ToyEngine(table_law(VOCAB), VOCAB), clock, lambda rows, width: 1.0)
    target = Priced(ToyEngine(table_law(VOCAB), VOCAB), clock, lambda rows, width: 10.0, beside=0.25)
    took = []
    for engine in (target, draft, target, target, draft, draft, target):
        before = clock.now
        engine.reset(1)
        engine.reserve(4)
        engine.forward(np.array([[1]]), np.array([0]))
        took.append(1e3 * (clock.now - before))
    assert took == pytest.approx([10.0, 1.0, 12.5, 12.0, 1.0, 1.0, 12.5])


def test_short_steps_of_one_row_are_charged_too(clock):
    class Rows(ToyEngine):
        def row_logits(self, tokens: list[int], past_len: int, last: bool) -> Logits:
            logits = self.forward(np.array([tokens]), np.array([past_len]))
            return logits[:, -1:] if last else logits

    priced = Priced(Rows(table_law(VOCAB), VOCAB), clock, lambda rows, width: 5.0)
    priced.reset(1)
    priced.reserve(8)
    before = clock.now
    Stepper(priced, "draft").last_row([1], 0)
    assert clock.now - before == pytest.approx(0.005) and priced.engine.calls == [(1, 1)]
    Stepper(priced, "target").all_logits([[2, 3, 4]], [1])
    assert clock.now - before == pytest.approx(0.010) and priced.engine.calls == [(1, 1), (1, 3)]


def test_who_passes_on_what_he_has_not_himself_is_not_left_out():
    class Around:
        def __init__(self, engine: ToyEngine) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> object:
            return getattr(self._engine, name)

    class Rows(ToyEngine):
        def row_logits(self, tokens: list[int], past_len: int, last: bool) -> Logits:
            raise AssertionError("past the one around it")

    assert Wrapped(Rows(table_law(VOCAB), VOCAB)).row_logits is not None
    assert Wrapped(Around(Rows(table_law(VOCAB), VOCAB))).row_logits is None
    nested = Wrapped(Wrapped(ToyEngine(table_law(VOCAB), VOCAB)))
    assert nested.row_logits is None
