"""Decides what a round is thought to cost here and now: what ``Costs`` knows of its rows and context, looked up for
several rounds at once, for that takes its time and costs change slowly."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...engines.base import ANY, Widths
from ..settings import MAX_GUESS_LENGTH
from .costs import UNKNOWN, Costs

_A_PROMPT = 16  # tokens: of fewer, what one takes is mostly what a step does
_OUTLIER = 3.0  # a prompt that takes longer than usual by more met something else


def at(seconds: Sequence[float], drafted: float) -> float:
    """The ``seconds`` of a step or a round by drafted tokens a row, of which there may be a fraction on average. Less
    than one counts as one: what many rows take without any draft may be another graph's."""
    drafted = max(1.0, drafted) if drafted else 0.0
    whole = int(drafted)
    part = drafted - whole
    return seconds[whole] + (part * (seconds[whole + 1] - seconds[whole]) if part else 0.0)


class Prices:
    """Expected seconds of rounds, by how many rows share the step; relative ones (``UNKNOWN``) while none is measured.
    ``past``: the mean context of the rows. ``widths``: those of the target's steps, which depend on the
    requests. ``ragged``: steps of several rows cost by the tokens of all, and not by those of the longest draft.
    ``reading``: the draft model's seconds for a token of a prompt, 0 while it has read none. ``rereads``:
    whether it reads the accepted tokens of its drafts again."""

    def __init__(self, costs: Costs, widths: Widths = ANY) -> None:
        self.costs, self.widths, self.past, self.ragged = costs, widths, 0, False
        self.reading, self.rereads = 0.0, False
        self._steps: dict[int, list[float]] = {}
        self._without: dict[int, list[float]] = {}
        self._with: dict[int, list[float]] = {}
        self._missed: dict[int, float] = {}

    def begin(self, widths: Widths, *, ragged: bool = False) -> None:
        """New requests begin, whose target takes steps of these widths alone, ``ragged`` or not."""
        if (widths, ragged) != (self.widths, self.ragged):
            self.widths, self.ragged = widths, ragged
            self.renew()

    def drafted(self, drafts: Sequence[int]) -> float:
        """By how many drafted tokens a row a step is priced that verifies ``drafts``: those of the longest, where rows
        are ragged those that there are on average."""
        return sum(drafts) / len(drafts) if self.ragged else max(drafts)

    def step_width(self, drafts: Sequence[int]) -> int:
        """Among the steps of which width the one that verifies ``drafts`` is counted."""
        return self.widths.holding(math.ceil(self.drafted(drafts)) + 1)

    def renew(self) -> None:
        """All is looked up anew when it is asked for next."""
        for table in (self._steps, self._without, self._with, self._missed):
            table.clear()

    def steps(self, rows: int) -> list[float]:
        """Seconds of the target's step that verifies 0..63 drafted tokens."""
        if (known := self._steps.get(rows)) is None:
            steps = self.costs.target(rows, self.past) or UNKNOWN
            widths = (self.widths.holding(length + 1) for length in range(MAX_GUESS_LENGTH + 1))
            known = self._steps[rows] = [steps[width] for width in widths]
        return known

    def without_model(self, rows: int) -> list[float]:
        """Seconds of a round that verifies 0..63 drafted tokens which cost nothing. With 0 the step is a plain one, as
        it is while no draft model runs, if that was measured."""
        if (known := self._without.get(rows)) is None:
            host, steps = self.costs.host(rows), self.steps(rows)
            plain = self.costs.plain(rows, self.widths.holding(1), self.past) or steps[0]
            known = self._without[rows] = [host + seconds for seconds in (min(plain, steps[0]), *steps[1:])]
        return known

    def with_model(self, rows: int) -> list[float]:
        """Seconds of a round with 0..63 tokens of the draft model; with 0, of a round in which nobody is asked."""
        if (known := self._with.get(rows)) is None:
            drafts, free = self.costs.drafts(rows, self.past), self.without_model(rows)
            known = [draft + step for draft, step in zip(drafts, free, strict=True)]
            known[0] -= max(0.0, self.costs.host(rows) - self.costs.quiet(rows))
            self._with[rows] = known
        return known

    def together(self, drafts: Sequence[int], by_model: int | None) -> float:
        """Seconds of a round that verifies ``drafts``, the longest of the draft model's ``by_model`` tokens (None: it
        is not asked)."""
        rows, without = len(drafts), self.without_model(len(drafts))
        extra = 0.0 if by_model is None else self.with_model(rows)[by_model] - without[by_model]
        return extra + at(without, self.drafted(drafts))

    def again(self, rows: int, written: float) -> float:
        """Seconds by which the draft model's next draft is longer after a round of its own that wrote ``written``
        tokens: 0, unless it reads accepted tokens again."""
        return self.catch_up(rows, written - 1.0) if self.rereads else 0.0

    def missed(self, rows: int, written: float) -> float:
        """The same after a round in which others drafted; it reads the last token in any case."""
        return self.catch_up(rows, written if self.rereads else written - 1.0)

    def catch_up(self, rows: int, late: float) -> float:
        """Seconds by which a draft is longer that has to read ``late`` tokens more than is usual. While that was never
        measured, each takes as long as a token of a prompt."""
        if (each := self._missed.get(rows)) is None:
            each = self._missed[rows] = self.costs.catch_up(rows, 1, self.reading)
        return late * each

    def read(self, tokens: int, seconds: float) -> float:
        """The draft model read ``tokens`` tokens of prompts in ``seconds``. Few tokens say little of what each one of
        many takes, so they do not change the price. Returns the seconds that this usually takes: a prompt that stalled
        is neither a price nor a reason to rest."""
        took, known = self.costs.usual(seconds), self.reading
        if known and tokens >= _A_PROMPT:
            took = min(took, _OUTLIER * known * tokens)
        if tokens >= _A_PROMPT or (tokens and not known):
            self.reading = took / tokens
            self._missed.clear()
        return took
