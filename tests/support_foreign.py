"""Handwritten two-layer decoders in the forms other exporters write, their numpy reference, and model directories."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser
from tokenizers import Tokenizer, models, pre_tokenizers

from leadout.bundle import CacheShape, Model, ModelEntry, file_entry
from leadout.engines.foreign import ForeignEngine

VOCAB, LAYERS, HEADS, WIDTH, HIDDEN, CONTEXT = 23, 2, 2, 8, 16, 40


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"tokens": (VOCAB, HIDDEN), "places": (CONTEXT, HIDDEN), "head": (HIDDEN, VOCAB)}
    shapes |= {f"{name}{i}": (HIDDEN, HIDDEN) for i in range(LAYERS) for name in "qkvo"}
    return {name: rng.normal(0, 0.7, shape).astype(np.float32) for name, shape in shapes.items()}


NEAR = 2e-4  # these weights are steep: float32 may be as far from float64 as this


def reference(w: dict[str, np.ndarray], tokens: np.ndarray, window: int = 10**6) -> np.ndarray:
    """Logits [T, V] of one row, everything recomputed, in float64."""
    w = {name: array.astype(np.float64) for name, array in w.items()}
    x, slot = w["tokens"][tokens] + w["places"][np.arange(len(tokens))], np.arange(len(tokens))
    allowed = (slot[None] <= slot[:, None]) & (slot[:, None] - slot[None] < window)
    for i in range(LAYERS):
        q, k, v = ((x @ w[f"{n}{i}"]).reshape(-1, HEADS, WIDTH).transpose(1, 0, 2) for n in "qkv")
        scores = np.where(allowed, q @ k.transpose(0, 2, 1) / 2, -1e9)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        attended = (share / share.sum(-1, keepdims=True)) @ v
        x = x + np.tanh(attended.transpose(1, 0, 2).reshape(-1, HIDDEN) @ w[f"o{i}"])
    return x @ w["head"]


@dataclasses.dataclass(frozen=True)
class Form:
    """Which of the many forms people export."""

    positions: bool = True
    merged: bool = False
    keep: bool = False
    window: int = 10**6
    last_only: bool = False
    blind: bool = False  # old merged decoders: no causal mask on top of a past, traced for one token
    trimmed: bool = False  # a sliding cache: presents hold the window only
    square: bool = False  # several tokens make a mask of their own, without a past (genai's in fp16 for a CPU)
    per_tensor: bool = False
    by_width: bool = False  # logits end in other bits by how many tokens a step has
    gqa: bool = False  # onnxruntime-genai: GroupQueryAttention, lengths from the mask
    bounded: bool = False  # its buffers may be as short as the window, and no shorter: what is behind it is forgotten


def body(form: Form, cached: bool, p: str) -> tuple[str, list[str]]:
    """Nodes of the decoder in onnx's text form, every name under prefix ``p``, and the names of its outputs."""
    past = "past_key_values__0__key" if cached else "none"
    lines = [
        f"{p}ids_shape = Shape (input_ids)",
        f"{p}new = Gather ({p}ids_shape, one)",
        f"{p}mask_shape = Shape (attention_mask)",
        f"{p}wide = Gather ({p}mask_shape, one)",
        f"{p}past_shape = Shape ({past})",
        f"{p}past = " + (f"Sub ({p}wide, {p}new)" if form.gqa else f"Gather ({p}past_shape, two)"),
        f"{p}total = Add ({p}past, {p}new)",
        f"{p}rows = Range ({p}past, {p}total, one)",
        f"{p}cols = Range ({p + 'past' if form.square else 'zero'}, {p}total, one)",
        f"{p}q = Unsqueeze ({p}rows, axis1)",
        f"{p}far = Sub ({p}q, {p}cols)",
        f"{p}causal = GreaterOrEqual ({p}far, {'never' if form.blind and cached else 'zero'})",
        f"{p}near = Less ({p}far, window)",
        f"{p}seen = Cast <to = 9> (attention_mask)",
        f"{p}seen4 = Unsqueeze ({p}seen, axes12)",
        f"{p}both = And ({p}causal, {p}near)",
        f"{p}allowed = And ({p}both, {p}seen4)",
        f"{p}words = Gather (tokens, input_ids)",
        f"{p}at = Gather (places, {'position_ids' if form.positions else p + 'rows'})",
        f"{p}x0 = Add ({p}words, {p}at)",
    ]
    outputs = []
    if form.gqa:
        lines += [
            f"{p}sum = ReduceSum <keepdims = 0> (attention_mask, axis1)",
            f"{p}last = Sub ({p}sum, one)",
            f"{p}seqlens = Cast <to = 6> ({p}last)",
            f"{p}total32 = Cast <to = 6> ({p}wide)",
        ]
    for i in range(LAYERS):
        lines += [f"{p}{n}{i}_flat = MatMul ({p}x{i}, {n}{i})" for n in "qkv"]
        lines += shared(form, p, i) if form.gqa else concatenated(form, cached, p, i)
        outputs += [f"{p}present__{i}__key", f"{p}present__{i}__value"]
        lines += [
            f"{p}mixed{i} = MatMul ({p}joined{i}, o{i})",
            f"{p}tanh{i} = Tanh ({p}mixed{i})",
            f"{p}x{i + 1} = Add ({p}x{i}, {p}tanh{i})",
        ]
    return "\n".join(lines + head(form, p)), [f"{p}logits", *outputs]


