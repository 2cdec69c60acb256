"""Decides what a grammar lets one answer go on with, wherever its text and what is drafted behind it stand. (How a
grammar is compiled: ``grammars.py``.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..engines.base import LogitArray, LogitRow
from ..errors import LeadoutError, UsageError
from .held import agreement
from .rules import buffers
from .rules.heads import not_finite

if TYPE_CHECKING:
    from llguidance import LLMatcher

Cap = NDArray[np.float32]

_WORD = 32  # tokens in a word of llguidance's masks
_MOST = 300  # characters of what it says
_SHOWN = re.compile(r"\s*(\d+ \||<state>|<backtrace>)")  # the line from which on it shows the grammar, or itself
# What each byte of a mask allows, lowest bit first: a row is copied for each byte.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_CAPS: Cap = np.where(_BITS, np.inf, -np.inf).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar before its first token: the setting it came from, ``matcher``, which nobody moves, how many logits a
    row has, and the tokens that end a text. Where there are none, a token that no row has stands for them. ``named``:
    the grammar may ask for special tokens, among them ends, by their names."""

    name: str
    matcher: LLMatcher
    size: int
    ends: frozenset[int]
    stand_in: int | None
    named: bool = False


@dataclass(slots=True)
class _Place:
    """What is known of the position after some tokens. Once ``known``, ``cap`` [V] is inf for tokens that are allowed
    there and -inf for all others (None: the text is complete, and no token could end it); ``allowed`` is a token that
    was found allowed."""

    known: bool = False
    cap: Cap | None = None
    allowed: int = -1


