"""The prompts that benchmarks use, and the program that counts who proposed what."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from leadout.engines.toy import ToyEngine
from leadout.runtime.controller.costs import Cost
from leadout.runtime.settings import DRAFTS
from leadout.scripts.make_prompts import HELD_OUT, main


@pytest.mark.parametrize(("options", "name", "each"), [((), "prompts.jsonl", 10), (("--kinds",), "kinds.jsonl", 12)])
def test_prompts_are_of_four_kinds_and_from_held_out_files(
    root: Path, options: tuple[str, ...], name: str, each: int
) -> None:
    rows = [json.loads(line) for line in (root / "benchmarks" / name).read_text(encoding="utf-8").splitlines()]
    assert Counter(row["kind"] for row in rows) == dict.fromkeys(("completion", "prose", "table", "edit"), each)
    assert {row["file"] for row in rows} <= set(HELD_OUT.read_text(encoding="utf-8").split())
    made = CliRunner().invoke(main, options).stdout.splitlines()
    assert [json.loads(line)["kind"] for line in made] == [row["kind"] for row in rows]
    assert made == CliRunner().invoke(main, options).stdout.splitlines(), "the same every time"


def test_an_edit_is_a_function_and_copies_of_it_with_names_replaced_the_last_one_half(root: Path) -> None:
    lines = (root / "benchmarks" / "kinds.jsonl").read_text(encoding="utf-8").splitlines()
    for row in (json.loads(line) for line in lines):
        if row["kind"] != "edit":
            continue
        prompt = row["prompt"]
        heads = [next(line for line in prompt.splitlines() if f"_{i}(" in line) for i in (2, 3, 4)]
        whole, *copies = re.split("|".join(map(re.escape, heads)), prompt)
        assert heads[0].split("_2(")[0] + "(" in whole
        assert re.sub(r"_2\b", "_3", copies[0]) == copies[1] and 0 < len(copies[2]) < len(copies[1])


def test_no_prompt_ends_where_a_token_goes_on(root: Path) -> None:
    for name in ("prompts.jsonl", "kinds.jsonl"):
        for line in (root / "benchmarks" / name).read_text(encoding="utf-8").splitlines():
            assert json.loads(line)["prompt"] == json.loads(line)["prompt"].rstrip()


@pytest.mark.slow
def test_drafters_are_counted_over_kinds(root: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "kinds.jsonl"
    rows = [{"kind": kind, "prompt": text} for kind, text in (("a", "x = 1\nx = 1\n"), ("b", "import"), ("a", "y"))]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    command = [sys.executable, str(root / "benchmarks" / "drafters.py"), str(tiny_bundle), "--prompts", str(path)]
    options = ["--max-new-tokens", "12", "--json"]
    report = json.loads(subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout)
    assert list(report) == ["a", "b"] and all(set(kind) == set(DRAFTS) - {"siblings"} for kind in report.values())
    for row in (row for kind in report.values() for row in kind.values()):
        accepted = sum(share["accepted"] for share in row["by_drafter"].values())
        assert accepted + row["rounds"] >= row["tokens"] and row["tokens_per_round"] == row["tokens"] / row["rounds"]
    path.write_text("{}", encoding="utf-8")
    assert "line 1: expected" in subprocess.run(command, capture_output=True, text=True).stderr


@pytest.mark.slow
def test_siblings_are_counted_by_their_number(root: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("x = 1\nx = 1\n", "import")), encoding="utf-8")
    command = [sys.executable, str(root / "benchmarks" / "siblings.py"), str(tiny_bundle), "--prompts", str(path)]
    options = ["--max-new-tokens", "6", "--limit", "2", "--temperature", "0.5"]
    shown = subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout.splitlines()
    assert shown[0].split() == ["tokens", "a", "round", "1", "2", "4", "8", "answers"]
    report = json.loads(subprocess.run([*command, *options, "--json"], check=True, capture_output=True).stdout)
    assert [line.split()[0] for line in shown[1:]] == list(report) == ["siblings", "model", "suffix", "auto"]
    for draft, cells in report.items():
        assert list(cells) == (["2", "4", "8"] if draft == "siblings" else ["1", "2", "4", "8"])
        for n, cell in cells.items():
            assert cell["tokens"] <= 12 * int(n) and sum(cell["accepted"].values()) + cell["rounds"] >= cell["tokens"]
    refused = subprocess.run([*command, "--temperature", "0"], capture_output=True, text=True)
    assert refused.returncode and "at 0 all answers are the same" in refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("draft", [[], ["--useless", "--no-exact"]])
def test_the_grid_has_a_cell_for_all_it_was_asked(
    draft: list[str], root: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    path, cells = tmp_path / "kinds.jsonl", tmp_path / "cells.json"
    rows = [{"kind": kind, "prompt": text} for kind in "ab" for text in ("x = 1\nx = 1\n", f"import {kind}")]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    command = [sys.executable, str(root / "benchmarks" / "never_slower.py"), str(tiny_bundle), "--prompts", str(path)]
    options = [
        "--max-new-tokens",
        "8",
        "--limit",
        "2",
        "--batches",
        "1",
        "3",
        "--temperatures",
        "0",
        "--json",
        str(cells),
    ]
    done = subprocess.run([*command, *options, *draft], capture_output=True, text=True)
    assert done.returncode in (0, 1) and "3 cells" in done.stdout, done.stderr
    found = json.loads(cells.read_text(encoding="utf-8"))["cells"]
    assert [(cell["kind"], cell["batch"]) for cell in found] == [("a", 1), ("b", 1), ("all", 3)]
    assert done.returncode == any(cell["speedup"] < 0.97 for cell in found)


@pytest.mark.slow
def test_lengths_are_swept_for_each_kind(root: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "kinds.jsonl", tmp_path / "lengths.json"
    rows = [{"kind": kind, "prompt": text} for kind, text in (("a", "x = 1\nx = 1\n"), ("b", "import"), ("a", "y"))]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    command = [sys.executable, str(root / "benchmarks" / "lengths.py"), str(tiny_bundle), "--prompts", str(path)]
    options = ["--lengths", "1", "3", "--max-new-tokens", "8", "--json", str(out)]
    for by_kind in (["--by-kind"], []):
        subprocess.run([*command, *options, *by_kind], check=True, capture_output=True, text=True)
        report = json.loads(out.read_text(encoding="utf-8"))
        for result in (report["a"], report["b"]) if by_kind else (report,):
            assert set(result["tokens_per_second"]) == {"plain", "1", "3", "auto"}
            assert result["auto_of_best"] == result["tokens_per_second"]["auto"] / max(
                result["tokens_per_second"][length] for length in ("1", "3")
            )
    path.write_text('{"prompt": "x"}', encoding="utf-8")
    assert 'expected {"kind"' in subprocess.run([*command, "--by-kind"], capture_output=True, text=True).stderr


@pytest.mark.parametrize("exact", [True, False])
def test_prices_are_all_that_is_known_of_a_priced_device(
    exact: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that was measured on the real one is noise. What exactness costs is paid by whoever wants it."""
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    devices = importlib.import_module("devices")
    measured = (Cost("target", 1, 0, 1, 0.5),)
    toy = ToyEngine(lambda context: np.ones(3) / 3, 3)
    toy.reset(1)
    toy.reserve(8)
    pair = SimpleNamespace(target=toy, draft=None, known=measured, exact=exact)
    with devices.priced(pair, None, "demo-int8") as bare:
        assert pair.known == ()
        took = []
        for engine in (bare, pair.target):
            began = engine._clock.now
            engine.forward(np.zeros((1, 1), np.int64), np.zeros(1, np.int64))
            took.append(engine._clock.now - began)
    assert took == pytest.approx([0.62e-3, 0.7e-3 if exact else 0.62e-3])


