"""Converts between text and token ids: a prompt's ids, the text that may be shown already, where a stop string ends.

Torch-free: the ``tokenizers`` library alone. Special tokens are read in a prompt and never shown in an answer.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from ..errors import BundleError
from .held import agreement

# Decoders such as SentencePiece's drop a leading space unless some ids of context precede it; more are taken where
# these begin within a character.
CONTEXT_IDS = 8
_UNFINISHED, _LONGEST_CHARACTER = "\ufffd", 4  # bytes
_MANY_IDS = 16  # ids that wait to be said: more than one character can have


class Codec:
    """A bundle's ``tokenizer.json``."""

    def __init__(self, path: Path) -> None:
        """Raises BundleError if the file is missing or not a tokenizer."""
        try:
            self.tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
            self.tokenizer.no_truncation()  # some were saved as they were used in training: no prompt is to be cut
            self.tokenizer.no_padding()
        except FileNotFoundError:
            raise BundleError(f"{path} is missing; copy the whole bundle or export it again") from None
        except Exception as error:  # tokenizers raises bare Exception
            raise BundleError(f"{path}: not a tokenizer: {error}") from None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Codec:
        """That of a tokenizer which was read already."""
        made = cls.__new__(cls)
        made.tokenizer = tokenizer
        return made

    def encode(self, text: str, *, framed: bool = False) -> list[int]:
        """The ids of a prompt, with whatever the tokenizer puts around one (a BOS token, for instance), unless the text
        has that already: it is ``framed``."""
        return list(self.tokenizer.encode(text, add_special_tokens=not framed).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids`` without special tokens; an incomplete character at the end becomes U+FFFD."""
        return str(self._speller.decode(list(token_ids), skip_special_tokens=True))

    def is_silent(self, token_id: int) -> bool:
        """Whether ``decode`` leaves ``token_id`` out, wherever it stands: a special token, or an id of no token."""
        return self._speller.id_to_token(token_id) in self._left_out

    def special_ids(self, names: Sequence[str]) -> list[int]:
        """The ids of those of ``names`` that are special tokens, which no text of an answer holds."""
        found = (self.tokenizer.token_to_id(name) for name in names if name in self._left_out)
        return [token_id for token_id in found if token_id is not None]

    @functools.cached_property
    def _left_out(self) -> set[str | None]:
        added = self.tokenizer.get_added_tokens_decoder().values()
        return {None, *(token.content for token in added if token.special)}

    @functools.cached_property
    def _speller(self) -> Tokenizer:
        """What ids are read back with: the tokenizer, or one whose added tokens are spelled as they stand.

        tokenizers 0.23 spells those with ``normalized`` as the normalizer does ("\u2581</s>" in Llama 2's first files),
        and does not see then that they are special.
        """
        added = self.tokenizer.get_added_tokens_decoder()
        if all(self.tokenizer.id_to_token(i) == token.content for i, token in added.items()):
            return self.tokenizer
        settings = json.loads(self.tokenizer.to_str())
        settings["added_tokens"] = [{**token, "normalized": False} for token in settings["added_tokens"]]
        return Tokenizer.from_str(json.dumps(settings))

    def vocab_size(self) -> int:
        """One more than the largest id this tokenizer can give."""
        return 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


class Spelling:
    """Token ids become text one by one, each when its last character is complete.

    Not ``tokenizers``' DecodeStream, which fails where a token changes what was said of those before it: a decoder with
    byte fallback (Llama 2's, Mistral's, Gemma's) calls a whole run of bytes broken for one that is. What was said
    stands here, and what cannot be read together with it is read alone.
    """

    def __init__(self, codec: Codec, context: Sequence[int]) -> None:
        """``context`` are the last ids before, of which nothing is said but a character that they leave unfinished."""
        self._codec = codec
        settled = len(context)
        while settled and codec.decode(context[:settled]).endswith(_UNFINISHED):
            settled -= 1
        self._ids = list(context)  # those that were said last, and behind them those that were not
        self._said, self._text = settled, codec.decode(context[:settled])
        self._before = self._alone()  # what the context leaves unfinished, as it looks where nothing finishes it

    def next(self, token_id: int) -> str:
        """What ``token_id`` completes; nothing while it leaves a character unfinished."""
        if self._codec.is_silent(token_id):
            return ""
        self._ids.append(token_id)
        text = self._codec.decode(self._ids)
        if text == self._text or text.endswith(_UNFINISHED):  # there is more to come
            return "" if (len(self._ids) - self._said) % _MANY_IDS else self._settle()
        new = self._say(self._beyond(self._ids))
        del self._ids[: self._said]
        self._said, self._text, self._before = len(self._ids), self._codec.decode(self._ids), ""
        return new

    @property
    def waits(self) -> bool:
        """Whether there are tokens of which not all is said yet."""
        return len(self._ids) > self._said

    def rest(self) -> str:
        """What no token completed, an unfinished character as U+FFFD."""
        return self._say(self._beyond(self._ids))

    def _settle(self) -> str:
        """What no token to come can change of many ids that wait; the last few of them wait on, so that no step reads
        all of them again.

        Those few must read as they do behind the others, wherever within a character's length they end: then so does
        what follows them. (They do not where they would be whole characters but for a broken byte before them, which
        breaks a whole run; one id more or less begins within a character.)
        """
        ends = range(len(self._ids), len(self._ids) - _LONGEST_CHARACTER, -1)
        whole = [self._beyond(self._ids[:end]) for end in ends]
        for count in range(CONTEXT_IDS, CONTEXT_IDS + _LONGEST_CHARACTER):
            at = len(self._ids) - count
            parts = [self._codec.decode(self._ids[at:end]) for end in ends]
            same = agreement(whole[-1][::-1], parts[-1][::-1])
            said, read = len(whole[-1]) - same, len(parts[-1]) - same
            new = whole[0][:said]
            if same and all(
                text.startswith(new) and text[said:] == part[read:] for text, part in zip(whole, parts, strict=True)
            ):
                del self._ids[:at]
                self._said, self._text = 0, parts[0][:read]
                return self._say(new)
        return ""

    def _beyond(self, ids: Sequence[int]) -> str:
        """What the text of ``ids``, the last ones perhaps left out, adds to what was said."""
        text = self._codec.decode(ids)
        return text[len(self._text) :] if text.startswith(self._text) else self._codec.decode(ids[self._said :])

    def _say(self, new: str) -> str:
        """``new`` without what the context left of it; what is said next may begin with the rest of that."""
        known = agreement(new, self._before)
        self._before = self._before[known:] if known == len(new) else ""
        return new[known:]

    def _alone(self) -> str:
        return self._codec.decode(self._ids[self._said :])


def context_of(codec: Codec, prompt: Sequence[int]) -> list[int]:
    """The end of a prompt, without ids that say nothing: enough of it to read on. (A run of bytes is broken as a whole
    where it ends within a character, too.)"""
    spoken = (token_id for token_id in reversed(prompt) if not codec.is_silent(token_id))
    last = [*itertools.islice(spoken, CONTEXT_IDS + _LONGEST_CHARACTER - 1)][::-1]
    ends = range(len(last), len(last) - _LONGEST_CHARACTER, -1)
    for count in range(CONTEXT_IDS, CONTEXT_IDS + _LONGEST_CHARACTER):
        if any(not codec.decode(last[-count:end]).startswith(_UNFINISHED) for end in ends):
            break
    return last[-count:]


def behind_text(codec: Codec, prompt: Sequence[int]) -> Sequence[int]:
    """``prompt`` or, where none of it is text, a letter in its place: an answer behind it is read as what stands within
    a text. At the beginning of one a decoder such as SentencePiece's takes the first space for its own, and of an
    answer that is bound to begin with one that space is a part."""
    return prompt if codec.decode(context_of(codec, prompt)) else codec.encode("a", framed=True)


class TextStream:
    """One answer as it grows: its text, the offset where each token's text ends, and how much may be shown.

    Fed token by token, so where a stop string ends does not depend on how many tokens a round brought.
    ``ends[i]`` is the length of the text once token i is in; bytes of an unfinished character count with the token
    that completes it. Text that may still become a stop string is held back (``visible``).
    """

    def __init__(self, codec: Codec, prompt: Sequence[int], stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        """``stop``: non-empty strings; one completed within the first ``min_tokens`` tokens does not count."""
        self._codec = codec
        self._context = context_of(codec, prompt)
        self._spelling = Spelling(codec, self._context)
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._stop_at: int | None = None
        self._text = ""
        self._ends: list[int] = []

    @property
    def text(self) -> str:
        """All of it, but for an unfinished character."""
        self._catch_up()
        return self._text

    @property
    def ends(self) -> list[int]:
        self._catch_up()
        return self._ends

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Take new tokens; how many of them to keep if a stop string was completed (the last kept one completed it).

        Tokens after a stop are not taken. Without stop strings they become text when somebody asks for it.
        """
        if not self._stop:
            self._ids += token_ids
            return None
        for count, token_id in enumerate(token_ids, start=1):
            before = len(self._text)
            self._ids.append(token_id)
            self._read(token_id)
            if len(self._ids) > self._min_tokens and self._find_stop(before):
                return count
        return None

    def keep(self, count: int) -> None:
        """Forget all but the first ``count`` tokens: the decoder may have cut the round for a reason of its own."""
        if count < len(self._ids):
            del self._ids[count:]
            if count < len(self._ends):
                del self._ends[count:]
                self._text = self._text[: self._ends[-1] if self._ends else 0]
                self._spelling = Spelling(self._codec, self._context)
                for token_id in self._ids[: len(self._ends)]:
                    self._spelling.next(token_id)
            self._stop_at = None  # its last character came with the last token

    def close(self) -> None:
        """No more tokens: what was held back may be shown, an unfinished character as U+FFFD, which may stand in a stop
        string."""
        if self._stop_at is None and len(self._ids) > 0:
            length = len(self.text)
            self._text += self._spelling.rest()
            self._ends[-1] = len(self._text)
            if len(self._ids) > self._min_tokens:
                self._find_stop(length)
        self._stop = ()

    def _catch_up(self) -> None:
        for token_id in self._ids[len(self._ends) :]:
            self._read(token_id)

    def _read(self, token_id: int) -> None:
        self._text += self._spelling.next(token_id)
        self._ends.append(len(self._text))

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop_at is not None

    @property
    def visible(self) -> int:
        """How many characters may be shown now."""
        if self._stop_at is not None:
            return self._stop_at
        text = self.text
        return len(text) - max((overlap(text, stop) for stop in self._stop), default=0)

    def _find_stop(self, before: int) -> bool:
        """Look for the first stop string that ends after ``before``."""
        found = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stop]
        self._stop_at = min((at for at in found if at >= 0), default=None)
        return self._stop_at is not None


def overlap(text: str, stop: str) -> int:
    """The length of the longest beginning of ``stop``, but for the whole of it, that ``text`` ends with."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0:  # few places are looked at, however long the stop string is
        if stop.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0
