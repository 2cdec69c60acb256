"""What a caller gets for a prompt: a ``Stream`` of ``Piece``s as the answer is written, and its ``Result``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NoReturn, TypeVar

from ..errors import UsageError
from .decoder import Event
from .settings import Settings
from .stats import Stats
from .text import TextStream

T = TypeVar("T")
_TAKEN = ("generator already executing",)  # what Python says, in a ValueError


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring tokens of one round that have one author: the text to show, the token ids, and whether the draft
    proposed them.

    Text that may still become a stop string, and an unfinished character, come with a later piece, so ``text`` may be
    empty. Joined, the pieces' texts are ``Result.text`` and their ids ``Result.token_ids``.
    """

    text: str
    token_ids: tuple[int, ...]
    from_draft: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One answer.

    ``text`` is without the prompt, special tokens and the stop string; ``token_ids`` end with the token that ended the
    answer (EOS, a stop token, or the one that completed a stop string). ``finish_reason``: stop, length
    (max_new_tokens) or context (the model's limit). ``lossless``: the target alone would have written exactly these
    tokens (rules greedy and coupled), or the tokens were drawn from the target's law, up to how steps of different
    widths round (rejection, block). It is False for trees, whose sums are rounded in another order, and where something
    drafts for a pair that was loaded with ``exact=False``, whose steps round in whatever way is fastest. ``distance``:
    how far, on average, the law of a token was from the target's (total variation; 0 unless the rule is lossy).
    ``seed`` is the one the answer was drawn with, None if nothing was drawn; ``draft`` says who proposed. ``sample`` is
    the answer's number among the n answers to its prompt: with the same seed it is the same answer whatever n is, and
    number 0 is the answer that is given without n.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    lossless: bool
    distance: float
    rule: str
    seed: int | None
    draft: str
    stats: Stats
    sample: int = 0


class Taken(Iterator[T]):
    """What a generator gives, to one thread at a time. Raises UsageError where one asks while another waits for the
    next: what each of them got would be a part of a text."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items

    def __next__(self) -> T:
        try:
            return next(self._items)
        except ValueError as error:
            if error.args != _TAKEN:
                raise
        raise UsageError(
            "another thread (or this one, interrupted) is waiting for the next already: take a stream, or answers, in"
            " one thread"
        )

    def __reduce__(self) -> NoReturn:
        """Neither copied nor sent to another process: a copy would take pieces away from it."""
        raise UsageError("a stream, or answers that are still to come, cannot be copied or pickled")


class Stream(Iterator[Piece]):
    """Pieces of one answer as they come; afterwards ``result`` is the whole."""

    def __init__(self, items: Iterator[Piece | Result]) -> None:
        self._items = Taken(items)
        self._result: Result | None = None

    def __next__(self) -> Piece:
        for item in self._items:
            if isinstance(item, Piece):
                return item
            self._result = item
        raise StopIteration

    def __reduce__(self) -> NoReturn:
        self._items.__reduce__()

    @property
    def result(self) -> Result:
        """The finished answer. Raises UsageError while pieces are still to come, and for good where the stream ended by
        an error."""
        if self._result is None:
            raise UsageError("the stream has no result: its pieces were not taken to the end")
        return self._result


@dataclasses.dataclass(slots=True)
class Answer:
    """An answer in the making, the ``index``-th of its call: its tokens so far, and how many characters were shown."""

    index: int
    settings: Settings
    sample: int
    text: TextStream
    token_ids: list[int] = dataclasses.field(default_factory=list)
    shown: int = 0

    def pieces(self, event: Event) -> Iterator[Piece]:
        """Take the tokens of a round and yield them as pieces; changes ``token_ids`` and ``shown``."""
        self.text.keep(len(self.token_ids) + len(event.tokens))
        if event.finish_reason is not None:
            self.text.close()
        for from_draft, run in itertools.groupby(event.tokens, key=lambda token: token[1]):
            ids = tuple(token_id for token_id, _ in run)
            self.token_ids += ids
            end = max(self.shown, min(self.text.ends[len(self.token_ids) - 1], self.text.visible))
            yield Piece(self.text.text[self.shown : end], ids, from_draft)
            self.shown = end

    def take(self, event: Event) -> None:
        """Take the tokens of a round without showing them, where only the finished text is wanted."""
        self.token_ids += [token_id for token_id, _ in event.tokens]
        self.text.keep(len(self.token_ids))
        if event.finish_reason is not None:
            self.text.close()
