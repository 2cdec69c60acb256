"""Programs that torch's exporter need not trace a second time, and those it must."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from leadout.export.capture import tracing
from leadout.export.capture.decoder_graph import capture
from leadout.export.capture.kept import kept

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # torch's, of itself
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


@torch.library.custom_op("leadout_tests::relu_", mutates_args=("x",))
def relu_(x: Tensor) -> None:
    """Of the name of an operator of torch's, and no more."""
    x.add_(100)


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


def in_what_was_given_on(x: Tensor) -> Tensor:
    made = x * 2
    row = made[0].to(torch.float32)
    made.add_(1)
    return row


def twice_in_what_has_a_view(x: Tensor) -> Tensor:
    made = x * 2
    row = made[0]
    made.add_(1)
    made.mul_(3)
    return row * 1


def elsewhere_and_in_what_has_a_view(x: Tensor) -> Tensor:
    made = x * 2
    row = made[0]
    torch.add(x, 1, out=made)
    made.mul_(2)
    return row * 3


def in_what_looks_like_its_own(x: Tensor) -> Tensor:
    made = x[0] * 2
    grid, _ = torch.meshgrid(made, made, indexing="ij")
    made.add_(1)
    return grid * 1


def in_several(x: Tensor) -> Tensor:
    made = [x * 2, x * 3]
    torch._foreach_add_(made, 1.0)
    return made[0] + made[1]


def in_a_range(x: Tensor) -> Tensor:
    made = x[0] * 2
    torch.arange(0, 4, out=made)
    return made + x


def in_another_s_place(x: Tensor) -> Tensor:
    made, other = x * 2, x * 3
    made.set_(other)
    made.add_(1)
    return other * 1


def by_another_s_operator(x: Tensor) -> Tensor:
    made = x * 2
    torch.ops.leadout_tests.relu_(made)
    return made + 1


def yes_and_no(x: Tensor) -> Tensor:
    made = x * 2
    made.lt_(0.5)
    return made * 3


def a_power(x: Tensor) -> Tensor:
    made = x * 2
    made.pow_(2)
    return made * 3


def in_whole_numbers(x: Tensor) -> Tensor:
    made = (x * 9).to(torch.int64)
    made += 1
    return made * made


def in_what_it_gives_out(x: Tensor) -> Tensor:
    made = x * 2
    made.add_(1)
    return made.detach_()


def other_shapes(x: Tensor) -> Tensor:
    apart = x.unsqueeze(1).expand(x.shape[0], 2, 4)
    return apart.flatten(1).view_as(apart).reshape_as(apart).flatten(-2) + x.T[0, 0].expand_as(x[:, :1])


def in_parts(x: Tensor) -> Tensor:
    return torch.cat([part + i for i, part in enumerate((*x.chunk(1, -1), *x.chunk(9, -1), *x.chunk(3, 1)))], -1)


def in_a_view(x: Tensor) -> Tensor:
    made = x * 2
    made[0].add_(1)
    return made


def in_a_slice(x: Tensor) -> Tensor:
    made = x * 2
    made[:, 1:3] = x[:, :2]
    return made + 1


def in_every_other_of_a_row(x: Tensor) -> Tensor:
    """As Qwen 3.5 mixes its angles: of a product that is turned, and read elsewhere."""
    turned = torch.stack((x.T, x.T * 3, x.T * 5)).transpose(1, 2)
    row = turned[0]
    row[:, 1:3:2] = turned[1, :, 1:3:2]
    row[:, 2:] = turned[2, :, 2:]
    return torch.cat((row, row * 2, turned[0], turned[1]), -1)


def in_both_its_halves(x: Tensor) -> Tensor:
    """As DeepSeek joins what its keys share and what they do not."""
    made = x.new_empty((x.shape[0], 2, 4))
    made[..., :2] = x[:, None, 2:] * 2
    made[..., 2:] = x[:, :1, None] * 3
    made *= 2
    return made


def in_what_is_read_before(x: Tensor) -> Tensor:
    made = x * 2
    row = made[0]
    before = row * 1
    made[:1, 1:3] = x[1:2, :2]
    return torch.cat((before, row, made[0], row[1:2]))


def in_a_part_of_which_another_is_written(x: Tensor) -> Tensor:
    made = x * 2
    row, column = made[0], made[:, 1]
    row[:2] = x[1, :2]
    column[:1] = row[3:]
    return torch.cat((row, made[:, 1], column))


def in_a_slice_of_what_is_turned_elsewhere(x: Tensor) -> Tensor:
    made = x * 2
    turned = made.transpose(0, 1)
    made[:, 1:3] = x[:, :2]
    return turned * 1


def in_a_slice_of_what_it_was_turned_from(x: Tensor) -> Tensor:
    made = x * 2
    turned = made.transpose(0, 1)
    turned[1:3] = x.T[:2]
    return made * 1


