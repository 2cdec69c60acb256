"""How a bundle takes its place: what is said before, where that cannot be, and that what is written can be read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support_graphs import Shape, entry

from leadout.bundle import FileEntry, read_manifest
from leadout.errors import ExportError
from leadout.export.writing import aside, destination, write_manifest


def test_a_bundle_is_said_to_be_replaced_before_it_is(tmp_path: Path) -> None:
    said: list[str] = []
    out = tmp_path / "out"
    for old in (False, True):
        with aside(out, said.append) as folder:
            assert said == ([f"replacing the bundle at {out}, with its engines and tuned.json"] if old else [])
            (folder / "leadout.json").write_text("{}")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "bundle", tmp_path / ("x" * 300)):
        with pytest.raises(ExportError, match=f"cannot write '{place}': "), aside(destination(place), print):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_cannot_be_read_back_is_not_written(tmp_path: Path) -> None:
    target = entry(Shape(), "fp32", {"canonical": FileEntry("model.onnx", "", 0)})
    ends = dataclasses.replace(target, eos_token_ids=(-1, 3, target.vocab_size))
    write_manifest(tmp_path, {"target": ends}, {}, {})
    assert read_manifest(tmp_path).models["target"].eos_token_ids == (3,), "the others end no text"
    with pytest.raises(ExportError, match="models: target: precision must be one of fp32, fp16"):
        write_manifest(tmp_path, {"target": dataclasses.replace(target, precision="int2")}, {}, {})
