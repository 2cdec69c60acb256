"""What devices and SDKs do that is seldom seen: kernels that change over, steps that cannot be captured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import support_tensorrt_rtx as rtx
from support_graphs import Shape, tokens, write
from support_tensorrt_host import HostCuda, build, install

from leadout.bundle import Model
from leadout.engines.tensorrt import selftest
from leadout.engines.tensorrt.engine import TensorRTEngine

C = Shape(layers=1, windows=(None,))
START = np.zeros(1, np.int64)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    written = write(C, tmp_path / "target")
    for sdk in ("tensorrt", "tensorrt-rtx"):
        build(written, sdk=sdk)
    return written


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    rtx.install(monkeypatch)


@pytest.fixture
def engine(model: Model) -> Iterator[TensorRTEngine]:
    made = TensorRTEngine(model, provider="tensorrt-rtx")
    yield made
    made.close()


def test_a_shape_has_one_set_of_bits_from_its_first_step_on(engine: TensorRTEngine, model: Model) -> None:
    row = tokens(C, 1, 5)
    found = [np.asarray(engine.forward(row, START)) for _ in range(4)]
    assert all(np.array_equal(one, found[0]) for one in found)
    selftest.require(engine, model)


def test_a_step_is_captured_where_the_sdk_says_that_it_can_be(engine: TensorRTEngine) -> None:
    row, cuda = tokens(C, 1, 5), engine.cuda
    for _ in range(4):
        engine.forward(row, START)
    assert isinstance(cuda, HostCuda) and cuda.launched == 2 and engine.graph_error == ""
    assert [context.asked for context in engine.session._engine.contexts] == [0, 1]


def test_an_engine_that_allocates_while_it_runs_is_not_captured(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtx.RTXEngine, "fixed", False)
    engine = TensorRTEngine(model, provider="tensorrt-rtx")
    row, cuda = tokens(C, 1, 5), engine.cuda
    found = [np.asarray(engine.forward(row, START)) for _ in range(4)]
    assert all(np.array_equal(one, found[0]) for one in found)
    assert isinstance(cuda, HostCuda) and cuda.launched == 0
    assert "cannot be captured as a CUDA graph; rebuild it: leadout build" in engine.graph_error
    engine.close()
