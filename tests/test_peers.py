"""The comparison with other programs: its protocol, its arithmetic, and what it does with a program that fails."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from time import sleep
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

FAKE = """
import os, sys
sys.path.insert(0, {adapters!r})
from protocol import complete, run

def prepare(job):
    if "unprepared" in sys.argv[0]:
        raise RuntimeError("no converter for this")

def load(job):
    mode, asked = job["mode"], []
    print("a library that prints")
    if mode == "unloadable":
        raise RuntimeError("cannot be loaded")
    def answer(request):
        if "compare" in request:
            return {{"margin": 0.5, "near_tie": True}}
        asked.append(request)
        if mode == "mortal" and len(asked) == 3:
            os.write(2, b"killed by its own bug\\n")
            os._exit(1)
        tokens = [(request["prompt_ids"][0] + i) % 97 + 1 for i in range(request["max_new_tokens"])]
        if mode == "other":
            tokens[3] = 98
        cost = {{"auto": 1.0, "same": 2.0, "other": 4.0}}.get(mode, 1.0)
        return complete(tokens, cost + 0.5, 0.5, 1)
    return answer

run(prepare, load, ["numpy"])
"""


@pytest.fixture
def bench(root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`benchmarks/peers.py`, imported."""
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    return importlib.import_module("peers")


