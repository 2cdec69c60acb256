"""What a build asks of the SDK, and what it makes of the answers: of SDKs that are not installed, from stand-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support_graphs import Shape, write

from leadout.bundle import Bundle, Manifest, dump
from leadout.engines.tensorrt import compat
from leadout.export.tensorrt import Sizes, build_engines

RTX = "tensorrt-rtx"
C = Shape(vocab=48, layers=1, windows=(None,))
SIZES = Sizes(max_batch=2, max_draft=3, max_prefill=16, capacity=48, top=0)


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
