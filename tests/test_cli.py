"""The command line: the same answers as the Python face, results alone on stdout, one line and a code for errors."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import leadout
from leadout.runtime.pair import Piece
from leadout.runtime.settings import Settings
from leadout.runtime.stats import Stats
from leadout.scripts.cli import COMMANDS, Stopped, main, stopped_by_signals
from leadout.scripts.cmd_generate import summarise, write_batch, write_stream
from leadout.scripts.options import Line, given

KEYS = {"text", "token_ids", "finish_reason", "lossless", "distance", "rule", "seed", "draft", "stats", "sample"}
STATS = {
    "held",
    "rounds",
    "drafted",
    "tested",
    "accepted",
    "acceptance_rate",
    "tested_per_position",
    "accepted_per_position",
    "by_drafter",
    "tokens_per_round",
    "tokens_per_second",
    "seconds",
}
PROMPT = "def f(x):\n"


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def command(name: str) -> click.Command:
    found: click.Command = importlib.import_module(f"leadout.scripts.cmd_{name}").command
    return found


def test_version_is_the_project_s(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert run("--version").output == f"leadout, version {project['version']}\n"
    assert leadout.__version__ == project["version"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_stands_for_a_number_that_is_not_given(name: str) -> None:
    numbers = [option for option in command(name).params if option.type in (click.INT, click.FLOAT)]
    options = [option for option in numbers if isinstance(option, click.Option) and not option.multiple]
    said = {option.name: option.show_default or "[default: " in str(option.help) for option in options}
    assert [option for option, default in said.items() if not default] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("generate", "else 1e-6 to 1e6"),
        ("generate", "batch-size N The most prompts to run at once, 1 or more"),
        ("generate", "up to 64 nodes, 16 deep"),
        ("bench", "else 1e-6 to 1e6"),
        ("tune", "each 1 to 4096"),
        ("plan", "Rows at once, 1 to 4096"),
        ("plan", "Drafted tokens a round, 0 to 64"),
        ("build", "Rows of a step, 1 to 4096"),
        ("build", "Drafted tokens of a round, 1 to 64"),
        ("build", "1 to 3840"),
        ("build", "more than K, at most M"),
        ("bench", "Prompts at once, 1 or more"),
        ("export", "2 to the model's own"),
        ("chat", "after N tokens, 1 or more"),
    ],
)
def test_help_says_ranges(name: str, words: str) -> None:
    assert words in " ".join(run(name, "--help").output.split())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ("generate", "x", "--threads", "abc"),
            "'--threads': 'abc' is not a valid integer. (see: leadout generate --help)",
        ),
        (("generate",), "Missing argument 'BUNDLE'. (see: leadout generate --help)"),
        (("--nope",), "No such option '--nope'. (see: leadout --help)"),
        (("--version=3",), "Option '--version' does not take a value. (see: leadout --help)"),
        (("doctor", "--nope"), "No such option '--nope'. (see: leadout doctor --help)"),
        (("genrate",), "no command 'genrate'; did you mean 'generate'? (see: leadout --help)"),
        (("bench", "x", "--limit", "0"), "--limit must be an integer of at least 1, not 0"),
        (("bench", "x", "--batch-size", "-1"), "--batch-size must be an integer of at least 1, not -1"),
        (("tune", "x", "--context", "0"), "--context must be an integer of at least 1, not 0"),
    ],
)
def test_a_command_that_cannot_be_read_is_told_in_one_line(args: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(main, args, prog_name="leadout")
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("leadout: ") and done.stderr.endswith(f"{said}\n")


def test_help_lists_every_command_with_a_sentence() -> None:
    output = run("--help").output
    for name in COMMANDS:
        assert f"\n  {name}" in output
        assert command(name).get_short_help_str()
        assert run(name, "--help").exit_code == 0


def test_a_mistyped_command_names_the_nearest() -> None:
    result = run("generat", "x")
    assert result.exit_code == 2 and "did you mean 'generate'?" in result.stderr


def test_every_setting_is_an_option_and_every_option_is_documented() -> None:
    flags = {option.name: option for option in command("generate").params}
    names = {field.name for field in dataclasses.fields(Settings)} - {"stop_token_ids"} | {"stop_token_id"}
    assert names <= set(flags)
    for option in flags.values():
        if isinstance(option, click.Option):
            assert option.help, option.name
    parsed = command("generate").make_context("generate", ["bundle"]).params
    assert given({name: parsed[name] for name in names}) == {}, "what is not given is left to the bundle"


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("--temperature", "1", "--seed", "7")])
def test_json_has_exactly_the_promised_keys_and_the_api_s_answer(tiny_bundle: Path, settings: tuple[str, ...]) -> None:
    result = run("generate", tiny_bundle, "-p", PROMPT, "--max-new-tokens", 16, "--json", *settings)
    assert result.exit_code == 0 and result.stderr == ""
    row = json.loads(result.stdout)
    assert set(row) == KEYS and set(row["stats"]) == STATS
    given: dict[str, Any] = {"temperature": 1.0, "seed": 7} if settings else {}
    with leadout.load(tiny_bundle) as pair:
        expected = pair.generate(PROMPT, max_new_tokens=16, **given)
    assert (row["text"], row["token_ids"], row["rule"]) == (expected.text, expected.token_ids, expected.rule)
    assert row["seed"] == (7 if settings else None)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["auto", "model", "none"])
def test_a_grammar_binds_what_is_written(tiny_bundle: Path, tmp_path: Path, draft: str) -> None:
    schema = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 4}
    schema["x-guidance"] = {"whitespace_flexible": False}
    (tmp_path / "schema.json").write_text(json.dumps(schema), encoding="utf-8")
    (tmp_path / "words.lark").write_text('start: ("a" | "b") "!"', encoding="utf-8")
    options = "generate", tiny_bundle, "-p", PROMPT, "--draft", draft
    named, told = (run(*options, "--json-schema", each) for each in (tmp_path / "schema.json", json.dumps(schema)))
    assert named.exit_code == 0 and named.stdout == told.stdout
    assert 2 <= len(json.loads(named.stdout)) <= 4 and set(json.loads(named.stdout)) <= {"red", "green"}
    with leadout.load(tiny_bundle) as pair:
        assert pair.generate(PROMPT, json_schema=schema, draft="none").text + "\n" == named.stdout
    assert run(*options, "--grammar", tmp_path / "words.lark").stdout in ("a!\n", "b!\n")
    assert run(*options, "--regex", "[0-9]{3}", "--json").stdout.startswith('{"text": "')


@pytest.mark.slow
def test_text_goes_to_stdout_and_the_summary_to_stderr(tiny_bundle: Path) -> None:
    result = run("generate", tiny_bundle, "-p", PROMPT, "--max-new-tokens", 16)
    with leadout.load(tiny_bundle) as pair:
        assert result.stdout == pair.generate(PROMPT, max_new_tokens=16).text + "\n"
    assert "16 tokens in" in result.stderr and result.stderr.count("\n") == 1
    assert "\x1b[" not in result.stdout, "no colours where nobody looks"


def test_the_summary_of_auto_says_whose_tokens_were_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    stats = Stats()
    for by, accepted in (("model", 2), ("suffix", 5), ("none", 0), ("recycling", 0)):
        stats.record(drafted=accepted + 1, tested=accepted + 1, accepted=accepted, tokens=accepted + 1, by=by)
    result = SimpleNamespace(stats=stats, draft="auto", rule="greedy", seed=None, finish_reason="length")
    summarise(result)  # type: ignore[arg-type]
    assert "draft auto: 7 of 11 accepted (suffix 5, model 2); greedy" in capsys.readouterr().err
    result.stats = Stats()
    result.stats.record(drafted=1, tested=1, accepted=0, tokens=1)
    summarise(result)  # type: ignore[arg-type]
    assert "draft auto: 0 of 1 accepted; greedy" in capsys.readouterr().err


def test_a_terminal_gets_tints_but_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = [Piece("a\x1b[2J\tb\n", (1,), True), Piece("", (3,), True), Piece("\tc\x7f\x9b", (2,), False)]
    stats = Stats()
    result = SimpleNamespace(stats=stats, draft="model", rule="greedy", seed=None, finish_reason="length")
    for variables, expected in (
        ({"FORCE_COLOR": "1"}, "\x1b[36ma\u241b[2J\tb\x1b[0m\n\tc\u2421\ufffd\n"),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, "a\u241b[2J\tb\n\tc\u2421\ufffd\n"),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, "a\u241b[2J\tb\n\tc\u2421\ufffd\n"),
        ({}, "a\x1b[2J\tb\n\tc\x7f\x9b\n"),
    ):
        for name in ("FORCE_COLOR", "NO_COLOR", "TERM"):
            monkeypatch.delenv(name, raising=False)
        for name, value in ({"TERM": "xterm"} | variables).items():
            monkeypatch.setenv(name, value)
        stream = Listed(pieces)
        stream.result = result
        write_stream(stream)  # type: ignore[arg-type]
        assert capsys.readouterr().out == expected


def test_a_terminal_gets_no_control_characters_of_several_answers_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = Stats()
    result = SimpleNamespace(
        text="a\x1b[2J\tb\n", stats=stats, draft="model", rule="greedy", seed=None, finish_reason="length"
    )
    pair = SimpleNamespace(
        settings=lambda given: given, token_ids=lambda prompt: [1], answers=lambda *_, **__: [(0, result)]
    )
    for terminal, expected in ((True, "a\u241b[2J\tb\n\n"), (False, "a\x1b[2J\tb\n\n")):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout.isatty", lambda terminal=terminal: terminal, raising=False)
            write_batch(pair, [Line("x", {}, "")], {}, False, 1)  # type: ignore[arg-type]
        assert capsys.readouterr().out == expected


class Listed(list[Piece]):
    """Pieces known in advance."""

    result: Any


@pytest.mark.slow
def test_a_batch_file_sets_each_row_s_settings(tiny_bundle: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": PROMPT, "max_new_tokens": 5, "kind": "a label"},
        {"prompt": "import", "temperature": 1.0, "seed": 3, "stop_token_ids": [7], "logit_bias": {"5": -3.5}},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    result = run("generate", tiny_bundle, "--batch-file", path, "--json", "--max-new-tokens", 9, "--ignore-eos")
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["rule"] for row in found] == ["greedy", "coupled"]
    assert len(found[0]["token_ids"]) == 5
    assert len(found[1]["token_ids"]) == 9 or found[1]["token_ids"][-1] == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), ("--batch-size", "2"), ("--temperature", "1"), ("--draft", "ngram"), ("--draft", "auto")]
)
def test_bench_reports_every_promised_figure(tiny_bundle: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in ("x = 1", PROMPT)), encoding="utf-8")
    result = run("bench", tiny_bundle, "--prompts", path, "--max-new-tokens", 12, "--json", *options)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["plain"]["tokens_per_second"] > 0 and report["speculative"]["tokens_per_second"] > 0
    ratio = report["speculative"]["tokens_per_second"] / report["plain"]["tokens_per_second"]
    assert report["speedup"] == pytest.approx(ratio)
    assert all(share < 1 for share in report["unaccounted"].values()) and report["cost_ms"]["host"] > 0
    assert report["predicted_speedup"] > 0 and 0 < report["host_share"] < 1
    assert 0 <= report["acceptance_rate"] <= 1 and report["tokens_per_round"] >= 1
    assert sum(share["rounds"] for share in report["by_drafter"].values()) > 0
    assert report["identical_outputs"] is (None if "--temperature" in options else True)
    assert all(divergence["near_tie"] for divergence in report["plain_divergences"] or ())
    assert {"processor", "cores"} <= set(report["hardware"]) and "onnxruntime" in report["versions"]
    assert ("batch_gain" in report) == ("--batch-size" in options)
    assert result.stderr == ""


@pytest.mark.slow
def test_bench_for_people_shows_the_speedup(tiny_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x = 1"}', encoding="utf-8")
    output = run("bench", tiny_bundle, "--prompts", path, "--max-new-tokens", 8, "--batch-size", 2).stdout
    assert {"plain decode", "speculative", "speedup", "same tokens", "one at a time"} <= {
        line[:16].strip() for line in output.splitlines()
    }
    assert f"1 from {path}, 1 at once" in output


@pytest.mark.slow
def test_inspect_shows_the_manifest(tiny_bundle: Path) -> None:
    assert json.loads(run("inspect", tiny_bundle, "--json").stdout)["models"]["target"]["vocab_size"] == 512
    output = run("inspect", tiny_bundle).stdout
    assert "LlamaForCausalLM" in output and "gqa" in output and "parity" in output


def test_doctor_names_versions_and_conflicts(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = json.loads(run("doctor", "--json").stdout)
    assert healthy["conflicts"] == [] and "CPUExecutionProvider" in healthy["providers"]
    assert healthy["int8"].startswith("exact sums by ")
    assert run("doctor").exit_code == 0
    providers = importlib.import_module("leadout.engines.providers")
    both = {"onnxruntime": "1", "onnxruntime-gpu": "1"}
    for installed, message in ((both, "pip uninstall"), ({}, "pip install 'leadout[cpu]'")):
        monkeypatch.setattr(providers, "installed", lambda installed=installed: installed)
        if not installed:
            monkeypatch.setitem(sys.modules, "onnxruntime", None)
        result = run("doctor")
        assert result.exit_code == 5 and message in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "code", "line"),
    [
        ("onnxscript", 4, "exporting needs 'onnxscript', which is not installed: pip install 'leadout[export]'"),
        ("onnxruntime", 5, "no onnxruntime installed: pip install 'leadout[cpu]' or 'leadout[cuda]'"),
    ],
)
def test_an_export_names_what_it_lacks_before_it_reads_a_model(
    package: str, code: int, line: str, tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    hidden = (
        f"import sys\nsys.modules['{package}'] = None\n"
        "from leadout.engines import providers\nproviders.installed = dict\n"
        "from leadout.scripts.cli import main\nmain(sys.argv[1:])"
    )
    program = [sys.executable, "-c", hidden, "export", str(tiny_pair[0]), "-o", str(tmp_path / "out")]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, f"leadout: {line}\n")


def test_packages_that_do_not_fit_together_end_an_export_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def export_pair(*_: object, **__: object) -> None:  # what transformers says as it is imported
        raise ImportError("tokenizers>=0.23.1,<0.24.0 is required, but found tokenizers==0.21.0.\nTry: another")

    monkeypatch.setattr(importlib.import_module("leadout.export.build"), "export_pair", export_pair)
    result = run("export", tmp_path, "-o", tmp_path / "out")
    line = "tokenizers>=0.23.1,<0.24.0 is required, but found tokenizers==0.21.0."
    assert result.stderr == (
        f"leadout: exporting needs other packages than are here ({line}): pip install 'leadout[export]'\n"
    )
    assert result.exit_code == 4


def test_a_stream_that_is_closed_or_knows_few_characters_fails_nothing(root: Path) -> None:
    shell = ["bash", "-c", 'exec "$@" 1>&- 2>&-', "bash", sys.executable, "-m", "leadout.scripts.cli", "doctor"]
    assert subprocess.run(shell, check=False).returncode == 0
    said = "from leadout.scripts.cli import open_streams\nopen_streams()\nprint('a\\ufffd\\u6f22b')"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", said], env=environment, capture_output=True, check=True)
    assert done.stdout == b"a??b\n"


@pytest.mark.parametrize("command", [("--help",), ("doctor", "--json"), ("plan",)])
def test_a_stream_that_takes_nothing_ends_a_command_in_one_line(tiny_bundle: Path, command: tuple[str, ...]) -> None:
    program = [
        sys.executable,
        "-m",
        "leadout.scripts.cli",
        *command,
        *([str(tiny_bundle)] if command == ("plan",) else []),
    ]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    line = "leadout: cannot write to stdout: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, line)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(program, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


WAITS = """
import signal, sys, time, types
from leadout.export.writing import aside
from leadout.scripts.cli import main

