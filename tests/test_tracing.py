"""Programs that torch's exporter need not trace a second time, and those it must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from leadout.export.capture import tracing
from leadout.export.capture.decoder_graph import capture
from leadout.export.capture.kept import kept

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 8}


class Program(nn.Module):
    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def in_its_own(x: Tensor) -> Tensor:
    made = x * 2
    made /= made.sum(-1, keepdim=True)
    made += 1
    return made * made


def in_the_chosen(x: Tensor) -> Tensor:
    values, _ = torch.topk(x, 2)
    values.div_(values.sum(-1, keepdim=True))
    return values + 1


def behind_a_copy(x: Tensor) -> Tensor:
    made = x * 2
    before = made.to(torch.float32, copy=True)
    made += 1
    return before * made


def in_what_has_a_view(x: Tensor) -> Tensor:
    made = x * 2
    row = made[0]
    made.add_(1)
    return row * 3


def of_what_is_wider(x: Tensor) -> Tensor:
    made = x * 2
    made.add_(torch.ones(4, dtype=torch.float64))
    return made + 1


def in_a_view(x: Tensor) -> Tensor:
    made = x * 2
    made[0].add_(1)
    return made


def in_its_input(x: Tensor) -> Tensor:
    return x.add_(1) * 2


def by_branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))


ONCE = {
    "a cast": lambda x: x.to(torch.float64) + 1,
    "a cast to what it is": lambda x: (x.to(torch.float32) + 1).to(torch.float32),
    "a cast at its end": lambda x: (x + 1).to(torch.float64),
    "two masks": lambda x: x * ((x > 0) & (x < 1)),
    "it lets go of its past": lambda x: (x + 1).detach_() * 2,
    "it writes in what is its own": in_its_own,
    "it writes in one of several": in_the_chosen,
    "it writes in what was copied": behind_a_copy,
    "a product and another shape": lambda x: nn.functional.linear(x, torch.ones(2, 4)).reshape(-1),
}
TWICE = {
    "it writes in what has a view": in_what_has_a_view,
    "it writes in a view": in_a_view,
    "it writes what is wider": of_what_is_wider,
    "it writes in its input": in_its_input,
    "operators made of others": lambda x: x.flatten(0) + 1,
    "a branch": by_branch,
}


def program(run: Callable[[Tensor], Tensor]) -> ExportedProgram:
    return torch.export.export(Program(run), (torch.rand(3, 4),), dynamic_shapes=({0: torch.export.Dim.AUTO},))


@pytest.mark.parametrize("run", ONCE.values(), ids=ONCE)
def test_what_stays_computes_the_same_and_writes_nowhere(run: Callable[[Tensor], Tensor]) -> None:
    traced = program(run)
    assert tracing._settled(traced.graph_module, {})
    x = torch.rand(5, 4) - 0.2
    given = x.clone()
    torch.testing.assert_close(traced.module()(x), run(x.clone()), rtol=0, atol=0)
    assert torch.equal(x, given)
    assert not any(tracing._writes(n.target) for n in traced.graph.nodes if isinstance(n.target, tracing.OpOverload))


@pytest.mark.parametrize("run", TWICE.values(), ids=TWICE)
def test_what_does_not_stay_computes_the_same_still(run: Callable[[Tensor], Tensor]) -> None:
    traced = program(run)
    assert not tracing._settled(traced.graph_module, {})
    x = torch.rand(5, 4) - 0.2
    torch.testing.assert_close(traced.module()(x.clone()), run(x.clone()), rtol=0, atol=0)


def test_what_onnx_has_no_form_for_is_taken_apart() -> None:
    traced = program(lambda x: torch.nn.functional.silu(x))
    assert tracing._settled(traced.graph_module, {})
    assert not tracing._settled(traced.graph_module, {torch.ops.aten.silu.default: None})


@pytest.mark.parametrize(
    "make",
    [lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), lambda: MixtralForCausalLM(MixtralConfig(**SIZES, **EXPERTS))],
    ids=["llama", "experts that slide"],
)
def test_traced_once_it_is_the_graph_that_it_is_traced_twice(
    make: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    settled, said = tracing._settled, list[bool]()
    monkeypatch.setattr(tracing, "_settled", lambda *given: said.append(settled(*given)) or said[-1])
    model = make().eval()
    once = capture(model, *kept(model))
    assert said == [True]
    monkeypatch.setattr(tracing, "_settled", lambda *given: False)
    twice = capture(model, *kept(model))
    assert Counter(node.op_type for node in once.graph) == Counter(node.op_type for node in twice.graph)
    assert sorted(once.graph.initializers) == sorted(twice.graph.initializers)
    assert ExportedProgram.run_decompositions.__module__ == "torch.export.exported_program"
