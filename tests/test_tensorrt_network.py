"""What a build asks of the SDK, and what it makes of the answers: of SDKs that are not installed, from stand-ins."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_graphs import Shape, write

from leadout.bundle import Bundle, Manifest, dump
from leadout.engines.tensorrt import compat
from leadout.engines.tensorrt.manifest import read
from leadout.errors import EngineError
from leadout.export.tensorrt import network as parsed
from leadout.export.tensorrt.build import Sizes, build_engines, write_graph
from leadout.export.tensorrt.network import attention_layers, check_import, parse, timing_cache

RTX = "tensorrt-rtx"
C = Shape(vocab=48, layers=1, windows=(None,))
SIZES = Sizes(max_batch=2, max_draft=3, max_prefill=16, capacity=48, top=9)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """A target without a draft and texts."""
    entry = write(C, tmp_path / "target").entry
    manifest = Manifest(format=1, leadout="test", models={"target": entry}, files={}, sampling={}, provenance={})
    (tmp_path / "leadout.json").write_text(dump(manifest), encoding="utf-8")
    return Bundle.read(tmp_path)


def test_engines_of_the_rtx_sdk_allocate_nothing_in_a_step(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    trt = compat.sdk(RTX)
    build, flags = trt.Builder.build_serialized_network, []

    def watched(builder: Any, network: Any, config: Any) -> Any:
        flags.append({name for name, flag in trt.BuilderFlag.__members__.items() if config.get_flag(flag)})
        return build(builder, network, config)

    monkeypatch.setattr(trt.Builder, "build_serialized_network", watched)
    (path,) = build_engines(bundle, RTX, sizes=SIZES, capabilities=["86"])
    assert path.is_file() and flags == [{"REQUIRE_USER_ALLOCATION"}]


class Older:
    """What is ``real``, but for the names that only a later SDK has, and for what is ``set``."""

    def __init__(self, real: Any, *later: str, **set: Any) -> None:
        self._real, self._later, self._set = real, later, set

    def __getattr__(self, name: str) -> Any:
        if name in self._later:
            raise AttributeError(name)
        return self._set[name] if name in self._set else getattr(self._real, name)


def test_an_sdk_without_causal_kinds_says_whether_attention_is_causal(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT 10 has ``causal`` alone, and no lengths."""
    path, _, _ = write_graph(bundle.model("target"), tmp_path, "fp16", SIZES)
    trt, logger = compat.sdk(RTX), compat.logger(RTX)
    logger.lines.clear()
    network = trt.Builder(logger).create_network(compat.network_flags(RTX))
    parser = parse(trt, network, logger, path)  # it owns the weights
    ((name, attention),) = attention_layers(trt, network).items()
    for causal in (False, True):
        older = Older(attention, "causal_kind", "key_value_lengths", causal=causal)
        monkeypatch.setattr(parsed, "attention_layers", lambda *given, found={name: older}: found)
        if causal:
            with pytest.raises(EngineError, match="the parser made it causal; the mask alone decides"):
                check_import(Older(trt, "CausalMaskKind"), network, logger, layers=1, attentions=1)
        else:
            assert len(check_import(Older(trt, "CausalMaskKind"), network, logger, layers=1, attentions=1)) == 2
    del parser


def saying(monkeypatch: pytest.MonkeyPatch, lines: list[tuple[str, str]], *, blob: bool) -> None:
    """Let every build report these lines, and end with an engine or (as SDKs do where they fail) with None."""
    trt, logger = compat.sdk(RTX), compat.logger(RTX)
    build = trt.Builder.build_serialized_network

    def reporting(builder: Any, network: Any, config: Any) -> Any:
        logger.lines += lines
        return build(builder, network, config) if blob else None

    monkeypatch.setattr(trt.Builder, "build_serialized_network", reporting)


ERRORS = [
    ("ERROR", "[defaultAllocator.cpp::allocateAsync::48] Error Code 1: Cuda Runtime (out of memory)"),
    ("WARNING", "Skipping tactic 2 due to insufficient memory on requested size of 805306368."),
    ("ERROR", "[timingCache.cpp::deserialize::42] The timing cache will not be used!"),
]


def test_an_engine_is_kept_whatever_the_sdk_reported_on_the_way(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    saying(monkeypatch, ERRORS, blob=True)
    told: list[str] = []
    (path,) = build_engines(bundle, RTX, sizes=SIZES, capabilities=["86"], progress=told.append)
    assert {text for _, text in ERRORS} <= {*read(path.with_suffix(".json")).log}
    reports = [line.removeprefix("target: the SDK reports, and goes on: ") for line in told if "reports" in line]
    assert reports == [text for severity, text in ERRORS if severity == "ERROR"]


def test_a_build_that_failed_says_all_that_the_sdk_reported(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    saying(monkeypatch, [ERRORS[0], *ERRORS], blob=False)
    said = f"built no engine of the target: {ERRORS[0][1]}; {ERRORS[2][1]}"
    with pytest.raises(EngineError, match=re.escape(said) + "$"):
        build_engines(bundle, RTX, sizes=SIZES, capabilities=["86"])
    assert not list((bundle.path / "target").glob("tensorrt*"))
    monkeypatch.undo()
    saying(monkeypatch, [], blob=False)
    with pytest.raises(EngineError, match="built no engine of the target: no reason given"):
        build_engines(bundle, RTX, sizes=SIZES, capabilities=["86"])


class Timings:
    """Of a builder's configuration, what keeps kernel timings. ``known`` maps what was kept to whether it is of this
    device; all else is damaged."""

    def __init__(self, **known: bool) -> None:
        self.known, self.used = {name.encode(): own for name, own in known.items()} | {b"": True}, b"nothing"

    def create_timing_cache(self, kept: bytes) -> memoryview | None:
        return memoryview(kept) if kept in self.known else None

    def set_timing_cache(self, cache: memoryview, ignore_mismatch: bool) -> bool:
        if not isinstance(cache, memoryview) or not isinstance(ignore_mismatch, bool):
            raise TypeError("set_timing_cache(): incompatible function arguments")
        if ignore_mismatch or self.known[bytes(cache)]:
            self.used = bytes(cache)
        return self.known[bytes(cache)]

    def get_timing_cache(self) -> SimpleNamespace:
        return SimpleNamespace(serialize=lambda: self.used + b"+")


@pytest.mark.parametrize(
    ("kept", "begun"), [(None, b""), (b"own", b"own"), (b"others", b""), (b"damaged", b""), (b"", b"")]
)
def test_timings_that_cannot_be_used_are_begun_anew(kept: bytes | None, begun: bytes, tmp_path: Path) -> None:
    path, config = tmp_path / "tensorrt-86.timing", Timings(own=True, others=False)
    if kept is not None:
        path.write_bytes(kept)
    with timing_cache("tensorrt", config, path):
        assert config.used == begun
    assert path.read_bytes() == begun + b"+" and list(tmp_path.iterdir()) == [path]
