"""Concatenating caches (optimum, onnx-community): handwritten two-layer decoders against a numpy reference."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from leadout.bundle import CacheShape, Model, ModelEntry, file_entry
from leadout.engines.foreign import ForeignEngine
from leadout.engines.foreign_cache import ConcatCache
from leadout.errors import EngineError

VOCAB, LAYERS, HEADS, WIDTH, HIDDEN, CONTEXT = 23, 2, 2, 4, 8, 40


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"tokens": (VOCAB, HIDDEN), "places": (CONTEXT, HIDDEN), "head": (HIDDEN, VOCAB)}
    shapes |= {f"{name}{i}": (HIDDEN, HIDDEN) for i in range(LAYERS) for name in "qkvo"}
    return {name: rng.normal(0, 0.7, shape).astype(np.float32) for name, shape in shapes.items()}


def reference(w: dict[str, np.ndarray], tokens: np.ndarray, window: int = 10**6) -> np.ndarray:
    """Logits [T, V] of one row, everything recomputed."""
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
    per_tensor: bool = False


def body(form: Form, cached: bool, p: str) -> tuple[str, list[str]]:
    """Nodes of the decoder in onnx's text form, every name under prefix ``p``, and the names of its outputs."""
    past = "past_key_values__0__key" if cached else "none"
    lines = [
        f"{p}ids_shape = Shape (input_ids)",
        f"{p}new = Gather ({p}ids_shape, one)",
        f"{p}past_shape = Shape ({past})",
        f"{p}past = Gather ({p}past_shape, two)",
        f"{p}total = Add ({p}past, {p}new)",
        f"{p}rows = Range ({p}past, {p}total, one)",
        f"{p}cols = Range (zero, {p}total, one)",
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
    for i in range(LAYERS):
        for n in "qkv":
            lines += [
                f"{p}{n}{i}_flat = MatMul ({p}x{i}, {n}{i})",
                f"{p}{n}{i}_split = Reshape ({p}{n}{i}_flat, split)",
                f"{p}{n}{i} = Transpose <perm = [0, 2, 1, 3]> ({p}{n}{i}_split)",
            ]
        for n, kind in (("k", "key"), ("v", "value")):
            whole = f"past_key_values__{i}__{kind}, {p}{n}{i}" if cached else f"{p}{n}{i}"
            lines.append(f"{p}all_{n}{i} = Concat <axis = 2> ({whole})")
            keep = f"Slice ({p}all_{n}{i}, minus_window, huge, axis2)" if form.trimmed else f"Identity ({p}all_{n}{i})"
            lines.append(f"{p}present__{i}__{kind} = {keep}")
            outputs.append(f"{p}present__{i}__{kind}")
        lines += [
            f"{p}kt{i} = Transpose <perm = [0, 1, 3, 2]> ({p}all_k{i})",
            f"{p}raw{i} = MatMul ({p}q{i}, {p}kt{i})",
            f"{p}scaled{i} = Mul ({p}raw{i}, half)",
            f"{p}masked{i} = Where ({p}allowed, {p}scaled{i}, low)",
            f"{p}share{i} = Softmax <axis = -1> ({p}masked{i})",
            f"{p}attended{i} = MatMul ({p}share{i}, {p}all_v{i})",
            f"{p}back{i} = Transpose <perm = [0, 2, 1, 3]> ({p}attended{i})",
            f"{p}joined{i} = Reshape ({p}back{i}, join)",
            f"{p}mixed{i} = MatMul ({p}joined{i}, o{i})",
            f"{p}tanh{i} = Tanh ({p}mixed{i})",
            f"{p}x{i + 1} = Add ({p}x{i}, {p}tanh{i})",
        ]
    return "\n".join(lines + head(form, p)), [f"{p}logits", *outputs]


def head(form: Form, p: str) -> list[str]:
    lines, x = [], f"{p}x{LAYERS}"
    if form.keep or form.last_only:
        start = f"{p}start"
        lines += [f"{start} = Neg ({'num_logits_to_keep' if form.keep else 'one'})"]
        lines += [f"{p}start1 = Reshape ({start}, axis_1)", f"{p}kept = Slice ({x}, {p}start1, huge, axis1)"]
        x = f"{p}kept"
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
    text = (
        f'<ir_version: 10, opset_import: ["" : 18]>\nmade ({", ".join(inputs)}) => ({", ".join(outputs)}) {{ {nodes} }}'
    )
    model = parser.parse_model(text)
    dotted(model.graph)
    w = weights(seed)
    ints = {"zero": 0, "one": 1, "two": 2, "never": -(10**6), "window": form.window, "axis1": [1], "axes12": [1, 2]}
    ints |= {"axis2": [2], "axis_1": [-1], "huge": [10**9], "minus_window": [-min(form.window, 10**6)]}
    ints |= {"split": [0, 0, HEADS, WIDTH], "join": [0, 0, HIDDEN]}
    floats = {**w, "half": 0.5, "low": -1e9, "head_scale": 0.02}
    arrays = {n: np.asarray(v, np.int64) for n, v in ints.items()} | {
        n: np.asarray(v, np.float32) for n, v in floats.items()
    }
    arrays |= {"head_int": np.round(w["head"] / 0.02).clip(-127, 127).astype(np.int8)}
    arrays |= {"none": np.zeros((1, HEADS, 0, WIDTH), np.float32)}
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    return model


def entry(path: Path) -> ModelEntry:
    return ModelEntry(
        directory="target", architecture="made", precision="fp32", dialect="concat", dtype="float32", vocab_size=VOCAB,
        max_context=CONTEXT, parameters=1, cache=(CacheShape(HEADS, WIDTH, WIDTH),) * LAYERS, eos_token_ids=(0,),
        variants={"canonical": file_entry(path)}, files={},
    )  # fmt: skip


def engine(folder: Path, form: Form = Form()) -> ForeignEngine:
    onnx.save(decoder(form), folder / "model.onnx")
    return ForeignEngine(Model(folder, entry(folder / "model.onnx")))


FORMS = {
    "plain": Form(),
    "no position_ids": Form(positions=False),
    "merged": Form(merged=True),
    "merged, no position_ids": Form(merged=True, positions=False),
    "num_logits_to_keep": Form(keep=True),
    "sliding window": Form(window=5),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_ragged_batch_with_roll_backs_equals_a_full_recompute(tmp_path: Path, form: Form) -> None:
    runner = engine(tmp_path, form)
    runner.reset(3)
    rng, w = np.random.default_rng(1), weights()
    text = rng.integers(0, VOCAB, (3, CONTEXT))
    truth = np.stack([reference(w, row, form.window) for row in text])
    lens = np.zeros(3, np.int64)
    for width in (7, 5, 2, 5, 1, 4):
        tokens = np.stack([text[b, n : n + width] for b, n in enumerate(lens)])
        want = np.stack([truth[b, n : n + width] for b, n in enumerate(lens)])
        np.testing.assert_allclose(runner.forward(tokens, lens), want, atol=2e-5)
        lens += rng.integers(0, width + 1, 3)  # some of each row's tokens are rolled back, none in common
    assert len(set(lens)) == 3


def test_a_row_has_the_same_bits_alone_and_in_a_batch_and_at_every_width(tmp_path: Path) -> None:
    runner = engine(tmp_path)
    text = np.random.default_rng(2).integers(0, VOCAB, (3, 12))
    alone = runner.forward(text[1:2], np.zeros(1, np.int64)).copy()
    runner.reset(3)
    lens = np.zeros(3, np.int64)
    for start in range(0, 12, 2):
        together = runner.forward(text[:, start : start + 2], lens)
        np.testing.assert_array_equal(together[1], alone[0, start : start + 2])
        lens += 2


@pytest.mark.parametrize("form", [Form(), Form(keep=True)], ids=["gathered here", "num_logits_to_keep"])
def test_logit_index_gathers_the_same_bits(tmp_path: Path, form: Form) -> None:
    runner = engine(tmp_path, form)
    tokens = np.arange(6)[None]
    whole = runner.forward(tokens, np.zeros(1, np.int64)).copy()
    for index in ([5], [4, 5], [2, 0, 5], [0]):
        some = runner.forward(tokens, np.zeros(1, np.int64), np.array([index]))
        np.testing.assert_array_equal(some[0], whole[0, index])


def test_padding_beyond_the_context_is_not_run(tmp_path: Path) -> None:
    runner, w = engine(tmp_path), weights()
    assert runner.spec.max_context == CONTEXT - 1
    text = np.random.default_rng(3).integers(0, VOCAB, CONTEXT)
    runner.forward(text[None, : CONTEXT - 2], np.zeros(1, np.int64))
    tail = np.concatenate([text[CONTEXT - 2 :], [1, 2, 3]])[None]
    out = runner.forward(tail, np.array([CONTEXT - 2]))
    np.testing.assert_allclose(out[0, :2], reference(w, text)[-2:], atol=2e-5)
    assert out.shape == (1, 5, VOCAB) and not out[0, 2:].any()
    assert not runner.forward(tail, np.array([CONTEXT])).any()


def test_rows_survive_growth_and_are_copied_whole(tmp_path: Path) -> None:
    runner, w = engine(tmp_path), weights()
    runner.reset(2)
    text = np.random.default_rng(4).integers(0, VOCAB, 9)
    runner.forward(np.stack([text[:6], text[:6][::-1]]), np.zeros(2, np.int64))
    with pytest.raises(EngineError, match="capacity 128"):
        runner.forward(text[None, 6:], np.array([126]))
    runner.reserve(129)
    assert runner.capacity == 256
    runner.copy_row(0, 1)
    out = runner.forward(np.stack([text[5:8], text[6:9]]), np.array([5, 6]))
    truth = reference(w, text)
    np.testing.assert_allclose(out, [truth[5:8], truth[6:9]], atol=2e-5)
    with pytest.raises(EngineError, match="holds 8"):
        runner.forward(text[None, :2], np.array([9]))
    runner.reset(1)
    assert runner.batch == 1
    with pytest.raises(EngineError, match="holds 0"):
        runner.forward(text[None, :2], np.array([1]))
    runner.close()
    runner.close()


def test_an_accepted_round_copies_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, crops = engine(tmp_path), []
    monkeypatch.setattr(ConcatCache, "_crop", lambda self, past: crops.append(past))
    runner.forward(np.array([[1, 2, 3]]), np.array([0]))
    runner.forward(np.array([[4, 5]]), np.array([3]))
    assert not crops
    runner.forward(np.array([[6, 7]]), np.array([4]))
    assert crops == [4]


def renamed(model: onnx.ModelProto, old: str, new: str) -> onnx.ModelProto:
    for port in (*model.graph.input, *model.graph.output):
        port.name = port.name.replace(old, new)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [n.replace(old, new) for n in names]
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (decoder(Form(last_only=True)), "one position only|cannot take this step"),
        (decoder(Form(window=1, trimmed=True)), "cannot take this step"),
        (renamed(decoder(), "past_key_values.1.key", "past_conv.1"), "past_conv.1.*rewound"),
        (renamed(decoder(), "past_key_values", "past_ssm"), "past_ssm.*rewound"),
        (renamed(decoder(), "present.1.key", "present.1.conv"), "a layer of present has a key without a value"),
        (renamed(decoder(), "input_ids", "inputs_embeds"), "has no 'input_ids'"),
        (renamed(decoder(), "attention_mask", "token_type_ids"), "'token_type_ids' is neither"),
    ],
    ids=["last logits only", "windowed cache", "convolution", "state space", "no present", "embeddings", "unknown"],
)
def test_what_cannot_be_rewound_is_refused_by_name_when_loaded(
    tmp_path: Path, model: onnx.ModelProto, reason: str
) -> None:
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(EngineError, match=reason) as caught:
        ForeignEngine(Model(tmp_path, entry(tmp_path / "model.onnx")))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_other_shapes_than_the_manifest_and_other_providers_are_refused(tmp_path: Path) -> None:
    onnx.save(decoder(), tmp_path / "model.onnx")
    right = entry(tmp_path / "model.onnx")
    for wrong, options, reason in (
        (dataclasses.replace(right, cache=right.cache[:1]), {}, "manifest"),
        (dataclasses.replace(right, vocab_size=VOCAB + 1), {}, "logits"),
        (dataclasses.replace(right, dialect="mobius"), {}, "dialect 'mobius'"),
        (right, {"provider": "cuda"}, "runs on provider cpu"),
    ):
        with pytest.raises(EngineError, match=reason):
            ForeignEngine(Model(tmp_path, wrong), **options)
