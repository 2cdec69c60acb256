"""What an application around a pair does with it: threads that are still at work when it ends, copies, odd locales."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support_runtime import toy_pair

import leadout
from leadout.bundle import Model
from leadout.engines import Engine, open_engine, providers
from leadout.errors import BundleError, EngineError, UsageError
from leadout.runtime import pair as pair_module
from leadout.runtime.decoder import Decoder
from leadout.runtime.settings import Settings

AT_WORK = """
import sys, threading, time
import leadout

def work():
    while True:
        pair.generate("def f(x):", max_new_tokens=60, ignore_eos=True)

pair = leadout.load(sys.argv[1])
pair.generate("x", max_new_tokens=1)
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
print("over")
"""


@pytest.mark.slow
def test_daemon_threads_at_work_do_not_abort_a_process_that_ends(tiny_bundle: Path) -> None:
    for _ in range(2):
        program = [sys.executable, "-c", AT_WORK, str(tiny_bundle)]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")


def test_once_the_interpreter_ends_a_daemon_thread_begins_no_round() -> None:
    decoder, steps = Decoder(*toy_pair(11)), []

    def take() -> None:
        with contextlib.suppress(SystemExit):  # threading passes over it, pytest does not
            for _ in decoder.decode([([1, 2], Settings(max_new_tokens=9, ignore_eos=True))]):
                steps.append(threading.current_thread().daemon)
                decoder.turns._end()

    for daemon in (True, False):
        thread = threading.Thread(target=take, daemon=daemon)
        thread.start()
        thread.join()
    assert steps.count(True) == 1 and steps.count(False) > 1, "others are waited for, and go on"


def test_a_worker_whose_thread_has_ended_begins_another() -> None:
    request = ([1, 2], Settings(max_new_tokens=30, draft_length=3))
    decoder = Decoder(*toy_pair(11, share=0.05), draft_ahead=True)
    texts = []
    for gone in (False, True):
        tokens = []
        for event in decoder.decode([request]):
            tokens += [token for token, _ in event.tokens]
            if gone and decoder.ahead is not None:
                decoder.ahead._worker.close()
        texts.append(tokens)
    assert decoder.ahead is not None and decoder.ahead.tried > 1 and texts[0] == texts[1]
    assert len(list(decoder.decode([request]))) > 1


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_pair_is_not_copied(tiny_bundle: Path, take: Any) -> None:
    with leadout.load(tiny_bundle) as pair, pytest.raises(UsageError, match="load the bundle once in each process"):
        take(pair)


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_what_is_still_to_come_is_not_copied(tiny_bundle: Path, take: Any) -> None:
    """A copy would take pieces away from it."""
    with leadout.load(tiny_bundle) as pair, pytest.raises(UsageError, match="cannot be copied or pickled"):
        take(pair.stream("def f(x):", max_new_tokens=4))


def test_an_interrupt_while_onnxruntime_loads_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        raise ImportError("initialization failed") from KeyboardInterrupt()  # as pybind11 does

    monkeypatch.setattr(importlib, "import_module", load)
    with pytest.raises(KeyboardInterrupt):
        providers.onnxruntime()


@pytest.mark.slow
def test_an_open_pair_takes_no_graph_of_another_export(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    with leadout.load(bundle) as pair:
        alone = pair.generate("def f(x):", max_new_tokens=4).token_ids
        bundle.rename(tmp_path / "before")
        for other, asked in ((None, "moved away"), ("draft", "replaced")):
            if other is not None:
                shutil.copytree(tiny_bundle, bundle)
                shutil.copy(bundle / other / "model.onnx.data", bundle / "target" / "model.onnx.data")
            happened = "is gone" if other is None else "was changed"
            with pytest.raises(BundleError, match=f"{happened} since this bundle was opened; open it again"):
                pair.generate(["def f(x):", asked], max_new_tokens=4)
            assert pair.generate("def f(x):", max_new_tokens=4).token_ids == alone
        shutil.rmtree(bundle)
        shutil.copytree(tiny_bundle, bundle)  # the same once more
        assert len(pair.generate(["def f(x):", "copied back"], max_new_tokens=4)) == 2


@pytest.mark.parametrize("first", ["target", "draft"])
def test_a_bundle_that_is_replaced_while_it_is_opened_is_refused(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Its files were checked before, so that a graph of the other would pass for one of this."""
    bundle, opened = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle")), []

    def replaced(model: Model, **where: Any) -> Engine:
        if model.folder.name == first:
            bundle.rename(tmp_path / "before")
            shutil.copytree(tiny_bundle, bundle)
            shutil.copy(bundle / "draft" / "model.onnx.data", bundle / "target" / "model.onnx.data")
            manifest = bundle / "leadout.json"
            raw = json.loads(manifest.read_text(encoding="utf-8"))
            raw["models"]["target"]["files"]["model.onnx.data"] = raw["models"]["draft"]["files"]["model.onnx.data"]
            manifest.write_text(json.dumps(raw), encoding="utf-8")
        opened.append(open_engine(model, **where))
        return opened[-1]

    monkeypatch.setattr(pair_module, "open_engine", replaced)
    with pytest.raises(BundleError, match="was replaced while it was opened; open it again"):
        leadout.load(bundle)
    for engine in opened:
        with pytest.raises(EngineError, match="is closed"):
            engine.reserve(4000)
    monkeypatch.undo()
    with leadout.load(bundle) as pair:
        assert pair.generate("def f(x):", max_new_tokens=4).text


def test_a_program_may_go_elsewhere(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_bundle.parent)
    with leadout.load(tiny_bundle.name) as pair:
        monkeypatch.chdir(tmp_path)
        assert len(pair.generate(["another", "graph"], max_new_tokens=2)) == 2


def test_a_path_is_found_whatever_the_locale_calls_it(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(tiny_bundle, tmp_path / "ünï 漢")
    plainly = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    program = [sys.executable, "-m", "leadout", "generate", str(bundle), "-p", "x", "--max-new-tokens", "2"]
    done = subprocess.run(program, env=plainly, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(EngineError, match="onnxruntime opens names in UTF-8 alone"):
        providers.native(Path(os.fsdecode(b"/tmp/\xff")))