class Grammar:
    """Where one answer stands in its grammar. Every question is about the text, which ``extend`` makes longer, and the
    tokens ``drafted`` after it; what was found out for one question is kept for the next.

    Allowed is what llguidance's masks say: every token with which the text can go on, or, where only one continuation
    is possible, its first token as the tokenizer would cut it. After a forbidden token, and after an end, everything
    counts as allowed: no rule looks at rows there.

    Some checkpoints end with a token that is text as well, such as a line feed: it is allowed only where the text is
    complete before it.
    """

    def __init__(self, compiled: Compiled) -> None:
        self._compiled, self._matcher = compiled, compiled.matcher.deep_copy()
        self._lost = False
        self._text: list[int] = []
        self._ahead: list[int] = []  # drafted tokens that the matcher took
        self._places = [_Place()]  # behind each of them
        self._stands = 0  # behind how many of them the matcher is
        words = -(-(max(compiled.size, (compiled.stand_in or 0) + 1)) // _WORD)
        self._mask = np.zeros(4 * words, np.uint8)
        self._address = self._mask.ctypes.data

    def fork(self) -> Grammar:
        """Where it stands if the text goes on otherwise: good for as long as the text stays as it is."""
        return Supposed(self, ())

    def matcher(self) -> LLMatcher:
        """One of its own before the first token, for who reads what is forced."""
        return self._compiled.matcher.deep_copy()

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that may follow a text that is complete."""
        return self._compiled.ends

    def extend(self, tokens: Sequence[int]) -> None:
        """Append ``tokens`` to the text. Raises UsageError for one that was allowed and is not taken: llguidance may
        cut a text in another way than it reads it, or come to a limit of its own."""
        if self._place(tokens) is None:
            if not self._lost and (token := tokens[len(self._ahead)]) not in self.ends:
                raise self._untaken(token)
            self._lost = True
            return
        count = len(tokens)
        self._text += tokens
        self._stand(max(count, self._stands))
        del self._ahead[:count], self._places[:count]
        self._stands -= count

    def allows(self, token: int, drafted: Sequence[int]) -> bool:
        """Whether ``token`` may follow ``drafted``: faster than ``within``."""
        place = self._place(drafted)
        if place is None or place.allowed == token:
            return True
        if self._compiled.named and token in self._compiled.ends:  # validate_tokens knows no end within a text
            self._looked(drafted)
        if place.known:
            return place.cap is None or bool(place.cap[token] > 0)
        self._stand(len(drafted))
        if legal := self._legal(token):
            place.allowed = token
        return legal

    def within(self, logits: LogitRow, drafted: Sequence[int]) -> LogitRow:
        """The row behind ``drafted`` with -inf for all that is forbidden, or the row itself. Raises UsageError where
        nothing possible is allowed."""
        if (place := self._looked(drafted)) is None or place.cap is None:
            return logits
        whole = np.asarray(logits)
        row: LogitArray = np.minimum(whole, place.cap, out=buffers.like(whole))
        if not row[row.argmax()] > -np.inf:
            raise self._nothing(logits)
        return row

    def ending(self, new: Sequence[int]) -> int | None:
        """How many of ``new`` complete the text, where no token says so; None while there is more to come."""
        if self._compiled.ends:
            return None
        for count in range(1, len(new) + 1):
            place = self._looked(new[:count])
            if place is None or place.cap is None:
                return count
        return None

    def check(self) -> None:
        """Raise UsageError unless an answer can begin, and what is drafted of it can be taken back."""
        name, place = self._compiled.name, self._looked(())
        if place is None or place.cap is None:
            raise UsageError(f"{name} allows the empty answer alone, which a target without an end token cannot give")
        first = int(place.cap.argmax())
        if not self._matcher.try_consume_tokens([first]):
            if first not in self.ends:
                raise self._untaken(first)
        elif not self._matcher.rollback(1):
            raise UsageError(f"{name} cannot be used where drafts are taken back: {reason(self._matcher.get_error())}")

    def _place(self, drafted: Sequence[int]) -> _Place | None:
        """What is known behind ``drafted``; None behind what is forbidden."""
        ahead, count = self._ahead, len(drafted)
        if self._lost:
            return None
        same = count if ahead[:count] == list(drafted) else agreement(ahead, drafted)
        if same < count:
            self._stand(same)
            del ahead[same:], self._places[same + 1 :]
            new = list(drafted[same:])
            taken = self._matcher.try_consume_tokens(new)
            if taken < len(new) and self._matcher.is_error():
                taken = self._take_singly(new)
            ahead += new[:taken]
            self._places += [_Place() for _ in range(taken)]
            self._stands = same = same + taken
        return self._places[count] if same == count else None

    def _stand(self, count: int) -> None:
        """Bring the matcher behind the first ``count`` of what it took."""
        back, self._stands = self._stands - count, count
        if back > 0 and not self._matcher.rollback(back):
            raise self._failure()
        if back < 0:
            self._matcher.try_consume_tokens(self._ahead[count + back : count])

    def _legal(self, token: int) -> bool:
        matcher = self._matcher
        if matcher.is_stopped():
            if matcher.is_error():
                raise self._failure()
            return not self._compiled.ends or token in self._compiled.ends
        if forced := matcher.compute_ff_tokens():
            legal = token == forced[0]
        else:
            legal = token != self._compiled.stand_in and matcher.validate_tokens([token]) == 1
        return legal and (token not in self._compiled.ends or self._may_end())

    def _may_end(self) -> bool:
        """Whether an answer may end where the matcher stands."""
        return self._compiled.named or bool(self._matcher.is_accepting())

    def _looked(self, drafted: Sequence[int]) -> _Place | None:
        """``_place``, once all about it is known."""
        place = self._place(drafted)
        if place is None or place.known:
            return place
        self._stand(len(drafted))
        matcher, mask, compiled = self._matcher, self._mask, self._compiled
        matcher.unsafe_compute_mask_ptr(self._address, mask.size)
        if matcher.is_error():
            raise self._failure()
        if (end := compiled.stand_in) is not None:
            mask[end // 8] &= ~np.uint8(1 << end % 8)
        if not self._may_end():
            for end in compiled.ends:
                mask[end // 8] &= ~np.uint8(1 << end % 8)
        if compiled.ends or mask.any() or not matcher.is_accepting():
            caps = buffers.empty(8 * mask.size, np.float32).reshape(mask.size, 8)
            place.cap = _CAPS.take(mask, axis=0, out=caps, mode="clip").reshape(-1)[: compiled.size]
        place.known = True
        return place

    def _nothing(self, logits: LogitRow) -> LeadoutError:
        if not np.isfinite(np.asarray(logits).max()):
            return not_finite()
        return UsageError(f"{self._compiled.name}: no token that it allows here is possible")

    def _take_singly(self, new: Sequence[int]) -> int:
        """How many of ``new`` can be taken by a matcher that failed over one of them: the text may go elsewhere."""
        self._renew()
        self._stand(len(self._ahead))
        for count, token in enumerate(new):
            before = self._matcher.deep_copy()
            if not self._matcher.try_consume_tokens([token]):
                self._matcher = before
                return count
        return len(new)

    def _renew(self) -> None:
        """A new matcher in place of one that has failed, at the end of the text."""
        self._matcher = self._compiled.matcher.deep_copy()
        self._matcher.try_consume_tokens(self._text)
        self._stands = 0

    def _untaken(self, token: int) -> UsageError:
        """The error for a token that was allowed behind ``_ahead`` and is not taken."""
        self._stand(len(self._ahead))
        if not self._matcher.try_consume_tokens([token]) and self._matcher.is_error():
            return self._failure()
        name = self._compiled.name
        return UsageError(f"{name}: llguidance allows a token of this tokenizer here that it does not take")

    def _failure(self) -> UsageError:
        """The error for a matcher that has failed."""
        failed = self._matcher
        self._renew()
        if (why := reason(failed.get_error())) == "NoExtensionBias":  # nor may the text end here
            why = "no token of this tokenizer goes on with the answer"
        return UsageError(f"{self._compiled.name}: {why}")


class Supposed(Grammar):
    """Where ``grammar`` would stand behind ``tokens``. It asks that, whose matcher goes there and comes back: to copy a
    matcher takes the longer the longer the text is."""

    def __init__(self, grammar: Grammar, tokens: Sequence[int]) -> None:
        self._compiled, self._of, self._tokens = grammar._compiled, grammar, list(tokens)

    def fork(self) -> Grammar:
        return Supposed(self._of, self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def allows(self, token: int, drafted: Sequence[int]) -> bool:
        return self._of.allows(token, [*self._tokens, *drafted])

    def within(self, logits: LogitRow, drafted: Sequence[int]) -> LogitRow:
        return self._of.within(logits, [*self._tokens, *drafted])


def reason(message: str) -> str:
    """The reason in a message of llguidance, on one line: without the grammar and the state that it quotes."""
    said: list[str] = []
    for line in message.splitlines():
        if _SHOWN.match(line):
            break
        said += [line.strip()] if line.strip(" ^") else []
    text = " ".join(said)
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."
