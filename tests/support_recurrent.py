"""Recurrent layers' pieces of a graph, run in torch step by step, beside what transformers' functions say of all of a
text: no model and no capture, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.qwen3_5 import modeling_qwen3_5

from leadout.bundle import Recurrence
from leadout.export.capture import recurrent
from leadout.export.capture.recurrent import Memory, TrailLayer

ROWS, TEXT, SLOTS, WIDEST = 2, 60, 16, 5  # several times around a trail; what is taken back and a step fit into it


def one_output(op: str, inputs: Sequence[Tensor], attributes: Mapping[str, Any], **_: Any) -> Tensor:
    """ONNX's ``TensorScatter`` and ``GatherND``, of a trail."""
    if op == "GatherND":
        data, index = inputs
        assert attributes == {"batch_dims": 1}
        return torch.stack([row[places[:, 0]] for row, places in zip(data, index, strict=True)])
    buffer, new, at = inputs
    assert op == "TensorScatter" and attributes == {"axis": 2, "mode": "circular"}
    written = buffer.clone()
    for row, start in enumerate(at.tolist()):
        for i in range(new.shape[2]):
            written[row, :, (start + i) % buffer.shape[2]] = new[row, :, i]
    return written


def several_outputs(op: str, inputs: Sequence[Tensor], attributes: Mapping[str, Any], **_: Any) -> tuple[Tensor, ...]:
    """onnxruntime's ``LinearAttention``, a token at a time: state [B, H, N, M], which ``q_num_heads`` keys share."""
    query, key, value, state, decay, *beta = inputs
    assert op.endswith("::LinearAttention")
    heads, groups = attributes["kv_num_heads"], attributes["q_num_heads"]
    rows, width = value.shape[:2]
    assert key.shape[-1] == heads * state.shape[2] and query.shape[-1] == groups * state.shape[2], "as it is declared"
    query = query.reshape(rows, width, groups, -1).repeat_interleave(heads // groups, 2)
    key, value = (part.reshape(rows, width, heads, -1) for part in (key, value))
    said = []
    for t in range(width):
        state = state * decay[:, t, :, None, None].exp()
        taken = value[:, t]
        if attributes["update_rule"] == "gated_delta":
            taken = beta[0][:, t, :, None] * (taken - torch.einsum("bhn,bhnm->bhm", key[:, t], state))
        state = state + key[:, t, :, :, None] * taken[:, :, None, :]
        said.append(attributes["scale"] * torch.einsum("bhn,bhnm->bhm", query[:, t], state))
    return torch.stack(said, 1).reshape(rows, width, -1), state


def in_rounds(layer: Callable[..., Tensor], text: Sequence[Tensor]) -> Tensor:
    """What a layer says [ROWS, TEXT, ...] of its inputs [ROWS, TEXT, ...] in steps of which some tokens are wrong and
    are taken back, each row by itself; ``layer``: of a memory and a step's inputs [ROWS, S, ...]."""
    measured, rng = Memory(), np.random.default_rng(5)
    layer(measured, *(part[:, :2] for part in text))
    kept = measured.recurrence()
    assert isinstance(kept, Recurrence)
    trails = [torch.randn(ROWS, 1, SLOTS, width) for width in kept.trails]  # of whatever text was here before
    states = [torch.zeros(ROWS, each.heads, each.key_dim, each.value_dim) for each in kept.states]
    past, anchors, said = torch.zeros(ROWS, dtype=torch.long), torch.zeros(ROWS, dtype=torch.long), None
    while int(past.min()) < TEXT:
        width = int(rng.integers(1, WIDEST + 1))
        right = torch.minimum(torch.from_numpy(rng.integers(1, width + 1, ROWS)), TEXT - past)
        places = past[:, None] + torch.arange(width)
        wrong = places >= (past + right)[:, None]
        fed = [picked(part, places.clamp(max=TEXT - 1)) for part in text]
        fed = [torch.where(wrong.reshape(*wrong.shape, *[1] * (part.dim() - 2)), 0.7, part) for part in fed]
        memory = Memory()
        memory.begin(past, anchors, torch.arange(int((past - anchors).max()) + 1), trails, states)
        found = layer(memory, *fed)
        said = torch.zeros(ROWS, TEXT, *found.shape[2:]) if said is None else said
        for row, count in enumerate(right.tolist()):
            said[row, past[row] : past[row] + count] = found[row, :count]
        trails = memory.new_trails
        if int((past - anchors).max()) > WIDEST:
            states, anchors = memory.new_states, past
        past = past + right
    assert said is not None
    return said


def picked(part: Tensor, places: Tensor) -> Tensor:
    return torch.stack([row[at] for row, at in zip(part, places, strict=True)])


def beside(layer: Callable[..., Tensor], text: Sequence[Tensor], wanted: Tensor, patch: pytest.MonkeyPatch) -> None:
    with patch.context() as within:
        within.setattr(recurrent, "symbolic", one_output)
        within.setattr(torch.onnx.ops, "symbolic_multi_out", several_outputs)
        found = in_rounds(layer, text)
    assert (found - wanted).abs().max() < 1e-4 and wanted.abs().max() > 0.1


def drawn(*shapes: int | tuple[int, ...]) -> list[Tensor]:
    noise = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=noise) for shape in shapes]


