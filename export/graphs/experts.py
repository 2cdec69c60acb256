"""How the experts of a mixture are computed: pair by pair, each a token and one of its experts.

ONNX Runtime's ``MoE`` and ``QMoE`` read the weights of each expert once, in place. But they sum up the results of a
token's experts in an order that depends on the other tokens of the step, so that steps of different widths would differ
in their last bits. Therefore they are given pairs, as if each were a token with a single expert (k = 1), and the graph
does the sum. Then the result of a pair depends on that pair alone, bit for bit: in 8 bits always, for activations are
rounded in blocks of 32 within a row; in float32 and in 4 bits only where each expert has at least two pairs, for a
single row takes another kernel (``never_alone``).

A node reads pairs [P,H], their experts [P,E] (1 for each pair's own, else 0), the weights [E,2I,H] of gates, each
beside what it gates, and [E,H,I], those of the way down; and what is added to both, [E,2I] and [E,H], if anything is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from .levels import BLOCK, blocks_to_int8, int4_to_rows, rows_to_int4
from .pieces import Array, Pieces, piece_of, steps
from .rewrite import CONTRIB, array_of, constant, dims, made_by, node, swap

# Of one expert the weight is 1, whatever it is scaled to. A gate's beside what it gates.
PAIRS: dict[str, Any] = {"k": 1, "normalize_routing_weights": 1, "activation_type": "swiglu", "swiglu_fusion": 1}
# gate * sigmoid(alpha * gate) * (what it gates + beta), both within a limit if there is one.
SILU = {"activation_alpha": 1.0, "activation_beta": 0.0}


def arrange(model: ir.Model) -> None:
    """Reorder the expert weights in place from the layout of the checkpoint (attributes ``concatenated`` and
    ``transposed``) to that of the operator. It is done when they are read, for there is no room for copies of all."""
    for n in _mixtures(model, "MoE"):
        apart, turned = (bool(n.attributes.pop(name).as_int()) for name in ("concatenated", "transposed"))
        for at, value in enumerate(n.inputs[2:]):
            if value is None:
                continue
            given = value.const_value
            assert given is not None and value.shape is not None
            shape, is_weight = list(value.shape), at % 2 == 0
            if turned and is_weight:
                shape[1:] = shape[:0:-1]
            value.shape = ir.Shape(shape)
            value.const_value = _arranged(given, shape, apart=apart and at < 2, turned=turned and is_weight)


def _arranged(given: ir.TensorProtocol, shape: list[int], *, apart: bool, turned: bool) -> Pieces:
    def make(experts: slice, columns: slice) -> Array:
        rows = piece_of(given, experts)
        if turned:
            rows = rows.swapaxes(1, 2)
        if apart:
            count, height, *width = rows.shape
            rows = rows.reshape(count, 2, height // 2, *width).swapaxes(1, 2).reshape(rows.shape)
        return rows[:, columns]

    return Pieces(make, ir.DataType.FLOAT, shape, given)


def routers_of(model: ir.Model) -> set[ir.Node]:
    """The products by which experts are chosen, the nearest above each choice: they decide much and cost little."""
    found, seen = set[ir.Node](), set[ir.Value]()
    left = [n.inputs[1] for n in [*_mixtures(model), *_gathered(model)]]
    while left:
        value = left.pop()
        producer = None if value is None or value in seen else value.producer()
        if value is None or producer is None:
            continue
        seen.add(value)
        if producer.op_type in ("MatMul", "Gemm"):
            found.add(producer)
        elif producer.op_type != "Shape":
            left += producer.inputs
    return found


def quantize_experts(model: ir.Model, bits: int) -> None:
    """Experts in place to 8 or 4 ``bits``, in blocks of 32 along what is summed up; without such blocks they stay."""
    for n in _mixtures(model, "MoE"):
        if any(dims(n.inputs[at])[2] % BLOCK for at in (2, 4)):
            continue
        up, down = (_levels(model, n.inputs[at], bits) for at in (2, 4))
        added, added_down = (value for value in (*n.inputs[3:], None, None)[:3:2])
        how: dict[str, Any] = {
            "expert_weight_bits": bits,
            "block_size": BLOCK,
            "accuracy_level": 4,
            "weights_prepacked": 0,
        }
        inputs = [*n.inputs[:2], *up, added, *down, added_down]
        how |= _attributes(n)
        swap(n.outputs[0], node(model, n, "QMoE", inputs, domain=CONTRIB, like=n.outputs[0], **how))
        model.graph.remove(n, safe=True)


def never_alone(model: ir.Model) -> None:
    """Where kernels compute one row of an expert in a way of their own, show each pair whose expert has no other twice,
    in place: in float32, and in 4 bits, for processors without AVX-512."""
    for n in _mixtures(model):
        if n.op_type == "QMoE" and n.attributes["expert_weight_bits"].as_int() == 8:
            continue
        pairs, chosen = n.inputs[:2]
        first = constant(model, "experts.first", np.array([0], np.int64))
        two = constant(model, "experts.two", np.array(2, np.float32))
        company = node(model, n, "MatMul", [chosen, node(model, n, "ReduceSum", [chosen, first], keepdims=0)])
        alone = node(model, n, "NonZero", [node(model, n, "Less", [company, two])])
        alone = node(model, n, "Squeeze", [alone, first])
        shown = [_and_again(model, n, value, alone) for value in (pairs, chosen)]
        made = node(model, n, n.op_type, [*shown, *n.inputs[2:]], domain=CONTRIB, **_attributes(n))
        count = node(model, n, "Shape", [pairs], start=0, end=1)
        swap(n.outputs[0], node(model, n, "Slice", [made, first, count]))
        model.graph.remove(n, safe=True)


def _and_again(model: ir.Model, before: ir.Node, rows: ir.Value | None, which: ir.Value) -> ir.Value:
    again = node(model, before, "Gather", [rows, which], axis=0)
    shown: ir.Value = node(model, before, "Concat", [rows, again], axis=0)
    return shown


def _attributes(n: ir.Node) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in n.attributes.items()}


def experts_apart(model: ir.Model) -> None:
    """Experts in place to plain operators in float32, as transformers has them, for runtimes that know no others: they
    gather a copy of its expert's weights for every pair. Weights of 4 bits keep the values that those gave them."""
    for n in _mixtures(model):
        pairs, experts, result = _once(n)
        chosen = node(model, n, "ArgMax", [experts], axis=-1, keepdims=1)
        both = _gathered_product(model, n, pairs, chosen, *_apart(n, first=True))
        gate, up = node(model, n, "Split", [both], outputs=2, axis=-1, num_outputs=2)
        down = _gathered_product(model, n, _gated(model, n, gate, up), chosen, *_apart(n, first=False))
        swap(result, down)


