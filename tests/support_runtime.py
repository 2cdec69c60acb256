"""Exact laws of the production code: its coins are replaced by ones that fork, and every branch is run."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np

from leadout.engines.base import ANY, Widths
from leadout.engines.toy import Law, ToyEngine, mixed_law, table_law
from leadout.runtime import admission, ahead, judging
from leadout.runtime.controller.costs import Costs
from leadout.runtime.controller.coverage import Coverage
from leadout.runtime.decoder import Decoder, Event
from leadout.runtime.drafters import tree_drafter
from leadout.runtime.rules import law as laws_held
from leadout.runtime.rules import sampling
from leadout.runtime.settings import MAX_DRAFT_LENGTH, Settings

T = TypeVar("T", bound=Hashable)
EOS = 3


class Branches:
    """One path through a tree of choices; ``law`` walks them all and adds up their probabilities."""

    def __init__(self, path: list[int]) -> None:
        self.path, self.weight, self.open = path, 1.0, []  # type: tuple[list[int], float, list[list[int]]]
        self._depth = 0

    def choose(self, chances: list[float]) -> int:
        if self._depth == len(self.path):
            possible = [i for i, chance in enumerate(chances) if chance > 0]
            self.open += [[*self.path, i] for i in possible[1:]]
            self.path.append(possible[0])
        chosen = self.path[self._depth]
        self._depth += 1
        self.weight *= chances[chosen]
        return chosen


def law(run: Callable[[Branches], T]) -> dict[T, float]:
    """The exact distribution of what ``run`` returns."""
    total: dict[T, float] = defaultdict(float)
    paths: list[list[int]] = [[]]
    while paths:
        branches = Branches(paths.pop())
        total[run(branches)] += branches.weight
        paths += branches.open
    return dict(total)


class Coin:
    """A uniform on [0, 1) that has not fallen yet. Each comparison forks with its exact probability, given what
    earlier ones have shown: a coin that is used twice by mistake is biased here just as it would be in life."""

    def __init__(self, branches: Branches) -> None:
        self.branches, self.low, self.high = branches, 0.0, 1.0

    def below(self, threshold: float) -> bool:
        edge = min(max(threshold, self.low), self.high)
        share = (edge - self.low) / (self.high - self.low)
        yes = self.branches.choose([share, 1.0 - share]) == 0
        self.low, self.high = (self.low, edge) if yes else (edge, self.high)
        return yes

    def __lt__(self, threshold: float) -> bool:
        return self.below(float(threshold))

    def __le__(self, threshold: float) -> bool:
        return self.below(float(threshold))

    def __mul__(self, scale: float) -> Scaled:
        return Scaled(self, float(scale))

    def draw(self, weights: laws_held.Law) -> int:
        """``law.draw`` with this coin: the token whose stretch of the cumulative law it falls in."""
        tokens = list(weights) if isinstance(weights, laws_held.Few) else None
        weights = np.array(list(weights.values())) if isinstance(weights, laws_held.Few) else weights
        edges = np.concatenate([[0.0], np.cumsum(weights) / weights.sum()])
        inside = np.clip(edges, self.low, self.high)
        token = self.branches.choose(list(np.diff(inside) / (self.high - self.low)))
        self.low, self.high = inside[token], inside[token + 1]
        return token if tokens is None else tokens[token]


class Scaled:
    def __init__(self, coin: Coin, scale: float) -> None:
        self.coin, self.scale = coin, scale

    def __lt__(self, threshold: float) -> bool:
        return self.coin.below(float(threshold) / self.scale) if self.scale else threshold > 0


def draw_with_coins(patch: Any) -> None:
    """Whoever draws from a law asks the Coin that stands for its uniform."""
    for module in (judging, ahead, tree_drafter):
        patch.setattr(module, "draw", lambda weights, coin: coin.draw(weights))
    patch.setattr(sampling, "draw_and_sum", lambda weights, coin: (coin.draw(weights), laws_held.mass_of(weights)))


class ScriptedNoise:
    """Stands in for ``Noise``: one coin for each (position, purpose, index), the same whenever it is asked for."""

    def __init__(self, branches: Branches) -> None:
        self.branches, self.seed = branches, 0
        self.coins: dict[tuple[int, int, int], Coin] = {}

    def uniforms(self, position: int, purpose: int, size: int) -> list[Coin]:
        keys = [(position, int(purpose), i) for i in range(size)]
        return [self.coins.setdefault(key, Coin(self.branches)) for key in keys]


def decode_law(
    laws: tuple[Law, Law],
    vocab: int,
    count: int,
    monkeypatch: Any,
    prompt: list[int],
    watch: Callable[[Event], None] = lambda event: None,
    mask_token: int | None = None,
    **settings: Any,
) -> dict[tuple[int, ...], float]:
    """The exact law of the first ``count`` tokens of a whole production run: decoder, drafter, cache, rule.

    ``watch`` is told every event of every branch; ``mask_token`` is the draft's."""
    options = Settings(max_new_tokens=count, ignore_eos=True, **settings)

    def run(branches: Branches) -> tuple[int, ...]:
        with monkeypatch.context() as patch:
            patch.setattr(admission, "Noise", lambda seed, stream=0: ScriptedNoise(branches))
            draw_with_coins(patch)
            target, draft = laws
            decoder = Decoder(ToyEngine(target, vocab), ToyEngine(draft, vocab, mask_token=mask_token))
            events = list(decoder.decode([(prompt, options)]))
            for event in events:
                watch(event)
            return tuple(token for event in events for token, _ in event.tokens)

    return law(run)


