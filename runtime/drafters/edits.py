"""Decides what comes next where a text writes a passage of its own again with changes: what came next there, changed as
it was changed before (a name that is another now, the next number, a field that is added)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..settings import MAX_GUESS_LENGTH
from .free import Candidate

_FOUND, _ELSEWHERE = 5, 8  # tokens that stood before say what is copied: where nothing is, and where a copy was lost
_LONGEST = 10  # tokens of a change, old or new: where more have passed, the copy is lost
_ANYWHERE = -1  # no token: stands for any before a change
_PROVEN, _SURE = 2, 4  # how often a change was seen before it is made again, and what it counts for at most
_FAITHFUL = 12  # tokens in a row that were copied as they are: a change behind them counts twice
# A guess's class: how many tokens were copied in a row before it, those guessed included (1, 2-3, 4-7, 8-15, more);
# one that was changed; the first one behind a change that was never seen.
_LENGTHS, _CHANGED, _BEHIND = 5, 5, 6
_PRIOR = (0.78, 0.89, 0.91, 0.93, 0.98, 0.92, 0.10)  # counted on renamed functions, and those of two Python versions


@dataclass(slots=True)
class Change:
    """``old`` tokens of a passage that were written as ``new``, and for how many ``times`` that counts: one more with
    each repetition (two more behind a faithful copy), one less where they were left as they are."""

    old: list[int]
    new: list[int]
    times: int = 0

    @property
    def proven(self) -> bool:
        return self.times >= _PROVEN


class EditedCopy:
    """The free drafter that knows which passage of its text the end of it is a copy of, and what was changed on the
    way.

    Token for token the copy goes along with its source. Where they part, the two ends are compared until they meet
    again, and what lies between is a change: known by the first token it took the place of, and by that and the one
    before. Until one counts twice it says nothing, for to copy without changes needs no drafter beside ``OwnText``,
    which tells this where the text's longest end stood before.
    """

    name = "edits"
    prior = _PRIOR

    def __init__(self) -> None:
        self._text: list[int] = []
        self._source: int | None = None  # where what comes next is copied from; where the copy parted, if it did
        self._parted: int | None = None  # where the text parted from its source
        self._copied = 0  # tokens in a row
        self._changes: dict[tuple[int, int], Change] = {}  # by the token before them, or any, and their first
        self._changed: set[int] = set()  # the first tokens of changes that are known
        self._speaks = False

    def follow(self, token: int, matched: int, place: int) -> None:
        """The text goes on with ``token``; its longest end that stands elsewhere is ``matched`` tokens long, and was
        last followed by the token at ``place``."""
        text, source = self._text, self._source
        if self._parted is None and source is not None:
            if text[source] == token:
                if token in self._changed:
                    self._left_alone(source)
                self._source, self._copied = source + 1, self._copied + 1
                text.append(token)
                return
            self._parted = len(text)
        text.append(token)
        if self._parted is not None and self._meets(self._parted):
            return
        if matched >= (_FOUND if self._source is None else _ELSEWHERE):
            self._source, self._parted, self._copied = place, None, matched

    def take(self, tokens: Sequence[int]) -> None:
        """``OwnText`` tells it."""

    def candidates(self) -> Iterator[Candidate]:
        text, at, copied = self._text, self._source, self._copied
        if at is None or not self._speaks:
            return
        changed = self._changed
        if self._parted is not None:
            written = text[self._parted :]
            change = self._change(at)
            if change is not None and change.new[: len(written)] == written:
                for token in change.new[len(written) :]:
                    yield token, _CHANGED
                at += len(change.old)
            elif (at := at + len(written)) < len(text):  # as if it had been changed into as many
                yield text[at], _BEHIND
                at += 1
            copied = 0
        elif copied >= _FAITHFUL and changed.isdisjoint(text[at : at + MAX_GUESS_LENGTH]):
            return  # ``OwnText`` says the same
        while at < len(text):
            if text[at] not in changed or (change := self._change(at)) is None:
                copied += 1
                yield text[at], min(copied.bit_length(), _LENGTHS) - 1
                at += 1
            else:
                for token in change.new:
                    yield token, _CHANGED
                at += len(change.old)
                copied += len(change.new)

    def _meets(self, parted: int) -> bool:
        """Whether the text's end stands in the source, a little behind where they parted; the further, the more of
        it."""
        assert self._source is not None
        text, source = self._text, self._source
        written = len(text) - parted
        if written > _LONGEST:
            self._source = self._parted = None
            return False
        for skipped in range(_LONGEST):
            needed = 2 if skipped < 4 else 3 if skipped < 9 else 4
            at, new = source + skipped, written - needed
            meets = at + needed
            if meets > parted:
                return False
            if text[meets - 1] == text[-1] and new >= 0 and (new or skipped) and text[at:meets] == text[-needed:]:
                self._learn(source, text[source:at], text[parted : parted + new])
                self._source, self._parted, self._copied = meets, None, needed
                return True
        return False

    def _learn(self, at: int, old: list[int], new: list[int]) -> None:
        """What stood at ``at`` was changed. What was put in stands for the token before which it was, there alone."""
        before, first = self._text[at - 1 : at + 1]
        places = [before, _ANYWHERE] if old else [before]
        if not old:
            old, new = [first], [*new, first]
        for place in places:
            change = self._changes.setdefault((place, first), Change(old, new))
            if change.old != old or change.new != new:
                change.old, change.new, change.times = old, new, 0
            change.times = min(change.times + (_PROVEN if self._copied >= _FAITHFUL else 1), _SURE)
            self._speaks = self._speaks or change.proven
        self._changed.add(first)

    def _left_alone(self, at: int) -> None:
        """What stands at ``at`` was copied as it is."""
        for change in self._known(at):
            change.times = max(0, change.times - 1)

    def _change(self, at: int) -> Change | None:
        """What is to be made of what stands at ``at``, if anything."""
        text = self._text
        for change in self._known(at):
            if change.proven and text[at : at + len(change.old)] == change.old:
                return change
        return None

    def _known(self, at: int) -> list[Change]:
        """The changes of what stands at ``at``: that of just there first."""
        before, first = self._text[at - 1 : at + 1]
        found = (self._changes.get((place, first)) for place in (before, _ANYWHERE))
        return [change for change in found if change is not None]
