"""What devices and SDKs do that is seldom seen: kernels that change over, steps that cannot be captured, memory
that is not there, drivers that are too old."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import support_tensorrt_rtx as rtx
from support_graphs import Shape, tokens, write
from support_tensorrt_host import STREAMS, WORKSPACE, HostCuda, Plan, build, install

from leadout.bundle import Model
from leadout.engines.lazy import LogitStore
from leadout.engines.tensorrt import selftest
from leadout.engines.tensorrt.cuda import Cuda
from leadout.engines.tensorrt.engine import TensorRTEngine
from leadout.errors import EngineError

C = Shape(layers=1, windows=(None,))
START = np.zeros(1, np.int64)
CACHE = 4 * Plan().capacity * C.kv_heads * C.head_dim  # bytes of a row's keys, or of its values


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
    assert isinstance(cuda, HostCuda) and cuda.launched == 4 and engine.graph_error == ""
    assert [context.asked for context in engine.session._engine.contexts] == [0, 0, 1]


def test_an_engine_that_allocates_while_it_runs_is_not_captured(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtx.RTXEngine, "fixed", False)
    engine = TensorRTEngine(model, provider="tensorrt-rtx")
    row, cuda = tokens(C, 1, 5), engine.cuda
    found = [np.asarray(engine.forward(row, START)) for _ in range(4)]
    assert all(np.array_equal(one, found[0]) for one in found)
    assert isinstance(cuda, HostCuda) and cuda.launched == 0
    assert "cannot be captured as a CUDA graph; rebuild it: leadout build" in engine.graph_error
    engine.close()


def test_a_graph_s_context_is_its_own_and_all_work_in_the_same_memory(engine: TensorRTEngine) -> None:
    """A context that is given another shape spoils what was captured from it. (The stand-in asserts it.)"""
    rows, cuda = tokens(C, 1, 5), engine.cuda
    assert isinstance(cuda, HostCuda)
    once = [np.array(engine.forward(rows[:, :width], START)) for width in (5, 3, 2)]
    for _ in range(3):
        again = [np.array(engine.forward(rows[:, :width], START)) for width in (5, 3, 2)]
        assert all(np.array_equal(*each) for each in zip(again, once, strict=True))
    contexts = engine.session._engine.contexts
    assert cuda.launched == 12 and len(contexts) == 2 + 3 and len({context.memory for context in contexts}) == 1


def used(cuda: object) -> int:
    assert isinstance(cuda, HostCuda)
    return sum(map(len, cuda.blocks.values()))


def test_memory_that_ends_while_rows_are_added_leaves_no_half_of_a_cache(engine: TensorRTEngine) -> None:
    row, cuda = tokens(C, 1, 3), engine.cuda
    assert isinstance(cuda, HostCuda)
    whole = np.asarray(engine.forward(row, START)).copy()
    cuda.room = used(cuda) + 2 * CACHE  # the keys of three rows, but not their values
    with pytest.raises(EngineError, match="out of memory"):
        engine.reset(3)
    assert engine.batch == 0 and len(cuda.blocks) == 3, "keys, logits and what steps work in"
    with pytest.raises(EngineError, match="1 rows given, the engine has 0"):
        engine.forward(row, START)
    engine.reset(1)
    assert np.array_equal(np.asarray(engine.forward(row, START)), whole)


@pytest.mark.parametrize("room", [0, WORKSPACE, WORKSPACE + CACHE])
def test_an_engine_that_finds_no_memory_leaves_nothing_behind(
    model: Model, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(HostCuda, "room", room)
    with pytest.raises(EngineError, match="out of memory"):
        TensorRTEngine(model, provider="tensorrt")
    made = STREAMS[max(STREAMS)]
    assert made.stream == 0 and not made.blocks and not made.pins


def test_logits_that_find_no_more_room_stay_where_they_are(engine: TensorRTEngine) -> None:
    row, cuda = tokens(C, 1, 5), engine.cuda
    assert isinstance(cuda, HostCuda)
    for _ in range(3):
        expected = np.asarray(engine.forward(row[:, :2], START)).copy()
    cuda.room = used(cuda)
    with pytest.raises(EngineError, match="out of memory"):
        engine.forward(row, START)
    assert np.array_equal(np.asarray(engine.forward(row[:, :2], START)), expected), "from a graph that names them"


def test_a_store_of_logits_says_whether_they_moved() -> None:
    cuda = HostCuda()
    store = LogitStore(cuda, 8)
    assert store.reserve(2) and not store.reserve(1)
    before, cuda.room = store.address, 100
    with pytest.raises(EngineError, match="out of memory"):
        store.reserve(3)
    assert store.address == before and not store.reserve(2)
    store.close()
    assert not cuda.blocks


def test_memory_that_ends_is_told_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    fine, none = runtime.cudaError_t.cudaSuccess, runtime.cudaError_t.cudaErrorMemoryAllocation
    answers = {
        "cudaGetDeviceCount": (fine, 1),
        "cudaSetDevice": (fine,),
        "cudaStreamCreateWithFlags": (fine, 7),
        "cudaMalloc": (none, None),
        "cudaMemGetInfo": (fine, 500_000_000, 8_000_000_000),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(runtime, name, lambda *given, answer=answer: answer)
    with pytest.raises(EngineError, match=r"out of memory: 2000 MB wanted, 500 MB of 8000 MB free \(leadout plan"):
        Cuda().allocate(2_000_000_000)


def test_a_driver_that_is_too_old_is_told_from_none(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    codes = runtime.cudaError_t
    monkeypatch.setattr(runtime, "cudaGetDeviceCount", lambda: (codes.cudaErrorInsufficientDriver, None))
    monkeypatch.setattr(runtime, "cudaRuntimeGetVersion", lambda: (codes.cudaSuccess, 13050))
    monkeypatch.setattr(runtime, "cudaDriverGetVersion", lambda: (codes.cudaSuccess, 12040))
    old = r"^the NVIDIA driver is too old for CUDA 13 .*CUDA 12\.4 at most.*580 or later.*'cuda-bindings<13'$"
    with pytest.raises(EngineError, match=old):
        Cuda()
    monkeypatch.setattr(runtime, "cudaDriverGetVersion", lambda: (codes.cudaSuccess, 0))
    with pytest.raises(
        EngineError, match=r"^no CUDA device \(no NVIDIA driver is here\): run this on the machine with"
    ):
        Cuda()
