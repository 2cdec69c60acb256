"""What is promised of a draft length, how it is measured, and which device's costs a bundle keeps."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support_runtime import collect, toy_pair

from leadout.bundle import Bundle, file_entry
from leadout.engines.base import ANY, FROM_TWO
from leadout.errors import BundleError
from leadout.runtime.controller import tuned
from leadout.runtime.controller.costs import PARTS, Cost, Costs
from leadout.runtime.controller.tempo import Tempo
from leadout.runtime.device import cores, processor, this_device
from leadout.runtime.pair import load
from leadout.runtime.settings import Settings
from leadout.runtime.stats import Stats
from leadout.runtime.tune import Sweep, Tuner, acceptance, doubt, grouped, promise
from leadout.scripts.cli import main
from leadout.scripts.cmd_tune import candidate

HERE = platform.processor() or platform.machine()
WHERE: dict[str, Any] = {
    "provider": "cpu",
    "draft_provider": None,
    "threads": 1,
    "draft_threads": None,
    "variant": "auto",
    "exact": True,
}
COSTS = [Cost("target", 1, 0, 2, 0.5), Cost("draft", 1, 0, 1, 0.25), Cost("host", 2, 0, 1, 0.125)]


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the tiny bundle that may be changed."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_a_promise_is_tokens_over_seconds_against_plain() -> None:
    plain, pair, stats = Costs(), Costs(), Stats()
    plain.record_target(1, 1, 1.0)
    plain.record_host(1, 0.25)
    for width, seconds in ((2, 1.0), (3, 1.5)):
        pair.record_target(1, width, seconds)
    pair.record_draft(1, 2, 0.5)
    pair.record_host(1, 0.5)
    for tested, accepted in ((2, 2), (2, 1), (1, 0), (2, 2)):
        stats.record(drafted=2, tested=tested, accepted=accepted, tokens=accepted + 1)
    found = promise(plain, pair, [stats], rows=1, past=0, widths=FROM_TWO)
    assert found.tokens[:3] == pytest.approx([1.0, 1.75, 1.75 + 0.75 * 2 / 3])
    assert found.round_ms[:3] == pytest.approx([1500, 1750, 2500]) and found.plain_ms == pytest.approx(1250)
    assert found.speedup[:3] == pytest.approx([1.25 / 1.5, 1.75 * 1.25 / 1.75, 2.25 * 1.25 / 2.5])
    assert found.best == 1 and found.acceptance == pytest.approx(5 / 7)


def test_a_promise_is_of_rounds_as_slow_as_they_were() -> None:
    """What models leave of each other in a cache shows as slowness: rounds that were half as fast again take as long,
    whatever their steps are said to take. Steps of other numbers of rows say nothing of these."""
    plain, tempo, stats = Costs(), Tempo(), Stats()
    plain.record_target(1, 1, 1.0)
    pair = Costs(tempo=tempo)
    for rows, slowness in ((1, 1.5), (4, 9.0)):
        tempo.slowness = slowness
        pair.record_target(rows, 3, slowness * 1.25)
        tempo.slowness = slowness
        pair.record_draft(rows, 2, slowness * 0.5)
    stats.record(drafted=2, tested=2, accepted=2, tokens=3)
    assert pair.slowness(1) == pytest.approx(1.5) and pair.slowness(4) == pytest.approx(9.0) and pair.slowness(7) == 1.0
    found = promise(plain, pair, [stats], rows=1, past=0, widths=ANY)
    assert found.round_ms[2] == pytest.approx(1.5 * 1750) and found.plain_ms == pytest.approx(1000)
    assert found.speedup[2] == pytest.approx(3.0 / 2.625)


def test_positions_that_were_not_reached_are_not_counted() -> None:
    stats = Stats()
    for accepted in (0, 0, 0, 3):
        stats.record(drafted=3, tested=min(accepted + 1, 3), accepted=accepted, tokens=accepted + 1)
    assert acceptance([stats])[:5] == [0.25, 1.0, 1.0, 1.0, 1.0]
    assert acceptance([Stats()]) == [0.0] * 16


@pytest.mark.parametrize(("temperature", "narrowest"), [(0.0, 2), (1.0, 1)])
def test_a_sweep_knows_the_narrowest_step_of_what_it_measured(temperature: float, narrowest: int) -> None:
    sweep = Sweep(*toy_pair(context=400), exact=True)
    collect(sweep.decode([([1, 2], Settings(draft="model", max_new_tokens=150, temperature=temperature))]), 1)
    widths = {step.width for step in sweep.costs.counts if step.part == "target"}
    assert sweep.widths.narrowest == min(widths) == narrowest


def test_groups_are_full() -> None:
    assert grouped([[1], [2], [3]], 2) == [[[1], [2]], [[3], [1]]]
    assert grouped([[1]], 3) == [[[1], [1], [1]]]


def test_a_sweep_measures_every_length_as_often_and_changes_no_text() -> None:
    settings = Settings(draft="model", max_new_tokens=150, ignore_eos=True)
    plain = collect(Sweep(*toy_pair(context=400), exact=True).decode([([1, 2], settings)]), 1)[0]
    sweep = Sweep(*toy_pair(context=400), exact=True)
    for _ in range(3):
        assert collect(sweep.decode([([1, 2], settings)]), 1)[0] == plain
    widths: Counter[int] = Counter()
    for step, times in sweep.costs.counts.items():
        widths[step.width] += times * (step.part == "target")
    del widths[1]  # of the draft and the host
    assert set(widths) == set(range(2, 18)) and sweep.lengths.rounds == sum(widths.values())
    assert max(widths.values()) <= 3 * min(widths[width] for width in range(3, 17)), widths
    known = {cost.part for cost in sweep.costs.entries()}
    assert known == {*PARTS} - {"plain", "catch-up"}, "it drafts in nearly every round"


def arm_cores(*parts: str) -> str:
    """/proc/cpuinfo of an ARM64 machine."""
    return "".join(f"processor\t: {i}\nCPU implementer\t: 0x41\nCPU part\t: {p}\n\n" for i, p in enumerate(parts))


@pytest.mark.parametrize(
    ("cpuinfo", "board", "name"),
    [
        ("processor\t: 0\nmodel name\t: AMD EPYC 7763\n", "Some PC", "AMD EPYC 7763"),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", "Raspberry Pi 5 Model B\0", "Raspberry Pi 5 Model B"),
        (arm_cores("0xd05", "0xd05", "0xd0b"), None, f"{HERE} 0x41 0xd05 0xd0b"),
        (None, None, HERE),
    ],
    ids=["x86", "board", "cores of two kinds", "no Linux"],
)
def test_no_two_processors_share_a_name(cpuinfo: str | None, board: str | None, name: str, tmp_path: Path) -> None:
    """Costs are kept by it, and a bundle travels."""
    for place, text in (("cpuinfo", cpuinfo), ("device-tree/model", board)):
        if text is not None:
            (tmp_path / "proc" / place).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "proc" / place).write_text(text)
    assert processor(tmp_path) == name


def test_a_sandbox_that_shows_no_processor_is_no_reason_not_to_load(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_text

    def denied(path: Path, *args: Any, **kwargs: Any) -> str:
        if path.parts[:2] == ("/", "proc"):
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", denied)
    assert processor() == HERE
    with load(tiny_bundle) as pair:
        assert pair.generate("x", max_new_tokens=2).token_ids


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "99999999 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_a_container_s_share_of_time_is_so_many_cores(files: dict[str, str], most: int | None, tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert cores(tmp_path) == (most or len(os.sched_getaffinity(0)))


def test_costs_are_kept_per_device(bundle: Path) -> None:
    found, device = Bundle.read(bundle), this_device(**WHERE)
    other = dataclasses.replace(device, draft_threads=device.threads + 1)
    assert tuned.read(found, device) == ((), "")
    tuned.write(found, device, COSTS)
    tuned.write(found, other, COSTS[:1])
    tuned.write(found, device, COSTS[1:])
    assert tuned.read(Bundle.read(bundle), device) == (tuple(COSTS[1:]), "")
    assert tuned.read(found, other) == (tuple(COSTS[:1]), "")
    costs, note = tuned.read(found, dataclasses.replace(device, processor="another"))
    assert costs == () and "does not know this device" in note
    spaced = dataclasses.replace(found, path=Path(shutil.copytree(bundle, bundle.with_name("my pair"))))
    _, note = tuned.read(spaced, dataclasses.replace(device, processor="another"))
    assert note.endswith("my pair'") and "leadout tune '" in note, "as a shell takes it"
    assert [path.name for path in bundle.iterdir() if path.name.startswith(".")] == [], "nothing is left behind"


TUNE = """
import dataclasses, sys
from leadout.bundle import Bundle
from leadout.runtime.controller import tuned
from leadout.runtime.device import this_device
from test_tune import COSTS, WHERE
found, device = Bundle.read(sys.argv[1]), this_device(**WHERE)
for cores in range(int(sys.argv[2]), int(sys.argv[3])):
    tuned.write(found, dataclasses.replace(device, cores=cores), COSTS)
