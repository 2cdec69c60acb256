"""Conversations: prompts as transformers makes them, by templates in a sandbox, and talked through to the end."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import leadout
from leadout.bundle import file_entry
from leadout.errors import BundleError, ContextError, UsageError
from leadout.runtime.chat_template import ChatTemplate
from leadout.runtime.pair import Chat, Pair, Request, load
from leadout.scripts import cmd_chat
from leadout.scripts.cli import Stopped, main
from leadout.scripts.cmd_chat import lines

PLAIN = """\
{% for m in messages %}
{{ m.role }}: {{ m.content }}
{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}"""
CHATML = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content | trim + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
STRICT = """\
{{ bos_token }}{% set ns = namespace(last='') %}
{% for message in messages %}
    {% if message['role'] == 'system' %}{% continue %}{% endif %}
    {% if message['role'] == ns.last %}
        {{ raise_exception('roles must alternate, not ' ~ message['role'] ~ ' twice') }}
    {% endif %}
    {% set ns.last = message['role'] %}
    {% if message['content'] is string %}
[INST] {{ message['content'] }} [/INST]{{ eos_token }}
    {% else %}
        {% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}
    {% endif %}
    {% if loop.index > 6 %}{% break %}{% endif %}
{% endfor %}
"""
TOOLS = """\
{%- set date = date_string if date_string is defined else strftime_now('%d %b %Y') -%}
Today is {{ date }}.
{%- if tools is not none %}
{% for tool in tools %}{{ tool | tojson(indent=2) }}
{{ tool | tojson }}
{% endfor %}{% endif %}
{%- if documents %}{{ documents | length }} documents{% endif %}
{%- for m in messages %}
{{ m.role }}
{%- for call in m.tool_calls or [] %}
 calls {{ call.function.name }}({{ call.function.arguments | tojson(sort_keys=true) }})
{%- else %} {{ m.content }}{% endfor %}
{%- endfor %}
"""
TRIMMED = """\
{%- for m in messages %}
{{ m.role }}:{{ m['content'] | trim }}
    {%- if m.content is none %}(none){% endif %}
    {%- if m.content is not defined %}(no content){% endif %}
    {%- if 'tool_calls' in m and m.tool_calls %} calls {{ m.tool_calls[0].function.name }}{% endif %}
    {%- if m.thinking %} thinks {{ m.thinking }}{% endif %}
    {%- if m.reasoning_content is string %} reasons {{ m.reasoning_content }}{% endif %}
    {%- for key, value in m.items() %}[{{ key }}]{% endfor %}
{%- endfor %}
"""
TEMPLATES = {"plain": PLAIN, "chatml": CHATML, "strict": STRICT, "tools": TOOLS, "trimmed": TRIMMED}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

HELLO = [{"role": "user", "content": "Hello <b>&amp; 'été' \U0001f6b2"}]
TURNS = [
    {"role": "system", "content": "  Speak plainly. "},
    *HELLO,
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi."},
    {"role": "user", "content": "Again"},
]
CALLS = [
    *HELLO,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": "é<"}}}],
    },
    {"role": "tool", "name": "add", "content": "3"},
]
ABSENT = [
    {"role": "system", "content": None},
    *CALLS,
    {"role": "assistant", "content": "3", "tool_calls": None, "reasoning": None, "name": None},
]
REASONS = [
    *HELLO,
    {"role": "assistant", "content": "a", "reasoning_content": "of servers"},
    {"role": "assistant", "content": "b", "thinking": "of gpt-oss"},
    {"role": "assistant", "content": "c", "reasoning": "of others", "reasoning_content": None},
    {"role": "assistant", "content": "d", "reasoning": "r", "reasoning_content": "", "thinking": "t"},
]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "in"}, {"type": "text", "text": " parts"}]}]
ADD = {"type": "function", "function": {"name": "add", "description": "a < b & 'c'", "parameters": {"é": 1.5}}}


@pytest.mark.parametrize(
    "variables", [{}, {"tools": [ADD], "documents": [{"title": "a", "text": "b"}]}], ids=["", "more"]
)
@pytest.mark.parametrize(
    "messages",
    [HELLO, TURNS, CALLS, ABSENT, REASONS, PARTS],
    ids=["hello", "turns", "calls", "absent", "reasons", "parts"],
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_the_text_that_transformers_makes(
    name: str, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({})), **TOKENS)
    own = {"chatml": {"enable_thinking": False}, "tools": {"date_string": "1 May 2026"}}.get(name, {})
    for more in ({}, {"add_generation_prompt": False}, own):
        known = {"add_generation_prompt": True, **variables, **more}
        try:
            expected = theirs.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False, **known)
        except Exception as error:
            with pytest.raises(UsageError, match=re.escape(str(error))):
                ChatTemplate({"default": TEMPLATES[name]}, TOKENS).render(Chat(messages, **variables, **more))
        else:
            found = ChatTemplate({"default": TEMPLATES[name]}, TOKENS).render(Chat(messages, **variables, **more))
            assert found == expected


def test_a_template_that_waits_for_none_is_given_it() -> None:
    """DeepSeek R1's, which transformers does not make a prompt with."""
    template = (
        "{%- for m in messages %}{%- if m['role'] == 'assistant' and m['content'] is none %}"
        "{{ '<call>' + m['tool_calls'][0]['function']['name'] }}"
        "{%- else %}{{ '<' + m['role'] + '>' + m['content'] }}{%- endif %}{%- endfor %}"
    )
    assert ChatTemplate({"default": template}, {}).render(Chat(CALLS)).endswith("<call>add<tool>3")


