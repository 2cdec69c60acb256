"""Where text and token ids meet: what a prompt's ids are, which text may be shown already, where a stop string ends.

Torch-free: the ``tokenizers`` library alone. Special tokens are read in a prompt and never shown in an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from ..errors import BundleError

# A decoder such as SentencePiece's drops a leading space; a few ids of context keep it.
CONTEXT_IDS = 8
_UNFINISHED = "\ufffd"


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

    def encode(self, text: str, *, framed: bool = False) -> list[int]:
        """The ids of a prompt, with whatever the tokenizer puts around one (a BOS token, for instance), unless the text
        has that already: it is ``framed``."""
        return list(self.tokenizer.encode(text, add_special_tokens=not framed).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids`` without special tokens; an incomplete character at the end becomes U+FFFD."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def vocab_size(self) -> int:
        """One more than the largest id this tokenizer can give."""
        return 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


class TextStream:
    """One answer as it grows: its text, the offset where each token's text ends, and how much may be shown.

    Fed token by token, so where a stop string ends does not depend on how many tokens a round brought.
    ``ends[i]`` is the length of the text once token i is in; bytes of an unfinished character count with the token
    that completes it. Text that may still become a stop string is held back (``visible``).
    """

    def __init__(self, codec: Codec, prompt: Sequence[int], stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        """``stop``: non-empty strings; one completed within the first ``min_tokens`` tokens does not count."""
        self._codec = codec
        self._context = list(prompt[-CONTEXT_IDS:])
        self._begin()
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
                self._begin()
                for token_id in self._ids[: len(self._ends)]:
                    self._next(token_id)
            self._stop_at = None  # its last character came with the last token

    def close(self) -> None:
        """No more tokens: what was held back may be shown, an unfinished character as U+FFFD."""
        whole, before = self._codec.decode(self._context + self._ids), self._codec.decode(self._context)
        answer = _beyond(whole, before)  # it may finish the prompt's last character
        if self._stop_at is None and answer.startswith(self.text):
            self._text = answer
            if self._ends:
                self._ends[-1] = len(self._text)
        self._stop = ()

    def _catch_up(self) -> None:
        for token_id in self._ids[len(self._ends) :]:
            self._read(token_id)

    def _read(self, token_id: int) -> None:
        self._text += self._next(token_id)
        self._ends.append(len(self._text))

    def _begin(self) -> None:
        """Stand at the end of the prompt. A decoder that begins behind an unfinished character (or behind U+FFFD, which
        looks like one) would say all that it was given as context: such an end is fed to it, token by token."""
        settled, whole = len(self._context), self._codec.decode(self._context)
        before = whole
        while before.endswith(_UNFINISHED):
            settled -= 1
            before = self._codec.decode(self._context[:settled])
        self._decode = DecodeStream(ids=self._context[:settled], skip_special_tokens=True)
        self._prompted = whole[len(before) :]
        for token_id in self._context[settled:]:
            self._decode.step(self._codec.tokenizer, token_id)

    def _next(self, token_id: int) -> str:
        """What ``token_id`` adds to the answer, without the prompt's end, unless it finishes a character of that."""
        text = self._decode.step(self._codec.tokenizer, token_id) or ""
        if text:
            text, self._prompted = _beyond(text, self._prompted), ""
        return text

    @property
    def visible(self) -> int:
        """How many characters may be shown now."""
        if self._stop_at is not None:
            return self._stop_at
        held = (n for stop in self._stop for n in range(1, len(stop)) if self.text.endswith(stop[:n]))
        return len(self.text) - max(held, default=0)

    def _find_stop(self, before: int) -> bool:
        """Look for the first stop string that ends after ``before``."""
        found = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stop]
        self._stop_at = min((at for at in found if at >= 0), default=None)
        return self._stop_at is not None


def _beyond(text: str, before: str) -> str:
    """``text`` without what it begins with in common with ``before``."""
    same = 0
    while same < min(len(text), len(before)) and text[same] == before[same]:
        same += 1
    return text[same:]