def target_law(row: Callable[[tuple[int, ...]], np.ndarray], vocab: int, count: int) -> dict[tuple[int, ...], float]:
    """The joint law of ``count`` tokens drawn one by one from row(new tokens so far)."""
    joint = {}
    for tokens in itertools.product(range(vocab), repeat=count):
        joint[tokens] = float(np.prod([row(tokens[:i])[tokens[i]] for i in range(count)]))
    return joint


def distance(a: dict[tuple[int, ...], float], b: dict[tuple[int, ...], float]) -> float:
    """Total variation."""
    return 0.5 * sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})


def sharpened(law: Law, prompt: list[int], power: float) -> Callable[[tuple[int, ...]], np.ndarray]:
    """``law`` after ``prompt``, at temperature 1/power."""

    def row(tokens: tuple[int, ...]) -> np.ndarray:
        weights = law(np.array([*prompt, *tokens])) ** power
        return weights / weights.sum()

    return row


def parallel(law: Law, mask: int) -> Law:
    """``law`` as a draft has it that was trained to go on behind masks: it takes them for what it finds likeliest."""

    def ahead(context: np.ndarray) -> np.ndarray:
        text = [int(token) for token in context]
        while mask in text:
            first = text.index(mask)
            text[first] = int(law(np.array(text[:first])).argmax())
        return law(np.array(text))

    return ahead


def toy_pair(vocab: int = 23, *, order: int | None = None, share: float = 0.3, seed: int = 1, context: int = 96) -> Any:
    """A target and a draft that agree for the most part."""
    target = table_law(vocab, seed=seed, order=order, sharpness=2.0)
    draft = mixed_law(target, table_law(vocab, seed=seed + 1, order=order, sharpness=2.0), share)
    return ToyEngine(target, vocab, max_context=context), ToyEngine(draft, vocab, max_context=context)


def collect(events: Any, count: int) -> tuple[list[list[int]], dict[int, Event]]:
    """All tokens of each of ``count`` requests, and its last event."""
    texts: list[list[int]] = [[] for _ in range(count)]
    last: dict[int, Event] = {}
    for event in events:
        assert event.index not in last, "an event after the last"
        texts[event.index] += [token for token, _ in event.tokens]
        if event.finish_reason is not None:
            last[event.index] = event
    assert len(last) == count
    return texts, last


class Covered(Coverage):
    """Whatever was measured with one row is known of all."""

    def lacks_plain(self, rows: int) -> bool:
        return False

    def first_length(self, limit: int, rows: int = 1, widths: Widths = ANY, *best: Any) -> int | None:
        return super().first_length(limit, 1, widths, *best)


class FixedCosts(Costs):
    """Costs as if measured once and for all: a target step of width S takes 1 + per_token * (S - 1) seconds."""

    def __init__(self, per_draft: float = 0.1, per_token: float = 0.02) -> None:
        super().__init__()
        self.coverage = Covered()
        for width in 2 * list(range(1, MAX_DRAFT_LENGTH + 2)):
            super().record_target(1, width, 1 + per_token * (width - 1))
        super().record_draft(1, 1, per_draft)

    def record_target(self, rows: int, width: int, seconds: float, past: int = 0, **how: bool) -> None:
        pass

    def record_draft(self, rows: int, steps: int, seconds: float, past: int = 0, late: int = 0) -> None:
        pass

    def doubt(self, rows: int) -> float:
        return 0.0

    def record_host(self, rows: int, seconds: float, *, quiet: bool = False) -> None:
        pass
