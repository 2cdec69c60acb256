"""What a command finds around it: variables of its environment, standard input, a terminal, odd names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


def test_standard_input_that_is_closed_is_empty() -> None:
    said = (
        "import sys\nfrom leadout.scripts.cli import open_streams\nopen_streams()\nassert not sys.stdin.buffer.read()\n"
    )
    said += "from leadout.scripts.cmd_chat import lines\nassert not list(lines())"
    subprocess.run(["bash", "-c", 'exec "$@" 0<&-', "bash", sys.executable, "-c", said], check=True)


@pytest.mark.parametrize("name", ["we[red]ird", "a[/b]", ":smile:"])
def test_a_path_is_shown_as_it_is(
    tiny_bundle: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(tiny_bundle)
    monkeypatch.chdir(tmp_path)
    result = run("inspect", name)
    assert result.exit_code == 0 and f"{name}, written by Leadout" in result.stdout
