"""What a command finds around it: variables of its environment, standard input, a terminal, odd names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import leadout
from leadout.scripts.cli import COMMANDS, main


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.mark.parametrize("value", ["0.1.0", "1"])
def test_a_variable_that_names_a_version_asks_for_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEADOUT_VERSION", value)
    result = run("doctor", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["python"]


def test_paths_in_a_variable_are_told_apart_as_paths_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEADOUT_TUNE_DRAFT", os.pathsep.join(("/a b", "/c")))
    command = main.get_command(click.Context(main), "tune")
    assert command is not None and command.make_context("tune", ["bundle"]).params["drafts"] == ("/a b", "/c")


def test_the_package_is_a_program_and_completes_commands() -> None:
    program = [sys.executable, "-m", "leadout"]
    done = subprocess.run([*program, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"leadout, version {leadout.__version__}\n"
    environment = os.environ | {"_LEADOUT_COMPLETE": "bash_complete", "COMP_WORDS": "leadout ", "COMP_CWORD": "1"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert {line.partition(",")[2] for line in done.stdout.splitlines()} == set(COMMANDS)


def test_ctrl_c_while_the_program_is_loaded_is_no_traceback(root: Path) -> None:
    program = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]["leadout"]
    module, _, name = program.partition(":")
    said = f"""
import importlib, sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == "click":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
getattr(importlib.import_module({module!r}), {name!r})()
"""
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_export_says_that_it_needs_docstrings(tmp_path: Path) -> None:
    command = [sys.executable, "-OO", "-m", "leadout", "export", "nowhere", "-o", str(tmp_path / "bundle")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 4 and done.stderr.count("\n") == 1 and "set PYTHONOPTIMIZE=1 or none" in done.stderr


def test_standard_input_that_is_closed_is_empty() -> None:
    said = (
        "import sys\nfrom leadout.scripts.cli import open_streams\nopen_streams()\nassert not sys.stdin.buffer.read()\n"
    )
    said += "from leadout.scripts.cmd_chat import lines\nassert not list(lines())"
    subprocess.run(["bash", "-c", 'exec "$@" 0<&-', "bash", sys.executable, "-c", said], check=True)


def test_a_byte_that_is_no_text_is_named_in_the_locale_c_too() -> None:
    """Python reads such a byte as half a surrogate pair there, and a prompt was told to have it."""
    said = "from leadout.scripts import cli, cmd_chat\ncli.open_streams()\nlist(cmd_chat.asked())"
    plainly = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"}
    plainly |= {"LC_ALL": "C", "PYTHONUTF8": "1"}
    program = [sys.executable, "-c", said]
    done = subprocess.run(program, input=b"ab\xffc\n", env=plainly, capture_output=True, check=False)
    assert b"UsageError: standard input: 'utf-8' codec can't decode byte 0xff in position 2" in done.stderr


@pytest.mark.parametrize("name", ["we[red]ird", "a[/b]", ":smile:"])
def test_a_path_is_shown_as_it_is(
    tiny_bundle: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(tiny_bundle)
    monkeypatch.chdir(tmp_path)
    result = run("inspect", name)
    assert result.exit_code == 0 and f"{name}, written by Leadout" in result.stdout


NOBODY = "draft_length has no effect with draft 'none': nobody proposes"
UNUSED = "is for the draft model, which no request asks here (draft auto or model does, with a draft_length above 0)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--draft", "none", "--draft-threads", "1"), f"draft_threads {UNUSED}"),
        (("--draft", "suffix", "--draft-provider", "cpu"), f"draft_provider {UNUSED}"),
        (("--draft", "ngram", "--draft-ahead", "on"), f"draft_ahead {UNUSED}"),
        (("--draft-length", "0", "--draft-threads", "1"), f"draft_threads {UNUSED}"),
        (("--draft", "model", "--draft-length", "0", "--draft-ahead", "on"), f"draft_ahead {UNUSED}"),
        (
            ("--draft", "model", "--branches", "2,1", "--draft-ahead", "on"),
            "draft_ahead and branches exclude each other",
        ),
    ],
)
@pytest.mark.parametrize("command", ["generate", "bench"])
def test_an_option_without_effect_is_refused(
    tiny_bundle: Path, tmp_path: Path, command: str, options: tuple[str, ...], message: str
) -> None:
    prompt = tmp_path / "prompt.jsonl"
    prompt.write_text('{"prompt": "x"}', encoding="utf-8")
    asked = {"generate": "--batch-file", "bench": "--prompts"}[command], prompt
    result = run(command, tiny_bundle, *asked, *options)
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [("generate", "--batch-file", "-"), ("bench", "--prompts", "-"), ("chat",)])
@pytest.mark.parametrize("form", ["--json-schema", "--grammar"])
def test_standard_input_is_one_thing_only(tiny_bundle: Path, command: tuple[str, ...], form: str) -> None:
    name, *prompts = command
    result = run(name, tiny_bundle, *prompts, form, "-")
    named = form.strip("-").replace("-", "_")
    assert result.exit_code == 2 and result.stdout == ""
    assert f"{named} cannot be standard input: what is to be answered is read from there" in result.stderr


def test_of_several_prompts_the_one_that_is_refused_is_named(tiny_bundle: Path) -> None:
    result = run("generate", tiny_bundle, "-p", "x", "-p", "", "-p", "y")
    assert result.exit_code == 2 and "prompt '': a prompt must have at least one token" in result.stderr


def test_an_option_that_one_line_of_many_has_a_use_for_is_taken(tiny_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    lines = [{"prompt": "x", "draft": "none"}, {"prompt": "y", "draft": "model", "draft_length": 2}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    asked = "generate", tiny_bundle, "--batch-file", path, "--max-new-tokens", 2
    assert NOBODY not in (result := run(*asked, "--draft-threads", 1, "--draft-length", 0)).stderr
    assert result.exit_code == 0
    assert NOBODY in run(*asked, "--draft-length", 4).stderr  # said, and not refused: lists of drafts share options


@pytest.mark.parametrize("option", ["--draft", "--from-onnx", "--draft-from-onnx", "-o"])
def test_an_export_takes_no_empty_name(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"-o": "out", option: ""}
    result = run(
        "export", *([] if option == "--from-onnx" else ["models"]), *[each for pair in given.items() for each in pair]
    )
    assert (result.exit_code, result.stderr) == (2, f"leadout: {option}: the name is empty\n")
