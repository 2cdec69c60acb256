"""What a prompt may be: text, token ids, or either with settings of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import UsageError, shown
from .ranges import integer, is_array
from .settings import check_names


class Request:
    """A prompt (text or token ids) with settings of its own, which win over those of the whole call."""

    def __init__(self, /, prompt: str | Sequence[int], **settings: Any) -> None:
        """Raises UsageError for a setting that does not exist, and for what is not one prompt."""
        if isinstance(prompt, Request) or not is_single(prompt):
            raise UsageError(f"a Request takes one prompt, text or token ids, not {shown(prompt)}")
        if isinstance(prompt, str):
            check_text(prompt)
        else:
            check_ids(prompt)
        self.prompt = prompt
        self.settings = check_names(settings)


Prompt = str | Sequence[int] | Request


def is_single(prompt: Any) -> bool:
    """Whether ``prompt`` is one prompt (text, Request, an array, or a non-empty sequence of ids) and not a list of
    them. Raises UsageError for what is neither."""
    if isinstance(prompt, (str, Request)) or is_array(prompt):
        return True
    if not _is_sequence(prompt):
        raise UsageError(f"a prompt must be text, token ids or a Request, or a list of these, not {shown(prompt)}")
    return len(prompt) > 0 and not (isinstance(prompt[0], (Request, Sequence)) or is_array(prompt[0]))


def check_text(text: str) -> str:
    """``text``. Raises UsageError where half of a surrogate pair stands alone: no character, so no bytes to read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise UsageError(
            f"a prompt must be text of whole characters, not with a lone surrogate ({half} at {error.start})"
        ) from None
    return text


def check_ids(prompt: Any, vocab_size: int = 2**31) -> list[int]:
    """The ids of a prompt that is a sequence or an array of integers from 0 to ``vocab_size`` - 1. Raises UsageError
    for anything else."""
    if is_array(prompt):
        if prompt.ndim != 1:
            raise UsageError(f"a prompt of token ids must be an array of 1 dimension, not {prompt.ndim}")
        prompt = prompt.tolist()
    elif not _is_sequence(prompt):
        raise UsageError(f"a prompt must be text, token ids or a Request, not {shown(prompt)}")
    name, last = "a token id in a prompt", vocab_size - 1
    return [each if type(each) is int and 0 <= each <= last else integer(name, each, 0, last) for each in prompt]


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))
