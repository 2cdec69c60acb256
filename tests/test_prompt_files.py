"""Files of prompts: what a line may be, who takes settings in it, which line is at fault, and answers as they come."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import leadout
from leadout.errors import ContextError, EngineError, LeadoutError, UsageError, named
from leadout.runtime.pair import Pair
from leadout.scripts.cli import main
from leadout.scripts.cmd_bench import chosen
from leadout.scripts.cmd_generate import in_order, write_batch
from leadout.scripts.options import Line, given, prompt_ids, read_prompts

DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def pair(tiny_bundle: Path) -> Iterator[Pair]:
    with leadout.load(tiny_bundle, batch_size=2) as made:
        yield made


def file(folder: Path, text: str) -> str:
    path = folder / "prompts.jsonl"
    path.write_bytes(text.encode("utf-8"))
    return str(path)


def test_only_a_newline_ends_a_line_and_a_mark_may_begin_the_file(tmp_path: Path) -> None:
    path = file(tmp_path, '\ufeff{"prompt": "a\u2028b\u0085c"}\r\n\n{"prompt": [1, 2], "seed": 3, "kind": "x"}\n')
    assert read_prompts(path) == [
        Line("a\u2028b\u0085c", {}, f"{path}, line 1"),
        Line([1, 2], {"seed": 3}, f"{path}, line 3"),
    ]


def test_prompts_and_grammars_may_come_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def typed(content: str | bytes) -> None:
        content = content if isinstance(content, bytes) else content.encode("utf-8")
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))

    typed('\ufeff{"prompt": "\u00e9"}\r\n')
    assert read_prompts("-") == [Line("\u00e9", {}, "standard input, line 1")]
    typed('start: "\u00e9"\n')
    assert given({"grammar": "-"}) == {"grammar": 'start: "\u00e9"\n'}
    typed(' {"type": "object"}')
    assert given({"json_schema": "-"}) == {"json_schema": ' {"type": "object"}'}
    typed('{"prompt": "x"}')
    assert chosen("-", "bench")[1] == "standard input"
    for content, message in (
        ("\n", "standard input: no prompts in it"),
        ("\n{}", "standard input, line 2: expected an object"),
        (b"\n\xff", "cannot read standard input, line 2: 'utf-8' codec"),
    ):
        typed(content)
        with pytest.raises(UsageError, match=message):
            read_prompts("-")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (DEEP, "not JSON: its brackets are nested too deep"),
        ('{"prompt": "x", "self": 1}', "unknown setting 'self'"),
        ('{"prompt": "x", "temprature": 1}', "did you mean 'temperature'"),
        ('{"prompt": "x", "n": 2}', "it goes with a call: generate(prompt, n=8), --n 8"),
        ('{"prompt": {"a": 1}}', "a prompt must be text or a list of token ids, not {'a': 1}"),
        ('{"text": "x"}', 'expected an object like {"prompt": "text"}'),
        ('{"prompt": [1, "a"]}', "a prompt must be text or a list of token ids, not [1, 'a']"),
        ('{"prompt": [true]}', "a prompt must be text or a list of token ids"),
        (
            '{"prompt": "x", "logit_bias": {"a": 1}}',
            'logit_bias must be token ids and numbers, for instance {"42": -5}',
        ),
        ('{"prompt": "x", "logit_bias": {"3": "much"}}', "logit_bias must be token ids and numbers"),
        ('{"prompt": "x", "logit_bias": {"3": 1, "03": 2}}', "logit_bias of token 3 is given twice"),
        ('{"prompt": "x", "logit_bias": {"3": 1, "3": 2}}', "key '3' is given twice"),
        ('{"prompt": "x", "seed": 1, "seed": 1}', "key 'seed' is given twice"),
        ('{"messages": [{"role": "user", "content": "x", "content": "y"}]}', "key 'content' is given twice"),
        ('{"prompt": []}', "a prompt must be text or a list of token ids, not []"),
    ],
    ids=range(15),
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = file(tmp_path, f'{{"prompt": "x"}}\n{line}\n')
    with pytest.raises(UsageError) as error:
        read_prompts(path)
    assert str(error.value).startswith(f"{path}, line 2: ") and message in str(error.value)


def test_a_line_of_other_characters_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    for begins in (b"", b"\xef\xbb\xbf"):
        path.write_bytes(begins + b'{"prompt": "x"}\r\n\n{"prompt": "\xe9"}\n')
        with pytest.raises(UsageError) as error:
            read_prompts(str(path))
        assert str(error.value).startswith(f"cannot read '{path}', line 3: 'utf-8' codec can't decode byte 0xe9")


def test_biases_of_a_line_are_by_token(tmp_path: Path) -> None:
    path = file(tmp_path, '{"prompt": "x", "logit_bias": {"3": -2, "5": "-inf"}}')
    assert read_prompts(path)[0].settings == {"logit_bias": {3: -2, 5: float("-inf")}}
    with pytest.raises(UsageError, match="logit_bias of token 3 is given twice"):
        given({"logit_bias": ((3, 1.0), (3, 2.0))})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "x", "max_new_tokens": 3}, "'max_new_tokens' is a setting; {} takes settings as options"),
        ({"prompt": "x", "kind": "a", "draft": "none"}, "'draft' is a setting; {} takes settings as options"),
        ({"prompt": "x", "colour": "red"}, "unknown key 'colour' (known: prompt, messages, kind, file)"),
    ],
)
def test_who_takes_settings_as_options_refuses_them_in_lines(
    tmp_path: Path, line: dict[str, Any], message: str
) -> None:
    path = file(tmp_path, json.dumps(line))
    for command in ("bench", "tune"):
        result = CliRunner().invoke(main, [command, "nowhere", "--prompts", path])
        assert result.exit_code == 2 and result.stderr == f"leadout: {path}, line 1: {message.format(command)}\n"
        assert "'kind' and 'file'" in CliRunner().invoke(main, [command, "--help"]).stdout.replace("\n" + 34 * " ", " ")
    labelled = file(tmp_path, '{"prompt": "x", "kind": "a", "file": "b"}')
    assert read_prompts(labelled, "bench")[0].settings == {}


@pytest.mark.parametrize(
    ("line", "options", "error", "message"),
    [
        ({"prompt": "x", "temperature": -1}, {}, UsageError, "temperature must be"),
        ({"prompt": "x", "logit_bias": {"99999": 1}}, {}, UsageError, "99999"),
        ({"prompt": "x", "stop_token_ids": 5}, {}, UsageError, "stop_token_ids must be"),
        ({"prompt": "y", "draft": "siblings"}, {"seed": 1}, UsageError, "draft 'siblings' needs other answers"),
        ({"prompt": [99999]}, {}, UsageError, "from 0 to 511, not 99999"),
        ({"prompt": ""}, {}, UsageError, "at least one token"),
        ({"prompt": "x = 1\n" * 200}, {"top_k": 3}, ContextError, "at most 255"),
    ],
)
def test_a_request_that_is_refused_is_named_by_its_line(
    pair: Pair, tmp_path: Path, line: dict[str, Any], options: dict[str, Any], error: type[LeadoutError], message: str
) -> None:
    path = file(tmp_path, '{"prompt": "x", "seed": 1}\n\n' + json.dumps(line))
    with pytest.raises(error) as refused:
        write_batch(pair, read_prompts(path), options, as_json=True)
    assert str(refused.value).startswith(f"{path}, line 3: ") and message in str(refused.value)


def test_lines_of_one_prompt_may_draft_from_each_other(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = read_prompts(file(tmp_path, '{"prompt": "x"}\n{"prompt": "x", "seed": 1}'))
    options = {"draft": "siblings", "temperature": 1.0, "max_new_tokens": 3}
    write_batch(pair, lines, options, as_json=True)
    assert len(capsys.readouterr().out.splitlines()) == 2
    with pytest.raises(UsageError, match=r"line 3: draft 'siblings' needs other answers"):
        write_batch(pair, [*lines, Line("y", {}, "line 3")], options, as_json=True)


def test_what_the_options_say_is_no_line_s_fault(pair: Pair, tmp_path: Path) -> None:
    lines = read_prompts(file(tmp_path, '{"prompt": "x", "seed": 1}'))
    with pytest.raises(UsageError, match=r"^temperature must be"):
        write_batch(pair, lines, {"temperature": -1.0}, as_json=True)
    with pytest.raises(UsageError, match=r"^branches must be the same for all"):
        write_batch(pair, [*lines, Line("x", {"draft": "model", "branches": [2]}, "line 2")], {}, as_json=True)
    with pytest.raises(ContextError, match=r"^the prompt has"):
        write_batch(pair, [Line("x = 1\n" * 200, {}, ""), *lines], {}, as_json=True)


def test_a_prompt_that_bench_cannot_take_is_named_by_its_line(pair: Pair, tmp_path: Path) -> None:
    lines = read_prompts(
        file(tmp_path, json.dumps({"prompt": "x"}) + "\n" + json.dumps({"prompt": [7] * 256})), "bench"
    )
    assert prompt_ids(pair, lines[:1]) == [pair.token_ids("x")]
    with pytest.raises(ContextError, match=r"prompts\.jsonl, line 2: the prompt has 256 tokens"):
        prompt_ids(pair, lines)


def test_results_are_given_as_soon_as_all_before_them_are_there() -> None:
    taken: list[int] = []

    def finishing() -> Iterator[tuple[int, Any]]:
        for index in (1, 0, 3, 2, 4):
            taken.append(index)
            yield index, f"answer {index}"

    seen = [(result, len(taken)) for result in in_order(finishing())]
    assert seen == [("answer 0", 2), ("answer 1", 2), ("answer 2", 4), ("answer 3", 4), ("answer 4", 5)]


@pytest.mark.parametrize("n", [None, 2])
def test_what_is_finished_is_out_when_a_later_group_fails(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], n: int | None
) -> None:
    decode, groups = pair.decoder.decode, 0

    def failing(*args: Any, **more: Any) -> Iterator[Any]:
        nonlocal groups
        groups += 1
        return lost() if groups == len(lines) + 3 else decode(*args, **more)  # each line is checked by itself before

    def lost() -> Iterator[Any]:
        raise EngineError("the device is gone")
        yield

    monkeypatch.setattr(pair.decoder, "decode", failing)
    lines = [Line("x" * i, {"max_new_tokens": 9 - i}, "") for i in range(1, 6)]
    options = {"ignore_eos": True} | ({} if n is None else {"temperature": 1.0, "seed": 1})
    with pytest.raises(EngineError, match="the device is gone"):
        write_batch(pair, lines, options, as_json=True, n=n)
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert [len(row["token_ids"]) for row in rows] == ([8, 7, 6, 5] if n is None else [8, 8, 7, 7])
    assert [row["sample"] for row in rows] == ([0, 0, 0, 0] if n is None else [0, 1, 0, 1])


def test_an_error_keeps_its_kind_when_it_is_named() -> None:
    for kind in (UsageError, ContextError):
        with pytest.raises(kind, match=r"^FILE, line 3: no$"), named("FILE, line 3"):
            raise kind("no")
    with pytest.raises(UsageError, match=r"^no$"), named(""):
        raise UsageError("no")
