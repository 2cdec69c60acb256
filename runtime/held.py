"""Decides how much of a new text a model's cache holds already: as far as it begins like the text before.

A conversation sends its whole history with every turn; only what is new has to be read.
"""

from __future__ import annotations

from collections.abc import Sequence

_LEAST = 16  # tokens: fewer are not worth it


class Held:
    """The tokens in the slots of an engine's only row, as far as they are known: never more than the cache really
    holds, also after a step that failed.

    A slot is *sound* if it and all before it were made by steps that round alike. A text whose numbers must be the bits
    that a fresh cache gives can continue only from sound slots.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._sound = 0

    def cut(self, past: int) -> None:
        """The slots from ``past`` on are about to be overwritten."""
        del self._tokens[past:]
        self._sound = min(self._sound, past)

    def add(self, tokens: Sequence[int], past: int, *, even: bool) -> None:
        """A step has written ``tokens`` behind the first ``past`` slots; ``even``: it rounded as all wide ones do."""
        if len(self._tokens) < past:
            return  # nobody knows what stands before them
        self._tokens += tokens
        if even and self._sound == past:
            self._sound += len(tokens)

    def common(self, text: Sequence[int], *, even: bool) -> int:
        """How many tokens of ``text``, from the first on, the slots hold; only sound slots count if it must be
        ``even``. 0 where they are too few to matter."""
        same = agreement(self._tokens[: self._sound] if even else self._tokens, text)
        return same if same >= _LEAST else 0


def agreement(one: Sequence[object], other: Sequence[object]) -> int:
    """The length of the longest common beginning of two sequences."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next((i for i in range(most) if one[i] != other[i]), most)
