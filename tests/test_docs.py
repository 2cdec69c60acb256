"""The documentation does not lie: links lead somewhere, commands and names exist."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import click
import pytest

import leadout
from leadout.runtime.pair import Result
from leadout.scripts.cli import COMMANDS

PAGES = ("README.md", "CHANGELOG.md", "benchmarks/README.md", *(f"docs/{name}.md" for name in (
    "architecture", "drafts", "edge", "exactness", "guide", "notes"
)))  # fmt: skip
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
    assert named or page != "docs/architecture.md"


@pytest.mark.parametrize("page", PAGES)
def test_sections_that_are_linked_exist(root: Path, page: str) -> None:
    text = (root / page).read_text(encoding="utf-8")
    for link, section in re.findall(r"\]\(([^)#\s:]*)#([\w-]+)\)", text):
        there = (root / page).parent / link if link else root / page
        heads = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
        assert section in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}, (link, section)


def commands_of(root: Path, page: str) -> list[list[str]]:
    blocks = [body for language, body in BLOCK.findall((root / page).read_text(encoding="utf-8")) if language == "bash"]
    lines = [line for body in blocks for line in body.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("leadout ")]


@pytest.mark.parametrize("page", PAGES)
def test_the_command_line_knows_every_command_of_a_page(root: Path, page: str) -> None:
    for _, name, *args in commands_of(root, page):
        command: click.Command = importlib.import_module(f"leadout.scripts.cmd_{name}").command
        command.make_context(name, args)


def test_the_guide_shows_every_command(root: Path) -> None:
    assert {words[1] for words in commands_of(root, "docs/guide.md")} == set(COMMANDS)


def test_every_file_is_on_the_map(root: Path) -> None:
    text = (root / "docs/architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named: set[Path] = set()
    for row in rows:
        folder = "."  # of the last name that says one
        for name in re.findall(r"`([\w./*]+)`", row):
            folder = str(Path(name).parent) if "/" in name else folder
            named |= set(root.glob(f"{folder}/{Path(name).name}"))
    folders = ("export", "engines", "runtime", "scripts")
    files = {path for folder in folders for path in (root / folder).rglob("*.py") if path.name != "__init__.py"}
    files.add(root / "__main__.py")
    assert {str(path.relative_to(root)) for path in files - named} == set()


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
def test_the_guide_s_example_runs(root: Path, tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (root / "docs/guide.md").read_text(encoding="utf-8")
    (example,) = [body for language, body in BLOCK.findall(text) if language == "python"]
    exec(compile(example.replace("bundles/demo", str(tiny_bundle)), "guide.md", "exec"), {})
    assert set(ast.literal_eval(capsys.readouterr().out)) <= {"class", "function", "module"}


@pytest.mark.slow
def test_the_readme_s_example_runs(root: Path, tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    example = next(body for language, body in BLOCK.findall(text) if language == "python")
    exec(compile(example.replace("bundles/demo", str(tiny_bundle)), "README.md", "exec"), {})
    assert capsys.readouterr().out