"""


def test_who_tunes_at_once_loses_nothing_of_each_other(bundle: Path) -> None:
    """Two processes here; threads in the test below."""
    where = {**os.environ, "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), *sys.path))}
    ranges = (("0", "40"), ("40", "80"))
    begun = [subprocess.Popen([sys.executable, "-c", TUNE, str(bundle), *each], env=where) for each in ranges]
    assert [process.wait() for process in begun] == [0, 0]
    raw = json.loads((bundle / tuned.TUNED).read_text(encoding="utf-8"))
    assert sorted(each["device"]["cores"] for each in raw["tunings"]) == list(range(80))


def test_threads_that_tune_at_once_lose_nothing_of_each_other(bundle: Path) -> None:
    found, device, last = Bundle.read(bundle), this_device(**WHERE), threading.Barrier(8)

    def write(first: int) -> None:
        last.wait()
        for number in range(first, first + 10):
            tuned.write(found, dataclasses.replace(device, cores=number), COSTS)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(0, 80, 10)))
    raw = json.loads((bundle / tuned.TUNED).read_text(encoding="utf-8"))
    assert sorted(each["device"]["cores"] for each in raw["tunings"]) == list(range(80))


def test_who_may_read_a_bundle_may_read_its_costs(bundle: Path) -> None:
    (bundle / "leadout.json").chmod(0o444)
    before = os.umask(0o077)
    try:
        path = tuned.write(Bundle.read(bundle), this_device(**WHERE), COSTS)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


def test_costs_of_another_export_are_not_used(bundle: Path) -> None:
    device = this_device(**WHERE)
    tuned.write(Bundle.read(bundle), device, COSTS)
    manifest = bundle / "leadout.json"
    manifest.write_text(manifest.read_text(encoding="utf-8") + " ", encoding="utf-8")
    costs, note = tuned.read(Bundle.read(bundle), device)
    assert costs == () and "another export" in note
    tuned.write(Bundle.read(bundle), dataclasses.replace(device, cores=99), COSTS)
    assert "does not know" in tuned.read(Bundle.read(bundle), device)[1], "what was stale is gone"


def test_costs_are_not_said_to_be_of_what_took_the_bundle_s_place(bundle: Path) -> None:
    found, device, manifest = Bundle.read(bundle), this_device(**WHERE), bundle / "leadout.json"
    raw = json.loads(manifest.read_text(encoding="utf-8"))
    manifest.write_text(json.dumps(raw | {"provenance": {"target": "another"}}), encoding="utf-8")
    with pytest.raises(BundleError, match="was replaced while it was measured; tune it again"):
        tuned.write(found, device, COSTS)
    manifest.unlink()
    with pytest.raises(BundleError, match=r"leadout\.json is missing"):
        tuned.write(found, device, COSTS)
    assert not (bundle / tuned.TUNED).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": -1.0}, "seconds must be from 1e-09 to 3600, not -1"),
        ({"seconds": float("nan")}, "seconds must be from"),
        ({"width": 65}, "width must be from 1 to 64, not 65"),
        ({"rows": 0}, "rows must be from 1"),
        ({"rows": 10**399}, "rows must be from 1 to 4096, not 1000"),
        ({"seconds": 10**399}, "seconds: expected float, found 1000"),
        ({"part": "sleep"}, "part 'sleep' is unknown"),
        ({"speed": 1}, "unknown option 'speed'"),
        ({"rows": "two"}, "expected int"),
    ],
)
def test_a_table_that_is_none_is_refused(bundle: Path, change: dict[str, Any], message: str) -> None:
    found, device = Bundle.read(bundle), this_device(**WHERE)
    path = tuned.write(found, device, COSTS)
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["tunings"][0]["costs"][0] |= change
    path.write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(BundleError, match="leadout tune") as error:
        tuned.read(found, device)
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 9}', "\xff", "[" * 100_000], ids=range(5))
def test_a_file_that_is_no_table_is_refused(bundle: Path, text: str) -> None:
    (bundle / tuned.TUNED).write_text(text, encoding="latin-1")
    result = run("generate", bundle, "-p", "x", "--max-new-tokens", 2)
    assert result.exit_code == BundleError.exit_code and result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"leadout: {bundle / tuned.TUNED}: ") and "run: leadout tune" in result.stderr


def test_a_link_and_a_place_that_cannot_be_written_are_refused(bundle: Path, tmp_path: Path) -> None:
    found, device = Bundle.read(bundle), this_device(**WHERE)
    written = tuned.write(found, device, COSTS).rename(tmp_path / "elsewhere")
    (bundle / tuned.TUNED).symlink_to(written)
    with pytest.raises(BundleError, match="is a link"):
        tuned.read(found, device)
    (bundle / tuned.TUNED).unlink()
    os.mkfifo(bundle / tuned.TUNED)
    with pytest.raises(BundleError, match="is no file"):
        tuned.read(found, device)
    (bundle / tuned.TUNED).unlink()
    gone = dataclasses.replace(found, path=bundle)
    (bundle / f".{tuned.TUNED}.{os.getpid()}.partial").mkdir()
    with pytest.raises(BundleError, match="--no-save"):
        tuned.write(gone, device, COSTS)
    assert not (bundle / tuned.TUNED).exists()


def test_costs_that_do_not_hold_together_are_not_believed() -> None:
    def report(undrafted: float, off: float) -> dict[str, Any]:
        return {"batch_sizes": {1: {"predicted": [1.0, 2.0], "off": 0.1}, 4: {"predicted": [undrafted], "off": off}}}

    assert doubt(report(1.1, -0.2)) == doubt(report(0.6, 0.2)) == ""
    assert doubt(report(3.55, 0.0)).startswith("4 at once: without drafts the pair seemed 3.55 times as fast as plain")
    for off in (-0.755, 1.696):
        assert f"observed is {off:+.0%} off" in doubt(report(1.0, off))


@pytest.mark.parametrize("kept", [True, False])
def test_a_report_is_shown_whatever_becomes_of_its_costs(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    each = {"predicted": [1.0, 2.0], "best_length": 1, "observed": 2.0, "off": 0.0 if kept else -0.5, "auto": 2.0}
    each |= {"tokens_rest": 0.0, "time_rest": 0.0}
    report = {"batch_sizes": {1: each}, "drafts": {1: {"the bundle's own": each}}, "prompts": 1}
    monkeypatch.setattr("leadout.runtime.tune.tune", lambda *_, **__: (dict(report), COSTS))
    (bundle / f".{tuned.TUNED}.{os.getpid()}.partial").mkdir()  # it cannot be written
    result = run("tune", bundle, "--limit", 1)
    assert "draft auto, the default, at 2.00" in result.stdout
    if kept:
        assert result.exit_code == BundleError.exit_code and "--no-save" in result.stderr
    else:
        assert result.exit_code == 0 and "not kept: 1 at once: what was observed is -50% off" in result.stdout
    assert ("note" in json.loads(run("tune", bundle, "--limit", 1, "--json").stdout)) != kept


def test_no_draft_is_promised_that_is_longer_than_the_target_verifies(tiny_bundle: Path) -> None:
    """As an engine of TensorRT does not that was built for drafts of 8: what is promised is then observed."""
    with load(tiny_bundle, threads=1) as pair:
        target: Any = pair.target
        target._spec = dataclasses.replace(target.spec, max_verify=6)
        tuner = Tuner(pair, {"max_new_tokens": 16})
        found = tuner.measure([[5, 6, 7]], 1)
        assert len(found.speedup) == len(found.tokens) == len(found.round_ms) == 6
        tuner.observe([[5, 6, 7]], 1, draft="model", draft_length=5)


@pytest.mark.slow
def test_tune_keeps_what_generate_starts_from(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leadout.runtime.tune.doubt", lambda report: "")  # other tests run beside this one
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("x = 1", "def f(")), encoding="utf-8")
    options = ["--prompts", path, "--batch-sizes", "1,2", "--max-new-tokens", 24, "--context", 128, "--threads", 1]
    result = run("tune", bundle, *options, "--draft", bundle, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert list(report["batch_sizes"]) == ["1", "2"] and report["contexts"] == [0, 1]
    for each in report["batch_sizes"].values():
        assert len(each["predicted"]) == len(each["tokens"]) == 17 and each["observed"] > 0 and each["auto"] > 0
        parts = (1 + each["tokens_rest"]) * (1 + each["time_rest"])
        assert parts == pytest.approx(1 + each["off"]) == each["observed"] / max(each["predicted"])
    assert list(report["drafts"]["1"]) == ["the bundle's own", str(bundle)]
    with load(bundle, threads=1) as pair:
        assert pair.note == "" and {cost.rows for cost in pair.known} >= {1, 2}
        assert pair.decoder.costs.coverage.first_length(16) is None and pair.decoder.costs.target(1) is not None
    assert run("generate", bundle, "-p", "x", "--max-new-tokens", 2, "--threads", 1).stderr.count("tuned.json") == 0
    for other in (("--threads", 2), ("--threads", 1, "--draft-threads", 2)):
        assert "does not know" in run("generate", bundle, "-p", "x", "--max-new-tokens", 2, *other).stderr
    shown = run("tune", bundle, *options[:2], *options[4:], "--batch-sizes", 1, "--draft", bundle, "--no-save")
    assert "drafts" in shown.stdout and "not kept" in shown.stdout and f"{bundle}: " in shown.stdout


def test_drafts_are_compared_for_a_bundle_that_has_none(bundle: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(bundle, tmp_path / "bare"))
    manifest = json.loads((bare / "leadout.json").read_text(encoding="utf-8"))
    del manifest["models"]["draft"]
    (bare / "leadout.json").write_text(json.dumps(manifest), encoding="utf-8")
    shutil.rmtree(bare / "draft")
    other, path = Path(shutil.copytree(bundle, tmp_path / "other")), tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "x = 1"}), encoding="utf-8")
    options = ["--prompts", path, "--batch-sizes", 1, "--max-new-tokens", 16, "--context", 64, "--threads", 1]
    refused = run("tune", bare, *options)
    assert refused.exit_code == 2 and "nothing to tune (one of another is measured by --draft" in refused.stderr
    result = run("tune", bare, *options, "--draft", bundle, "--draft", other, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert list(report["drafts"]["1"]) == [str(bundle), str(other)] and report["batch_sizes"]["1"]["observed"] > 0
    assert "saved" not in report and report["note"] and not (bare / "tuned.json").exists()


def test_tune_refuses_what_it_cannot_do(bundle: Path) -> None:
    for value in ("0", "1,", "x", "4097", "99999999999999"):
        assert "is not a list of numbers" in run("tune", bundle, "--batch-sizes", value).stderr
    assert "--limit" in run("tune", bundle, "--limit", 0).stderr
    result = run("tune", bundle, "--draft", bundle / "target", "--limit", 1)
    assert result.exit_code == BundleError.exit_code and "no bundle at" in result.stderr


def test_a_draft_of_other_ids_is_not_compared(bundle: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(bundle, tmp_path / "other"))
    path = other / "leadout.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    (other / "draft" / "vocabulary.npz").write_bytes(b"its map")
    files = {"vocabulary.npz": dataclasses.asdict(file_entry(other / "draft" / "vocabulary.npz"))}
    for change, reason in (({"vocab_size": 200}, "200 tokens, the target 512"), ({"files": files}, "ids of its own")):
        changed = manifest["models"]["draft"] | change
        path.write_text(json.dumps(manifest | {"models": manifest["models"] | {"draft": changed}}), encoding="utf-8")
        result = run("tune", bundle, "--draft", other, "--limit", 1)
        assert result.exit_code == 2 and f"--draft '{other}': its draft has {reason}; a draft that is trimmed" in (
            result.stderr
        )


def test_a_draft_of_another_tokenizer_of_one_size_is_not_compared(bundle: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(bundle, tmp_path / "other"))
    path, tokenizer = other / "leadout.json", other / "tokenizer.json"
    said = json.loads(tokenizer.read_text(encoding="utf-8"))

    def keep() -> None:
        tokenizer.write_text(json.dumps(said), encoding="utf-8")
        manifest = json.loads(path.read_text(encoding="utf-8"))
        manifest["files"]["tokenizer.json"] = dataclasses.asdict(file_entry(tokenizer))
        path.write_text(json.dumps(manifest), encoding="utf-8")

    said["added_tokens"][0]["content"] = "<|im_end|>"  # chat models call their end of text otherwise
    said["model"]["vocab"]["<|im_end|>"] = said["model"]["vocab"].pop("<|endoftext|>")
    keep()
    with load(bundle) as pair, candidate(str(other), pair, this_device(**WHERE)) as draft:
        assert draft.spec.vocab_size == pair.target.spec.vocab_size
    vocab = said["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    keep()
    result = run("tune", bundle, "--draft", other, "--limit", 1)
    assert result.exit_code == 2 and f"--draft '{other}': its draft has other tokens; a draft that is" in result.stderr
