"""What takes the place of transformers' code in a capture, run node by node, beside that code: no capture of a model,
which takes seconds."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from leadout.export.capture import decoder_graph, lowerings
from leadout.export.capture.lowerings import lowered


def node_alone(
    op: str, inputs: Sequence[Tensor | None], attributes: Mapping[str, Any], *, like: Tensor, version: int, **_: Any
) -> Tensor:
    """What onnxruntime makes of one node. Parameters are weights of its graph, and arranged as a capture's are."""
    domain, _, kind = op.rpartition("::")
    values, weights, fed = list[ir.Value | None](), list[ir.Value](), dict[str, Any]()
    for place, tensor in enumerate(inputs):
        if tensor is None:
            values.append(None)
            continue
        array, name = tensor.detach().contiguous().numpy(), f"given.{place}"
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(array.shape))
        values.append(value)
        if isinstance(tensor, nn.Parameter):
            value.const_value = ir.tensor(array, name=name)
            weights.append(value)
        else:
            fed[name] = array
    made = ir.Value(name="made", type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.Node(domain, kind, values, ir.convenience.convert_attributes(dict(attributes)), outputs=[made])
    given = [value for value in values if value is not None and value.name in fed]
    versions = {"": max(version, 18), domain: version}
    graph = ir.Graph(given, [made], nodes=[node], initializers=weights, opset_imports=versions, name=kind)
    model = ir.Model(graph, ir_version=11)
    decoder_graph.arrange(model)
    try:
        session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
        return torch.from_numpy(session.run(None, fed)[0])
    except Exception as error:  # a node that cannot be
        raise AssertionError(error) from error


def experts_hold(model: nn.Module, patch: pytest.MonkeyPatch) -> None:
    """Each mixture of ``model`` says by pairs what it says itself, whatever experts are chosen with what weights."""
    mixtures = [module for module in model.modules() if hasattr(module, "has_gate")]
    assert mixtures
    noise = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for experts in mixtures:
            count, size = experts.gate_up_proj.shape[0], model.config.hidden_size
            tokens = 3.0 * torch.randn(9, size, generator=noise)
            chosen = torch.stack([torch.randperm(count, generator=noise)[:2] for _ in tokens])
            share = torch.rand(len(tokens), 2, generator=noise)
            wanted = experts(tokens, chosen, share)
            with patch.context() as within, lowered(model):
                within.setattr(lowerings, "symbolic", node_alone)
                assert "forward" in vars(experts), "by pairs"
                found = experts(tokens, chosen, share)
            assert wanted.std() > 0.01
            assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max().clamp(min=1.0)


def rotations_hold(model: nn.Module, patch: pytest.MonkeyPatch) -> None:
    """Heads are turned by one node as transformers' code turns them, by tables as the model has them."""
    code: Any = sys.modules[type(model).__module__]
    rotary = next(module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding"))
    query, key = (torch.from_numpy(np.random.default_rng(2).standard_normal((2, n, 7, 16), np.float32)) for n in (4, 2))
    tables = rotary(query, torch.arange(7)[None].expand(2, 7))
    wanted = code.apply_rotary_pos_emb(query, key, *tables)
    with patch.context() as within, lowered(model):
        within.setattr(lowerings, "symbolic", node_alone)
        assert isinstance(code.apply_rotary_pos_emb, functools.partial), "by one node"
        found = code.apply_rotary_pos_emb(query, key, *tables)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape and (ours - theirs).abs().max() < 1e-5