def export_pair(target, draft, out, *, progress, **others):
    with aside(out, progress):
        progress("waiting")
        time.sleep(60)

sys.modules["leadout.export.build"] = types.SimpleNamespace(export_pair=export_pair)
signal.signal(signal.SIGHUP, signal.SIG_IGN if "nohup" in sys.argv else signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests in the background ignores it
main(["export", "x", "-o", sys.argv[1]])
"""


@pytest.mark.parametrize(
    ("signals", "code", "line"),
    [
        (["SIGTERM"], 143, "leadout: stopped by SIGTERM\n"),
        (["SIGHUP"], 129, "leadout: stopped by SIGHUP\n"),
        (["SIGINT"], 130, "leadout: stopped by SIGINT\n"),
        (["nohup", "SIGHUP", "SIGTERM"], 143, "leadout: stopped by SIGTERM\n"),
    ],
)
def test_an_export_that_is_told_to_end_leaves_nothing(tmp_path: Path, signals: list[str], code: int, line: str) -> None:
    program = [sys.executable, "-c", WAITS, str(tmp_path / "out"), *signals]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None and child.stderr.readline() == "waiting\n"
        for name in signals[signals[0] == "nohup" :]:
            child.send_signal(getattr(signal, name))
        assert (child.stderr.read(), child.wait()) == (line, code)
    assert not list(tmp_path.iterdir())


def test_signals_that_come_at_once_end_it_once(tmp_path: Path) -> None:
    both = "{signal.SIGHUP, signal.SIGTERM}"
    sent = f"signal.pthread_sigmask(signal.SIG_BLOCK, {both}); [signal.raise_signal(each) for each in {both}]"
    at_once = WAITS.replace("time.sleep(60)", f"{sent}; signal.pthread_sigmask(signal.SIG_UNBLOCK, {both})")
    result = subprocess.run([sys.executable, "-c", at_once, str(tmp_path / "out")], capture_output=True, text=True)
    assert (result.stderr, result.returncode) == ("waiting\nleadout: stopped by SIGHUP\n", 129)
    assert not list(tmp_path.iterdir())


def test_an_interrupt_while_the_line_is_read_is_told_as_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(click.Group, "parse_args", interrupted)
    result = run("plan", "x")
    assert (result.exit_code, result.stderr) == (130, "leadout: stopped by SIGINT\n")


def test_an_interrupt_behind_the_command_ends_the_process_in_silence() -> None:
    program = """
import atexit, signal, sys
from leadout.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(signal.raise_signal, signal.SIGINT)
sys.argv = ["leadout", "--version"]
main()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.startswith("leadout") and (result.stderr, result.returncode) == ("", -signal.SIGINT)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("export", "doctor")])
def test_a_bundle_without_a_name_is_not_the_one_in_the_current_directory(
    name: str, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_bundle)
    result = run(name, "", *(("--sdk", "tensorrt-rtx") if name == "build" else ()))
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == "leadout: no bundle at '': the name is empty\n"


