"""Counters of one request, what is derived from them, and the clock of a round."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

PHASES = ("prefill", "draft", "target", "verify", "host")
_SHARED = ("rounds", "drafted", "tested", "accepted")


@dataclass(slots=True)
class Stats:
    """One request's counters.

    A drafted token is *tested* when the rule looked at it: tokens after the first rejection are not. ``tokens`` are
    the committed new ones. ``seconds`` are this request's share (a round's time divided by the rows it served), so
    that the sum over a batch is its wall time. Time the caller spends between events is not counted.
    ``held`` counts the tokens of the prompt that the target's cache held from the text before and did not read again.
    ``by_drafter`` has the first four counters for each name that proposed (model, suffix, ...); rounds without a
    draft are those of ``none``. ``shift`` is the sum, over the committed tokens, of the total variation between the law
    a token was drawn from and the target's: 0 under exact rules.
    """

    rounds: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    tokens: int = 0
    shift: float = 0.0
    held: int = 0
    by_drafter: dict[str, dict[str, int]] = field(default_factory=dict)
    tested_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def record(
        self,
        *,
        drafted: int,
        tested: int,
        accepted: int,
        tokens: int,
        by: str = "model",
        shift: float = 0.0,
        depth: int | None = None,
    ) -> None:
        """Count one round of the drafter ``by``. ``tokens`` is what was committed after every cut; ``depth``, where the
        draft was a tree, how many of the ``drafted`` could be accepted: then ``tested`` counts depths, too."""
        self.tokens += tokens
        self.shift += shift
        if (share := self.by_drafter.get(by)) is None:
            share = self.by_drafter[by] = dict.fromkeys(_SHARED, 0)
        share["rounds"] += 1
        share["drafted"] += drafted
        share["tested"] += tested
        share["accepted"] += accepted
        self.rounds += 1
        self.drafted += drafted
        self.tested += tested
        self.accepted += accepted
        if not drafted:
            return
        for counts, reached in ((self.tested_per_position, tested), (self.accepted_per_position, accepted)):
            counts.extend([0] * ((drafted if depth is None else depth) - len(counts)))
            for position in range(reached):
                counts[position] += 1

    @property
    def acceptance_rate(self) -> float:
        """Accepted / tested; 0 where nothing was tested."""
        return self.accepted / self.tested if self.tested else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Committed tokens a round, the target's own included."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def distance(self) -> float:
        """Mean total variation a token from the target's law, given the text before it: 0 under exact rules. Times
        the number of tokens it bounds the distance between the laws of whole texts."""
        return self.shift / self.tokens if self.tokens else 0.0

    @property
    def total_seconds(self) -> float:
        """Seconds of the whole request, prefill included."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second of ``total_seconds``."""
        return self.tokens / self.total_seconds if self.total_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens per second after prefill."""
        spent = self.total_seconds - self.seconds["prefill"]
        return self.tokens / spent if spent > 0 else 0.0

    @property
    def host_share(self) -> float:
        """The part of the rounds' time that no model was running: verification and bookkeeping."""
        spent = self.total_seconds - self.seconds["prefill"]
        return (self.seconds["verify"] + self.seconds["host"]) / spent if spent > 0 else 0.0

    def to_dict(self) -> dict[str, object]:
        """Counters and derived figures, JSON-ready."""
        derived = (
            "acceptance_rate",
            "tokens_per_round",
            "distance",
            "tokens_per_second",
            "decode_tokens_per_second",
            "host_share",
        )
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}


class Stopwatch:
    """Seconds by phase of the round in progress, to be shared by the rows it serves."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._last = perf_counter()

    def lap(self, phase: str) -> None:
        """Charge the time since the last lap to ``phase``."""
        now = perf_counter()
        self._spent[phase] += max(0.0, now - self._last)  # a clock may be put back, where a machine is moved
        self._last = now

    def spent(self, *phases: str) -> float:
        """Seconds of the round in these phases so far."""
        return sum(self._spent[phase] for phase in phases)

    def charge(self, shares: Sequence[Stats]) -> float:
        """Give what was spent, in equal parts; the rest of the round is the host's. Returns the seconds of the round
        besides models and verdict."""
        self.lap("host")
        spent = self._spent
        outside, rows = spent["host"], len(shares)
        for phase, seconds in spent.items():
            if seconds:
                for stats in shares:
                    stats.seconds[phase] += seconds / rows
                spent[phase] = 0.0
        return outside

    def resume(self) -> None:
        """Forget the time the caller spent between rounds."""
        self._last = perf_counter()