def convolutions_hold(patch: pytest.MonkeyPatch) -> None:
    (text, taps, bias) = drawn((ROWS, TEXT, 6), (6, 4), (6,))
    for activation in ("silu", None):

        def layer(memory: Memory, step: Tensor, activation: str | None = activation) -> Tensor:
            turned = TrailLayer(memory).update_conv_state(step.transpose(1, 2), conv_kernel_size=4)
            return recurrent.convolve(memory, turned, taps, bias, activation).transpose(1, 2)

        wanted = modeling_lfm2.causal_conv1d_fn(text.transpose(1, 2), taps, bias, activation=activation)
        beside(layer, [text], wanted.transpose(1, 2), patch)


def delta_rules_hold(patch: pytest.MonkeyPatch) -> None:
    """Keys, queries, values, decays and rates; two groups of keys for four heads."""
    keys = (ROWS, TEXT, 2, 8)
    query, key, value, decay, beta = drawn(keys, keys, (ROWS, TEXT, 4, 6), (ROWS, TEXT, 4), (ROWS, TEXT, 4))
    text = query, key, value, -decay.abs(), beta.sigmoid()
    for normed in (True, False):
        text = query, key if normed else key / 8, *text[2:]

        def layer(memory: Memory, *step: Tensor, normed: bool = normed) -> Tensor:
            return recurrent.gated_delta_rule(memory, *step, use_qk_l2norm_in_kernel=normed)[0]

        wanted, _ = modeling_qwen3_5.torch_chunk_gated_delta_rule(*text, use_qk_l2norm_in_kernel=normed)
        beside(layer, text, wanted, patch)


def scans_hold(patch: pytest.MonkeyPatch) -> None:
    """Hidden states, time steps, B and C of two groups; decays, what goes past the scan and a bias of each head."""
    keys = (ROWS, TEXT, 2, 8)
    hidden, dt, key, query, past, bias = drawn((ROWS, TEXT, 4, 6), (ROWS, TEXT, 4), keys, keys, 4, 4)
    heads = {"A": -torch.tensor([0.2, 0.5, 1.0, 2.0]), "D": past, "dt_bias": bias, "dt_softplus": True}

    def layer(memory: Memory, hidden: Tensor, dt: Tensor, key: Tensor, query: Tensor) -> Tensor:
        found = recurrent.scan(memory, hidden, dt, B=key, C=query, **heads)
        assert isinstance(found, Tensor)
        return found

    wanted = modeling_falcon_h1.mamba2_chunk_scan(hidden, dt, B=key, C=query, chunk_size=16, **heads)
    beside(layer, [hidden, dt, key, query], wanted, patch)


def softplus_is_even(patch: pytest.MonkeyPatch) -> None:
    """Of rows of 3 and 8 numbers, each alone and among others, as ``decoder_graph`` lets it be computed."""
    from leadout.export.capture import decoder_graph

    del patch
    for width in (3, 8):
        given, made = (
            ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["B", width]))
            for name in ("given", "made")
        )
        nodes = [ir.Node("", "Softplus", [given], outputs=[made])]
        model = ir.Model(ir.Graph([given], [made], nodes=nodes, opset_imports={"": 24}, name="softplus"), ir_version=11)
        decoder_graph.evenly(model)
        quiet = onnxruntime.SessionOptions()
        quiet.log_severity_level = 3  # it is told the wider rows' shape late
        session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), quiet)
        rows = np.random.default_rng(0).standard_normal((64, width)).astype(np.float32)
        (whole,) = session.run(None, {"given": rows})
        assert np.abs(whole - np.log1p(np.exp(rows))).max() < 1e-6
        for row, wanted in zip(rows, whole, strict=True):
            assert np.array_equal(session.run(None, {"given": row[None]})[0][0], wanted)


HOLD = (convolutions_hold, delta_rules_hold, scans_hold, softplus_is_even)