@pytest.fixture
def fakes(bench: ModuleType, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Adapters of invented programs, run in place of the real ones."""
    for name in ("leadout", "invented", "unprepared"):
        text = FAKE.format(adapters=str(root / "benchmarks" / "adapters"))
        (tmp_path / f"peer_{name}.py").write_text(text, encoding="utf-8")
    (tmp_path / "adapters").symlink_to(tmp_path)
    monkeypatch.setattr(bench, "HERE", tmp_path)
    return tmp_path


def peer(bench: ModuleType, name: str, *modes: str, **other: Any) -> Any:
    return bench.Peer(name, modes, **other)


def start(bench: ModuleType, fakes: Path, mode: str) -> Any:
    job = {"python": sys.executable, "mode": mode, "models": str(fakes)}
    return bench.Child(bench.command(peer(bench, "invented", mode), "serve", job), fakes / "log", {})


def rows(kinds: str, decode: float, first_tokens: int = 0) -> list[dict[str, Any]]:
    """An answer of ten tokens for each letter of ``kinds``: ``decode`` seconds after a prompt of one second."""
    timing = {"seconds": 1.0 + decode, "first_seconds": 1.0, "first_tokens": first_tokens}
    return [{"kind": kind, "token_ids": list(range(1, 11)), **timing} for kind in kinds]


def test_ratios_are_of_tokens_a_second_after_the_prompt_and_with_it(bench: ModuleType) -> None:
    sides = {("leadout", "auto"): rows("aab", 1.0), ("x", "plain"): rows("aa", 2.0) + rows("b", 0.5)}
    ours, theirs = bench.summarise(sides, ("leadout", "auto"), [0], greedy=False)
    assert ours["tokens_per_second"] == 10 and ours["tokens_per_second_with_prompt"] == 5
    assert theirs["tokens_per_second"] == pytest.approx(30 / 4.5) and theirs["ratio"] == pytest.approx(1.5)
    assert theirs["ratio_by_kind"] == {"a": 2.0, "b": 0.5} and theirs["ratio_median"] == 2.0
    assert theirs["ratio_with_prompt"] == pytest.approx(7.5 / 6) and "divergences" not in theirs
    assert {entry["ratio"] for entry in (ours,)} == {1.0}


def test_tokens_that_came_with_the_prompt_are_not_decoding(bench: ModuleType) -> None:
    report = importlib.import_module("adapters.report")
    assert report.rate(rows("a", 1.0, first_tokens=4)) == 6 and report.whole_rate(rows("a", 1.0, 4)) == 5


def test_an_answer_that_was_whole_with_the_prompt_says_nothing_of_decoding(bench: ModuleType) -> None:
    whole = rows("a", 0.0, first_tokens=10)
    sides = {("leadout", "auto"): whole + rows("b", 1.0), ("x", "plain"): rows("a", 1.0) + rows("b", 2.0)}
    _, theirs = bench.summarise(sides, ("leadout", "auto"), [0], greedy=False)
    assert theirs["ratio_median"] == 2.0 and theirs["ratio_by_kind"]["b"] == 2.0
    assert math.isnan(theirs["ratio_by_kind"]["a"]) and theirs["ratio"] == pytest.approx(10 / (20 / 3))


@pytest.mark.parametrize(
    ("ours", "other", "position"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 5, 3], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1, 0, 3], [1, 7, 9], None),  # our text ended at 0
        ([1, 2, 0], [4, 2, 0], 0),
        ([0, 2], [5, 5], None),
    ],
)
def test_where_two_texts_part(bench: ModuleType, ours: list[int], other: list[int], position: int | None) -> None:
    assert importlib.import_module("adapters.report").divergence(ours, other, [0]) == position


def test_the_verdict_is_on_the_fastest_mode_of_each_and_names_where_leadout_is_behind(bench: ModuleType) -> None:
    report = importlib.import_module("adapters.report")
    sides = {("leadout", "auto"): rows("ab", 1.0), ("leadout", "plain"): rows("ab", 0.1)}
    sides |= {("x", "plain"): rows("ab", 3.0), ("x", "draft"): rows("a", 3.0) + rows("b", 0.5)}
    summary = bench.summarise(sides, ("leadout", "auto"), [0], greedy=True)
    assert report.verdicts(summary) == ["best of x: draft; Leadout is 1.75 times as fast; BEHIND on b 0.50"]


def test_who_writes_another_model_s_text_is_named(bench: ModuleType) -> None:
    """Near-ties are rounding, a few others quantisation; on most prompts at once they are neither."""
    report = importlib.import_module("adapters.report")
    apart, near = ({"prompt": 0, "position": 0, "margin": m, "near_tie": m < 0.2} for m in (5.5, 0.1))
    sides = [("us", None), ("right", [near] * 4), ("coarse", [apart, apart, near]), ("wrong", [apart, apart, apart])]
    sides.append(("not looked at", [{"prompt": 0, "position": 0}] * 4))
    summary = [{"peer": name, "mode": "plain"} | ({} if d is None else {"divergences": d}) for name, d in sides]
    found = report.strangers(summary, prompts=4)
    assert [line.split(":")[0] for line in found] == ["wrong plain"]
    assert "on 3 of 4 prompts (median margin 5.5)" in found[0]


def test_a_child_is_stopped_between_requests_and_answers_in_order(bench: ModuleType, fakes: Path) -> None:
    child = start(bench, fakes, "same")
    try:
        assert child.hello["versions"].keys() == {"numpy"}
        for first in (5, 6):
            assert state(child) == "T"
            answer = child.ask({"prompt_ids": [first], "max_new_tokens": 2})
            assert answer["token_ids"] == [first + 1, first + 2] and answer["first_tokens"] == 1
    finally:
        child.close()
    child.close()
    assert child.process.returncode is not None


def state(child: Any) -> str:
    """The kernel's letter for what the process does."""
    for _ in range(500):  # a signal takes a moment
        sleep(0.01)
        letter = Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if letter == "T":
            break
    return letter


def test_a_child_that_dies_says_why(bench: ModuleType, fakes: Path) -> None:
    with pytest.raises(bench.PeerError, match="cannot be loaded"):
        start(bench, fakes, "unloadable")
    child = start(bench, fakes, "mortal")
    request = {"prompt_ids": [1], "max_new_tokens": 2}
    child.ask(request), child.ask(request)
    for _ in range(2):
        with pytest.raises(bench.PeerError, match="killed by its own bug"):
            child.ask(request)
    child.close()


def test_a_comparison_keeps_what_works_and_names_what_fails(bench: ModuleType, fakes: Path, tmp_path: Path) -> None:
    peers = [
        peer(bench, "leadout", "auto"),
        peer(bench, "invented", "same", "other", "unloadable", "mortal", int8="Q8", sampled="biased"),
        peer(bench, "unprepared", "plain"),
        peer(bench, "refusing", "plain", refused="too new"),
    ]
    prompts = [{"kind": kind, "ids": [number, 3]} for number, kind in enumerate("abab")]
    result = bench.Comparison(tmp_path / "env", 2, 8, 7).measure(peers, "demo", "int8", 0.0, prompts)
    assert [(side["peer"], side["mode"]) for side in result["sides"]] == [
        ("leadout", "auto"),
        ("invented", "same"),
        ("invented", "other"),
    ]
    assert {(one["peer"], one["mode"]): one["reason"] for one in result["failures"]} == {
        ("invented", "unloadable"): "RuntimeError: cannot be loaded",
        ("invented", "mortal"): "killed by its own bug",
        ("unprepared", "(all modes)"): "RuntimeError: no converter for this",
        ("refusing", "(all modes)"): "no int8: too new",
    }
    same, other = result["sides"][1:]
    assert (same["ratio"], other["ratio"]) == (2.0, 4.0) and same["divergences"] == []
    parted = {"position": 3, "margin": 0.5, "near_tie": True}
    assert other["divergences"] == [{"prompt": number, **parted} for number in range(4)]
    assert len(result["answers"]["invented same"]) == 4 and result["remarks"] == {"invented": "Q8"}
    text = bench.table(result)
    assert "0/4, earliest at 3, 4 near-ties" in text and "invented mortal: not measured: killed by its own bug" in text
    assert "best of invented: same; Leadout is 2.00 times as fast" in text


def test_a_reason_does_not_say_where_this_machine_keeps_things(bench: ModuleType, tmp_path: Path) -> None:
    comparison = bench.Comparison(tmp_path / "env", 2, 8, 7)
    comparison.fail(("invented", "plain"), bench.PeerError(f"no model at {tmp_path}/env/models/grown"))
    assert comparison.failures[0]["reason"] == "no model at models/grown"


def test_without_leadout_nothing_is_compared(bench: ModuleType, fakes: Path, tmp_path: Path) -> None:
    comparison = bench.Comparison(tmp_path / "env", 2, 8, 7)
    with pytest.raises(bench.UsageError, match="without leadout auto nothing can be compared"):
        comparison.measure([peer(bench, "invented", "same")], "demo", "fp32", 0.0, [{"kind": "a", "ids": [1]}])


def test_prompts_take_turns_by_kind_and_can_be_limited(bench: ModuleType, root: Path) -> None:
    every = bench.read_prompts(root / "benchmarks" / "kinds.jsonl", 99)
    few = bench.read_prompts(root / "benchmarks" / "kinds.jsonl", 2)
    assert len(every) == 48 and few == every[:8] and len({row["kind"] for row in few[:4]}) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pairs", "demo,huge"], "'huge' (possible, between commas: demo, grown, large, mixture)"),
        (["--precisions", "int3"], "possible, between commas: fp32, int8, int4"),
        (["--peers", "genai,vllm"], "possible, between commas: genai, openvino, transformers, llama"),
        (["--temperatures", "0,-1"], "possible, between commas: numbers from 0"),
        (["--limit-per-kind", "0"], "x>=1"),
    ],
)
def test_bad_options_are_refused_with_what_is_possible(bench: ModuleType, options: list[str], message: str) -> None:
    result = CliRunner().invoke(bench.main, options)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())


def test_a_failed_installation_gives_its_last_line(bench: ModuleType, tmp_path: Path) -> None:
    environments = importlib.import_module("adapters.environments")
    fails = [sys.executable, "-c", "print('working'); print('no such wheel'); raise SystemExit(3)"]
    with pytest.raises(bench.PeerError, match=r"^no such wheel$"):
        environments.run(fails, tmp_path / "log", 20)
    with pytest.raises(bench.PeerError, match="took longer than 0 s"):
        environments.run([sys.executable, "-c", "input()"], tmp_path / "log", 0.0)
