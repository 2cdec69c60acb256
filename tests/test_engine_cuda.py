"""ONNX Runtime's engine with its cache and its logits on a device, over host memory: what is bound, copied, fetched."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnxruntime import OrtValue
from support_ahead import interrupts, is_done
from support_graphs import Shape, tokens, write
from support_runtime import collect
from support_tensorrt_host import HostCuda

from leadout.bundle import Model
from leadout.engines import ort, sessions
from leadout.engines.memory import CudaBuffer
from leadout.engines.ort import SlotEngine
from leadout.engines.ort_step import Step
from leadout.engines.recording import Recording
from leadout.errors import EngineError
from leadout.runtime.decoder import Decoder
from leadout.runtime.rules.trees import ancestry
from leadout.runtime.settings import Settings
from leadout.runtime.steps import Stepper
from leadout.scripts.gpu_measure import graph_gain

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
    opened = sessions.open_session

    def on_the_host(path: Path, *, provider: str, graphs: bool, **how: Any) -> Any:
        session = opened(path, provider="cpu", **how)
        return session if provider == "cpu" else Watched(session, graphs)

    monkeypatch.setattr(sessions, "open_session", on_the_host)
    monkeypatch.setattr(ort, "Cuda", HostCuda)
    monkeypatch.setattr(CudaBuffer, "device", "cpu")
    engine = SlotEngine(model, provider="cuda")
    cuda = host(engine)
    yield engine
    engine.close()
    engine.close()
    assert not cuda.blocks and cuda.stream == 0, "memory is left behind"


class Watched:
    """A session that notes which graph each of its runs names, and refuses names that it was not opened for."""

    def __init__(self, session: Any, graphs: bool) -> None:
        self.session, self.graphs, self.runs, self.fault = session, graphs, [], ""  # type: ignore[var-annotated]

    def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
        assert (options is not None) == self.graphs
        name = options.get_run_config_entry("gpu_graph_id") if options else None
        self.runs.append(name)
        if self.fault and name not in (None, "-1"):
            raise RuntimeError(self.fault)
        self.session.run_with_iobinding(binding.binding)

    def io_binding(self) -> Any:
        return Copying(self.session.io_binding())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)


class Copying:
    """A binding that takes values of the host as they are when they are bound, as ONNX Runtime does on a device."""

    def __init__(self, binding: Any) -> None:
        self.binding, self._copies = binding, dict[str, Any]()

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        self._copies[name] = OrtValue.ortvalue_from_numpy(value.numpy().copy())
        self.binding.bind_ortvalue_input(name, self._copies[name])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.binding, name)


def host(engine: SlotEngine) -> HostCuda:
    assert isinstance(engine._cuda, HostCuda)
    return engine._cuda


def test_a_gpu_takes_the_variant_for_ragged_rows(device: SlotEngine) -> None:
    assert device.variant == "nonpad"


@pytest.mark.parametrize("graphs", [False, True])
def test_the_same_bits_as_on_the_cpu_and_nothing_crosses_by_itself(
    device: SlotEngine, model: Model, graphs: bool
) -> None:
    device.graphs = graphs
    cpu = SlotEngine(model, variant="nonpad")
    rows, lengths = tokens(C, 3, 40), at(17, 3, 9)
    ids = 8 * (3 * 17 * 2 + 3 + 3) + 8 * (3 * 4 * 3 + 3)  # tokens, positions, lengths, wanted logits of both steps
    ids *= graphs  # else ONNX Runtime copies them
    new = np.stack([row[n : n + 4] for row, n in zip(rows, lengths, strict=True)])
    for engine in (device, cpu):
        engine.reset(3)
        engine.forward(rows[:, :17], at(0, 0, 0), np.array([[16], [2], [8]]))
    found, expected = device.forward(new, lengths), np.asarray(cpu.forward(new, lengths))
    assert host(device).moved == {"up": ids, "down": 0} and device.bytes_moved == 0
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
        engine.reserve(600)
        engine.copy_row(1, 0)
    assert host(device).moved["down"] == 0
    assert device.capacity == 2048
    again = [np.array(engine.forward(rows[:, 100:], at(100, 100))) for engine in (device, cpu)]
    assert np.array_equal(*again)
    assert not np.array_equal(again[0][0], again[0][1])


def test_fresh_and_grown_memory_is_zero(device: SlotEngine) -> None:
    device.forward(tokens(C, 1, 3), START)
    device.reserve(513)
    blocks = [host(device).blocks[buffer.pointer] for buffer in device._cache]
    for block in blocks:
        cache = np.frombuffer(block, np.float32)[: C.kv_heads * 1024 * C.head_dim].reshape(C.kv_heads, 1024, C.head_dim)
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


def test_every_shape_has_a_graph_of_its_own_and_prompts_have_none(device: SlotEngine) -> None:
    assert device.graphs, "on a GPU it is on"
    rows = tokens(C, 1, 80)
    for _ in range(2):
        for width in (70, 5, 1):  # widest first: else the room for logits grows, and moves
            device.forward(rows[:, :width], START)
    device.reset(1)  # the next text finds the cache, and what was recorded, where they were
    device.forward(rows[:, :5], START)
    device.reserve(600)  # the cache moves: what was recorded names memory that is gone
    device.forward(rows[:, :5], START)
    recorded = ["-1", *["1"] * 3, *["2"] * 3, "-1", "1", "2", "1", *["3"] * 3]
    assert device._session.runs == recorded and device.graph_error == ""


def test_fewer_rows_leave_the_cache_where_it_is(device: SlotEngine, model: Model) -> None:
    """So graphs that were recorded for more rows are of use again, and slots of before are nobody's."""
    cpu, rows = SlotEngine(model, variant="nonpad"), tokens(C, 3, 5)
    for batch in (3, 1, 2, 3):
        for engine in (device, cpu):
            engine.reset(batch)
        found, expected = (np.array(each.forward(rows[:batch], at(*[0] * batch))) for each in (device, cpu))
        assert np.array_equal(found, expected) and device.batch == batch
        with pytest.raises(EngineError, match=f"row {batch} is not one of the engine's {batch}"):
            device.copy_row(0, batch)
    assert device._session.runs == [*["1"] * 3, *["2"] * 3, *["3"] * 3, "1"]


