"""Whether a bundle makes of a conversation the prompt that transformers makes: both are asked after an export."""

from __future__ import annotations

from typing import Any

from ..bundle import Bundle
from ..errors import LeadoutError, shown

MESSAGES = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 'é' < 3?"},
]
ADD = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}}]


def difference(bundle: Bundle, source: str) -> str | None:
    """What to say if the bundle's prompt is another than that of ``source``, a directory or hub id that became its
    target; None if it is not, or transformers makes none: it knows no template, or refuses these messages."""
    from ..export.checkpoints.checkpoint import open_tokenizer, quiet

    theirs = open_tokenizer(source)
    for tools in (None, TOOLS):
        try:
            with quiet():
                expected = theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True)
        except Exception:  # templates and tokenizers raise what they like
            continue
        if fault := _fault(bundle, tools, str(expected)):
            what = "a conversation" if tools is None else "a conversation with tools"
            return f"target: of {what} transformers' {type(theirs).__name__} makes another prompt: {fault}"
    return None


def _fault(bundle: Bundle, tools: Any, expected: str) -> str | None:
    """Where the bundle's prompt is not as ``expected``, or why it has none; None if it is."""
    from ..runtime.chat_template import ChatTemplate
    from ..runtime.held import agreement
    from ..runtime.prompts import Chat

    try:
        found = ChatTemplate.read(bundle).render(Chat(MESSAGES, tools=tools))
    except LeadoutError as error:
        return str(error)
    if found == expected:
        return None
    same = agreement(found, expected)
    return f"{shown(expected[same : same + 24])} where the bundle's has {shown(found[same : same + 24])}"