def shared(form: Form, p: str, i: int) -> list[str]:
    """Attention as onnxruntime-genai's builder writes it."""
    window = form.window if form.window < CONTEXT or form.bounded else -1
    attributes = f"num_heads = {HEADS}, kv_num_heads = {HEADS}, scale = 0.5, local_window_size = {window}"
    attributes += ", sliding_window_cache = 1" * form.bounded
    arguments = ", ".join(
        [*(f"{p}{n}{i}_flat" for n in "qkv"), *(f"past_key_values__{i}__{k}" for k in ("key", "value"))]
    )
    return [
        f"{p}joined{i}, {p}present__{i}__key, {p}present__{i}__value = com.microsoft.GroupQueryAttention "
        f"<{attributes}> ({arguments}, {p}seqlens, {p}total32)"
    ]


def concatenated(form: Form, cached: bool, p: str, i: int) -> list[str]:
    """Attention as optimum writes it."""
    lines = []
    for n in "qkv":
        lines += [
            f"{p}{n}{i}_split = Reshape ({p}{n}{i}_flat, split)",
            f"{p}{n}{i} = Transpose <perm = [0, 2, 1, 3]> ({p}{n}{i}_split)",
        ]
    for n, kind in (("k", "key"), ("v", "value")):
        whole = f"past_key_values__{i}__{kind}, {p}{n}{i}" if cached else f"{p}{n}{i}"
        lines.append(f"{p}all_{n}{i} = Concat <axis = 2> ({whole})")
        keep = f"Slice ({p}all_{n}{i}, minus_window, huge, axis2)" if form.trimmed else f"Identity ({p}all_{n}{i})"
        lines.append(f"{p}present__{i}__{kind} = {keep}")
    lines += [
        f"{p}kt{i} = Transpose <perm = [0, 1, 3, 2]> ({p}all_k{i})",
        f"{p}raw{i} = MatMul ({p}q{i}, {p}kt{i})",
        f"{p}scaled{i} = Mul ({p}raw{i}, half)",
        f"{p}masked{i} = Where ({p}allowed, {p}scaled{i}, low)",
        f"{p}share{i} = Softmax <axis = -1> ({p}masked{i})",
        f"{p}attended{i} = MatMul ({p}share{i}, {p}all_v{i})",
        f"{p}back{i} = Transpose <perm = [0, 2, 1, 3]> ({p}attended{i})",
        f"{p}joined{i} = Reshape ({p}back{i}, join)",
    ]
    return lines


def head(form: Form, p: str) -> list[str]:
    lines, x = [], f"{p}x{LAYERS}"
    if form.keep or form.last_only:
        start = f"{p}start"
        lines += [f"{start} = Neg ({'num_logits_to_keep' if form.keep else 'one'})"]
        lines += [f"{p}start1 = Reshape ({start}, axis_1)", f"{p}kept = Slice ({x}, {p}start1, huge, axis1)"]
        x = f"{p}kept"
    if form.by_width:
        lines += [f"{p}count = Cast <to = 1> ({p}new)", f"{p}bits = Mul ({p}count, millionth)"]
        return [*lines, f"{p}even = MatMul ({x}, head)", f"{p}logits = Add ({p}even, {p}bits)"]
    if not form.per_tensor:
        return [*lines, f"{p}logits = MatMul ({x}, head)"]
    return [
        *lines,
        f"{p}xi, {p}xs, {p}xz = DynamicQuantizeLinear ({x})",
        f"{p}li = MatMulInteger ({p}xi, head_int, {p}xz)",
        f"{p}lf = Cast <to = 1> ({p}li)",
        f"{p}ls = Mul ({p}lf, head_scale)",
        f"{p}logits = Mul ({p}ls, {p}xs)",
    ]


def dotted(graph: onnx.GraphProto) -> None:
    """The text form knows no dots in names: ``__`` stands for one."""
    for port in (*graph.input, *graph.output):
        port.name = port.name.replace("__", ".")
    for node in graph.node:
        node.input[:], node.output[:] = ([n.replace("__", ".") for n in names] for names in (node.input, node.output))
        for attribute in node.attribute:
            if attribute.HasField("g"):
                dotted(attribute.g)


