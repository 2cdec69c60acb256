"""Decides how many tokens to draft this round, or none: from past rounds only, so that every rule stays exact."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from statistics import median_low
from typing import Protocol

from .settings import MAX_DRAFT_LENGTH

_PRIOR_ACCEPTANCE = 0.7
_PRIOR_WEIGHT = 4.0  # rounds' worth of belief in the prior, and in the pooled rate at each position
_DECAY = 0.95  # per round: about the last 40 rounds count
_FIRST_LENGTHS = (4, 8, 2, 1)  # the start-up measurement: each twice, and each still writes text
_SAMPLES = 2
_FIRST_REST, _LONGEST_REST = 16, 256
_PROBE_LENGTH = 2


class Policy(Protocol):
    """How long a draft one request should get."""

    def length(self, limit: int, rows: int) -> int:
        """Drafts for the next round, 0..limit, when ``rows`` rows share a step."""
        ...

    def observe(self, tested: int, accepted: int) -> None:
        """What the last round's verdict was (both 0 if nothing was drafted)."""
        ...


class Costs:
    """Measured seconds on this device, shared by all requests: a step of the target by (rows, width), and one step
    of the draft by rows. The middle of the last few, because first calls at a new shape are slow. What is not known
    for a number of rows is taken from the nearest number that was measured."""

    def __init__(self) -> None:
        self._target: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=7))
        self._draft: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=7))
        self._samples: Counter[int] = Counter()

    def record_target(self, rows: int, width: int, seconds: float) -> None:
        self._target[rows, width].append(seconds)
        self._samples[width] += 1

    def record_draft(self, rows: int, steps: int, seconds: float) -> None:
        if steps:
            self._draft[rows].append(seconds / steps)

    def target(self, rows: int, width: int) -> float | None:
        """Seconds of a step; between measured widths a straight line, beyond them the nearest. None: no idea yet."""
        if not self._target:
            return None
        rows = min((r for r, _ in self._target), key=lambda r: (abs(r - rows), r))
        known = [w for r, w in self._target if r == rows]
        if width in known:
            return median_low(self._target[rows, width])
        below = max((w for w in known if w < width), default=None)
        above = min((w for w in known if w > width), default=None)
        if below is None or above is None:
            nearest = above if below is None else below
            assert nearest is not None
            return median_low(self._target[rows, nearest])
        share = (width - below) / (above - below)
        return (1 - share) * median_low(self._target[rows, below]) + share * median_low(self._target[rows, above])

    def draft(self, rows: int) -> float:
        """Seconds of one step of the draft; 0 while it was never measured."""
        if not self._draft:
            return 0.0
        return median_low(self._draft[min(self._draft, key=lambda r: (abs(r - rows), r))])

    def first_length(self, limit: int) -> int | None:
        """The next draft length of the start-up measurement that ``limit`` allows; None when it is done."""
        return next((k for k in _FIRST_LENGTHS if k <= limit and self._samples[k + 1] < _SAMPLES), None)


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
        best = max(range(limit + 1), key=lambda length: self.speed(length, rows))
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

    def acceptance(self, position: int) -> float:
        """Estimated probability that the draft at ``position`` (0-based) is accepted once it is reached."""
        pooled = (_PRIOR_WEIGHT * _PRIOR_ACCEPTANCE + sum(self._accepted)) / (_PRIOR_WEIGHT + sum(self._tested))
        return (_PRIOR_WEIGHT * pooled + self._accepted[position]) / (_PRIOR_WEIGHT + self._tested[position])

    def speed(self, length: int, rows: int) -> float:
        """Expected tokens per expected second with drafts of ``length`` (tokens a round while nothing is measured)."""
        tokens, survival = 1.0, 1.0
        for position in range(length):
            survival *= self.acceptance(position)
            tokens += survival
        step = self._costs.target(rows, max(length + 1, self._narrowest))
        drafting = 0.0 if self._free else length * self._costs.draft(rows)
        return tokens / (drafting + step) if step else tokens
