"""A tiny Llama-like decoder as the exporter captures one, its float64 reference in numpy, and bundles' models of it."""

from __future__ import annotations

import dataclasses
import platform
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, shape_inference

from leadout.bundle import CacheShape, Model, ModelEntry, file_entry
from leadout.engines import Engine
from leadout.engines.base import FROM_TWO, RAGGED
from leadout.engines.ort import SlotEngine
from leadout.engines.rounding import even_widths
from leadout.export.graphs.passes import pack, simplify, to_gqa, to_gqa_even, to_grouped, to_nonpad
from leadout.export.graphs.quantize import quantize
from leadout.export.graphs.ragged import to_ragged
from leadout.export.graphs.tree import to_tree, to_tree_gqa

Array = NDArray[Any]

LOWERINGS = {
    "gqa": to_gqa,
    "gqa_even": to_gqa_even,
    "grouped": to_grouped,
    "nonpad": to_nonpad,
    **{name: partial(to_ragged, rows=rows) for name, rows in RAGGED.items()},
}
BRANCHING = {"tree": to_tree, "tree_gqa": to_tree_gqa}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A decoder's dimensions. ``windows``: per layer, the width of its sliding window or None; ``rotary``: how many of
    a head's dimensions are rotated."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 96
    vocab: int = 160
    context: int = 320
    rotary: int = 16
    windows: tuple[int | None, ...] = (None, None)
    biases: bool = False
    tied: bool = False
    seed: int = 0


def weights(c: Shape) -> dict[str, Array]:
    rng = np.random.default_rng(c.seed)
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed": (c.vocab, c.hidden), "norm": (c.hidden,)}
    if not c.tied:
        shapes["head"] = (c.hidden, c.vocab)
    for i in range(c.layers):
        linear = {"q": (c.hidden, q), "k": (c.hidden, kv), "v": (c.hidden, kv), "o": (q, c.hidden)}
        linear |= {"gate": (c.hidden, c.ffn), "up": (c.hidden, c.ffn), "down": (c.ffn, c.hidden)}
        shapes |= {f"{i}.{n}": s for n, s in linear.items()}
        shapes |= {f"{i}.{n}": (c.hidden,) for n in ("norm1", "norm2")}
        if c.biases:
            shapes |= {f"{i}.{n}.bias": linear[n][1:] for n in "qkv"}
    return {n: (rng.normal(size=s) * 0.15 + ("norm" in n)).astype(np.float32) for n, s in shapes.items()}


