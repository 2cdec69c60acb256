"""Which node attention becomes on ONNX Runtime: GroupQueryAttention for one row, grouped queries or lengths instead of
masks for many; and whether a step of one token rounds like every other (``padding``)."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from .padding import Padding
from .pieces import Array
from .rewrite import CONTRIB, constant, dims, evaluate, graph_inputs, made_by, node, sources, swap, sweep
from .sinks import SCORES, Sink, sink_of

_PROBED_SLOTS = 1 << 17  # windows narrower than this are recognised
_FARTHEST = 1 << 21  # a window as wide as this cannot be told from none
_MULTIPLE = 8  # GroupQueryAttention takes heads, and tables of angles, of such widths only


@dataclasses.dataclass(frozen=True)
class Layer:
    """One attention layer in canonical form. ``window`` is how many positions a query sees, None for all before it;
    ``sink`` what is made of what it attends to, if it has sinks."""

    attention: ir.Node
    key: ir.Node
    value: ir.Node
    window: int | None
    sink: Sink | None = None


def to_gqa(model: ir.Model, *, even: bool = False) -> int:
    """TensorScatter x2 + Attention -> GroupQueryAttention, rotary inside, in place: right for ONE row only.

    Packed q/k/v go in as one value; sums before norms are fused with them. A layer that is no causal or sliding-window
    attention, or not ``fusable``, stays as it is and stays right. Returns how many layers became one node:
    at 0 (falcon, bloom: no Attention node at all) the variant is worth nothing and should not be shipped.

    ``even``: a step of one token gives the same bits as wider ones, for it shows each node two rows, and writes a slot
    more, where the new input ``least_width`` is 2 and not 1. Returns 0 where a layer is left that does not.
    """
    layers, all_of_them = [layer for layer in layers_of(model) if fusable(layer)], attending(model)
    padding = Padding(model, asked=True) if even else None
    if layers:
        lengths = lengths_of(model, padding)
    for layer in layers:
        fuse_attention(model, layer, lengths, padding)
    fuse_skip_norm(model)
    sweep(model)
    return 0 if even and len(layers) < all_of_them else len(layers)


def to_gqa_even(model: ir.Model) -> int:
    """``to_gqa`` with ``even``."""
    return to_gqa(model, even=True)


def to_grouped(model: ir.Model) -> int:
    """Attention over all query heads that share keys as over one head with so many times the rows, in place.

    Ragged rows, and all widths give the same bits: no product inside has one row only (where every query head has keys
    of its own, one is added). A head's keys are packed once for its group: no slower than ``to_nonpad`` on a CPU.
    Returns how many layers changed, 0 where one is left.
    """
    layers, all_of_them = [n for n in model.graph if n.op_type == "Attention" and _groupable(n)], attending(model)
    padding = Padding(model)
    masks: dict[int, ir.Value] = {}
    for old in layers:
        if dims(old.inputs[0])[1] > dims(old.inputs[1])[1]:
            _group(model, old, masks)
        else:
            _accompany(model, old, padding)
    fuse_skip_norm(model)
    sweep(model)
    return 0 if len(layers) < all_of_them else len(layers)


def to_nonpad(model: ir.Model) -> int:
    """Attention's mask -> ``nonpad_kv_seqlen`` and ``is_causal``, in place: ragged rows, and CUDA's flash kernels.

    Layers with a sliding window keep their mask, and so do those with sinks, which look at it. Returns how many layers
    changed; at 0 do not ship the variant.
    """
    layers = [layer for layer in layers_of(model) if layer.window is None and layer.sink is None]
    inputs = graph_inputs(model)
    first = next(iter(model.graph))
    if layers:
        total = node(model, first, "Add", [inputs["past_lens"], _counted(model, first, inputs["input_ids"])])
    for layer in layers:
        old = layer.attention
        attributes = [*old.attributes.values(), ir.AttrInt64("is_causal", 1)]
        new = ir.Node("", "Attention", [*old.inputs[:3], None, None, None, total], attributes)
        model.graph.insert_before(old, new)
        swap(old.outputs[0], new.outputs[0])
        model.graph.remove(old, safe=True)
    fuse_skip_norm(model)
    sweep(model)
    return len(layers)


def _counted(model: ir.Model, before: ir.Node, tokens: ir.Value) -> ir.Value:
    """How many ``tokens`` [B,S] a row has, [B]. Not by their shape, which is known on a host: ``past_lens``, added to
    that, would have to come over from the device in each step, and no CUDA graph could hold it."""
    ones = node(model, before, "Cast", [node(model, before, "Equal", [tokens, tokens])], to=int(ir.DataType.INT64))
    last = constant(model, "nonpad.row", np.array([1], np.int64))
    counted: ir.Value = node(model, before, "ReduceSum", [ones, last], keepdims=0)
    return counted


def fuse_skip_norm(model: ir.Model) -> int:
    """Add + RMSNormalization -> SkipSimplifiedLayerNormalization, where both summands are [B,S,H]. Returns how many."""
    done = 0
    for norm in [n for n in model.graph if n.op_type == "RMSNormalization"]:
        add = made_by(norm.inputs[0], "Add")
        if (
            add is None
            or any(len(dims(v)) != 3 for v in add.inputs)
            or dims(norm.inputs[1]) != dims(add.outputs[0])[-1:]
        ):
            continue
        inputs = [*add.inputs, norm.inputs[1]]
        epsilon = norm.attributes["epsilon"].as_float()
        outputs = node(
            model, add, "SkipSimplifiedLayerNormalization", inputs, outputs=4, domain=CONTRIB, epsilon=epsilon
        )
        outputs[1].name = outputs[2].name = ""
        swap(norm.outputs[0], outputs[0])
        swap(add.outputs[0], outputs[3])
        model.graph.remove([norm, add], safe=True)
        done += 1
    return done


def layers_of(model: ir.Model) -> list[Layer]:
    """The attention layers whose mask is understood."""
    found = []
    windows: dict[int, tuple[bool, int | None]] = {}
    for n in model.graph:
        if n.op_type != "Attention" or len(n.inputs) < 4 or n.inputs[3] is None:
            continue
        key, value, mask = made_by(n.inputs[1], "TensorScatter"), made_by(n.inputs[2], "TensorScatter"), n.inputs[3]
        if key is None or value is None:
            continue
        if id(mask) not in windows:
            windows[id(mask)] = _window(model, mask)
        known, window = windows[id(mask)]
        if known:
            found.append(Layer(n, key, value, window, sink_of(n)))
    return found


def fusable(layer: Layer) -> bool:
    """Whether GroupQueryAttention takes the layer: heads whose keys are as wide as their values, in eights
    (open_llama_3b's 100 are not), and a cache that no other layer reads (Gemma 3n's and 4's do)."""
    width, alone = dims(layer.attention.inputs[0])[-1], len(layer.key.outputs[0].uses()) == 1
    return bool(alone and width == dims(layer.value.inputs[0])[-1] and width % _MULTIPLE == 0)


def _window(model: ir.Model, mask: ir.Value) -> tuple[bool, int | None]:
    """Recognise a mask by what it computes, not by how: (True, None) causal, (True, w) causal and of the last w."""
    caches = {name: v for name, v in graph_inputs(model).items() if name.startswith("past_key_values.")}
    if not sources([mask]) <= {"position_ids", "past_lens", "input_ids", *caches}:
        return False, None
    if not sources([mask], shapes=False).isdisjoint(caches):
        return False, None  # doge: which slots are seen follows from the values in them
    slot = np.arange(_PROBED_SLOTS)

    def seen(queries: list[int], slots: int = _PROBED_SLOTS) -> Array:
        feeds = {
            "position_ids": np.array([queries], np.int64),
            "past_lens": np.array([queries[0]], np.int64),
            "input_ids": np.zeros((1, len(queries)), np.int64),
        }
        for name, v in caches.items():  # read for their number of slots only, so caches without rows will do
            _, heads, _, width = dims(v)
            feeds[name] = np.zeros((0, heads, slots, width), v.dtype.numpy())
        return np.asarray(evaluate(model, [mask], feeds)[0][0, 0])

    width = int(seen([_FARTHEST - 1], _FARTHEST)[0].sum())
    if _PROBED_SLOTS <= width < _FARTHEST:
        return False, None
    width = min(width, _PROBED_SLOTS)
    queries = sorted({0, 1, width // 2, width - 1, width, width + 1, _PROBED_SLOTS // 2} & set(range(_PROBED_SLOTS)))
    wanted = [(slot <= q) & (slot > q - width) for q in queries]
    if not np.array_equal(seen(queries), wanted):
        return False, None
    return True, None if width == _PROBED_SLOTS else width


def attending(model: ir.Model) -> int:
    """How many layers attend, those included whose attention is no node and those that have no cache of their own."""
    cached = sum(name.endswith(".key") for name in graph_inputs(model))
    return max(cached, len([n for n in model.graph if n.op_type == "Attention"]))


def _groupable(attention: ir.Node) -> bool:
    """One mask for all heads, and nothing after it."""
    inputs = attention.inputs
    return len(inputs) == 4 and inputs[3] is not None and dims(inputs[3])[1:2] == (1,) and len(dims(inputs[3])) == 4


def _group(model: ir.Model, old: ir.Node, masks: dict[int, ir.Value]) -> None:
    """Query heads that share keys become rows of one head. ``masks``: the widened ones, by the mask they came from."""
    query, key, value, mask = old.inputs[:4]
    (_, heads, _, head_dim), kv_heads, value_dim = dims(query), dims(key)[1], dims(value)[-1]
    if id(mask) not in masks:
        masks[id(mask)] = node(model, old, "Concat", [mask] * (heads // kv_heads), axis=2)
    rows = constant(model, f"grouped.{kv_heads}x{head_dim}", np.array([0, kv_heads, -1, head_dim], np.int64))
    apart = constant(model, f"grouped.{heads}x{value_dim}", np.array([0, heads, -1, value_dim], np.int64))
    output, *scores = _attend(model, old, node(model, old, "Reshape", [query, rows]), masks[id(mask)])
    if scores:
        slots = node(model, old, "Shape", [*scores], start=3, end=4)
        each = constant(model, f"grouped.{heads}", np.array([0, heads, -1], np.int64))
        scores = [node(model, old, "Reshape", [*scores, node(model, old, "Concat", [each, slots], axis=0)])]
    _replace(model, old, node(model, old, "Reshape", [output, apart]), *scores)


def _accompany(model: ir.Model, old: ir.Node, padding: Padding) -> None:
    """Every query head has keys of its own: a row alone gets a second one."""
    made = _attend(model, old, padding.add(old, old.inputs[0], 2), padding.add(old, old.inputs[3], 2))
    _replace(model, old, *(padding.remove(old, output, 2) for output in made))


def _attend(model: ir.Model, old: ir.Node, query: ir.Value, mask: ir.Value) -> list[ir.Value]:
    """What is attended to; and the scores, where somebody looks at them."""
    inputs, scored = [query, *old.inputs[1:3], mask], len(old.outputs) > SCORES
    new = ir.Node("", "Attention", inputs, list(old.attributes.values()), num_outputs=SCORES + 1 if scored else 1)
    for unused in new.outputs[1:SCORES]:
        unused.name = ""
    model.graph.insert_before(old, new)
    return [new.outputs[0], *new.outputs[SCORES:]]


def _replace(model: ir.Model, old: ir.Node, output: ir.Value, *scores: ir.Value) -> None:
    swap(old.outputs[0], output)
    for value in scores:
        swap(old.outputs[SCORES], value)
    model.graph.remove(old, safe=True)


def lengths_of(model: ir.Model, padding: Padding | None = None) -> tuple[ir.Value, ir.Value]:
    """GroupQueryAttention's two lengths: slots used after this step less one (per row), and the most (a scalar)."""
    inputs = graph_inputs(model)
    first = next(iter(model.graph)) if padding is None else padding.end
    width = node(model, first, "Shape", [inputs["input_ids"]], start=1, end=2) if padding is None else padding.padded
    total = node(model, first, "Add", [inputs["past_lens"], width])
    total = node(model, first, "Cast", [total], to=int(ir.DataType.INT32))
    last = node(model, first, "Sub", [total, constant(model, "gqa.one", np.array(1, np.int32))])
    return last, node(model, first, "ReduceMax", [total], keepdims=0)


def fuse_attention(
    model: ir.Model,
    layer: Layer,
    lengths: tuple[ir.Value, ir.Value],
    padding: Padding | None = None,
    bias: ir.Value | None = None,
) -> None:
    """Make ``layer`` one GroupQueryAttention; ``bias`` [B, 1, S, slots in use] is added before the softmax."""
    old, past_key, past_value = layer.attention, layer.key.inputs[0], layer.value.inputs[0]
    heads, head_dim = dims(old.inputs[0])[1], dims(old.inputs[0])[-1]
    attributes = {"num_heads": heads, "kv_num_heads": dims(past_key)[1]}
    attributes |= {k: old.attributes[k].as_float() for k in ("scale", "softcap") if k in old.attributes}
    if layer.window is not None:
        attributes["local_window_size"] = layer.window
    query, key, rotary = _strip_rotary(old.inputs[0], layer.key.inputs[1])
    if rotary is not None:
        interleaved = rotary.attributes.get("interleaved")
        attributes |= {"do_rotary": 1, "rotary_interleaved": interleaved.as_int() if interleaved is not None else 0}
    flat = _packed([_flat(model, old, v) for v in (query, key, layer.value.inputs[1])])
    angles = list(rotary.inputs[1:4]) if rotary is not None else []
    if padding is not None:
        flat = [value if value is None else padding.add(old, value, 1) for value in flat]
        angles = [*angles[:2], *(padding.add(old, positions, 1) for positions in angles[2:])]
    inputs = [*flat, past_key, past_value, *lengths, *angles]
    if bias is not None:
        inputs += [None] * (10 - len(inputs)) + [bias]
    result = old.outputs[0]
    if layer.sink is not None:
        inputs += [None] * (11 - len(inputs)) + [constant(model, "gqa.sinks", layer.sink.logits)]
        result = layer.sink.result
    output, present_key, present_value = node(
        model, old, "GroupQueryAttention", inputs, outputs=3, domain=CONTRIB, **attributes
    )
    if padding is not None:
        output = padding.remove(old, output, 1)
    batch, _, width, _ = dims(result)
    output.shape, output.dtype = ir.Shape([batch, width, heads * head_dim]), result.dtype
    swap(layer.key.outputs[0], present_key)
    swap(layer.value.outputs[0], present_value)
    _reconnect(model, old, result, output, (heads, head_dim))


def _strip_rotary(query: ir.Value, key: ir.Value) -> tuple[ir.Value, ir.Value, ir.Node | None]:
    """Queries and keys before rotation, and the rotation, if both are rotated alike by tables and position_ids."""
    q, k = made_by(query, "RotaryEmbedding"), made_by(key, "RotaryEmbedding")
    if q is None or k is None or len(q.inputs) != 4 or list(q.inputs[1:]) != list(k.inputs[1:]):
        return query, key, None
    if dims(q.inputs[1])[-1] % _MULTIPLE:
        return query, key, None
    if {n: a.value for n, a in q.attributes.items()} != {n: a.value for n, a in k.attributes.items()}:
        return query, key, None
    return q.inputs[0], k.inputs[0], q


def _flat(model: ir.Model, before: ir.Node, value: ir.Value) -> ir.Value:
    """[B,heads,S,width] as [B,S,heads*width], without the Transpose and Reshape that made it where there are such."""
    _, heads, _, width = dims(value)
    transpose = made_by(value, "Transpose")
    if transpose is not None and list(transpose.attributes["perm"].as_ints()) == [0, 2, 1, 3]:
        value = transpose.inputs[0]
    else:
        value = node(model, before, "Transpose", [value], perm=[0, 2, 1, 3])
    reshape = made_by(value, "Reshape")
    if reshape is not None and len(dims(reshape.inputs[0])) == 3 and dims(reshape.inputs[0])[-1] == heads * width:
        source: ir.Value = reshape.inputs[0]
        return source
    shape = constant(model, "gqa.flat", np.array([0, 0, -1], np.int64))
    flat: ir.Value = node(model, before, "Reshape", [value, shape])
    return flat


def _packed(parts: list[ir.Value]) -> list[ir.Value | None]:
    """The value that q, k and v were split from, if it was split into just these; else the three."""
    split = made_by(parts[0], "Split")
    if split is not None and list(split.outputs) == parts:
        return [split.inputs[0], None, None]
    return list(parts)


def _reconnect(model: ir.Model, old: ir.Node, result: ir.Value, output: ir.Value, heads: tuple[int, int]) -> None:
    """Let what read Attention's ``result`` [B,heads,S,width] read ``output`` [B,S,heads*width], past its Transpose and
    Reshape."""
    for transpose in [n for n in result.consumers() if n.op_type == "Transpose"]:
        if list(transpose.attributes["perm"].as_ints()) != [0, 2, 1, 3]:
            continue
        for reshape in [n for n in transpose.outputs[0].consumers() if n.op_type == "Reshape"]:
            if dims(reshape.outputs[0]) == dims(output):
                swap(reshape.outputs[0], output)
                model.graph.remove(reshape, safe=True)
            elif len(dims(reshape.outputs[0])) == 2:
                reshape.replace_input_with(0, output)
        if not transpose.outputs[0].uses():
            model.graph.remove(transpose, safe=True)
    if result.uses():
        shape = constant(model, f"gqa.heads.{heads[0]}x{heads[1]}", np.array([0, 0, *heads], np.int64))
        split = node(model, old, "Reshape", [output, shape])
        swap(result, node(model, old, "Transpose", [split], perm=[0, 2, 1, 3]))