@pytest.mark.slow
def test_parts_are_taken_away_one_at_a_time_and_put_back(root: Path, tiny_bundle: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "kinds.jsonl", tmp_path / "parts.json"
    rows = [{"kind": kind, "prompt": text} for kind in "ab" for text in ("x = 1\nx = 1\n", f"import {kind}")]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    command = [sys.executable, str(root / "benchmarks" / "parts.py"), str(tiny_bundle), "--prompts", str(path)]
    reports = []
    for texts in ("0", "0", "1"):
        options = ["--max-new-tokens", "24", "--texts", texts, "--json", str(out)]
        subprocess.run([*command, *options], check=True, capture_output=True, text=True)
        reports.append(json.loads(out.read_text(encoding="utf-8"))["rates"])
    assert reports[0] == reports[1] != reports[2], "priced: the same every time"
    assert len(reports[0]) == 15 and len(set(reports[0].values())) > 3, "most parts do something"


@pytest.mark.slow
def test_known_edits_are_written_sooner_by_who_knows_of_changes(root: Path) -> None:
    """At prices that are no measurement: what is counted is the same everywhere."""
    command = [sys.executable, str(root / "benchmarks" / "edits.py"), "--limit", "8"]
    head, *lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert head.split()[:2] == ["changed", "texts"]
    found = {line[:24].strip(): line[24:].split() for line in lines}
    assert {row[0] for row in found.values()} == {"8"}
    assert float(found["names numbered"][4]) > 1.3
    assert all(float(row[4]) > 0.95 for row in found.values()) and float(found["nothing"][4]) <= 1.01


@pytest.mark.parametrize(
    ("program", "arguments", "code", "reason"),
    [
        ("lengths.py", ["nowhere"], 3, "no bundle at 'nowhere'"),
        ("lengths.py", ["nowhere", "--json", "no/such/file"], 2, "--json: 'no/such/file' is in no directory"),
        ("never_slower.py", ["nowhere", "--limit", "0"], 2, "--limit: '0' is not a number from 1 on"),
        ("drafters.py", ["nowhere", "--prompts", "none.jsonl"], 2, "cannot read 'none.jsonl'"),
        ("drafters.py", ["nowhere", "--prompts", "/dev/null"], 2, "no prompts in it"),
        ("identity.py", ["nowhere"], 1, "no bundle at 'nowhere'"),
        ("edits.py", ["--priced", "nosuch"], 2, "no prices of 'nosuch'"),
    ],
)
def test_what_a_program_refuses_is_told_at_once(
    root: Path, tmp_path: Path, program: str, arguments: list[str], code: int, reason: str
) -> None:
    """Before anything is measured: it could take an hour."""
    command = [sys.executable, str(root / "benchmarks" / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    assert reason in done.stderr.splitlines()[-1]


def test_what_was_measured_is_kept_though_the_program_is_stopped(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    never_slower, programs = (importlib.import_module(name) for name in ("never_slower", "programs"))
    cell = {"bundle": "b", "kind": "k", "temperature": 0.0, "batch": 1, "speedup": 2.0, "with_prompt": 1.5, "plain": 9}

    def cells(*_: object) -> Iterator[dict[str, object]]:
        yield cell
        raise KeyboardInterrupt

    monkeypatch.setattr(never_slower, "grid", cells)
    monkeypatch.setattr(sys, "argv", ["never_slower.py", "b", "--json", str(tmp_path / "cells.json")])
    with pytest.raises(SystemExit) as ended:
        programs.run(never_slower.main)
    assert ended.value.code == 130 and capsys.readouterr().err == "never_slower.py: stopped by SIGINT\n"
    assert json.loads((tmp_path / "cells.json").read_text(encoding="utf-8"))["cells"] == [cell]
