"""The graph passes: what each leaves of the graph, and that what it computes is unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from support_graphs import LOWERINGS, Array, Shape, graph, op_counts, reference, tokens

from leadout.engines.base import RAGGED
from leadout.engines.providers import onnxruntime
from leadout.export.graphs.gqa import fuse_skip_norm
from leadout.export.graphs.half import to_half
from leadout.export.graphs.passes import pack, simplify, to_gqa, to_gqa_even, to_grouped, to_nonpad
from leadout.export.graphs.rewrite import constant, node, swap
from leadout.export.graphs.tree import to_tree, to_tree_gqa

SHAPES = {
    "plain": Shape(),
    "window": Shape(windows=(8, None)),
    "biases": Shape(biases=True),
    "tied": Shape(tied=True),
    "partial": Shape(head_dim=32, rotary=16),
    "own keys": Shape(kv_heads=4),
    "narrow": Shape(rotary=8),  # tables of 4: GroupQueryAttention refuses them, rotation stays outside
}


def stepped(model: ir.Model, c: Shape, row: Array, chunks: tuple[int, ...]) -> Array:
    """Logits of one row fed in chunks, the cache copied by hand: no engine involved."""
    session = onnxruntime().InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    names = [v.name for v in session.get_inputs()]
    wanted = [v.name for v in session.get_outputs()]
    cache = {n: np.zeros((1, c.kv_heads, 64, c.head_dim), np.float32) for n in names if n.startswith("past_key")}
    done, logits = 0, []
    for width in chunks:
        positions = np.arange(done, done + width)[None]
        feeds: dict[str, Array] = {"input_ids": row[None, done : done + width], "position_ids": positions}
        feeds |= {"past_lens": np.array([done]), "logit_index": np.arange(width)[None], **cache}
        feeds |= {"least_width": np.array([2])}
        results = dict(zip(wanted, session.run(None, {n: feeds[n] for n in names}), strict=True))
        cache = {n: results[n.replace("past_key_values", "present")] for n in cache}
        logits.append(results["logits"][0])
        done += width
    return np.concatenate(logits)


ANY_WIDTH = {name: lower for name, lower in LOWERINGS.items() if name not in RAGGED}


def lowered(c: Shape, *passes: Callable[..., Any]) -> ir.Model:
    model = graph(c)
    simplify(model, c.context)
    pack(model)
    for one in passes:
        one(model)
    return model


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("lower", [None, *ANY_WIDTH.values()], ids=["canonical", *ANY_WIDTH])
def test_every_form_computes_the_model(name: str, lower: Callable[..., Any] | None) -> None:
    c = SHAPES[name]
    row = tokens(c, 1, 24)[0]
    model = lowered(c) if lower is None else lowered(c, lower)
    assert np.abs(stepped(model, c, row, (15, 1, 5, 3)) - reference(c, row)).max() < 2e-5


def test_the_captured_graph_itself_is_the_model() -> None:
    c = SHAPES["window"]
    row = tokens(c, 1, 24)[0]
    assert np.abs(stepped(graph(c), c, row, (15, 1, 5, 3)) - reference(c, row)).max() < 2e-5


def test_batch_1_form_has_eleven_nodes_a_layer() -> None:
    sizes = [len(list(lowered(Shape(layers=n, windows=(None,) * n), to_gqa).graph)) for n in (2, 3)]
    assert sizes[1] - sizes[0] == 11


def test_attention_takes_packed_values_and_rotates_inside() -> None:
    nodes = [n for n in lowered(Shape(), to_gqa).graph if n.op_type == "GroupQueryAttention"]
    assert len(nodes) == 2
    for n in nodes:
        assert n.inputs[1] is n.inputs[2] is None
        assert n.attributes["do_rotary"].as_int() == 1
    counts = op_counts(lowered(Shape(), to_gqa))
    assert not {"Transpose", "Reshape", "RotaryEmbedding", "TensorScatter", "Attention", "Cos"} & counts.keys()


def test_narrow_rotation_stays_outside() -> None:
    counts = op_counts(lowered(SHAPES["narrow"], to_gqa))
    assert counts["GroupQueryAttention"] == 2 and counts["RotaryEmbedding"] == 4


def test_windows_are_read_from_what_the_mask_computes() -> None:
    attention = [n for n in lowered(SHAPES["window"], to_gqa).graph if n.op_type == "GroupQueryAttention"]
    windows = [
        n.attributes["local_window_size"].as_int() if "local_window_size" in n.attributes else None for n in attention
    ]
    assert windows == [8, None]


@pytest.mark.parametrize("width", [1 << 17, 300_000])
def test_a_window_too_wide_to_be_recognised_is_not_taken_for_none(width: int) -> None:
    """It shows in texts longer than that alone: the layer keeps its mask."""
    model = lowered(Shape(windows=(width, None)), to_gqa)
    assert [n.op_type for n in model.graph if "Attention" in n.op_type] == ["Attention", "GroupQueryAttention"]


def test_nonpad_keeps_the_mask_of_a_window() -> None:
    model = lowered(SHAPES["window"])
    assert to_nonpad(model) == 1
    masked = [n.inputs[3] is not None for n in model.graph if n.op_type == "Attention"]
    assert masked == [True, False]


def test_a_step_of_one_token_costs_two_nodes_a_layer_more() -> None:
    sizes = [len(list(lowered(Shape(layers=n, windows=(None,) * n), to_gqa_even).graph)) for n in (2, 3)]
    assert sizes[1] - sizes[0] == 13


def test_queries_are_grouped_by_their_keys_and_alone_get_company() -> None:
    counts = op_counts(lowered(Shape(), to_grouped))
    assert counts["Attention"] == 2 and "Slice" not in counts, "two heads share keys: two rows at least"
    counts = op_counts(lowered(Shape(kv_heads=4), to_grouped))
    assert counts["Slice"] == 2 + 2, "rows of query and mask, once for all layers; and one cut a layer"


@pytest.mark.parametrize("lower", [to_gqa_even, to_grouped])
def test_one_layer_that_cannot_be_even_leaves_no_variant(lower: Callable[..., int]) -> None:
    model = lowered(Shape())
    next(n for n in model.graph if n.op_type == "Attention").op_type = "SomeAttention"
    assert lower(model) == 0


def shared(*, masked: bool) -> ir.Model:
    """The second layer's attention read twice, as by a layer that has no cache of its own; perhaps without its mask."""
    model = lowered(Shape())
    old = [n for n in model.graph if n.op_type == "Attention"][1]
    again = ir.Node("", "Attention", old.inputs[: 4 if masked else 3], list(old.attributes.values()))
    model.graph.insert_after(old, again)
    again.outputs[0].dtype, again.outputs[0].shape = old.outputs[0].dtype, old.outputs[0].shape
    swap(old.outputs[0], both := node(model, again, "Add", [old.outputs[0], again.outputs[0]], like=old.outputs[0]))
    made = both.producer()
    assert made is not None
    model.graph.remove(made)
    model.graph.insert_after(again, made)
    made.replace_input_with(0, old.outputs[0])
    return model