def decoder(form: Form = Form(), seed: int = 0) -> onnx.ModelProto:
    caches = [f"{i}__{kind}" for i in range(LAYERS) for kind in ("key", "value")]
    inputs = ["int64[B,S] input_ids", "int64[B,T] attention_mask"]
    inputs += ["int64[B,S] position_ids"] * form.positions + ["bool[1] use_cache_branch"] * form.merged
    inputs += ["int64 num_logits_to_keep"] * form.keep
    inputs += [f"float[B,{HEADS},P,{WIDTH}] past_key_values__{c}" for c in caches]
    outputs = [f"float[B,L,{VOCAB}] logits"] + [f"float[B,{HEADS},T,{WIDTH}] present__{c}" for c in caches]
    nodes, names = body(form, True, "t_")
    public = ["logits", *(f"present__{c}" for c in caches)]
    nodes += "".join(f"\n{name} = Identity ({inner})" for name, inner in zip(public, names, strict=True))
    if form.merged:
        (yes, yes_names), (no, no_names) = body(form, True, "a_"), body(form, False, "b_")
        then = f"then_branch = yes () => ({', '.join('float ' + n for n in yes_names)}) {{ {yes} }}"
        other = f"else_branch = no () => ({', '.join('float ' + n for n in no_names)}) {{ {no} }}"
        nodes = f"{', '.join(public)} = If <{then}, {other}> (use_cache_branch)"
    opsets = '<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>'
    text = f"{opsets}\nmade ({', '.join(inputs)}) => ({', '.join(outputs)}) {{ {nodes} }}"
    model = parser.parse_model(text)
    dotted(model.graph)
    w = weights(seed)
    ints = {"zero": 0, "one": 1, "two": 2, "never": -(10**6), "window": form.window, "axis1": [1], "axes12": [1, 2]}
    ints |= {"axis2": [2], "axis_1": [-1], "huge": [10**9], "minus_window": [-min(form.window, 10**6)]}
    ints |= {"split": [0, 0, HEADS, WIDTH], "join": [0, 0, HIDDEN]}
    floats = {**w, "half": 0.5, "low": -1e9, "head_scale": 0.02, "millionth": 1e-6}
    arrays = {n: np.asarray(v, np.int64) for n, v in ints.items()} | {
        n: np.asarray(v, np.float32) for n, v in floats.items()
    }
    if form.per_tensor:
        arrays |= {"head_int": np.round(w["head"] / 0.02).clip(-127, 127).astype(np.int8)}
    arrays |= {"none": np.zeros((1, HEADS, 0, WIDTH), np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    return model


def entry(path: Path, dialect: str = "concat") -> ModelEntry:
    return ModelEntry(
        directory="target", architecture="made", precision="fp32", dialect=dialect, dtype="float32", vocab_size=VOCAB,
        max_context=CONTEXT, parameters=1, cache=(CacheShape(HEADS, WIDTH, WIDTH),) * LAYERS, eos_token_ids=(0,),
        variants={"canonical": file_entry(path)}, files={},
    )  # fmt: skip


def engine(folder: Path, form: Form = Form()) -> ForeignEngine:
    onnx.save(decoder(form), folder / "model.onnx")
    return ForeignEngine(Model(folder, entry(folder / "model.onnx", "genai" if form.gqa else "concat")))


def renamed(model: onnx.ModelProto, old: str, new: str) -> onnx.ModelProto:
    for port in (*model.graph.input, *model.graph.output):
        port.name = port.name.replace(old, new)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [n.replace(old, new) for n in names]
    return model


def words(extra: tuple[str, ...] = ()) -> Tokenizer:
    """A word for every id but the last two, which are padding of the logits."""
    names = [f"w{i}" for i in range(VOCAB - 2 - len(extra))] + list(extra)
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def directory(folder: Path, model: onnx.ModelProto, name: str = "onnx/model.onnx", **config: Any) -> Path:
    """A model directory as optimum and onnx-community lay it out."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / name)
    settings = {"architectures": ["MadeForCausalLM"], "vocab_size": VOCAB, "max_position_embeddings": CONTEXT}
    settings |= {"eos_token_id": 0, "num_attention_heads": HEADS} | config
    (folder / "config.json").write_text(json.dumps(settings))
    words().save(str(folder / "tokenizer.json"))
    return folder


def genai_directory(folder: Path, model: onnx.ModelProto, window: int = 0, **extra: Any) -> Path:
    """A model directory as onnxruntime-genai's builder lays it out."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    decoder = {"filename": "model.onnx", "head_size": WIDTH, "num_key_value_heads": HEADS}
    if window:
        decoder["sliding_window"] = {"window_size": window, "slide_key_value_cache": False}
    settings = {"type": "made", "context_length": CONTEXT, "vocab_size": VOCAB, "eos_token_id": [0, 5]}
    config = {"model": settings | {"decoder": decoder} | extra, "search": {"do_sample": True, "top_k": 7}}
    (folder / "genai_config.json").write_text(json.dumps(config))
    words().save(str(folder / "tokenizer.json"))
    return folder
