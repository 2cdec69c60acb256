"""Decides where a text ends: tokens, and every cut."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal

from .controller.cascade import Cascade
from .controller.policy import Policy
from .rules.sampling import Sampler
from .settings import Settings
from .stats import Stats

FinishReason = Literal["stop", "length", "context"]
StopMatcher = Callable[[list[int]], int | None]


@dataclass(slots=True)
class Sequence:
    """One request's tokens, prompt first. The last of them is never in a cache.

    ``limit`` is the most new tokens asked for, ``max_context`` the most tokens altogether. ``ends`` are the tokens
    that end the text; they are kept. ``stop`` is told the new tokens of each round and says how many of them to keep,
    or None to go on.
    """

    tokens: list[int]
    prompt_length: int
    limit: int
    max_context: int
    ends: frozenset[int]
    stop: StopMatcher | None = None

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def cached(self) -> int:
        """How many tokens the target's cache holds between rounds."""
        return len(self.tokens) - 1

    @property
    def room(self) -> int:
        """How many new tokens may still come."""
        return min(self.limit + self.prompt_length, self.max_context) - len(self.tokens)

    def extend(self, new: Items[int]) -> tuple[int, FinishReason | None]:
        """Append what may be kept of ``new``; return how many that was, and why the text ends if it does.

        Order of cuts: room, end tokens, stop matcher. An end token or a stop at the very last place is "stop".
        """
        kept = list(new[: self.room])
        reason: FinishReason | None = None
        if not self.ends.isdisjoint(kept):
            end = next(i for i, token in enumerate(kept) if token in self.ends)
            kept, reason = kept[: end + 1], "stop"
        if self.stop is not None and (keep := self.stop(kept)) is not None:
            kept, reason = kept[:keep], "stop"
        self.tokens += kept
        if reason is None and self.room == 0:
            reason = "length" if len(self.tokens) - self.prompt_length == self.limit else "context"
        return len(kept), reason


@dataclass(slots=True)
class Row:
    """A live request: its sequence and what goes with it. ``index`` is its place among the requests; its place in
    the engines' caches is its place in the list of live rows. ``policy`` says how much the draft model drafts;
    ``cascade``, where free drafters may propose, who does."""

    index: int
    settings: Settings
    sequence: Sequence
    sampler: Sampler
    policy: Policy
    cascade: Cascade | None = None
    stats: Stats = field(default_factory=Stats)
    finish_reason: FinishReason | None = None