def test_a_cache_that_another_layer_reads_is_no_fused_attention_s() -> None:
    """Which would write it a second time."""
    assert to_gqa(shared(masked=True)) == 1 and to_gqa_even(shared(masked=True)) == 0
    assert to_tree_gqa(shared(masked=True)) == 0 and to_grouped(shared(masked=True)) == 3
    assert to_grouped(shared(masked=False)) == 0, "all that attend must be grouped, not as many as keep keys"


@pytest.mark.parametrize("lower", [to_gqa, to_gqa_even, to_tree_gqa])
def test_heads_that_are_no_multiple_of_8_wide_stay_attention(lower: Callable[..., int]) -> None:
    model = lowered(Shape(head_dim=12, rotary=8))
    assert lower(model) == 0 and op_counts(model)["Attention"] == 2


@pytest.mark.parametrize("lower", [to_gqa, to_nonpad, to_tree])
def test_a_mask_that_reads_the_cache_is_left_alone(lower: Callable[..., int]) -> None:
    """The second layer's, like doge's: the values in its slots say which of them are seen."""
    model = lowered(Shape())
    old = [n for n in model.graph if n.op_type == "Attention"][1]
    within, around = (constant(model, "axes", np.array(axes, np.int64)) for axes in ([1, 3], [1, 2]))
    largest = node(model, old, "ReduceMax", [old.inputs[2], within], keepdims=0)
    shown = node(model, old, "Less", [largest, constant(model, "most", np.array(1e9, np.float32))])
    shown = node(model, old, "Unsqueeze", [shown, around])
    old.replace_input_with(3, node(model, old, "And", [old.inputs[3], shown], like=old.inputs[3]))
    assert lower(model) == (0 if lower is to_tree else 1)


@pytest.mark.parametrize("lower", [to_gqa, to_nonpad])
def test_a_mask_of_another_law_is_left_alone(lower: Callable[..., int]) -> None:
    model = lowered(Shape())
    for n in [n for n in model.graph if n.op_type == "LessOrEqual"]:  # strict causality: a token does not see itself
        swap(n.outputs[0], node(model, n, "Less", list(n.inputs), like=n.outputs[0]))
    assert lower(model) == 0
    assert op_counts(model)["Attention"] == 2 and "GroupQueryAttention" not in op_counts(model)


