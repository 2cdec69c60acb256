"""Where the models run: what is missing is said in one line; draft and target may run on different devices."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_foreign import decoder, directory
from support_tensorrt_host import Plan, build, install, no_gpu

import leadout
from leadout.bundle import Bundle, Model
from leadout.engines import PROVIDERS, Engine, open_engine, providers, require
from leadout.engines.tensorrt import compat
from leadout.errors import EngineError, UsageError
from leadout.export.foreign.importing import import_pair
from leadout.runtime import check
from leadout.runtime.device import cores

SETTINGS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "leadout.scripts.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not no_gpu(), reason="there is a GPU: nothing is missing")
@pytest.mark.parametrize("provider", PROVIDERS[1:])
@pytest.mark.parametrize("command", ["generate", "doctor"])
def test_what_is_missing_is_one_line_and_no_crash(tiny_bundle: Path, provider: str, command: str) -> None:
    arguments = (tiny_bundle, "-p", "x", "--max-new-tokens", 2) if command == "generate" else ()
    done = run(command, *arguments, "--provider", provider)
    assert done.returncode == EngineError.exit_code
    assert done.stderr.startswith("leadout: ") and done.stderr.count("\n") == 1, done.stderr
    assert any(part in done.stderr for part in ("pip install 'leadout[", "no CUDA device", "no NVIDIA driver"))
    with pytest.raises(EngineError):
        require(provider)


def test_the_cpu_is_always_there(tiny_bundle: Path) -> None:
    require("cpu")
    assert json.loads(run("doctor", "--json").stdout)["gpu"].startswith("no ") == no_gpu()


def test_the_runtime_writes_nothing_into_a_home_unless_it_is_asked_to(tmp_path: Path) -> None:
    alone = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    alone |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    code = "import os\nfrom leadout.engines import require\nrequire('cpu')\nprint(os.environ['ORT_DISABLE_TELEMETRY'])"
    for said, expected in (({}, "1"), ({"ORT_DISABLE_TELEMETRY": "0"}, "0")):
        done = subprocess.run([sys.executable, "-c", code], env=alone | said, stdout=subprocess.PIPE, check=True)
        assert done.stdout.decode().strip() == expected
        if not said:
            assert list(tmp_path.rglob("*")) == []


def test_an_sdk_that_is_not_there_names_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in compat.SDKS.items():
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(EngineError, match=rf"{name} does not load .*pip install 'leadout\[{name}\]'"):
            compat.sdk(name)


def test_a_variant_is_onnx_runtime_s(tiny_bundle: Path) -> None:
    with pytest.raises(UsageError, match="variant 'nonpad' pins a graph of ONNX Runtime's; provider 'tensorrt'"):
        leadout.load(tiny_bundle, provider="tensorrt", variant="nonpad")


def test_other_people_s_models_are_refused_by_name(tiny_bundle: Path) -> None:
    import dataclasses

    model = Bundle.read(tiny_bundle).model("target")
    other = dataclasses.replace(model, entry=dataclasses.replace(model.entry, dialect="concat"))
    with pytest.raises(EngineError, match="a concat model runs on provider cpu, not tensorrt"):
        open_engine(other, provider="tensorrt")


def test_a_draft_that_cannot_be_opened_closes_the_target(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from leadout.engines.ort import SlotEngine

    closed: list[object] = []
    monkeypatch.setattr(SlotEngine, "close", lambda engine: closed.append(engine))
    with pytest.raises(EngineError):
        leadout.load(tiny_bundle, draft_provider="cuda")
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"target": cores(), "draft": cores()}),
        ({"threads": 3}, {"target": 3, "draft": 3}),
        ({"threads": 3, "draft_threads": 1}, {"target": 3, "draft": 1}),
        ({"draft_threads": 3}, {"target": cores(), "draft": 3}),
    ],
)
def test_the_draft_has_as_many_threads_unless_told_otherwise(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, int], expected: dict[str, int]
) -> None:
    found: dict[str, int] = {}

    def opened(model: Model, **where: Any) -> Engine:
        found[model.folder.name] = where["threads"]
        return open_engine(model, **where)

    monkeypatch.setattr("leadout.runtime.pair.open_engine", opened)
    leadout.load(tiny_bundle, **given).close()
    assert found == expected


@pytest.mark.parametrize("given", [{"draft_threads": 1}, {"draft_provider": "cuda"}])
def test_what_is_said_of_a_draft_that_is_not_there_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    bundle = import_pair(directory(tmp_path / "target", decoder()), None, tmp_path / "bundle")
    with pytest.raises(UsageError, match="draft_provider, draft_threads: this bundle has no draft model"):
        leadout.load(bundle, **given)


@pytest.fixture(scope="module")
def built_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair with an engine beside each model."""
    path = tmp_path_factory.mktemp("built") / "tiny"
    shutil.copytree(tiny_bundle, path)
    for role in ("target", "draft"):
        build(Bundle.read(path).model(role), Plan(capacity=128, rows=4, prefill=64, verify=9))
    return path


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT and CUDA are the fakes."""
    install(monkeypatch)


@pytest.mark.parametrize("devices", [("tensorrt", None), ("tensorrt", "cpu"), ("cpu", "tensorrt")])
def test_the_text_does_not_depend_on_who_runs_where(
    built_bundle: Path, on_the_host: None, devices: tuple[str, str | None]
) -> None:
    prompts = ["def f(x):\n", "import", "a = b = c = a = b = "]
    with leadout.load(built_bundle, variant="canonical") as pair:
        expected = [[r.token_ids for r in pair.generate(prompts, max_new_tokens=16, **s)] for s in SETTINGS]
    with leadout.load(built_bundle, provider=devices[0], draft_provider=devices[1]) as pair:
        found = [[r.token_ids for r in pair.generate(prompts, max_new_tokens=16, **s)] for s in SETTINGS]
        names = [type(engine).__name__ for engine in (pair.target, pair.draft)]
    assert found == expected
    kinds = {"cpu": "SlotEngine", "tensorrt": "TensorRTEngine"}
    assert names == [kinds[devices[0]], kinds[devices[1] or devices[0]]]


def test_check_holds_a_built_engine_to_account(built_bundle: Path, on_the_host: None) -> None:
    found = list(check.run(built_bundle, provider="tensorrt", draft_provider="cpu"))
    assert [(each.name, each.detail) for each in found if not each.ok] == []
    names = [each.name for each in found]
    assert "target tensorrt: widths 2 to 9" in names and "draft gqa: golden logits" in names
    assert "coupled: draft model against none" in names
    record = next((built_bundle / "target").glob("*.selftest"))
    assert json.loads(record.read_text())["passed"] is True


class Opened:
    """A session, as far as it is asked."""

    def __init__(self, providers: list[str]) -> None:
        self.get_providers = lambda: providers


class Sessions:
    """As much of onnxruntime as opening a session takes; ``given`` is what the session was asked to run on."""

    __file__ = "onnxruntime/__init__.py"

    def __init__(self, available: list[str], started: list[str]) -> None:
        self.available, self.started, self.given = available, started, []  # type: ignore[var-annotated]

    def get_available_providers(self) -> list[str]:
        return self.available

    def SessionOptions(self) -> Any:
        return SimpleNamespace(add_session_config_entry=lambda name, value: None)

    def preload_dlls(self) -> None:
        print("what is missing")

    def InferenceSession(self, path: str, options: Any, providers: list[Any], enable_fallback: int) -> Any:
        self.given = providers
        assert not enable_fallback
        return Opened(self.started)


CUDA, TENSORRT = "CUDAExecutionProvider", "TensorrtExecutionProvider"


def test_tensorrt_s_providers_are_asked_for_by_name_and_asserted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Sessions([TENSORRT, CUDA], [TENSORRT, CUDA])
    monkeypatch.setattr(providers, "onnxruntime", lambda: there)
    providers.open_session(tmp_path, provider="ort-tensorrt", threads=1)
    assert [name for name, _ in there.given] == [TENSORRT, CUDA], "what the first does not take runs on the second"
    with pytest.raises(EngineError, match=r"is not in this onnxruntime .* TensorRT's own libraries") as missing:
        providers.open_session(tmp_path, provider="ort-tensorrt-rtx", threads=1)
    assert "pip install 'leadout[cuda]'" not in str(missing.value), "that has it no more than what is installed"
    fallen = Sessions([TENSORRT, CUDA], [CUDA])
    monkeypatch.setattr(providers, "onnxruntime", lambda: fallen)
    with pytest.raises(EngineError, match="'ort-tensorrt' fell back to CUDAExecutionProvider"):
        providers.open_session(tmp_path, provider="ort-tensorrt", threads=1)


def test_cuda_s_libraries_are_looked_for_and_stdout_is_nobody_else_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(providers, "onnxruntime", lambda: Sessions([CUDA], [CUDA]))
    providers.open_session(tmp_path, provider="cuda", threads=1)
    assert capsys.readouterr() == ("", "what is missing\n")


@pytest.mark.parametrize(
    "missing, helps",
    [("libcublasLt.so.13", r"pip install 'leadout\[cuda\]'"), ("libcuda.so.1", "run this on the machine with the GPU")],
)
def test_a_library_that_a_provider_needs_is_named_before_anything_falls_back(
    missing: str, helps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, said = Sessions([CUDA], [CUDA]), f"{missing}: cannot open shared object file: No such file or directory"
    there.__file__ = str(tmp_path / "__init__.py")
    (tmp_path / "capi").mkdir()
    (tmp_path / "capi" / "libonnxruntime_providers_cuda.so").touch()

    def load(path: str) -> None:
        raise OSError(said)

    monkeypatch.setattr(providers, "onnxruntime", lambda: there)
    monkeypatch.setattr(providers.ctypes, "CDLL", load)
    for ask in (providers.require, lambda name: providers.open_session(tmp_path, provider=name, threads=1)):
        with pytest.raises(EngineError, match=f"^provider 'cuda' needs {missing}, which is not here: {helps}$"):
            ask("cuda")
    said = "libonnxruntime_providers_cuda.so: undefined symbol: Provider_GetHost"  # of a library not loaded yet
    providers.require("cuda")


def test_graphs_are_cuda_s_own_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Sessions([CUDA], [CUDA])
    monkeypatch.setattr(providers, "onnxruntime", lambda: there)
    for graphs in (True, False):
        providers.open_session(tmp_path, provider="cuda", threads=1, graphs=graphs)
        assert there.given[0][1].get("enable_cuda_graph") == ("1" if graphs else None)


def test_tensorrt_s_providers_take_the_only_form_they_read_right(tiny_bundle: Path) -> None:
    for variant in ("nonpad", "gqa"):
        with pytest.raises(UsageError, match=f"variant '{variant}': provider 'ort-tensorrt' takes canonical alone"):
            leadout.load(tiny_bundle, provider="ort-tensorrt", variant=variant)
