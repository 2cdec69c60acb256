"""What is installed is what is here: every package folder, nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

OUTSIDE = {"tests", "build", "dist", "models", "bundles", "benchmarks", "docs"}


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def mapped(project: dict[str, Any]) -> dict[str, str]:
    """Packages that live in another project's namespace: name to folder here (optimum-cli's commands)."""
    folders: dict[str, str] = project["tool"]["setuptools"]["package-dir"]
    return {name: folder for name, folder in folders.items() if name != "leadout"}


def package_folders(root: Path) -> list[Path]:
    """Folders of the checkout that are packages."""
    inits = (init.parent.relative_to(root) for init in root.rglob("__init__.py"))
    return [folder for folder in inits if not any(part.startswith(".") or part in OUTSIDE for part in folder.parts)]


def package_files(root: Path, project: dict[str, Any]) -> set[str]:
    """Every module of the package, as a wheel names it."""
    ours = {
        f"leadout/{path.relative_to(root)}" for folder in package_folders(root) for path in (root / folder).glob("*.py")
    }
    theirs = {
        f"{name.replace('.', '/')}/{path.name}"
        for name, folder in mapped(project).items()
        for path in (root / folder).glob("*.py")
    }
    return ours | theirs


def test_the_packages_listed_are_the_folders_with_an_init(root: Path, project: dict[str, Any]) -> None:
    folders = {".".join(["leadout", *folder.parts]) for folder in package_folders(root)}
    assert set(project["tool"]["setuptools"]["packages"]) == folders | set(mapped(project))


def test_the_tests_folder_is_no_package_and_the_root_holds_few_modules(root: Path) -> None:
    assert not (root / "tests" / "__init__.py").exists()
    assert {path.name for path in root.glob("*.py")} == {"__init__.py", "__main__.py", "bundle.py", "errors.py"}


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_its_data(root: Path, project: dict[str, Any], tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "models", "bundles")
    shutil.copytree(root, source, ignore=ignored)
    gone = source / "build" / "lib" / "leadout" / "gone.py"  # a module that was there when a wheel was last made
    gone.parent.mkdir(parents=True)
    gone.touch()
    program = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    names = set(zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]).namelist())
    data = {
        f"{package.replace('.', '/')}/{name}"
        for package, files in project["tool"]["setuptools"]["package-data"].items()
        for name in files
    }
    content = {name for name in names if ".dist-info/" not in name}
    assert content == package_files(root, project) | data
    assert any(name.endswith("licenses/LICENSE") for name in names)