def in_a_slice_of_what_was_split(x: Tensor) -> Tensor:
    left, right = (x * 2).split(2, -1)
    left[:, :1] = right[:, 1:]
    return torch.cat((left, right), -1)


def in_a_slice_of_its_input(x: Tensor) -> Tensor:
    x[:, :2] = x[:, 2:]
    return x * 2


def in_a_slice_what_is_wider(x: Tensor) -> Tensor:
    made = x * 2
    made[:, :2] = x[:, 2:].to(torch.float64)
    return made + 1


def in_a_slice_that_is_given_out(x: Tensor) -> Tensor:
    made = x * 2
    made[:, :2] = x[:, 2:]
    return made[:, :3]


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
    "it writes in whole numbers": in_whole_numbers,
    "it writes in what it gives out": in_what_it_gives_out,
    "a name for what is given out": lambda x: (x + 1).to(torch.float32),
    "squares and extremes": lambda x: torch.square(x) + torch.min(x, x * 2) - torch.max(x, -x),
    "as large as another": lambda x: torch.broadcast_to(x[:1], x.shape) + x[:1].expand_as(x),
    "other shapes": other_shapes,
    "parts": in_parts,
    "it writes in a slice": in_a_slice,
    "it writes in every other of a row": in_every_other_of_a_row,
    "it writes in both its halves": in_both_its_halves,
    "it writes in what is read before": in_what_is_read_before,
    "it writes in two parts that cross": in_a_part_of_which_another_is_written,
    "it writes in a slice of what is given out": in_a_slice_that_is_given_out,
    "a product and another shape": lambda x: nn.functional.linear(x, torch.ones(2, 4)).reshape(-1),
}
TWICE = {
    "it writes in what has a view": in_what_has_a_view,
    "it writes in a view": in_a_view,
    "it writes what is wider": of_what_is_wider,
    "it writes in its input": in_its_input,
    "it writes in what was given on": in_what_was_given_on,
    "it writes twice in what has a view": twice_in_what_has_a_view,
    "it computes into what has a view": elsewhere_and_in_what_has_a_view,
    "it writes in what looks like its own": in_what_looks_like_its_own,
    "it writes in a slice of what is turned elsewhere": in_a_slice_of_what_is_turned_elsewhere,
    "it writes in a slice of what it was turned from": in_a_slice_of_what_it_was_turned_from,
    "it writes in a slice of what was split": in_a_slice_of_what_was_split,
    "it writes in a slice of its input": in_a_slice_of_its_input,
    "it writes in a slice what is wider": in_a_slice_what_is_wider,
    "it writes in several": in_several,
    "it writes a range": in_a_range,
    "it writes in what is another's by now": in_another_s_place,
    "it writes by another's operator": by_another_s_operator,
    "it writes yes and no as numbers": yes_and_no,
    "it writes a power": a_power,
    "operators made of others": lambda x: x.movedim(0, 1) + 1,
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
    named = [spec.arg.name for spec in traced.graph_signature.output_specs]
    assert [n.name for n in traced.graph.output_node().args[0]] == named
    assert not any(tracing._writes(n.target) for n in traced.graph.nodes if isinstance(n.target, tracing.OpOverload))


@pytest.mark.parametrize("run", TWICE.values(), ids=TWICE)
def test_what_does_not_stay_computes_the_same_still(run: Callable[[Tensor], Tensor]) -> None:
    traced = program(run)
    assert not tracing._settled(traced.graph_module, {})
    x = torch.rand(5, 4) - 0.2
    torch.testing.assert_close(traced.module()(x.clone()), run(x.clone()), rtol=0, atol=0)
    again = traced.run_decompositions()
    torch.testing.assert_close(again.module()(x.clone()), run(x.clone()), rtol=0, atol=0)


def test_onnx_parts_a_tensor_as_torch_does() -> None:
    """Its own Split takes as many parts as it is told to give, where torch gives no empty ones."""
    with tracing.traced_once():
        made = torch.onnx.export(Program(in_parts), (torch.rand(3, 4),), dynamo=True, opset_version=24, verbose=False)
    assert made is not None
    x = torch.rand(3, 4)
    session = onnxruntime.InferenceSession(made.model_proto.SerializeToString())
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert np.array_equal(found, in_parts(x).numpy())


def test_other_threads_trace_as_they_did_and_errors_leave_nothing() -> None:
    whole, product = ExportedProgram.run_decompositions, program(lambda x: nn.functional.linear(x, torch.ones(2, 4)))

    def as_well() -> bool:
        with tracing.traced_once():
            return product.run_decompositions({}) is product

    with ThreadPoolExecutor(2) as elsewhere, pytest.raises(ZeroDivisionError), tracing.traced_once():
        assert product.run_decompositions({}) is product
        assert elsewhere.submit(product.run_decompositions, {}).result() is not product
        waits = elsewhere.submit(as_well)
        raise ZeroDivisionError
    assert waits.result()
    assert ExportedProgram.run_decompositions is whole


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