def in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_of_many_threads_two_record(device: SlotEngine) -> None:
    """The first in its own, as soon as can be, and one that serves all others: ONNX Runtime keeps what each recorded,
    and a server may have a thread for each request. For a prompt it keeps no less."""
    rows, found, takers = tokens(C, 1, 70), [], []
    device.forward(rows, START)  # else the room for logits grows, and moves
    device._session.runs.clear()
    run = device._session.run_with_iobinding
    device._session.run_with_iobinding = lambda *given: (takers.append(threading.get_ident()), run(*given))

    def step() -> None:
        found.append(np.array(device.forward(rows[:, :5], START)))

    def prompt() -> None:
        device.forward(rows, START)

    step()
    for work in (step, step, prompt):
        in_a_thread(work)
    step()
    assert device._session.runs == ["1"] * 7 + ["-1", "1"], "three times by the first, three and one by the other"
    assert len({*takers[:3]}) == len({*takers[3:]}) == 1 and takers[0] == threading.get_ident() != takers[3]
    assert all(np.array_equal(each, found[0]) for each in found)


def test_what_fails_in_another_thread_fails_where_it_was_asked_for(device: SlotEngine) -> None:
    rows, raised = tokens(C, 1, 70), []

    def fail() -> None:
        with pytest.raises(EngineError) as caught:
            device.forward(rows, START)
        raised.append(str(caught.value))

    device.forward(rows, START)
    device._session.run_with_iobinding = lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory"))
    in_a_thread(fail)
    assert len(raised) == 1 and "out of memory" in raised[0]


def test_an_engine_that_is_closed_has_no_thread(device: SlotEngine) -> None:
    before = threading.active_count()
    device.forward(tokens(C, 1, 5), START)
    in_a_thread(lambda: device.forward(tokens(C, 1, 5), START))
    assert threading.active_count() == before + 1
    device.close()
    assert threading.active_count() == before