def test_attention_without_an_attention_node_has_no_variants() -> None:
    model = lowered(Shape())
    for n in [n for n in model.graph if n.op_type == "Attention"]:
        n.op_type = "SomeAttention"
    assert [lower(model) for lower in LOWERINGS.values()] == [0] * len(LOWERINGS)


def test_pack_joins_what_reads_one_value() -> None:
    model = graph(Shape(biases=True))
    simplify(model, 320)
    before = op_counts(model)
    assert pack(model) == 4
    after = op_counts(model)
    assert before["MatMul"] - after["MatMul"] == 2 * (2 + 1)
    assert after["Split"] == 4
    assert before["Add"] - after["Add"] == 2 * 2


def test_simplify_tabulates_angles_exactly() -> None:
    model = graph(Shape())
    row = tokens(Shape(), 1, 24)[0]
    plain = stepped(model, Shape(), row, (20, 4))
    simplify(model, 320)
    assert "Cos" not in op_counts(model) and "GatherElements" not in op_counts(model)
    rotary = next(n for n in model.graph if n.op_type == "RotaryEmbedding")
    assert rotary.inputs[1].const_value is not None and rotary.inputs[1].shape == ir.Shape([320 + 128, 8])
    assert np.array_equal(stepped(model, Shape(), row, (20, 4)), plain)


def test_angles_that_depend_on_other_positions_are_no_tables() -> None:
    model = graph(Shape())
    cos = next(n for n in model.graph if n.op_type == "Cos")
    longest = node(model, cos, "ReduceMax", [cos.inputs[0]], keepdims=1)
    cos.replace_input_with(0, node(model, cos, "Mul", [cos.inputs[0], longest], like=cos.inputs[0]))
    simplify(model, 320)
    assert op_counts(model)["Cos"] == 1


def test_simplify_without_a_context_makes_no_tables() -> None:
    model = graph(Shape())
    simplify(model)
    assert op_counts(model)["Cos"] == 1


def test_slices_that_tile_become_a_split() -> None:
    def sliced(spans: tuple[tuple[int, int], ...]) -> ir.Model:
        model = graph(Shape())
        pack(model)
        split = next(n for n in model.graph if n.op_type == "Split")
        for part, span in zip(split.outputs, spans, strict=True):
            values = [constant(model, f"bound.{bound}", np.array([bound], np.int64)) for bound in (*span, -1)]
            swap(part, node(model, split, "Slice", [split.inputs[0], *values], like=part))
        return model

    whole = sliced(((0, 64), (64, 96), (96, 128)))
    simplify(whole)
    assert "Slice" not in op_counts(whole)
    overlapping = sliced(((0, 64), (64, 96), (64, 96)))
    simplify(overlapping)
    assert op_counts(overlapping)["Slice"] >= 2


def test_sums_before_norms_are_fused_and_still_read() -> None:
    model = lowered(Shape())
    assert fuse_skip_norm(model) == 4
    assert op_counts(model)["SkipSimplifiedLayerNormalization"] == 4


def test_weights_are_shared_by_name_between_forms() -> None:
    base = lowered(Shape())
    known = {n for n, v in base.graph.initializers.items() if v.const_value is not None and v.const_value.size > 64}
    for lower in LOWERINGS.values():
        model = lowered(Shape(), lower)
        assert {n for n, v in model.graph.initializers.items() if v.const_value.size > 64} <= known


@pytest.mark.parametrize("given", [None, 0.0, 2.5, -1e30])
def test_half_precision_fills_shapes_with_halves(given: float | None) -> None:
    model, largest = graph(Shape()), float(np.finfo(np.float16).max)
    head = model.graph.outputs[0].producer()
    attributes = {} if given is None else {"value": ir.tensor(np.array([given], np.float32))}
    shape = node(model, head, "Shape", [head.inputs[0]])
    filling = node(model, head, "ConstantOfShape", [shape], like=head.inputs[0], **attributes)
    head.replace_input_with(0, node(model, head, "Add", [head.inputs[0], filling], like=head.inputs[0]))
    to_half(model)
    assert filling.dtype == ir.DataType.FLOAT16
    found = filling.producer().attributes["value"].as_tensor().numpy()
    assert found.dtype == np.float16 and found.tolist() == [max(given or 0.0, -largest)]
    onnxruntime().InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])


def test_half_precision_compares_halves() -> None:
    """A router's choice: its limit, computed or given, has the type of what it limits."""
    model = graph(Shape())
    head = model.graph.outputs[0].producer()
    rows = head.inputs[0]
    far = node(model, head, "Greater", [rows, constant(model, "limit", np.array(3.0, np.float32))])
    far.dtype = ir.DataType.BOOL
    kept = node(model, head, "Where", [far, constant(model, "nought", np.array(0.0, np.float32)), rows], like=rows)
    head.replace_input_with(0, kept)
    to_half(model)
    onnxruntime().InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
