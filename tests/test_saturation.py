"""int8 on processors whose fastest products cut their sums: they are found out, and get exact ones."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from leadout.engines import providers, saturation
from leadout.engines.saturation import EXACT_SUMS, saturates

WITHOUT_CUT = {"avx512_vnni", "avx_vnni", "amx_int8"}


def expected_here() -> set[bool]:
    """What the processor's name, and on Linux its flags, leave open."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return {False}
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = [set(line.split()) for line in lines if line.startswith("flags")]
    return {WITHOUT_CUT.isdisjoint(flags[0])} if flags else {True, False}


def test_the_model_that_is_asked_is_one() -> None:
    model = onnx.load_from_string(saturation._matmul_integer())
    assert [node.op_type for node in model.graph.node] == ["MatMulInteger"]
    assert [value.type.tensor_type.elem_type for value in model.graph.input] == [TensorProto.UINT8, TensorProto.INT8]


def test_the_processor_s_own_flags_say_the_same() -> None:
    assert saturates(onnxruntime) in expected_here()


class Cutting:
    """An onnxruntime whose products of ``rows`` rows are cut."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    class SessionOptions:
        intra_op_num_threads = 0

    def InferenceSession(self, model: bytes, options: object, providers: list[str]) -> Cutting:
        assert onnx.load_from_string(model).graph.node and options is not None and providers
        return self

    def run(self, outputs: None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        a, b = (feeds[name].astype(np.int64) for name in "ab")
        pairs = np.einsum("mpk,pkn->mpn", a.reshape(len(a), -1, 2), b.reshape(-1, 2, b.shape[1]))
        return [(pairs.clip(-(1 << 15), (1 << 15) - 1) if len(a) == self.rows else pairs).sum(axis=1)]


@pytest.mark.parametrize(("rows", "wrong"), [(1, True), (2, True), (3, False)])
def test_one_kernel_that_cuts_is_enough(rows: int, wrong: bool) -> None:
    assert saturates(Cutting(rows)) is wrong


def test_a_build_without_the_operator_opens_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*given: object, **more: object) -> None:
        raise RuntimeError("MatMulInteger is not a registered function/op")

    small = Cutting(1)
    monkeypatch.setattr(small, "InferenceSession", refuses, raising=False)
    assert not saturates(small)


@pytest.mark.parametrize("cuts", [True, False])
def test_exact_sums_are_asked_for_where_they_are_not_exact_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: bool
) -> None:
    """The option costs time where it is not needed."""
    monkeypatch.setattr(providers, "saturates", lambda ort: cuts)
    path = tmp_path / "model.onnx"
    path.write_bytes(saturation._matmul_integer())
    options = providers.open_session(path, provider="cpu", threads=1).get_session_options()
    if cuts:
        assert options.get_session_config_entry(EXACT_SUMS) == "1"
    else:
        with pytest.raises(RuntimeError, match=EXACT_SUMS):
            options.get_session_config_entry(EXACT_SUMS)


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_a_product_in_int8_is_the_sum_of_its_products(tmp_path: Path, rows: int) -> None:
    rng = np.random.default_rng(rows)
    depth, columns = 96, 40
    weight = rng.choice(np.array([-127, 127, 90], np.int8), (depth, columns))
    levels = rng.integers(200, 256, (rows, depth)).astype(np.uint8)
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w", "zero"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [None, depth])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [None, columns])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(np.array(128, np.uint8), "zero")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    session = providers.open_session(tmp_path / "model.onnx", provider="cpu", threads=1)
    wanted = (levels.astype(np.int64) - 128) @ weight.astype(np.int64)
    assert np.array_equal(session.run(None, {"x": levels})[0], wanted)