def test_what_a_template_refuses_is_said_in_its_words() -> None:
    strict = ChatTemplate({"default": STRICT}, TOKENS)
    with pytest.raises(UsageError, match="does not take these messages: roles must alternate, not user twice"):
        strict.render(Chat([*HELLO, *HELLO]))
    with pytest.raises(UsageError, match="does not take these messages"):
        ChatTemplate({"default": CHATML}, {}).render(Chat([{"role": "assistant", "content": None}]))


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[-1].__subclasses__() }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ self.__init__.__globals__.__builtins__ }}",
        "{% set x = messages.append(1) %}{{ messages }}",
        "{% set x = messages[0].update(role='system') %}{{ messages }}",
        "{{ range(10 ** 9) | list }}",
        "{% include 'secret' %}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ (messages | attr('__class__')).mro() }}",
    ],
)
def test_a_template_reaches_nothing_but_its_messages(template: str) -> None:
    chat = Chat(HELLO)
    with pytest.raises(UsageError, match="does not take these messages"):
        ChatTemplate({"default": template}, {}).render(chat)
    assert chat.messages == HELLO


def test_a_file_that_is_no_template_says_so() -> None:
    with pytest.raises(BundleError, match=r"the bundle's chat template cannot be parsed: .*'endfor'"):
        ChatTemplate({"default": "{% for m in messages %}"}, {})


