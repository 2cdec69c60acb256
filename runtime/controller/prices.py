"""Decides what a round is thought to cost here and now: what ``Costs`` knows of its rows and context, looked up for
several rounds at once, for that takes its time and costs change slowly."""

from __future__ import annotations

from ..settings import MAX_GUESS_LENGTH
from .costs import UNKNOWN, Costs

_A_PROMPT = 16  # tokens: of fewer, what one takes is mostly what a step does
_OUTLIER = 3.0  # a prompt that takes longer than usual by more met something else


class Prices:
    """Expected seconds of rounds, by how many rows share the step; as ``UNKNOWN`` says while nothing is measured.
    ``past`` is the mean context of those rows, ``narrowest`` the least width the target steps with (requests may differ
    in it), ``reading`` what the draft model takes for a token of a prompt, 0 while it read none, and ``rereads``
    whether it reads again what is accepted of its drafts."""

    def __init__(self, costs: Costs, narrowest: int = 1) -> None:
        self.costs, self.narrowest, self.past = costs, narrowest, 0
        self.reading, self.rereads = 0.0, False
        self._steps: dict[int, list[float]] = {}
        self._without: dict[int, list[float]] = {}
        self._with: dict[int, list[float]] = {}
        self._missed: dict[int, float] = {}

    def begin(self, narrowest: int) -> None:
        """New requests begin, whose target takes no step narrower than that."""
        if narrowest != self.narrowest:
            self.narrowest = narrowest
            self.renew()

    def renew(self) -> None:
        """All is looked up anew when it is asked for next."""
        for table in (self._steps, self._without, self._with, self._missed):
            table.clear()

    def steps(self, rows: int) -> list[float]:
        """Of the target's step that verifies 0..63 drafts."""
        if (known := self._steps.get(rows)) is None:
            steps = self.costs.target(rows, self.past) or UNKNOWN
            widths = (max(length + 1, self.narrowest) for length in range(MAX_GUESS_LENGTH + 1))
            known = self._steps[rows] = [steps[width] for width in widths]
        return known

    def without_model(self, rows: int) -> list[float]:
        """Of a round with 0..63 drafts that cost nothing. Without any it is a step as such steps are where no draft
        model runs, if that is known."""
        if (known := self._without.get(rows)) is None:
            host, steps = self.costs.host(rows), self.steps(rows)
            plain = self.costs.plain(rows, self.narrowest, self.past) or steps[0]
            known = self._without[rows] = [host + seconds for seconds in (min(plain, steps[0]), *steps[1:])]
        return known

    def with_model(self, rows: int) -> list[float]:
        """The same with 0..63 drafts of the draft model; without any, of a round in which nobody is asked."""
        if (known := self._with.get(rows)) is None:
            drafts, free = self.costs.drafts(rows, self.past), self.without_model(rows)
            known = [draft + step for draft, step in zip(drafts, free, strict=True)]
            known[0] -= max(0.0, self.costs.host(rows) - self.costs.quiet(rows))
            self._with[rows] = known
        return known

    def again(self, rows: int, written: float) -> float:
        """Of what the draft model takes longer for its next draft where a round with it wrote so many tokens: nothing,
        unless it reads again what was accepted."""
        return self.catch_up(rows, written - 1.0) if self.rereads else 0.0

    def missed(self, rows: int, written: float) -> float:
        """The same where a round without it wrote so many: at the least it has not read the last of them."""
        return self.catch_up(rows, written if self.rereads else written - 1.0)

    def catch_up(self, rows: int, late: float) -> float:
        """Of what the draft model takes longer for ``late`` tokens that it usually has not to read: as long as for
        those of a prompt while that was never measured."""
        if (each := self._missed.get(rows)) is None:
            each = self._missed[rows] = self.costs.catch_up(rows, 1, self.reading)
        return late * each

    def read(self, tokens: int, seconds: float) -> float:
        """The draft model read so many ``tokens`` of prompts, which took so long. (What a few take says little of what
        one of many does.) What that usually takes: one that stalled is neither the price nor a reason to rest."""
        took, known = self.costs.usual(seconds), self.reading
        if known and tokens >= _A_PROMPT:
            took = min(took, _OUTLIER * known * tokens)
        if tokens >= _A_PROMPT or (tokens and not known):
            self.reading = took / tokens
            self._missed.clear()
        return took