def test_a_bundle_s_folder_need_not_be_listed(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of mode 711 of another user's; root may read everything."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tiny_bundle and access(path, mode))
    result = run("plan", tiny_bundle)
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--threads", "0"), 2, "threads must be an integer from 1 to 1024, not 0"),
        (("--threads", "99999999999"), 2, "threads must be an integer from 1 to 1024, not 99999999999"),
        (("--draft-provider", "cuda"), 5, "provider 'cuda' is not in this onnxruntime"),
        (("--draft-provider", "ort-tensorrt"), 5, "provider 'ort-tensorrt' is not in this onnxruntime"),
        (("--draft-provider", "tensorrt"), 5, "tensorrt does not load"),
    ],
)
def test_check_refuses_before_it_checks(tiny_bundle: Path, options: tuple[str, ...], code: int, message: str) -> None:
    result = run("check", tiny_bundle, *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_check_refuses_a_device_for_a_draft_that_is_not_there(tiny_bundle: Path, tmp_path: Path) -> None:
    manifest = json.loads((tiny_bundle / "leadout.json").read_text(encoding="utf-8"))
    del manifest["models"]["draft"]
    (tmp_path / "leadout.json").write_text(json.dumps(manifest), encoding="utf-8")
    result = run("check", tmp_path, "--draft-provider", "cuda")
    assert result.exit_code == 2 and "this bundle has no draft model" in result.stderr and result.stdout == ""


def test_more_threads_than_a_runtime_takes_are_refused(tiny_bundle: Path) -> None:
    for option in ("--threads", "--draft-threads"):
        result = run("generate", tiny_bundle, "-p", "x", option, "99999999999")
        assert result.exit_code == 2 and result.stderr.count("\n") == 1
        assert "1024" in result.stderr and "not 99999999999" in result.stderr


def test_bench_says_its_own_default_of_the_temperature() -> None:
    helps = {}
    for name in ("bench", "generate"):
        helps[name] = {option.name: option.help for option in command(name).params if isinstance(option, click.Option)}
    assert helps["bench"]["temperature"] == "0 is greedy; else 1e-6 to 1e6. [default: 0]"
    assert helps["generate"]["temperature"] == "0 is greedy; else 1e-6 to 1e6. [default: the bundle's, or 0]"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-o", "x"), "one target"),
        (("a", "--from-onnx", "b", "-o", "x"), "one target"),
        (("a", "--draft-from-onnx", "b", "-o", "x"), "--draft-from-onnx goes with --from-onnx"),
        (("--from-onnx", "b", "--precision", "int8", "-o", "x"), "takes no --precision"),
        (("--from-onnx", "b", "--draft-precision", "int8", "-o", "x"), "options of a draft go with --draft"),
        (("--from-onnx", "b", "--draft", "c", "--draft-from-onnx", "d", "-o", "x"), "give one draft"),
    ],
)
def test_export_refuses_options_that_do_not_go_together(args: tuple[str, ...], message: str) -> None:
    result = run("export", *args)
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1


