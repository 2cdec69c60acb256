"""What a prompt may be: text, token ids, a conversation, or one of them with settings of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError, shown
from .ranges import integer, is_array, whole
from .settings import check_names

Ids = Sequence[int] | NDArray[np.integer[Any]]


class Chat:
    """A conversation as a prompt: the bundle's chat template makes text of it, special tokens and all."""

    def __init__(self, /, messages: Sequence[Mapping[str, Any]], **variables: Any) -> None:
        """``messages``, oldest first, are objects like {"role": "user", "content": "Hello"}. ``variables`` are what
        else the template reads: ``tools``, ``enable_thinking`` and others; ``add_generation_prompt``, which begins the
        answer, is true if not given. All is copied. Raises UsageError for what is no list of messages or no JSON."""
        if not _is_sequence(messages) or not messages:
            raise UsageError(f"messages must be a list of at least one message, not {shown(messages)}")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise UsageError(
                    f'a message must be an object like {{"role": "user", "content": "text"}}, not {shown(message)}'
                )
        self.messages: list[dict[str, Any]] = _plain("messages", [dict(message) for message in messages])
        self.variables: dict[str, Any] = {name: _plain(name, value) for name, value in variables.items()}


class Request:
    """A prompt (text, token ids or a Chat) with settings of its own, which win over those of the whole call."""

    def __init__(self, /, prompt: str | Ids | Chat, **settings: Any) -> None:
        """Raises UsageError for a setting that does not exist, and for what is not one prompt."""
        if isinstance(prompt, Request) or not is_single(prompt):
            raise UsageError(f"a Request takes one prompt, text, token ids or a Chat, not {shown(prompt)}")
        if isinstance(prompt, str):
            whole("a prompt", prompt)
        elif not isinstance(prompt, Chat):
            check_ids(prompt)
        self.prompt = prompt
        self.settings = check_names(settings)


Prompt = str | Ids | Chat | Request
_KINDS = "text, token ids, a Chat or a Request"


def is_single(prompt: Any) -> bool:
    """Whether ``prompt`` is one prompt (text, Chat, Request, an array, or a non-empty sequence of ids) and not a list
    of them. Raises UsageError for what is neither."""
    if isinstance(prompt, (str, Chat, Request)) or is_array(prompt):
        return True
    if not _is_sequence(prompt):
        raise UsageError(f"a prompt must be {_KINDS}, or a list of these, not {shown(prompt)}")
    _check_no_messages(prompt)
    return len(prompt) > 0 and not (isinstance(prompt[0], (Chat, Request, Sequence)) or is_array(prompt[0]))


def check_ids(prompt: Any, vocab_size: int = 2**31) -> list[int]:
    """The ids of a prompt that is a sequence or an array of integers from 0 to ``vocab_size`` - 1. Raises UsageError
    for anything else."""
    if is_array(prompt):
        if prompt.ndim != 1:
            raise UsageError(f"a prompt of token ids must be an array of 1 dimension, not {prompt.ndim}")
        prompt = prompt.tolist()
    elif not _is_sequence(prompt):
        raise UsageError(f"a prompt must be {_KINDS}, not {shown(prompt)}")
    else:
        _check_no_messages(prompt)
    name, last = "a token id in a prompt", vocab_size - 1
    return [each if type(each) is int and 0 <= each <= last else integer(name, each, 0, last) for each in prompt]


def _check_no_messages(prompt: Sequence[Any]) -> None:
    if len(prompt) > 0 and isinstance(prompt[0], Mapping):
        raise UsageError("a prompt must not be a list of messages: give a conversation as Chat(messages)")


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def _plain(name: str, value: object) -> Any:
    """A copy of ``value`` with nothing in it but what JSON has: a template is not to be given anything else."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{name} must be what JSON can hold: {error}") from None