def graph(c: Shape) -> ir.Model:
    """The canonical graph of ``c``, unpacked, angles computed from position_ids, masks from slots."""
    w, made = weights(c), Nodes()
    const, op, ints = made.const, made.op, made.ints

    slots = op("Squeeze", [op("Shape", ["past_key_values.0.key"], start=2, end=3)])
    slot = op("Range", [const(np.array(0)), slots, const(np.array(1))])
    query = op("Unsqueeze", ["position_ids", ints(1, 3)])
    causal = op("LessOrEqual", [slot, query])

    def mask(window: int | None) -> str:
        if window is None:
            return causal
        return op("And", [causal, op("Greater", [slot, op("Sub", [query, const(np.array(window))])])])

    frequency = (100.0 ** -(np.arange(c.rotary // 2) * 2 / c.rotary)).astype(np.float32)
    where = op("Cast", [op("Unsqueeze", ["position_ids", ints(2)])], to=TensorProto.FLOAT)
    angle = op("Mul", [where, const(frequency)])
    cos, sin = op("Cos", [angle]), op("Sin", [angle])

    def norm(x: str, name: str) -> str:
        return op("RMSNormalization", [x, const(w[name], name)], axis=-1, epsilon=1e-5, stash_type=1)

    def linear(x: str, name: str) -> str:
        y = op("MatMul", [x, const(w[name], name)])
        return op("Add", [y, const(w[f"{name}.bias"], f"{name}.bias")]) if f"{name}.bias" in w else y

    def split(x: str, heads: int) -> str:
        return op("Transpose", [op("Reshape", [x, ints(0, 0, heads, c.head_dim)])], perm=[0, 2, 1, 3])

    def rotate(x: str) -> str:
        return op("RotaryEmbedding", [x, cos, sin], rotary_embedding_dim=c.rotary if c.rotary < c.head_dim else 0)

    x = op("Gather", [const(w["embed"], "embed"), "input_ids"])
    for i in range(c.layers):
        n = norm(x, f"{i}.norm1")
        q, k, v = (split(linear(n, f"{i}.{p}"), h) for p, h in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)))
        new = {"key": rotate(k), "value": v}
        kv = [
            op("TensorScatter", [f"past_key_values.{i}.{p}", new[p], "past_lens"], f"present.{i}.{p}", axis=2)
            for p in ("key", "value")
        ]
        a = op("Attention", [rotate(q), *kv, mask(c.windows[i])], scale=c.head_dim**-0.5)
        a = op("Reshape", [op("Transpose", [a], perm=[0, 2, 1, 3]), ints(0, 0, c.heads * c.head_dim)])
        x = op("Add", [x, linear(a, f"{i}.o")])
        n = norm(x, f"{i}.norm2")
        gate = linear(n, f"{i}.gate")
        gate = op("Mul", [gate, op("Sigmoid", [gate])])
        x = op("Add", [x, linear(op("Mul", [gate, linear(n, f"{i}.up")]), f"{i}.down")])
    index = op("Expand", [op("Unsqueeze", ["logit_index", ints(2)]), ints(1, 1, c.hidden)])
    rows = op("GatherElements", [norm(x, "norm"), index], axis=1)
    head = op("Transpose", ["embed"], perm=[1, 0]) if c.tied else const(w["head"], "head")
    op("MatMul", [rows, head], "logits")
    return made.model(c)


class Nodes:
    """A graph in the making: nodes and constants, known by the names of what they give."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._constants: dict[str, Array] = {}

    def const(self, array: Array, name: str = "") -> str:
        name = name or f"c{len(self._constants)}"
        self._constants[name] = np.asarray(array)
        return name

    def op(self, kind: str, inputs: list[str], out: str = "", **attributes: Any) -> str:
        out = out or f"v{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [out], **attributes))
        return out

    def halves(self, x: str) -> tuple[str, str]:
        first, second = f"{x}.first", f"{x}.second"
        self._nodes.append(helper.make_node("Split", [x], [first, second], axis=-1, num_outputs=2))
        return first, second

    def ints(self, *values: int) -> str:
        return self.const(np.array(values, np.int64))

    def model(self, c: Shape) -> ir.Model:
        """The decoder of shape ``c`` that these nodes are."""
        inputs, outputs = declared(c)
        initializers = [numpy_helper.from_array(a, n) for n, a in self._constants.items()]
        made = helper.make_graph(self._nodes, "decoder", inputs, outputs, initializers)
        proto = helper.make_model(made, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
        return ir.from_proto(shape_inference.infer_shapes(proto))


def declared(c: Shape) -> tuple[list[Any], list[Any]]:
    """Inputs and outputs of the decoder of shape ``c``."""
    real, whole = TensorProto.FLOAT, TensorProto.INT64
    inputs = [helper.make_tensor_value_info(n, whole, ["batch", "seq"]) for n in ("input_ids", "position_ids")]
    inputs.append(helper.make_tensor_value_info("past_lens", whole, ["batch"]))
    inputs.append(helper.make_tensor_value_info("logit_index", whole, ["batch", "wanted"]))
    outputs = [helper.make_tensor_value_info("logits", real, ["batch", "wanted", c.vocab])]
    shape = ["batch", c.kv_heads, "slots", c.head_dim]
    for i in range(c.layers):
        for part in ("key", "value"):
            inputs.append(helper.make_tensor_value_info(f"past_key_values.{i}.{part}", real, shape))
            outputs.append(helper.make_tensor_value_info(f"present.{i}.{part}", real, shape))
    return inputs, outputs


def reference(c: Shape, tokens: Array) -> Array:
    """Logits [S, vocab] of one row of tokens [S], all at once, in float64."""
    w = {n: a.astype(np.float64) for n, a in weights(c).items()}
    length = len(tokens)
    angle = np.arange(length)[:, None] * 100.0 ** -(np.arange(c.rotary // 2) * 2 / c.rotary)

    def norm(x: Array, name: str) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w[name]

    def heads(x: Array, name: str, count: int) -> Array:
        y = x @ w[name] + w.get(f"{name}.bias", 0.0)
        return y.reshape(length, count, c.head_dim).transpose(1, 0, 2)

    def rotate(x: Array) -> Array:
        a, b, rest = x[..., : c.rotary // 2], x[..., c.rotary // 2 : c.rotary], x[..., c.rotary :]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle), rest], -1)

    x = w["embed"][tokens]
    for i in range(c.layers):
        n = norm(x, f"{i}.norm1")
        q, k, v = (
            rotate(heads(n, f"{i}.q", c.heads)),
            rotate(heads(n, f"{i}.k", c.kv_heads)),
            heads(n, f"{i}.v", c.kv_heads),
        )
        k, v = (np.repeat(z, c.heads // c.kv_heads, axis=0) for z in (k, v))
        distance = np.arange(length)[:, None] - np.arange(length)
        seen = (distance >= 0) & (distance < (c.windows[i] or length))
        score = np.where(seen, q @ k.transpose(0, 2, 1) * c.head_dim**-0.5, -np.inf)
        score = np.exp(score - score.max(-1, keepdims=True))
        a = (score / score.sum(-1, keepdims=True)) @ v
        x = x + a.transpose(1, 0, 2).reshape(length, -1) @ w[f"{i}.o"]
        n = norm(x, f"{i}.norm2")
        gate = n @ w[f"{i}.gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (n @ w[f"{i}.up"])) @ w[f"{i}.down"]
    return norm(x, "norm") @ (w["embed"].T if c.tied else w["head"])


def write(c: Shape, folder: Path, precision: str = "fp32") -> Model:
    """Lower and save ``c`` as the exporter does: one blob of weights, a small file for each variant."""
    folder.mkdir(parents=True, exist_ok=True)
    model = graph(c)
    simplify(model, c.context)
    pack(model)
    if precision != "fp32":
        quantize(model, precision)
    ir.save(model, folder / "model.onnx", external_data="model.onnx.data")
    variants = {"canonical": file_entry(folder / "model.onnx")}
    for name, lower in (LOWERINGS | BRANCHING).items():
        variant = ir.load(folder / "model.onnx")
        if lower(variant):
            ir.save(variant, folder / f"model.{name}.onnx")
            variants[name] = file_entry(folder / f"model.{name}.onnx")
    return Model(folder, entry(c, precision, variants))


def without_ragged(model: Model) -> Model:
    """The same of an older bundle, which has no graphs for ragged rows."""
    kept = {name: file for name, file in model.entry.variants.items() if name not in RAGGED}
    return Model(model.folder, dataclasses.replace(model.entry, variants=kept))


def entry(c: Shape, precision: str, variants: dict[str, Any]) -> ModelEntry:
    return ModelEntry(
        directory="target",
        architecture="tiny",
        precision=precision,
        dialect="slots",
        dtype="float16" if precision == "fp16" else "float32",
        vocab_size=c.vocab,
        max_context=c.context,
        parameters=0,
        cache=(CacheShape(c.kv_heads, c.head_dim, c.head_dim),) * c.layers,
        eos_token_ids=(),
        variants=variants,
        files={},
    )


def tokens(c: Shape, rows: int, length: int, seed: int = 1) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, c.vocab, (rows, length))


def op_counts(model: ir.Model) -> dict[str, int]:
    kinds = [n.op_type for n in model.graph]
    return {kind: kinds.count(kind) for kind in set(kinds)}


def rounds_alike(engine: Engine) -> bool:
    """Whether steps of two and more tokens give one bit pattern: on ARM64 not where attention is fused, or sums over
    the slots in use."""
    even = even_widths(engine, 2) == FROM_TWO
    assert even or platform.machine().lower() not in ("x86_64", "amd64")
    return even


def fused_is_even(model: Model) -> bool:
    """``rounds_alike`` of the graph for one row."""
    return rounds_alike(SlotEngine(model, variant="gqa"))