def _gated(model: ir.Model, n: ir.Node, gate: ir.Value, up: ir.Value) -> ir.Value:
    """What the gate of the mixture ``n`` makes of two halves [P,I]."""
    given = {name: attribute.as_float() for name in (*SILU, "swiglu_limit") if (attribute := n.attributes.get(name))}

    def number(value: float) -> ir.Value:
        return constant(model, f"experts.{value:g}", np.array(value, np.float32))

    if (limit := given.get("swiglu_limit")) is not None:
        gate = node(model, n, "Min", [gate, number(limit)])
        up = node(model, n, "Clip", [up, number(-limit), number(limit)])
    slope, offset = given["activation_alpha"], given["activation_beta"]
    steep = gate if slope == 1.0 else node(model, n, "Mul", [gate, number(slope)])
    silu = node(model, n, "Mul", [gate, node(model, n, "Sigmoid", [steep])])
    gated: ir.Value = node(model, n, "Mul", [silu, up if not offset else node(model, n, "Add", [up, number(offset)])])
    return gated


def _gathered_product(
    model: ir.Model, before: ir.Node, rows: ir.Value | None, chosen: ir.Value, weights: Pieces, added: Array | None
) -> ir.Value:
    """[P,K] times each row's own of ``weights`` [E,N,K], the one that ``chosen`` [P,1] says, and ``added`` [E,N]:
    [P,N]."""
    last = constant(model, "experts.last", np.array([-1], np.int64))
    name = f"{before.name}.{'x'.join(map(str, weights.shape.numpy()[1:]))}"
    gathered = node(model, before, "GatherND", [constant(model, f"{name}.rows", weights), chosen])
    column = node(model, before, "MatMul", [gathered, node(model, before, "Unsqueeze", [rows, last])])
    made: ir.Value = node(model, before, "Squeeze", [column, last])
    if added is not None:
        more = node(model, before, "GatherND", [constant(model, f"{name}.added", added), chosen])
        made = node(model, before, "Add", [made, more])
    return made


