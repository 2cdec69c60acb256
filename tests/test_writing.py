"""How a bundle takes its place: what is said before, where that cannot be, and that what is written can be read."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support_graphs import Shape, entry

from leadout.bundle import MANIFEST, FileEntry, read_manifest
from leadout.errors import ExportError
from leadout.export.writing import _lock, aside, destination, write_manifest


def test_a_bundle_is_said_to_be_replaced_before_it_is(tmp_path: Path) -> None:
    said: list[str] = []
    out = tmp_path / "out"
    for old in (False, True):
        with aside(out, said.append) as folder:
            assert said == ([f"replacing the bundle at {out}, with its engines and tuned.json"] if old else [])
            (folder / "leadout.json").write_text("{}")


def test_a_bundle_that_was_read_only_is_replaced_and_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    out = destination("~/out")
    (out / "target").mkdir(parents=True)
    for name in ("leadout.json", "target/model.onnx"):
        (out / name).touch()
    (out / "target").chmod(0o500)
    with aside(out, print) as folder:
        (folder / "leadout.json").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and [path.name for path in out.iterdir()] == [MANIFEST]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "bundle", tmp_path / ("x" * 300)):
        with pytest.raises(ExportError, match=f"cannot write '{place}': "), aside(destination(place), print):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("values", [np.ones(1 << 16), np.ones((300, 300)).T], ids=["in order", "turned"])
def test_a_disk_that_is_full_as_numpy_says_it_is_told(tmp_path: Path, values: np.ndarray) -> None:
    """It gives no number of an error."""
    with (
        pytest.raises(ExportError, match=r"^cannot write beside .*out.: .*writ.*; an export takes 8 bytes"),
        aside(tmp_path / "out", print),
        Path("/dev/full").open("wb") as full,
    ):
        values.tofile(full)
    with pytest.raises(OSError, match="no model"), aside(tmp_path / "out", print):
        raise OSError("no model of that name")
    assert not list(tmp_path.iterdir())


def test_a_mount_point_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the volume of a container is: at the end it could not be renamed."""
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path)
    with pytest.raises(ExportError, match=rf"'{tmp_path}' is a mount point, .*; choose a place below it$"):
        destination(tmp_path)
    assert destination(tmp_path / "bundle") == tmp_path / "bundle"


def test_where_one_is_nothing_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is there would be in a directory that is gone."""
    free, below = tmp_path / "free", tmp_path / "bundle" / "target"
    free.mkdir()
    below.mkdir(parents=True)
    (below.parent / MANIFEST).touch()
    (tmp_path / "link").symlink_to(below.parent)
    for here, out in (free, "."), (free, free), (below, ".."), (tmp_path / "link" / "target", below.parent):
        monkeypatch.chdir(here)
        with pytest.raises(ExportError, match=rf"'{out}' is where you are, and a bundle replaces what is there"):
            destination(out)
        assert destination("other") == Path.cwd() / "other"


def test_what_cannot_be_read_back_is_not_written(tmp_path: Path) -> None:
    target = entry(Shape(), "fp32", {"canonical": FileEntry("model.onnx", "", 0)})
    ends = dataclasses.replace(target, eos_token_ids=(-1, 3, target.vocab_size))
    write_manifest(tmp_path, {"target": ends}, {}, {})
    assert read_manifest(tmp_path).models["target"].eos_token_ids == (3,), "the others end no text"
    with pytest.raises(ExportError, match="models: target: precision must be one of fp32, fp16"):
        write_manifest(tmp_path, {"target": dataclasses.replace(target, precision="int3")}, {}, {})


@pytest.fixture(scope="module")
def ended() -> int:
    """The number of a process that is no more."""
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return int(done.stdout)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_a_killed_export_left_is_removed(tmp_path: Path, ended: int) -> None:
    (tmp_path / f".out.{ended}.partial" / "target").mkdir(parents=True)
    (tmp_path / f".out.{os.getpid()}.partial").mkdir()  # a container's processes have the same numbers every time
    said: list[str] = []
    with aside(tmp_path / "out", said.append) as folder:
        assert names(tmp_path) == {folder.name} and not any(folder.iterdir())
    assert names(tmp_path) == {"out"}
    assert said == [f"removing what an export that was killed left beside {tmp_path / 'out'}"] * 2


def test_what_may_be_another_s_is_left_alone(tmp_path: Path, ended: int) -> None:
    kept = {f".out.{os.getppid()}.partial", f".out.{ended}.partial", f".other.{ended}.partial", ".out.x.partial"}
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / f".out.{ended}.old").symlink_to(tmp_path / ".out.x.partial")
    with _lock(tmp_path / f".out.{ended}.partial"), aside(tmp_path / "out", print):
        pass
    assert names(tmp_path) == kept | {"out", f".out.{ended}.old"}


def test_a_bundle_that_a_killed_export_had_moved_away_comes_back(tmp_path: Path, ended: int) -> None:
    (tmp_path / f".out.{ended}.partial").mkdir()
    (tmp_path / f".out.{ended}.old").mkdir()
    (tmp_path / f".out.{ended}.old" / "leadout.json").write_text("an older bundle")
    with pytest.raises(KeyboardInterrupt), aside(tmp_path / "out", print):
        raise KeyboardInterrupt
    assert names(tmp_path) == {"out"} and (tmp_path / "out" / "leadout.json").read_text() == "an older bundle"


def test_a_bundle_is_not_lost_between_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def interrupted(path: Path, to: Path) -> Path:
        rename(path, to)
        if to.name.endswith(".old"):
            raise KeyboardInterrupt
        return to

    monkeypatch.setattr(Path, "rename", interrupted)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "leadout.json").write_text("an older bundle")
    with pytest.raises(KeyboardInterrupt), aside(tmp_path / "out", print):
        pass
    assert names(tmp_path) == {"out"} and (tmp_path / "out" / "leadout.json").read_text() == "an older bundle"


EXPORTS = """
import sys, time
from pathlib import Path
from leadout.export.writing import aside

for i in range(80):
    with aside(Path(sys.argv[1]), lambda line: None) as folder:
        (folder / "leadout.json").write_text(sys.argv[2])
        (folder / "model.onnx").write_text(sys.argv[2])
        time.sleep(0.001 * (i % 3))
"""


def test_exports_that_end_at_one_moment_take_the_place_in_turn(tmp_path: Path) -> None:
    """None fails for another's renaming, after minutes of work; what is there in the end is one's, whole."""
    out = tmp_path / "out"
    begun = [subprocess.Popen([sys.executable, "-c", EXPORTS, str(out), name]) for name in "abc"]
    assert [process.wait() for process in begun] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "leadout.json").read_text() == (out / "model.onnx").read_text()
