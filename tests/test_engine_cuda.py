"""ONNX Runtime's engine with its cache and its logits on a device, over host memory: what is bound, copied, fetched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_graphs import Shape, tokens, write
from support_runtime import collect
from support_tensorrt_host import HostCuda

from leadout.bundle import Model
from leadout.engines import ort
from leadout.engines.memory import CudaBuffer
from leadout.engines.ort import SlotEngine
from leadout.errors import EngineError
from leadout.runtime.decoder import Decoder
from leadout.runtime.settings import Settings
from leadout.runtime.trees import ancestry

C = Shape()
START = np.zeros(1, np.int64)


def at(*lengths: int) -> np.ndarray:
    return np.array(lengths, np.int64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write(C, tmp_path_factory.mktemp("target"))


@pytest.fixture
def device(model: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlotEngine]:
    """An engine that thinks it is on a GPU: sessions are the CPU's, device memory is the host's."""
    opened = ort.open_session

    def on_the_host(path: Path, *, provider: str, threads: int) -> Any:
        return opened(path, provider="cpu", threads=threads)

    monkeypatch.setattr(ort, "open_session", on_the_host)
    monkeypatch.setattr(ort, "Cuda", HostCuda)
    monkeypatch.setattr(CudaBuffer, "device", "cpu")
    engine = SlotEngine(model, provider="cuda")
    cuda = host(engine)
    yield engine
    engine.close()
    engine.close()
    assert not cuda.blocks and cuda.stream == 0, "memory is left behind"


def host(engine: SlotEngine) -> HostCuda:
    assert isinstance(engine._cuda, HostCuda)
    return engine._cuda


def test_a_gpu_takes_the_variant_for_ragged_rows(device: SlotEngine) -> None:
    assert device.variant == "nonpad"


def test_the_same_bits_as_on_the_cpu_and_nothing_crosses_by_itself(device: SlotEngine, model: Model) -> None:
    cpu = SlotEngine(model, variant="nonpad")
    rows, lengths = tokens(C, 3, 40), at(17, 3, 9)
    new = np.stack([row[n : n + 4] for row, n in zip(rows, lengths, strict=True)])
    for engine in (device, cpu):
        engine.reset(3)
        engine.forward(rows[:, :17], at(0, 0, 0), np.array([[16], [2], [8]]))
    found, expected = device.forward(new, lengths), np.asarray(cpu.forward(new, lengths))
    assert host(device).moved == {"up": 0, "down": 0} and device.bytes_moved == 0
    assert found.shape == expected.shape
    row = found[1][2]
    assert row.argmax() == expected[1, 2].argmax() and row[5] == expected[1, 2, 5]
    assert device.bytes_moved == 4 * C.vocab == host(device).moved["down"]
    assert np.array_equal(np.asarray(found), expected)
    assert np.array_equal(found.argmax(-1), expected.argmax(-1))


def test_growing_and_copying_stay_on_the_device(device: SlotEngine, model: Model) -> None:
    cpu = SlotEngine(model, variant="nonpad")
    rows = tokens(C, 2, 140)
    for engine in (device, cpu):
        engine.reset(2)
        engine.forward(rows[:, :100], at(0, 0))
        engine.reserve(200)
        engine.copy_row(1, 0)
    assert host(device).moved == {"up": 0, "down": 0}
    assert device.capacity == 256
    again = [np.array(engine.forward(rows[:, 100:], at(100, 100))) for engine in (device, cpu)]
    assert np.array_equal(*again)
    assert not np.array_equal(again[0][0], again[0][1])


def test_fresh_and_grown_memory_is_zero(device: SlotEngine) -> None:
    device.forward(tokens(C, 1, 3), START)
    device.reserve(129)
    blocks = [host(device).blocks[buffer.pointer] for buffer in device._cache]
    for block in blocks:
        cache = np.frombuffer(block, np.float32)[: C.kv_heads * 256 * C.head_dim].reshape(C.kv_heads, 256, C.head_dim)
        assert cache[:, :3].any() and not cache[:, 3:].any()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "rule": "block"}])
def test_the_loop_writes_what_it_writes_on_a_cpu(device: SlotEngine, model: Model, sampling: dict[str, Any]) -> None:
    settings = Settings(draft_length=4, max_new_tokens=40, **{"seed": 5, **sampling})
    requests = [(tokens(C, 1, n, seed=n)[0].tolist(), settings) for n in (3, 110, 9)]
    draft = SlotEngine(model, variant="nonpad")
    cpu = SlotEngine(model, variant="nonpad")
    texts = [collect(Decoder(target, draft).decode(requests), 3)[0] for target in (device, cpu)]
    assert texts[0] == texts[1]


def test_a_later_step_takes_the_place_of_an_earlier_one(device: SlotEngine) -> None:
    logits = device.forward(tokens(C, 1, 3), START)
    device.forward(tokens(C, 1, 3), START)
    with pytest.raises(EngineError, match="earlier step are gone"):
        logits[0][0].argmax()


def test_trees_stay_on_the_device_too(device: SlotEngine, model: Model) -> None:
    """A step that branches and the compaction of one branch: the CPU's bits, and nothing crosses by itself."""
    cpu = SlotEngine(model, variant="nonpad")
    rows, fed = tokens(C, 2, 30), tokens(C, 2, 6, seed=2)
    sees = np.stack([ancestry([-1, -1, 0, 1, 3], 6), ancestry([-1, 0, 0, 2, 2], 6)])
    for engine in (device, cpu):
        engine.reset(2)
        engine.forward(rows, at(0, 0))
    found, expected = device.forward_tree(fed, at(30, 21), sees), np.array(cpu.forward_tree(fed, at(30, 21), sees))
    assert host(device).moved == {"up": 0, "down": 0}
    assert np.array_equal(np.asarray(found), expected)
    for engine in (device, cpu):
        engine.compact(0, 31, [1, 3, 4])
        engine.compact(1, 22, [0, 2, 4])
    again = [np.array(engine.forward(fed, at(34, 25))) for engine in (device, cpu)]
    assert np.array_equal(*again)
