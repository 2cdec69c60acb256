"""scripts/setup: what it says where it cannot make the environment, and that it believes no other checkout's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """As much of one as the script looks at, in a folder whose name has a space."""
    folder = tmp_path / "a checkout"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(root / "scripts" / "setup", folder / "scripts")
    shutil.copy(root / "pyproject.toml", folder)
    return folder


def refusal(checkout: Path, python: str) -> str:
    """What it says, called from elsewhere."""
    environment = os.environ | {"LEADOUT_PYTHON": python}
    command = [str(checkout / "scripts" / "setup")]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    return done.stderr


def interpreter(folder: Path, body: str) -> str:
    """One that answers as the shell script ``body`` does."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_an_older_python_is_refused(checkout: Path) -> None:
    assert "3.11 or later; name one with LEADOUT_PYTHON" in refusal(checkout, interpreter(checkout, "exit 1"))


def test_a_python_without_venv_leaves_nothing_half_made(checkout: Path) -> None:
    said = refusal(checkout, interpreter(checkout, '[ "$1" = -c ] || { mkdir .venv; exit 1; }'))
    assert said.count("\n") == 1 and "makes no environments" in said
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("shebang", ["/another/checkout/.venv/bin/python", None], ids=["copied", "halfway"])
def test_an_environment_that_is_not_this_checkout_s_is_not_used(checkout: Path, shebang: str | None) -> None:
    programs = checkout / ".venv" / "bin"
    programs.mkdir(parents=True)
    interpreter(programs, "exit 0")  # that has all it is asked for, and installs nothing
    if shebang is not None:
        (programs / "pip").write_text(f"#!{shebang}\n", encoding="utf-8")
    said = refusal(checkout, sys.executable)
    assert said.count("\n") == 1 and f"{checkout / '.venv'} is of another folder" in said
    assert programs.exists(), "what it did not make it does not remove"
