"""Decides how many tokens to draft this round, or none: from past rounds only, so that every rule stays exact."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Protocol

import numpy as np

from .settings import MAX_DRAFT_LENGTH

_PRIOR_ACCEPTANCE = 0.7
_PRIOR_WEIGHT = 4.0  # rounds' worth of belief in the prior, and in the pooled rate at each position
_DECAY = 0.95  # per round: about the last 40 rounds count
_FIRST_LENGTHS = (4, 8, 2, 1)  # the start-up measurement: each twice, and each still writes text
_SAMPLES = 2
_FIRST_REST, _LONGEST_REST = 16, 256
_PROBE_LENGTH = 2
_WIDTHS = np.arange(MAX_DRAFT_LENGTH + 2)
_DRAFT = 0  # stands for the draft among the widths


class Policy(Protocol):
    """How long a draft one request should get."""

    def length(self, limit: int, rows: int) -> int:
        """Drafts for the next round, 0..limit, when ``rows`` rows share a step."""
        ...

    def observe(self, tested: int, accepted: int) -> None:
        """What the last round's verdict was (both 0 if nothing was drafted)."""
        ...


class Costs:
    """Measured seconds on this device, shared by all requests: a step of the target by rows and width, and one step
    of the draft by rows. The middle of the last few, because first calls at a new shape are slow. What is not known
    for a number of rows is taken from the nearest number that was measured."""

    def __init__(self) -> None:
        self._recent: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=7))
        self._target: dict[int, dict[int, float]] = defaultdict(dict)
        self._draft: dict[int, float] = {}
        self._samples: Counter[int] = Counter()

    def record_target(self, rows: int, width: int, seconds: float) -> None:
        self._target[rows][width] = self._middle(rows, width, seconds)
        self._samples[width] += 1

    def record_draft(self, rows: int, steps: int, seconds: float) -> None:
        if steps:
            self._draft[rows] = self._middle(rows, _DRAFT, seconds / steps)

    def target(self, rows: int) -> list[float] | None:
        """Seconds of a step of each width from 0 to 17: between measured widths a straight line, beyond them the
        nearest, and never more than a wider step costs (a width that was last measured in a bad moment would else
        be avoided for good). None while nothing was measured."""
        if not self._target:
            return None
        known = self._target[min(self._target, key=lambda r: (abs(r - rows), r))]
        widths = sorted(known)
        table = np.interp(_WIDTHS, widths, [known[width] for width in widths])
        monotone: list[float] = np.minimum.accumulate(table[::-1])[::-1].tolist()
        return monotone

    def draft(self, rows: int) -> float:
        """Seconds of one step of the draft; 0 while it was never measured."""
        return self._draft[min(self._draft, key=lambda r: (abs(r - rows), r))] if self._draft else 0.0

    def first_length(self, limit: int) -> int | None:
        """The next draft length of the start-up measurement that ``limit`` allows; None when it is done."""
        return next((k for k in _FIRST_LENGTHS if k <= limit and self._samples[k + 1] < _SAMPLES), None)

    def _middle(self, rows: int, width: int, seconds: float) -> float:
        recent = self._recent[rows, width]
        recent.append(seconds)
        return sorted(recent)[(len(recent) - 1) // 2]


class FixedLength:
    """Always the same length."""

    def __init__(self, length: int) -> None:
        self._length = length

    def length(self, limit: int, rows: int) -> int:
        return max(0, min(self._length, limit))

    def observe(self, tested: int, accepted: int) -> None:
        pass


class AutoLength:
    """argmax over K of (expected tokens) / (expected seconds), with an off switch that can come back.

    Expected tokens are 1 + sum of survivals (Leviathan et al. 2211.17192, section 3.1, without assuming that
    positions are alike). Acceptance at a position counts only rounds that reached it: what stands behind the first
    rejection is censored, not rejected. When K = 0 wins, drafting rests for 16 rounds, then tries once; each failed
    try doubles the rest, up to 256 rounds.
    """

    def __init__(self, costs: Costs, narrowest: int = 1, *, free: bool = False) -> None:
        """``narrowest`` is the least width the target steps with; ``free``: the draft costs no model step."""
        self._costs, self._narrowest, self._free = costs, narrowest, free
        self._tested = [0.0] * MAX_DRAFT_LENGTH
        self._accepted = [0.0] * MAX_DRAFT_LENGTH
        self._resting, self._rest = 0, _FIRST_REST

    def length(self, limit: int, rows: int) -> int:
        limit = max(0, min(limit, MAX_DRAFT_LENGTH))
        if limit == 0:
            return 0
        if (first := self._costs.first_length(limit)) is not None:
            return first
        if self._resting:
            self._resting -= 1
            return min(_PROBE_LENGTH, limit) if self._resting == 0 else 0
        speeds = self.speeds(rows)[: limit + 1]
        best = speeds.index(max(speeds))
        if best == 0:
            self._resting, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)
        else:
            self._rest = _FIRST_REST
        return best

    def observe(self, tested: int, accepted: int) -> None:
        if not tested:
            return
        for position in range(MAX_DRAFT_LENGTH):
            self._tested[position] = _DECAY * self._tested[position] + (position < tested)
            self._accepted[position] = _DECAY * self._accepted[position] + (position < accepted)

    def acceptances(self) -> list[float]:
        """At each position, the estimated probability that a draft is accepted once it is reached: a Beta mean,
        shrunk to the rate of all positions, which is itself shrunk to 0.7."""
        pooled = (_PRIOR_WEIGHT * _PRIOR_ACCEPTANCE + sum(self._accepted)) / (_PRIOR_WEIGHT + sum(self._tested))
        return [
            (_PRIOR_WEIGHT * pooled + accepted) / (_PRIOR_WEIGHT + tested)
            for accepted, tested in zip(self._accepted, self._tested, strict=True)
        ]

    def speeds(self, rows: int) -> list[float]:
        """Expected tokens per expected second with drafts of 0..16 (tokens a round while nothing is measured)."""
        steps = self._costs.target(rows)
        drafting = 0.0 if self._free else self._costs.draft(rows)
        tokens, survival, speeds = 1.0, 1.0, []
        for length, acceptance in enumerate([*self.acceptances(), 0.0]):
            seconds = length * drafting + steps[max(length + 1, self._narrowest)] if steps else 1.0
            speeds.append(tokens / seconds)
            survival *= acceptance
            tokens += survival
        return speeds