def test_steps_that_are_recorded_have_few_shapes(device: SlotEngine, model: Model) -> None:
    """Each would take as long as many steps to record. Padding is nobody's."""
    plain, stepper = Stepper(SlotEngine(model), "target"), Stepper(device, "target")
    for each in (plain, stepper):
        each.reset(5)
    rng, past = np.random.default_rng(3), [0, 0, 0]
    for width in (33, 18, 12, 6, 7, 8, 4, 5, 1, 2):  # widest first: else the room for logits grows, and moves
        pieces = [rng.integers(0, C.vocab, n).tolist() for n in (width, max(1, width - 2), width)]
        found, expected = stepper.all_logits(pieces, past), plain.all_logits(pieces, past)
        assert found.shape[0] == 3
        for row, piece in enumerate(pieces):
            np.testing.assert_allclose(found[row, : len(piece)], expected[row][: len(piece)], atol=1e-4)
        past = [length + len(piece) for length, piece in zip(past, pieces, strict=True)]
    assert {step.tokens.shape for step in device._steps.values()} == {(4, n) for n in (1, 2, 5, 9, 17, 34)}
    device.graphs = False
    assert device.recording is None and Stepper(device, "target").all_logits([[1] * 6], [0]).shape[1] == 6


@pytest.mark.usefixtures("device")
def test_no_cache_grows_beyond_its_context_for_padding(tmp_path: Path) -> None:
    most = 512  # as many slots as are made at first; beyond, they come by the thousand
    device = SlotEngine(write(dataclasses.replace(C, context=most), tmp_path), provider="cuda")
    stepper = Stepper(device, "target")
    stepper.reset(2)
    for width in (8, 4, 3):
        found = stepper.all_logits([[1] * width, [2] * 3], [most - width, 7])
        assert found.shape[:2] == (2, width) and device.capacity == most
    stepper.all_logits([[1] * 4, [2]], [most - 5, 7])
    assert [step.tokens.shape[1] for step in device._steps.values()] == [8, 4, 3, 5], "padded where there is room"
    device.close()


