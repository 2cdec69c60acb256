"""Capturing a model takes most of an export's time: what one test captured serves the others, and other processes."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import pkgutil
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@contextlib.contextmanager
def shared(folder: Path) -> Iterator[None]:
    """While it lasts, models that are equal to the last weight are captured once, and kept in ``folder``. Where a test
    changed anything of the code that captures, it is asked anew."""
    import onnx_ir as ir

    from leadout.export import canonical

    capture, healthy = canonical.capture, everything()
    if getattr(capture, "shares", False):
        yield
        return

    def once(model: Any, shapes: Any, recurrence: Any = None, reader: Any = None) -> Any:
        now = everything()
        if any(now.get(name) is not value for name, value in healthy.items()):
            return capture(model, shapes, recurrence, reader)
        if not (place := folder / said_of(model, reader)).is_dir():
            with _written(place) as aside:
                made = capture(model, shapes, recurrence, reader)
                ir.save(made, aside / "capture.onnx", external_data="capture.data")
        return ir.load(place / "capture.onnx")

    once.shares = True  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canonical, "capture", once)
        yield


def offer(folder: Path, model: Any, captured: Path) -> None:
    """Let what lies in a folder, a capture of ``model`` for no head, serve others."""
    if not (place := folder / said_of(model)).is_dir():
        with _written(place) as aside:
            shutil.copytree(captured, aside, dirs_exist_ok=True)


@contextlib.contextmanager
def _written(place: Path) -> Iterator[Path]:
    """A folder for what becomes ``place``."""
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=place.parent))
    yield aside
    with contextlib.suppress(OSError):  # another process was sooner
        aside.rename(place)


def folder_of(run: Path) -> Path:
    """Where the processes of a run find each other's captures; ``run``: this one's folder for all its tests."""
    return (run.parent if "PYTEST_XDIST_WORKER" in os.environ else run) / "captures"


def everything() -> dict[str, Any]:
    """What the modules that make a graph of a model consist of, by name."""
    capture, drafts = (importlib.import_module(f"leadout.export.{package}") for package in ("capture", "drafts"))
    names = [
        module.name for each in (capture, drafts) for module in pkgutil.iter_modules(each.__path__, f"{each.__name__}.")
    ]
    found = {}
    for module in (*names, "leadout.export.graphs.experts", "leadout.export.graphs.sinks"):
        own = vars(importlib.import_module(module)).items()
        for name, value in ((name, value) for name, value in own if not name.startswith("__")):
            found[f"{module}.{name}"] = value
            if isinstance(value, type) and value.__module__ == module:
                found |= {f"{module}.{name}.{part}": each for part, each in vars(value).items()}
    return found


def said_of(*models: Any) -> str:
    """A digest of models' configurations and weights, wherever they were loaded from."""
    said = hashlib.sha256()
    for model in filter(None, models):
        config = json.dumps(anywhere(model.config.to_dict()), sort_keys=True, default=str)
        said.update(f"{type(model).__name__} {config}".encode())
        for name, weight in model.state_dict().items():
            said.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
            said.update(weight.detach().float().numpy().tobytes())
    return said.hexdigest()


def anywhere(config: Any) -> Any:
    """A configuration, and those in it, without the place that it was read from."""
    if isinstance(config, dict):
        return {str(key): anywhere(value) for key, value in config.items() if key != "_name_or_path"}
    return config
