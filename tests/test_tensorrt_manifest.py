"""Finding an engine: one for another graph, SDK or device is refused with the command that builds the right one."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest
from support_graphs import Shape, write

from leadout.bundle import Model
from leadout.engines.tensorrt import compat
from leadout.engines.tensorrt.manifest import EngineManifest, Profile, dump, find, read
from leadout.errors import BundleError, EngineError

SDK, VERSION = "tensorrt-rtx", "1.7.1"


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return write(Shape(layers=1, windows=(None,)), tmp_path / "target")


def put(model: Model, sm: str = "86", precision: str = "fp16", **changes: object) -> Path:
    """An engine's two files; a manifest is all that finding one asks of them."""
    blob = f"{sm} {precision}".encode()
    manifest = EngineManifest(
        sdk=SDK,
        version=VERSION,
        compute_capability=sm,
        precision=precision,
        capacity=64,
        profiles=(Profile(max_batch=2, max_width=32), Profile(max_batch=2, max_width=6)),
        aliases={"present.0.key": "past_key_values.0.key"},
        heads=("greedy",),
        top=0,
        graph_sha256=model.entry.variants["canonical"].sha256,
        engine_sha256=hashlib.sha256(blob).hexdigest(),
        engine_bytes=len(blob),
        log=(),
    )
    path = model.folder / f"{manifest.name}.engine"
    path.write_bytes(blob)
    path.with_suffix(".json").write_text(dump(dataclasses.replace(manifest, **changes)), encoding="utf-8")
    return path


def again(model: Model, sm: str = "86") -> str:
    sizes = "--max-batch 2 --max-draft 5 --max-prefill 32 --capacity 64 --top 0"
    return f"leadout build {model.folder.parent} --sdk {SDK} --precision fp16 --sm {sm} {sizes}"


def refused(model: Model, message: str) -> None:
    with pytest.raises(EngineError) as caught:
        find(model, SDK, VERSION, "86")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_engine_of_the_device_goes_before_a_portable_one(model: Model) -> None:
    portable = put(model, "portable")
    assert find(model, SDK, VERSION, "86")[0] == portable
    own = put(model)
    path, manifest = find(model, SDK, VERSION, "86")
    assert (path, manifest) == (own, read(own.with_suffix(".json")))
    assert manifest.profiles[1] == Profile(max_batch=2, max_width=6)


def test_a_missing_engine_names_the_command_and_what_there_is(model: Model) -> None:
    build = f"build it: leadout build {model.folder.parent} --sdk {SDK} --sm 86"
    refused(model, f"has no {SDK} engine for compute capability 86; {build}")
    put(model, "120")
    refused(model, f"for compute capability 86 (it has: {SDK}-120-fp16); {build}")
    with pytest.raises(EngineError, match=r"leadout build \S+ --sdk tensorrt$"):
        find(model, "tensorrt", "11.4", "86")


def test_a_stale_engine_is_refused(model: Model) -> None:
    put(model, graph_sha256="0" * 64)
    refused(model, "was built from another graph")
    refused(model, f"rebuild it: {again(model)}")


def test_another_version_s_engine_is_refused(model: Model) -> None:
    put(model, version="1.6.0")
    refused(model, f"{SDK}-86-fp16 was built with {SDK} 1.6.0, here is 1.7.1; rebuild it: {again(model)}")


def test_a_manifest_under_another_s_name_is_refused(model: Model) -> None:
    put(model, compute_capability="120")
    refused(model, "describes tensorrt-rtx-120-fp16")


def test_a_damaged_or_missing_engine_is_refused(model: Model) -> None:
    path = put(model)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    refused(model, f"does not match its SHA-256 in {path.stem}.json; rebuild it: {again(model)}")
    path.unlink()
    refused(model, f"{path} is missing; rebuild it: {again(model)}")


def test_of_two_engines_for_one_device_nobody_knows_which_is_meant(model: Model) -> None:
    put(model)
    put(model, precision="int4")
    refused(model, f"has several engines for one device ({SDK}-86-fp16, {SDK}-86-int4): remove all but one")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a manifest"),
        pytest.param("[" * 100_000, "not a manifest: its brackets are nested too deep", id="deep"),
        ("[]", "expected an object"),
        ('{"sdk": "x", "speed": 9}', "unknown option 'speed'"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_named(model: Model, text: str, message: str) -> None:
    path = put(model).with_suffix(".json")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BundleError, match=message) as caught:
        find(model, SDK, VERSION, "86")
    assert str(path) in str(caught.value)


def test_an_sdk_that_is_not_installed_names_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in compat.SDKS:
        monkeypatch.setitem(compat.SDKS, name, "no_such_sdk")
        with pytest.raises(EngineError, match=rf"{name} does not load .* pip install 'leadout\[{name}\]'"):
            compat.sdk(name)


def test_an_sdk_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.OLDEST, SDK, "99.0")
    with pytest.raises(EngineError, match=r"tensorrt-rtx [\d.]+ is too old, 99.0 or later is needed"):
        compat.sdk(SDK)
