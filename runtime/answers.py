"""What comes of a prompt: a ``Stream`` of ``Piece``s as it is written, and the ``Result`` it ends in."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from ..errors import UsageError
from .decoder import Event
from .settings import Settings
from .stats import Stats
from .text import TextStream


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """What a round brought, in runs of one author: text to show, its token ids, whether the draft proposed them.

    Text that may still become a stop string, or an unfinished character, comes with a later piece: ``text`` may be
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
    (max_new_tokens) or context (the model's limit). ``lossless``: the target alone would have written the same tokens
    to the last (greedy, coupled) or drawn from the same law, as its steps of one token or more round (rejection,
    block): not so in a tree, whose numbers are rounded in another order, nor where something drafts for a pair that was
    loaded with ``exact=False``, whose steps round as is fastest. ``distance``: how far, on average, the law of
    a token was from the target's (total variation; 0 unless the rule is lossy). ``seed`` is what was drawn with, None
    if nothing was; ``draft`` says who proposed. ``sample`` is its number among the n answers to a prompt: with the same
    seed it is the same answer whatever n is, and number 0 is the one without n.
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


class Stream(Iterator[Piece]):
    """Pieces of one answer as they come; afterwards ``result`` is the whole."""

    def __init__(self, items: Iterator[Piece | Result]) -> None:
        self._items = items
        self._result: Result | None = None

    def __next__(self) -> Piece:
        for item in self._items:
            if isinstance(item, Piece):
                return item
            self._result = item
        raise StopIteration

    @property
    def result(self) -> Result:
        """The finished answer. Raises UsageError while pieces are still to come."""
        if self._result is None:
            raise UsageError("the stream has no result: its pieces were not taken to the end before another call")
        return self._result


@dataclasses.dataclass(slots=True)
class Answer:
    """One answer in the making, the ``index``-th of its call: ids and text that are already given out."""

    index: int
    settings: Settings
    sample: int
    text: TextStream
    token_ids: list[int] = dataclasses.field(default_factory=list)
    shown: int = 0

    def pieces(self, event: Event) -> Iterator[Piece]:
        """Take the round's tokens and give them out; changes ``token_ids`` and ``shown``."""
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
        """Take the round's tokens: nobody asks for the text before it is whole."""
        self.token_ids += [token_id for token_id, _ in event.tokens]
        self.text.keep(len(self.token_ids))
        if event.finish_reason is not None:
            self.text.close()
