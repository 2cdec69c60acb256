"""``optimum-cli export leadout``: found by optimum itself, the same options, errors as one line and an exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optimum.commands import optimum_cli

import leadout.export.build as build
from leadout.errors import ExportError
from leadout.export.writing import aside


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run optimum's own entry point, which looks for registered commands on the way."""
    monkeypatch.setattr(sys, "argv", ["optimum-cli", "export", "leadout", *arguments])
    optimum_cli.main()


def raising(error: Exception) -> Callable[..., Path]:
    def export_pair(*_: Any, **__: Any) -> Path:
        raise error

    return export_pair


def test_optimum_finds_the_command_and_passes_every_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def export_pair(*args: Any, **options: Any) -> Path:
        options.pop("progress")("working")
        calls.append((args, options))
        return Path("/somewhere/out")

    monkeypatch.setattr(build, "export_pair", export_pair)
    call(monkeypatch, "--model", "big", "out")
    call(
        monkeypatch, "-m", "big", "--draft", "small", "--precision", "int8", "--draft-precision", "int4",
        "--draft-vocabulary", "500", "--calibration", "text", "--mask-token", "7", "--max-context", "99", "out",
    )  # fmt: skip
    plain: dict[str, Any] = {"precision": "fp32", "draft_precision": None, "draft_vocabulary": None, "calibration": []}
    plain |= {"mask_token": None, "max_context": None}
    assert calls == [
        (("big", None, Path("out")), plain),
        (("big", "small", Path("out")), {
            "precision": "int8", "draft_precision": "int4", "draft_vocabulary": 500, "calibration": ["text"],
            "mask_token": 7, "max_context": 99,
        }),
    ]  # fmt: skip
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["/somewhere/out"] * 2 and printed.err.splitlines() == ["working"] * 2


def test_refusals_are_one_line_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as caught:
        call(monkeypatch, "--model", str(tmp_path), str(tmp_path / "out"))
    assert caught.value.code == ExportError.exit_code
    message = capsys.readouterr().err
    assert "not a checkpoint: config.json is missing" in message and message.count("\n") == 1
    with pytest.raises(SystemExit) as caught:
        call(monkeypatch, "--model", "x", "--precision", "int3", "out")
    assert caught.value.code == 2
    capsys.readouterr()
    broken: dict[str, Exception] = {
        "two lines": ExportError("two\nlines"),
        "exporting needs 'onnx_ir', which is not installed": ModuleNotFoundError("No module", name="onnx_ir"),
        "exporting needs other packages than are here (tokenizers>=0.23": ImportError("tokenizers>=0.23\nTry"),
    }
    for line, error in broken.items():
        monkeypatch.setattr(build, "export_pair", raising(error))
        with pytest.raises(SystemExit) as caught:
            call(monkeypatch, "--model", "x", "out")
        assert caught.value.code == ExportError.exit_code
        message = capsys.readouterr().err
        assert message.startswith(f"optimum-cli export leadout: {line}") and message.count("\n") == 1


def test_an_export_that_is_told_to_end_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def export_pair(target: str, draft: str | None, out: Path, **_: Any) -> None:
        with aside(out, print):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(build, "export_pair", export_pair)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        call(monkeypatch, "--model", "x", str(tmp_path / "out"))
    assert caught.value.code == 143 and not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) == before


def test_optimum_starts_without_loading_the_exporter() -> None:
    program = (
        "import sys; from optimum.commands import optimum_cli; sys.argv = ['optimum-cli', 'export', '--help']\n"
        "try: optimum_cli.main()\n"
        "except SystemExit: pass\n"
        "assert 'leadout.export.optimum_command' in sys.modules\n"
        "assert not {'torch', 'transformers', 'onnxruntime', 'onnx'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "leadout" in done.stdout


def test_an_export_says_that_it_needs_docstrings() -> None:
    """Python drops them here, and transformers' own code fails for it as it is imported."""
    program = (
        "import sys; from optimum.commands import optimum_cli\n"
        "sys.argv = ['optimum-cli', 'export', 'leadout', '--model', 'nowhere', 'out']; optimum_cli.main()"
    )
    done = subprocess.run([sys.executable, "-OO", "-c", program], capture_output=True, text=True)
    assert done.returncode == 4 and done.stderr.count("\n") == 1 and "set PYTHONOPTIMIZE=1 or none" in done.stderr