@pytest.mark.parametrize(
    ("messages", "variables", "message"),
    [
        ([], {}, "messages must be a list of at least one message, not []"),
        ("hello", {}, "messages must be a list of at least one message, not 'hello'"),
        ({"role": "user"}, {}, "messages must be a list of at least one message"),
        (["hello"], {}, 'a message must be an object like {"role": "user", "content": "text"}, not \'hello\''),
        ([{"content": "x"}], {}, "a message must be an object like"),
        ([{"role": 1}], {}, "a message must be an object like"),
        ([{"role": "user", "content": b"x"}], {}, "messages must be what JSON can hold: "),
        (HELLO, {"tools": [print]}, "tools must be what JSON can hold: "),
    ],
)
def test_what_is_no_conversation_is_refused_by_name(messages: Any, variables: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        Chat(messages, **variables)
    assert message in str(error.value)


def test_a_conversation_is_copied() -> None:
    messages = [dict(HELLO[0])]
    chat = Chat(messages)
    messages[0]["content"] = "changed"
    assert chat.messages == HELLO


def with_files(bundle: Path, place: Path, **files: str | dict[str, Any]) -> Path:
    """A copy of a bundle with more files in it: names with _ for the dot."""
    shutil.copytree(bundle, place)
    manifest = json.loads((place / "leadout.json").read_text(encoding="utf-8"))
    for name, content in files.items():
        path = place / ".".join(name.rsplit("_", 1))
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        manifest["files"][path.name] = dataclasses.asdict(file_entry(path))
    (place / "leadout.json").write_text(json.dumps(manifest), encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def chatty(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair with a chat template, and a tokenizer that begins every prompt with its special token."""
    tokenizer = json.loads((tiny_bundle / "tokenizer.json").read_text(encoding="utf-8"))
    end = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [end, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    return with_files(
        tiny_bundle,
        tmp_path_factory.mktemp("chat") / "bundle",
        tokenizer_json=tokenizer,
        tokenizer_config_json={"bos_token": {"content": "<|endoftext|>"}, "eos_token": None, "add_bos_token": True},
        chat_template_jinja="{{ bos_token }}" + PLAIN,
    )


@pytest.fixture(scope="module")
def pair(chatty: Path) -> Iterator[Pair]:
    with load(chatty, threads=1) as pair:
        yield pair


def test_special_tokens_stand_once_where_the_template_puts_them(pair: Pair) -> None:
    ids = pair.token_ids(Chat([{"role": "user", "content": "x"}]))
    assert ids.count(0) == 1 and ids[0] == 0
    assert pair.codec.decode(ids) == "user: x\nassistant:"
    assert pair.token_ids("x")[0] == 0, "a prompt of text is framed by the tokenizer"


def test_a_chat_is_a_prompt_wherever_there_is_one(pair: Pair) -> None:
    chats = [Chat([{"role": "user", "content": text}]) for text in ("x = 1", "class A")]
    prompts = [pair.token_ids(chat) for chat in chats]
    expected = pair.generate(prompts, max_new_tokens=12)
    assert [r.token_ids for r in pair.generate(chats, max_new_tokens=12)] == [r.token_ids for r in expected]
    alone = pair.generate(prompts[0], max_new_tokens=12).token_ids
    assert pair.generate(chats[0], max_new_tokens=12).token_ids == alone
    assert pair.generate(Request(chats[0], max_new_tokens=12)).token_ids == alone
    stream = pair.stream(chats[0], max_new_tokens=12)
    assert [i for piece in stream for i in piece.token_ids] == alone
    seeded = {"temperature": 0.8, "seed": 3, "max_new_tokens": 8, "n": 2}
    assert [r.token_ids for r in pair.generate(chats[0], **seeded)] == [
        r.token_ids for r in pair.generate(prompts[0], **seeded)
    ]


def test_the_next_turn_begins_with_what_the_cache_holds(pair: Pair) -> None:
    messages = [{"role": "user", "content": "def f(x):\n    return x\n" * 2}]
    first = pair.generate(Chat(messages), max_new_tokens=6, draft="none")
    said = len(pair.token_ids(Chat(messages)))
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "y"}]
    second = pair.generate(Chat(messages), max_new_tokens=6, draft="none")
    assert second.stats.held >= said - 1
    pair.forget()
    assert pair.generate(Chat(messages), max_new_tokens=6, draft="none").token_ids == second.token_ids


def test_a_list_of_messages_is_told_from_a_list_of_prompts(pair: Pair) -> None:
    for call in (pair.generate, pair.stream, pair.answers, Request):
        with pytest.raises(UsageError, match=r"give a conversation as Chat\(messages\)|must be text, token ids"):
            call(HELLO)
    for call in (pair.generate, pair.answers):
        with pytest.raises(UsageError, match=r"^prompts\[1\]: .* give a conversation as Chat\(messages\)"):
            call(["x", HELLO])
    with pytest.raises(UsageError, match=r"give a conversation as Chat\(messages\)"):
        pair.token_ids(HELLO)  # type: ignore[arg-type]


def test_a_bundle_without_a_template_says_so(tiny_bundle: Path, tmp_path: Path) -> None:
    with load(tiny_bundle, threads=1) as pair, pytest.raises(BundleError, match="has no chat template"):
        pair.generate(Chat(HELLO))
    assert run("chat", tiny_bundle, input="hello\n").exit_code == 3
    for config in ({}, {"chat_template": 5}, {"chat_template": [{"name": "tool_use", "template": PLAIN}]}):
        place = tmp_path / str(len(str(config)))
        with (
            load(with_files(tiny_bundle, place, tokenizer_config_json=config), threads=1) as pair,
            pytest.raises(BundleError, match="has no chat template"),
        ):
            pair.token_ids(Chat(HELLO))


@pytest.mark.parametrize("config", ["[1]", "{"])
def test_settings_of_a_tokenizer_that_are_none_are_named(tiny_bundle: Path, tmp_path: Path, config: str) -> None:
    place = with_files(tiny_bundle, tmp_path / "b", tokenizer_config_json=config, chat_template_jinja=PLAIN)
    with load(place, threads=1) as pair, pytest.raises(BundleError, match=r"tokenizer_config\.json: not a tokenizer's"):
        pair.token_ids(Chat(HELLO))


def test_old_checkpoints_keep_templates_in_their_settings(tiny_bundle: Path, tmp_path: Path) -> None:
    one = with_files(tiny_bundle, tmp_path / "one", tokenizer_config_json={"chat_template": "one"})
    several = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "with {{ tools | length }}"}]
    two = with_files(tiny_bundle, tmp_path / "two", tokenizer_config_json={"chat_template": several})
    both = with_files(
        tiny_bundle, tmp_path / "three", tokenizer_config_json={"chat_template": "one"}, chat_template_jinja="file"
    )
    cases = ((one, None, "one"), (two, None, "two"), (two, [ADD], "with 1"), (two, [], "with 0"), (both, [ADD], "file"))
    for place, tools, text in cases:
        with load(place, threads=1) as pair:
            assert pair.chat_template.render(Chat(HELLO, tools=tools)) == text


def run(*args: object, input: str = "") -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], input=input)


def test_a_conversation_goes_line_by_line(chatty: Path, pair: Pair) -> None:
    pair.forget()
    messages = [{"role": "system", "content": "s"}]
    expected = []
    for text in ("def f(x):", "return"):
        messages.append({"role": "user", "content": text})
        expected.append(pair.generate(Chat(messages), max_new_tokens=9).text)
        messages.append({"role": "assistant", "content": expected[-1]})
    options = ("--system", "s", "--max-new-tokens", 9, "--threads", 1)
    result = run("chat", chatty, *options, input="def f(x):\n\n  \nreturn")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "".join(text + "\n" for text in expected)
    assert result.stderr.count("tokens in") == 2


def test_an_answer_ends_when_the_model_does(chatty: Path) -> None:
    """Or at the limit of its context: nobody asked for 128 tokens."""
    result = run("chat", chatty, "--ignore-eos", "--threads", 1, input="def f(x):\n")
    assert result.exit_code == 0 and "stopped by context" in result.stderr
    longer = run("chat", chatty, "--ignore-eos", "--threads", 1, input="def f(x):\nreturn\n")
    assert longer.exit_code == ContextError.exit_code and longer.stdout == result.stdout


def test_variables_reach_the_template(tiny_bundle: Path, tmp_path: Path) -> None:
    place = with_files(tiny_bundle, tmp_path / "b", chat_template_jinja="{{ raise_exception(a ~ ' ' ~ b.c) }}")
    result = run("chat", place, "--variable", "a=false", "--variable", 'b={"c": "=x"}', "--threads", 1, input="x\n")
    assert result.exit_code == 2 and result.stderr.strip().endswith("messages: False =x")
    for wrong in ("a", "a=nonsense", "=1"):
        result = run("chat", place, "--variable", wrong, input="x\n")
        assert result.exit_code == 2 and f"variable '{wrong}' is not NAME=JSON" in result.stderr


def test_a_variable_that_no_template_reads_is_named() -> None:
    """It would be without effect, as transformers leaves it; one that is set where it is not given is read."""
    late = "{% if not cutoff is defined %}{% set cutoff = '2023' %}{% endif %}"
    late += "{% macro f(x) %}{{ x ~ depth }}{% endmacro %}"
    template = ChatTemplate({"default": CHATML + late, "tool_use": TOOLS}, TOKENS)
    for name in ("enable_thinking", "cutoff", "depth", "date_string", "tools", "documents", "add_generation_prompt"):
        template.render(Chat(TURNS, **{name: None}))
    known = r"add_generation_prompt, cutoff, date_string, depth, documents, enable_thinking, tools"
    for name in ("enable_thinkin", "message", "ns", "x", "raise_exception"):
        with pytest.raises(UsageError, match=rf"reads no variable '{name}' \(it reads: {known}\)"):
            template.render(Chat(HELLO, **{name: False}))
    with pytest.raises(UsageError, match=r"reads no variable 'a' \(it reads: none\)"):
        ChatTemplate({"default": "{{ bos_token ~ messages }}"}, TOKENS).check({"a": 1})


def test_variables_are_given_once_and_messages_are_none(chatty: Path) -> None:
    for given, line in (
        (("messages=[]",), "variable 'messages' is the conversation itself"),
        (("a=1", "a=2"), "variable 'a' must be given once, not as 1 and 2"),
        (("a=1",), "reads no variable 'a' (it reads: add_generation_prompt)"),
    ):
        options = [each for text in given for each in ("--variable", text)]
        result = run("chat", chatty, *options, "--threads", 1)
        assert result.exit_code == 2 and line in result.stderr, result.output


@pytest.mark.parametrize("option", [("--stop-token-id", 99999), ("--draft", "siblings"), ("--min-p", 2)])
def test_settings_are_refused_before_the_first_line(chatty: Path, option: tuple[object, ...]) -> None:
    result = run("chat", chatty, *option, "--threads", 1)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.output


@pytest.mark.parametrize(
    ("typed", "answers", "line"),
    [
        (b"def f(x):\nreturn\n", 2, ""),
        (b"\xef\xbb\xbfdef f(x):\r\n\r\nreturn\r\n", 2, ""),
        (b"def f(x):\nreturn", 2, ""),
        (b"def f(x):\n\xffeturn\n", 1, "standard input, line 2: 'utf-8' codec can't decode byte 0xff in position 0"),
        (b"def f(x):\n\n\xc3", 1, "standard input, line 3: 'utf-8' codec can't decode byte 0xc3"),
    ],
    ids=range(5),
)
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # as Python opens it, by the locale
def test_a_line_of_a_pipe_is_a_message_without_its_end(
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed: bytes,
    answers: int,
    line: str,
    errors: str,
) -> None:
    told, messages = "", []
    for text in ("def f(x):", "return")[:answers]:
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": pair.generate(Chat(messages), max_new_tokens=4).text})
        told += messages[-1]["content"] + "\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8", errors=errors, newline="\n"))
    try:
        cmd_chat.converse(pair, [], {}, {"max_new_tokens": 4})
    except UsageError as error:
        assert line and str(error).startswith(line)
    else:
        assert not line
    assert capsys.readouterr().out == told


NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "options", "code", "line"),
    [
        (NO_SYSTEM + PLAIN, ("--system", "s"), 2, "does not take these messages: System role not supported"),
        (NO_SYSTEM + PLAIN, (), 0, ""),
        (STRICT, ("--system", "s"), 2, "the bundle's chat template leaves out what --system says"),
        (STRICT, (), 0, ""),
        (CHATML, ("--system", "Be brief."), 0, ""),  # the template's own
        (PLAIN, ("--system", ""), 0, ""),
        (PLAIN, ("--system", "s " * 300), 6, "this target takes at most 255"),
        (PLAIN, ("--logit-bias", "512=1"), 2, "logit_bias: token id 512 is outside the vocabulary"),
    ],
)
def test_what_no_line_could_be_answered_with_is_refused_before_there_is_one(
    tiny_bundle: Path, tmp_path: Path, template: str, options: tuple[str, ...], code: int, line: str
) -> None:
    place = with_files(tiny_bundle, tmp_path / "b", chat_template_jinja=template)
    result = run("chat", place, *options, "--threads", 1)
    assert result.exit_code == code and line in result.stderr and result.stdout == ""


class Interrupted:
    """A stream that Ctrl-C, or a signal, ends after its first piece."""

    def __init__(self, pieces: Any, error: type[BaseException], *arguments: Any) -> None:
        self._pieces, self._error = iter(pieces), error(*arguments)
        self._first = True

    def __iter__(self) -> Interrupted:
        return self

    def __next__(self) -> Any:
        if not self._first:
            raise self._error
        self._first = False
        return next(self._pieces)


def test_ctrl_c_ends_an_answer_and_not_the_conversation(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[dict[str, Any]]] = []
    whole = pair.stream

    def stream(chat: Chat, **settings: Any) -> Any:
        asked.append(chat.messages)
        pieces = whole(chat, **settings)
        return Interrupted(pieces, KeyboardInterrupt) if len(asked) == 1 else pieces

    monkeypatch.setattr(pair, "stream", stream)
    monkeypatch.setattr(cmd_chat, "lines", lambda: iter(["def f(x):", "return"]))
    cmd_chat.converse(pair, [], {}, {"max_new_tokens": 9, "draft": "none"})
    first, second = capsys.readouterr().out.split("\n", 1)
    assert [message["role"] for message in asked[1]] == ["user", "assistant", "user"]
    assert asked[1][1]["content"] == first != "" and second.strip()

    asked.clear()
    monkeypatch.setattr(pair, "stream", lambda chat, **settings: Interrupted(whole(chat, **settings), Stopped, 15))
    with pytest.raises(Stopped):
        cmd_chat.converse(pair, [], {}, {"max_new_tokens": 9, "draft": "none"})


def test_a_terminal_is_asked_for_each_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said, prompts = iter(["", "a", " ", "b"]), []

    def ask(prompt: str) -> str:
        prompts.append(prompt)
        if (line := next(said, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert list(lines()) == ["a", "b"] and set(prompts) == {"> "} and capsys.readouterr().out == "\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    said = iter(["c"])
    assert list(lines()) == ["c"] and prompts[-1] == "" == capsys.readouterr().out


def test_lines_of_a_prompt_file_may_be_conversations(chatty: Path, pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    rows = [{"messages": HELLO, "max_new_tokens": 5}, {"prompt": "x", "max_new_tokens": 5}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = run("generate", chatty, "--batch-file", path, "--json", "--threads", 1)
    assert result.exit_code == 0, result.stderr
    expected = pair.generate([Chat(HELLO), "x"], max_new_tokens=5)
    assert [json.loads(line)["token_ids"] for line in result.stdout.splitlines()] == [r.token_ids for r in expected]
    bare = tmp_path / "bare.jsonl"
    bare.write_text(json.dumps({"messages": HELLO}) + "\n", encoding="utf-8")
    result = run("bench", chatty, "--prompts", bare, "--max-new-tokens", 4, "--threads", 1)
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": HELLO, "prompt": "x"}, "expected an object like"),
        ({"messages": "x"}, "messages must be a list of at least one message"),
        ({"messages": HELLO, "tools": []}, "unknown setting 'tools'"),
        ({"role": "user"}, "expected an object like"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")
    result = run("generate", "nowhere", "--batch-file", path)
    assert result.exit_code == 2 and f"{path}, line 1: {message}" in result.stderr


def test_the_name_is_public() -> None:
    assert leadout.Chat is Chat and "Chat" in dir(leadout)