def _apart(n: ir.Node, *, first: bool) -> tuple[Pieces, Array | None]:
    """Weights [E,N,K] and what is added [E,N] of a node, of gates or of the way down: all gates in front of what they
    gate."""
    stack, added = _rows(n, first=first), _added(n, first=first)
    height = stack.shape.numpy()[1]
    order = np.arange(height).reshape(-1, 2).T.ravel() if first else np.arange(height)

    def make(experts: slice, columns: slice) -> Array:
        return piece_of(stack, experts)[:, order[columns]]

    return Pieces(make, ir.DataType.FLOAT, stack.shape.numpy(), stack), None if added is None else added[:, order]


def unrounded_experts(model: ir.Model) -> list[str]:
    """The weights that experts multiply with in float32."""
    own = [n.inputs[index] for n in _mixtures(model, "MoE") for index in (2, 4)]
    return [str(value.name) for value in [*own, *(n.inputs[0] for n in _gathered(model))] if value is not None]


def _mixtures(model: ir.Model, *kinds: str) -> list[ir.Node]:
    return [n for n in model.graph if n.domain == CONTRIB and n.op_type in (kinds or ("MoE", "QMoE"))]


def _gathered(model: ir.Model) -> list[ir.Node]:
    """The nodes that pick matrices out of a stack of them in float32, by an index: experts that stayed apart."""

    def is_stack(value: ir.Value | None) -> bool:
        return value is not None and value.is_initializer() and value.dtype == ir.DataType.FLOAT and _rank(value) == 3

    return [n for n in model.graph if n.op_type in ("Gather", "GatherND") and is_stack(n.inputs[0])]


def _rank(value: ir.Value) -> int:
    return 0 if value.shape is None else len(value.shape)


def _once(n: ir.Node) -> tuple[ir.Value | None, ir.Value | None, ir.Value]:
    """The pairs of a node, their experts and what is made of them, without what ``never_alone`` added."""
    shown, chosen = (made_by(value, "Concat") for value in n.inputs[:2])
    again = None if shown is None else made_by(shown.inputs[1], "Gather")
    if shown is None or chosen is None or again is None or again.inputs[0] is not shown.inputs[0]:
        return n.inputs[0], n.inputs[1], n.outputs[0]
    return shown.inputs[0], chosen.inputs[0], n.outputs[0].consumers()[0].outputs[0]


def _levels(model: ir.Model, weight: ir.Value | None, bits: int) -> tuple[ir.Value, ir.Value]:
    """[E,N,K] -> u8 [E,N,K] or, two in a byte, [E,N,K/2], around the middle of their range; scales [E,N,K/32]."""
    assert weight is not None and weight.const_value is not None
    stack, (count, height, width) = weight.const_value, dims(weight)

    def rounded(experts: slice) -> tuple[Array, Array]:
        levels, scale = (blocks_to_int8 if bits == 8 else rows_to_int4)(piece_of(stack, experts).reshape(-1, width))
        return levels.reshape(-1, height, width * bits // 8), scale.reshape(-1, height, width // BLOCK)

    def make(experts: slice, columns: slice) -> Array:
        return rounded(experts)[0][:, columns]

    levels = Pieces(make, ir.DataType.UINT8, (count, height, width * bits // 8), stack)
    scale = np.concatenate([rounded(experts)[1] for experts in steps((count, height, width))])
    return constant(model, f"{weight.name}.u{bits}", levels), constant(model, f"{weight.name}.scale", scale)


def _added(n: ir.Node, *, first: bool) -> Array | None:
    at = (3 if first else 5) if n.op_type == "MoE" else (4 if first else 7)
    return array_of(n.inputs[at]) if at < len(n.inputs) else None


def _rows(n: ir.Node, *, first: bool) -> ir.TensorProtocol:
    """The weights of a node, of gates or of the way down: fp32 [E,N,K]."""
    at = 2 if first else 4 if n.op_type == "MoE" else 5
    weight = n.inputs[at]
    assert weight is not None and weight.const_value is not None
    if n.op_type == "MoE":
        return weight.const_value
    scale = n.inputs[at + 1]
    assert scale is not None and scale.const_value is not None and n.attributes["expert_weight_bits"].as_int() == 4
    packed, scales, (count, height, blocks) = weight.const_value, scale.const_value, dims(scale)

    def make(experts: slice, columns: slice) -> Array:
        flat = piece_of(packed, experts).reshape(-1, blocks, BLOCK // 2), piece_of(scales, experts).reshape(-1, blocks)
        return int4_to_rows(*flat, blocks * BLOCK).reshape(-1, height, blocks * BLOCK)[:, columns]

    return Pieces(make, ir.DataType.FLOAT, (count, height, blocks * BLOCK), packed)