def test_what_recording_takes_is_no_step_s_price(device: SlotEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Step.run
    monkeypatch.setattr(Step, "run", lambda step: run(step) + 5.0)
    decoder = Decoder(device, device)
    for _ in decoder.decode([([1, 2, 3], Settings(max_new_tokens=8, draft="model", draft_length=2))]):
        pass
    told = {cost.part: cost.seconds for cost in decoder.costs.entries()}
    assert {"target", "draft"} <= told.keys() and max(told["target"], told["draft"]) < 1e-5, "less five seconds"
    assert decoder._pace.prices.reading == 0.0, "of the prompt, too, which is as short as a step that is recorded"


def test_graphs_can_be_switched_off_and_change_nothing(device: SlotEngine) -> None:
    rows, found = tokens(C, 1, 5), []
    for graphs in (True, False, True):
        device.graphs = graphs
        found.append(np.array(device.forward(rows, START)))
        assert device._session.graphs is graphs
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_the_check_on_a_gpu_measures_both_and_leaves_the_switch_as_it_was(device: SlotEngine) -> None:
    for graphs in (False, True):
        device.graphs = graphs
        found = graph_gain(device, 2, 16)
        assert min(found["with"], found["without"]) > 0 and device.graphs is graphs
        assert found["identical_logits"] is True and found["error"] == ""
    assert {name for name in device._sessions.kept["nonpad", True].runs if name != "-1"} != set()


def test_a_graph_that_cannot_be_recorded_is_done_without_and_the_reason_kept(device: SlotEngine) -> None:
    device.graphs = True
    rows = tokens(C, 1, 12)
    expected = [np.array(device.forward(rows[:, :8], START)), np.array(device.forward(rows[:, 8:], at(8)))]
    device._session.fault = "operation not permitted when stream is capturing"
    found = [np.array(device.forward(rows[:, :8], START)), np.array(device.forward(rows[:, 8:], at(8)))]
    assert all(np.array_equal(*each) for each in zip(found, expected, strict=True))
    assert not device.graphs and "capturing" in device.graph_error and set(device._session.runs) == {None}
    device.graphs = True
    assert device.graph_error == "", "another try is another try"


def test_a_graph_that_onnx_runtime_refuses_to_open_is_opened_without(
    model: Model, device: SlotEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = sessions.open_session

    def refusing(path: Path, *, graphs: bool, **how: Any) -> Any:
        if graphs:
            raise EngineError("not all nodes are on the CUDA provider")
        return opened(path, graphs=graphs, **how)

    monkeypatch.setattr(sessions, "open_session", refusing)
    engine = SlotEngine(model, provider="cuda")
    engine.graphs = True
    assert not engine.graphs and "not all nodes" in engine.graph_error
    engine.close()
    with pytest.raises(EngineError, match="provider 'cpu' runs without CUDA graphs"):
        SlotEngine(model).graphs = True


def test_recording_is_alone_and_other_steps_are_not() -> None:
    recording, order = Recording(), []
    inside, leave = threading.Event(), threading.Event()

    def beside() -> None:
        with recording.step(records=False):
            inside.set()
            leave.wait(5)
            order.append("beside")

    def alone() -> None:
        with recording.step(records=True):
            order.append("alone")

    threads = [threading.Thread(target=beside), threading.Thread(target=alone)]
    threads[0].start()
    assert inside.wait(5)
    with recording.step(records=False):
        order.append("both")
    threads[1].start()
    leave.set()
    for thread in threads:
        thread.join(5)
    assert order == ["both", "beside", "alone"]


def test_threads_that_ended_leave_nothing_to_wait_for() -> None:
    """Else a server with a thread for each request would wait for more and more of them whenever it records."""
    recording = Recording()

    def step() -> None:
        with recording.step(records=False):
            together.wait(5)

    together = threading.Barrier(8)
    threads = [threading.Thread(target=step) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert len(recording._locks) == 8
    del thread, threads
    assert not recording._locks
    with recording.step(records=True):
        pass


@pytest.mark.parametrize("records", [False, True])
def test_whoever_is_interrupted_keeps_nobody_from_a_step(records: bool) -> None:
    recording, count = Recording(), 0

    def step(records: bool = records) -> None:
        with recording.step(records=records):
            pass

    for _ in interrupts(step, ("recording.py", "threading.py")):
        assert is_done(lambda: step(records=True))
        count += 1
    assert count > 1


@pytest.mark.parametrize("graphs", [False, True])
def test_trees_stay_on_the_device_too(device: SlotEngine, model: Model, graphs: bool) -> None:
    """A step that branches and the compaction of one branch: the CPU's bits, and nothing crosses by itself. No graph
    is made of it, whatever becomes of the other steps."""
    device.graphs = graphs
    cpu = SlotEngine(model, variant="nonpad")
    rows, fed = tokens(C, 2, 30), tokens(C, 2, 6, seed=2)
    sees = np.stack([ancestry([-1, -1, 0, 1, 3], 6), ancestry([-1, 0, 0, 2, 2], 6)])
    for engine in (device, cpu):
        engine.reset(2)
        engine.forward(rows, at(0, 0))
    found, expected = device.forward_tree(fed, at(30, 21), sees), np.array(cpu.forward_tree(fed, at(30, 21), sees))
    assert host(device).moved == {"up": graphs * 8 * (2 * 30 * 2 + 2 + 2 * 30), "down": 0}, "those of the prompt"
    assert device._sessions.kept["tree", False].runs == [None]
    assert np.array_equal(np.asarray(found), expected)
    for engine in (device, cpu):
        engine.compact(0, 31, [1, 3, 4])
        engine.compact(1, 22, [0, 2, 4])
    again = [np.array(engine.forward(fed, at(34, 25))) for engine in (device, cpu)]
    assert np.array_equal(*again)
