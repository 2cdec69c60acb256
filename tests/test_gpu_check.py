"""The GPU check's own path, on the CPU: every section runs, and what is not there is skipped with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from leadout.engines.toy import ToyEngine, table_law
from leadout.errors import EngineError
from leadout.scripts.gpu_check import GROWN, Report, Size, build, main
from leadout.scripts.gpu_measure import cost_table, stale_slots, units_for

pytestmark = pytest.mark.usefixtures("captures_once")


@pytest.mark.slow
def test_a_dry_run_measures_everything_there_is(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = map(str, tiny_pair)
    path = tmp_path / "results" / "cpu.json"
    done = CliRunner().invoke(main, ["--dry-run", "--target", target, "--draft", draft, "-o", str(path)])
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    assert json.loads(done.stdout) == found
    tokens = found["cpu: same tokens as the CPU"]
    assert {mode: len(rows) for mode, rows in tokens.items()} == {"greedy": 6, "coupled": 6}
    assert all(row["ok"] and row["same"] == row["of"] == 2 for rows in tokens.values() for row in rows.values())
    assert all(row == {"difference": 0.0, "finite": True} for row in found["cpu: stale slots"].values())
    assert "without CUDA graphs" in found["cpu: CUDA graphs, ms"]["skipped"]
    assert found["small: export"]["parameters"] > 5e5
    costs = found["small, cpu"]
    assert costs["speed"]["speculative"]["tokens_per_second"] > 0 and costs["speed"]["identical_outputs"] is True
    assert {rows: set(table) for rows, table in costs["step_ms"].items()} == {r: {"1", "2", "3"} for r in "12"}
    nothing = {"target": 0.0, "draft": 0.0}
    assert costs["speed"]["bytes_moved_a_round"] == {"greedy": nothing, "coupled": nothing}
    ahead = costs["draft_ahead"]
    assert ahead["identical_outputs"] is True and ahead["tried"] > 0 and min(ahead["with"], ahead["without"]) > 0


def test_a_section_without_time_or_luck_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    path = tmp_path / "report.json"

    def missing() -> None:
        raise EngineError("no such thing")

    def broken() -> None:
        raise ValueError("twice\nsaid")

    report = Report(1.0, path)
    assert report.section("late", lambda: 1, seconds=100) is None
    assert report.section("missing", missing) is None
    assert report.section("broken", broken) is None
    assert report.section("fine", lambda: {"x": 1}) == {"x": 1}
    found: dict[str, Any] = json.loads(path.read_text())
    assert "out of time" in found["late"]["skipped"]
    assert found["missing"] == {"skipped": "EngineError: no such thing"}
    assert found["broken"] == {"failed": "ValueError: twice"}
    assert found["fine"] == {"x": 1} and set(found["seconds"]) == {"late", "missing", "broken", "fine"}


class Leaking(ToyEngine):
    """Its first logit follows the newest token of all slots, those behind the row's length included."""

    def _logits(self, row: int, length: int) -> np.ndarray:
        logits = super()._logits(row, length).copy()
        logits[0] += float(self._cache[row].max())
        return logits


def test_stale_slots_are_noticed() -> None:
    law = table_law(101)
    assert stale_slots(ToyEngine(law, 101)) == {"difference": 0.0, "finite": True}
    assert stale_slots(Leaking(law, 101))["difference"] > 0


def test_a_cost_table_has_what_the_engine_takes() -> None:
    table = cost_table(ToyEngine(table_law(5), 5), (1, 2), (1, 3), past=0)  # a toy refuses slots never written
    assert {rows: set(widths) for rows, widths in table.items()} == {"1": {"1", "2"}, "3": {"1", "2"}}
    assert all(ms > 0 for widths in table.values() for ms in widths.values())


def test_grown_targets_have_about_the_parameters_they_are_named_for() -> None:
    for parameters, layers in GROWN.values():
        units = units_for(parameters, 384, layers)
        assert layers * (3 * 384 * units + 3 * 384 * 384) == pytest.approx(parameters, rel=0.02)


def test_a_build_that_is_refused_is_the_reason(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="leadout build: "):
        build(tmp_path, "tensorrt", Size(dry=True))
