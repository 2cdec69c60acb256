"""The documentation does not lie: links lead somewhere, commands and names exist."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import click
import pytest

import leadout
from leadout.runtime.pair import Result
from leadout.scripts.cli import COMMANDS

PAGES = ("README.md", "CHANGELOG.md", "docs/architecture.md", "docs/edge.md", "benchmarks/README.md")
LINK = re.compile(r"\]\(([^)#\s]+)\)")
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
FILE = re.compile(r"`((?:export|engines|runtime|scripts|tests|docs)/[\w./*]+)((?:`, `[\w.*]+\.py)*)`")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(root: Path, page: str) -> None:
    text = (root / page).read_text(encoding="utf-8")
    local = [link for link in LINK.findall(text) if "://" not in link]
    assert [link for link in local if not ((root / page).parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(root: Path, page: str) -> None:
    named = []
    for first, others in FILE.findall((root / page).read_text(encoding="utf-8")):
        named.append(first)
        named += [str(Path(first).parent / other) for other in re.findall(r"[\w.*]+\.py", others)]
    assert [name for name in named if not list(root.glob(name))] == []
    assert named or page in ("CHANGELOG.md", "docs/edge.md", "benchmarks/README.md")


def readme_commands(root: Path) -> list[list[str]]:
    blocks = [
        body for language, body in BLOCK.findall((root / "README.md").read_text(encoding="utf-8")) if language == "bash"
    ]
    lines = [line for body in blocks for line in body.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("leadout ")]


def test_the_command_line_knows_every_command_of_the_readme(root: Path) -> None:
    commands = readme_commands(root)
    assert {words[1] for words in commands} == set(COMMANDS)
    for _, name, *args in commands:
        command: click.Command = importlib.import_module(f"leadout.scripts.cmd_{name}").command
        command.make_context(name, args)


def test_the_readme_s_scripts_are_there_and_run(root: Path) -> None:
    for name in ("scripts/demo", "scripts/test", "scripts/setup", ".ci/run"):
        path = root / name
        assert path.stat().st_mode & 0o111, f"{name} is not executable"
        assert path.read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n")
        assert "set -euo pipefail" in path.read_text(encoding="utf-8")


def test_the_readme_s_example_uses_what_exists(root: Path) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    example = next(body for language, body in BLOCK.findall(text) if language == "python")
    compile(example, "README.md", "exec")
    assert set(re.findall(r"leadout\.(\w+)", example)) <= set(leadout.__all__)
    fields = re.search(r"A `Result` has `([^`]+)`", text)
    assert fields and fields[1].split(", ") == list(Result.__dataclass_fields__)


@pytest.mark.slow
def test_the_readme_s_example_runs(root: Path, tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    example = next(body for language, body in BLOCK.findall(text) if language == "python")
    exec(compile(example.replace("bundles/demo", str(tiny_bundle)), "README.md", "exec"), {})
    assert capsys.readouterr().out
