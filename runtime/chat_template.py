"""How a conversation becomes a prompt: by the chat template that came with the checkpoint, run in a sandbox.

A template is a program that somebody else wrote (in Jinja). It sees messages and special tokens as plain data and can
reach nothing else of the process; how long it runs is its own affair, so a bundle is to be trusted that far.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..bundle import (
    CHAT_TEMPLATE,
    DEFAULT_TEMPLATE,
    TOKENIZER_CONFIG,
    Bundle,
    check_file,
    named_templates,
    read_json,
    special_tokens,
)
from ..errors import BundleError, UsageError, one_line
from .prompts import Chat

WITH_TOOLS = "tool_use"  # where a checkpoint brings several templates
ALWAYS = ("add_generation_prompt", "documents", "tools")  # what may be given to any template, as transformers does
REASONING = ("reasoning_content", "thinking", "reasoning")  # what a message may call it, the first that is there counts


class ChatTemplate:
    """The chat templates of a checkpoint by name (most have one, ``default``), and the text of its special tokens."""

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        """``tokens``: ``bos_token`` and its like, as text. Raises BundleError for a template that cannot be parsed."""
        self._tokens = dict(tokens)
        try:
            environment = _environment()
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
            parsed = map(environment.parse, sources.values())
            self._read = frozenset[str]().union(*map(meta.find_undeclared_variables, parsed))
        except TemplateError as error:
            raise BundleError(f"the bundle's chat template cannot be parsed: {_reason(error)}") from None

    @classmethod
    def read(cls, bundle: Bundle) -> ChatTemplate:
        """The bundle's: ``chat_template.jinja``, or what ``tokenizer_config.json`` holds. Raises BundleError if there
        is none."""
        files = bundle.manifest.files
        for name in {CHAT_TEMPLATE, TOKENIZER_CONFIG} & files.keys():
            check_file(bundle.path, files[name])  # it is read when it is first asked for: long after the others
        config = (
            read_json(bundle.path / TOKENIZER_CONFIG, "a tokenizer's settings") if TOKENIZER_CONFIG in files else {}
        )
        if not isinstance(config, dict):
            raise BundleError(f"{bundle.path / TOKENIZER_CONFIG}: not a tokenizer's settings: no object")
        if CHAT_TEMPLATE in files:
            sources = {DEFAULT_TEMPLATE: (bundle.path / CHAT_TEMPLATE).read_text(encoding="utf-8", errors="replace")}
        else:
            sources = named_templates(config.get("chat_template"))
        if DEFAULT_TEMPLATE not in sources:
            raise BundleError(
                f"bundle '{bundle.path}' has no chat template ({CHAT_TEMPLATE}, or chat_template in"
                f" {TOKENIZER_CONFIG}): its model continues text; give it a prompt"
            )
        return cls(sources, special_tokens(config))

    def check(self, variables: Mapping[str, Any]) -> None:
        """Raise UsageError for a variable that no template reads: it is probably misspelt."""
        for name in variables:
            if name not in self._read and name not in ALWAYS:
                read = ", ".join(sorted(self._read - self._tokens.keys() - {"messages"})) or "none"
                raise UsageError(f"the bundle's chat template reads no variable '{name}' (it reads: {read})")

    def render(self, chat: Chat) -> str:
        """The prompt as text, special tokens written out. Raises UsageError for a variable that no template reads, and,
        with the template's own reason, for messages that it refuses."""
        self.check(chat.variables)
        tools = chat.variables.get("tools") is not None and WITH_TOOLS in self._templates
        template = self._templates[WITH_TOOLS if tools else DEFAULT_TEMPLATE]
        known = {"tools": None, "documents": None, "add_generation_prompt": True, **self._tokens, **chat.variables}
        try:
            return template.render({**known, "messages": [_message(each) for each in chat.messages]})
        except Exception as error:  # a template does what it likes
            # DeepSeek R1's template, for one, tells tool calls by a content of None.
            with contextlib.suppress(Exception):
                return template.render({**known, "messages": chat.messages})
            raise UsageError(f"the bundle's chat template does not take these messages: {_reason(error)}") from None


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message as transformers hands it to a template: without fields that are None (servers send tool calls with such
    a content), and with its reasoning under each name that templates use for it."""
    said = {name: value for name, value in given.items() if value is not None}
    reasoning = next((said[name] for name in REASONING if name in said), None)
    return said if reasoning is None else {"thinking": reasoning, **said, "reasoning_content": reasoning}


class _Generation(Extension):
    """``{% generation %}`` marks, for training, what the model wrote; here only the text inside the block matters."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that templates are written for: transformers' functions and settings, in which a template cannot
    change the values it is given."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
    return made


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """In place of Jinja's own filter, which writes for web pages and escapes < and &."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _reason(error: Exception) -> str:
    return one_line(error) or type(error).__name__