def test_export_without_its_extra_says_which(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import builtins

    real = builtins.__import__

    def without_torch(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.endswith("build"):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    result = run("export", "a", "-o", tmp_path / "x")
    assert result.exit_code == 4 and "pip install 'leadout[export]'" in result.stderr


class Swallows:
    """What Python raises in a destructor is dropped."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, Stopped), (signal.SIGHUP, Stopped), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_that_nobody_heard_comes_again(number: signal.Signals, error: type[BaseException]) -> None:
    hook, usual = sys.unraisablehook, signal.SIG_DFL if error is Stopped else signal.default_int_handler
    before = signal.signal(number, usual)  # under nohup, say, it is ignored
    try:
        with pytest.raises(error), stopped_by_signals():
            made = Swallows(number)
            del made
            time.sleep(10)
        assert sys.unraisablehook is hook and signal.getsignal(number) == usual
    finally:
        signal.signal(number, before)


def test_options_come_from_variables_of_their_names(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROMPT": f"{PROMPT}a b\nc d", "JSON": "1", "MAX_NEW_TOKENS": "3", "STOP": "x y"}.items():
        monkeypatch.setenv(f"LEADOUT_GENERATE_{name}", value)
    lines = run("generate", tiny_bundle).stdout.splitlines()
    assert len(lines) == len(f"{PROMPT}a b\nc d".splitlines()), "a prompt a line"
    assert all(len(json.loads(line)["token_ids"]) == 3 for line in lines)
    for name in COMMANDS:
        made = main.get_command(click.Context(main), name)
        assert made is not None
        options = [each for each in made.params if isinstance(each, click.Option)]
        assert all(f"--{str(each.envvar).removeprefix(f'LEADOUT_{name.upper()}_').lower().replace('_', '-')}"
                   in each.opts for each in options)  # fmt: skip
