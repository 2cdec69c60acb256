"""Decides what to guess where a grammar leaves one way to go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..grammar import Grammar
from .free import Candidate


class ForcedDrafter:
    """The free drafter of one answer whose next tokens its grammar forces: names of keys, punctuation, an end. The
    target is allowed no others there, so that a guess is wrong only where the text is cut."""

    name, prior = "forced", (0.995,)

    def __init__(self, grammar: Grammar) -> None:
        self._matcher, self._end = grammar.matcher(), next(iter(grammar.ends)) if len(grammar.ends) == 1 else None
        self._taken = -1

    def take(self, tokens: Sequence[int]) -> None:
        if self._taken < 0:  # the prompt is not part of the answer
            self._taken = len(tokens)
        if (back := self._taken - len(tokens)) > 0:  # a shorter text is looked at again
            self._matcher.rollback(back)
        elif back < 0:
            self._matcher.try_consume_tokens(list(tokens[self._taken :]))
        self._taken = len(tokens)

    def candidates(self) -> Iterator[Candidate]:
        """What must come next and, where that completes the text, the end of it."""
        matcher = self._matcher
        forced = matcher.compute_ff_tokens()
        taken = matcher.try_consume_tokens(forced) if forced else 0
        complete = matcher.is_stopped()
        if taken:
            matcher.rollback(taken)
        for token in forced:
            yield token, 0
        if complete and self._end is not None:
            yield self._end, 0
