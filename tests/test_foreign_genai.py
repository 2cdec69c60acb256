"""Shared caches (onnxruntime-genai): GroupQueryAttention with lengths from the mask, against a numpy reference."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support_foreign import (
    CONTEXT,
    NEAR,
    VOCAB,
    Form,
    decoder,
    directory,
    engine,
    genai_directory,
    reference,
    weights,
)
from support_graphs import rounds_alike

import leadout
from leadout.bundle import Bundle
from leadout.engines import open_engine
from leadout.engines.foreign import ForeignEngine
from leadout.engines.plan import Load, plan
from leadout.errors import EngineError, ExportError
from leadout.export.foreign.importing import import_pair
from leadout.export.foreign.source import read_source

FORMS = {
    "plain": Form(gqa=True, positions=False),
    "position_ids": Form(gqa=True),
    "sliding window": Form(gqa=True, window=5),
    "forgets": Form(gqa=True, window=5, bounded=True),
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
        np.testing.assert_allclose(runner.forward(tokens, lens), want, atol=NEAR)
        lens += rng.integers(0, width + 1, 3)
    assert len(set(lens)) == 3


def test_the_cache_is_written_in_place_and_survives_growth(tmp_path: Path) -> None:
    runner, w = engine(tmp_path, Form(gqa=True)), weights()
    text = np.random.default_rng(2).integers(0, VOCAB, CONTEXT)
    runner.reset(2)
    addresses = [buffer.ctypes.data for buffer in runner._rows[0]._buffers]
    runner.forward(text[None, :5], np.zeros(1, np.int64))
    assert [buffer.ctypes.data for buffer in runner._rows[0]._buffers] == addresses
    assert runner._rows[0]._buffers[0][0, :, :5].any() and not runner._rows[0]._buffers[0][0, :, 5:].any()
    runner.copy_row(0, 1)
    runner.reserve(200)
    assert runner.capacity == 256
    out = runner.forward(np.stack([text[3:6], text[5:8]]), np.array([3, 5]))
    truth = reference(w, text)
    np.testing.assert_allclose(out, [truth[3:6], truth[5:8]], atol=NEAR)


def test_padding_beyond_the_context_is_not_run(tmp_path: Path) -> None:
    runner, w = engine(tmp_path, Form(gqa=True, positions=False)), weights()
    text = np.random.default_rng(3).integers(0, VOCAB, CONTEXT)
    runner.forward(text[None, :-2], np.zeros(1, np.int64))
    out = runner.forward(np.concatenate([text[-2:], [1, 2, 3]])[None], np.array([CONTEXT - 2]))
    np.testing.assert_allclose(out[0, :2], reference(w, text)[-2:], atol=NEAR)
    assert not out[0, 2:].any()


def test_import_reads_the_configuration(tmp_path: Path) -> None:
    source = genai_directory(tmp_path / "made", decoder(Form(gqa=True)))
    bundle = Bundle.read(import_pair(source, None, tmp_path / "bundle"))
    entry = bundle.manifest.models["target"]
    assert (entry.dialect, entry.max_context, entry.eos_token_ids) == ("genai", CONTEXT, (0, 5))
    assert bundle.manifest.sampling == {"temperature": 1.0, "top_k": 7.0}
    even = rounds_alike(engine(tmp_path, Form(gqa=True)))
    assert set(entry.parity) == {"rewound", "ragged", "single", "causal"}
    assert entry.parity["rewound"] <= (0 if even else NEAR)
    tokens = np.arange(6)[None]
    out = open_engine(bundle.model("target")).forward(tokens, np.zeros(1, np.int64))
    np.testing.assert_allclose(out[0], reference(weights(), tokens[0]), atol=NEAR)


@pytest.mark.parametrize("form", [Form(), Form(positions=False, window=6)], ids=["plain", "window"])
def test_a_graph_that_makes_its_cache_anew_is_no_less_the_builder_s(tmp_path: Path, form: Form) -> None:
    """As it writes MultiHeadAttention: past_present_share_buffer is false there."""
    sources = genai_directory(tmp_path / "one", decoder(form)), directory(tmp_path / "other", decoder(form))
    texts = []
    for source in sources:
        with leadout.load(import_pair(source, None, tmp_path / "bundle"), threads=1) as pair:
            texts.append(pair.generate([1, 2, 3], max_new_tokens=20, temperature=0, ignore_eos=True).token_ids)
    assert texts[0] == texts[1] and len(texts[0]) == 20


@pytest.mark.parametrize("laid_out", [genai_directory, directory])
@pytest.mark.parametrize("window", [5, 300])
def test_a_window_that_buffers_may_be_as_short_as(tmp_path: Path, window: int, laid_out: Any) -> None:
    """As the builder writes Gemma 2 and 3 and gpt-oss for a CPU: its node takes no buffer below the window, which may
    be above the slots that a text has, and above the context."""
    source = laid_out(tmp_path / "made", decoder(Form(gqa=True, window=window, bounded=True)))
    path = import_pair(source, None, tmp_path / "bundle")
    model = Bundle.read(path).model("target")
    assert model.entry.dialect == "genai"
    assert (model.entry.least_slots, model.entry.max_context, model.entry.note.count(";")) == (window, CONTEXT, 0)
    runner = ForeignEngine(model)
    buffers = [buffer for row in runner._rows for buffer in row._buffers]
    runner.reserve(200)
    assert runner._rows[0]._buffers[0] is buffers[0], "they were as long as they get"
    load = Load(provider="cpu", batch=1, draft_length=4, context=30)
    if window > CONTEXT:
        assert plan(model.entry, load).cache == sum(buffer.nbytes for buffer in buffers)
    text = list(range(1, 9))
    with leadout.load(path, threads=1) as pair:
        found = [
            pair.generate(text, draft=draft, max_new_tokens=25, temperature=0, ignore_eos=True).token_ids
            for draft in ("none", "recycling")
        ]
    for _ in range(25):
        text.append(int(reference(weights(), np.array(text), window)[-1].argmax()))
    assert found == [text[8:]] * 2


@pytest.mark.parametrize("form", [Form(), Form(gqa=True)], ids=["concat", "genai"])
def test_a_plan_counts_the_slots_that_an_import_allocates(tmp_path: Path, form: Form) -> None:
    """No more than it has positions, and in steps of 128 however long a text is."""
    write = genai_directory if form.gqa else directory
    model = Bundle.read(import_pair(write(tmp_path / "made", decoder(form)), None, tmp_path / "bundle")).model("target")
    for most, context in ((CONTEXT, 30), (CONTEXT, CONTEXT), (3000, 2100), (3000, 3000)):
        entry = dataclasses.replace(model.entry, max_context=most)
        runner = ForeignEngine(dataclasses.replace(model, entry=entry))
        runner.reset(2)
        runner.reserve(context + 8)
        held = [vars(row).get("_buffers") or row._full + row._free for row in runner._rows]
        planned = plan(entry, Load(provider="cpu", batch=2, draft_length=8, context=context)).cache
        assert planned == sum(buffer.nbytes for buffers in held for buffer in buffers)


def test_a_window_the_graph_does_not_know_limits_the_context(tmp_path: Path) -> None:
    blind = genai_directory(tmp_path / "blind", decoder(Form(gqa=True)), window=9)
    knows = genai_directory(tmp_path / "knows", decoder(Form(gqa=True, window=9)), window=9)
    told: list[str] = []
    bundle = Bundle.read(import_pair(blind, knows, tmp_path / "bundle", progress=told.append))
    assert "target: context limited to the sliding window of 9: the graph itself has none" in told
    target, draft = (bundle.manifest.models[role] for role in ("target", "draft"))
    assert target.max_context == 9 and "sliding window of 9" in target.note
    assert draft.max_context == CONTEXT and "window" not in draft.note


@pytest.mark.parametrize(
    ("said", "context"),
    [
        ({"sliding_window": 9}, 9),
        ({"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}, 9),
        ({"sliding_window": 9, "layer_types": ["full_attention"] * 2}, CONTEXT),
        ({"sliding_window": 9, "use_sliding_window": False}, CONTEXT),
        ({"sliding_window": None}, CONTEXT),
    ],
    ids=str,
)
def test_so_does_one_that_a_config_json_knows(tmp_path: Path, said: dict[str, Any], context: int) -> None:
    """As the builder's graphs of Mistral and Phi 3 where they are laid out as onnx-community does."""
    source = read_source(directory(tmp_path / "made", decoder(Form(gqa=True)), **said))
    assert source.max_context == context and ("window of 9" in source.note) == (context == 9)
    assert read_source(directory(tmp_path / "mask", decoder(Form(window=9)), **said)).max_context == CONTEXT
    assert read_source(directory(tmp_path / "node", decoder(Form(gqa=True, window=9)), **said)).max_context == CONTEXT


def test_a_window_of_a_config_json_that_is_too_small_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"config\.json: sliding_window must be at least 3, not 2"):
        read_source(directory(tmp_path / "made", decoder(Form(gqa=True)), sliding_window=2))


@pytest.mark.parametrize("shifts", [False, True], ids=["tables", "positions"])
def test_a_text_never_grows_from_one_set_of_rope_factors_into_another(tmp_path: Path, shifts: bool) -> None:
    """As the builder writes a Phi's longrope: with a table of each, or both in one and positions that are shifted."""
    model = decoder(Form(gqa=True))
    made = [helper.make_node("Constant", [], ["turn"], value=numpy_helper.from_array(np.array(17, np.int64)))]
    if shifts:
        made.append(helper.make_node("ReduceMax", ["position_ids"], ["furthest"], keepdims=0))
        made.append(helper.make_node("GreaterOrEqual", ["furthest", "turn"], ["far"]))
    else:
        table = helper.make_node("Constant", [], ["table"], value=numpy_helper.from_array(np.ones(3, np.float32)))
        kept = [helper.make_tensor_value_info("table", onnx.TensorProto.FLOAT, [3])]
        both = {f"{name}_branch": helper.make_graph([table], name, [], kept) for name in ("then", "else")}
        made.append(helper.make_node("Greater", ["t_wide", "turn"], ["far"]))
        made.append(helper.make_node("If", ["far"], ["chosen"], **both))
    model.graph.node.extend(made)
    source = genai_directory(tmp_path / "made", model)
    entry = Bundle.read(import_pair(source, None, tmp_path / "bundle")).manifest.models["target"]
    assert entry.max_context == 17 and "context limited to 17: one set of rope factors" in entry.note


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"encoder": {"filename": "encoder.onnx"}}, "encoder"),
        ({"vision": {"filename": "vision.onnx"}}, "vision"),
        ({"decoder": {"filename": "../model.onnx"}}, "filename"),
        ({"decoder": {"pipeline": []}}, "filename"),
        ({"context_length": 0}, "context_length"),
    ],
    ids=["encoder", "vision", "path", "pipeline", "no context"],
)
def test_what_is_not_one_decoder_is_refused(tmp_path: Path, extra: dict[str, object], reason: str) -> None:
    source = genai_directory(tmp_path / "made", decoder(Form(gqa=True)), **extra)
    with pytest.raises(ExportError, match=reason):
        import_pair(source, None, tmp_path / "bundle")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made"]


ODD = [
    ({"model": None}, "decoder.filename '' is not the name of one graph"),
    ({"model": []}, r"model must be an object, not \[\]"),
    ({"model": {"decoder": None}}, "decoder.filename '' is not the name of one graph"),
    ({"model": {"decoder": []}}, "model.decoder must be an object"),
    ({"model": {"decoder": {"filename": 5}}}, "model.decoder.filename must be text, not 5"),
    ({"model": {"decoder": {"filename": "gone.onnx"}}}, "decoder.filename 'gone.onnx' is missing"),
    ({"model": {"context_length": None}}, "model.context_length is missing; it must be from 3 to 2147483647"),
    ({"model": {"context_length": "x"}}, "model.context_length must be an integer from 3 to 2147483647, not 'x'"),
    ({"model": {"decoder": {"sliding_window": [8]}}}, r"model.decoder.sliding_window must be an object, not \[8\]"),
    ({"model": {"decoder": {"sliding_window": {"window_size": 2}}}}, "window_size must be at least 3, not 2"),
    ({"model": {"eos_token_id": "x"}}, "model.eos_token_id must be an integer or a list of integers, not 'x'"),
    ({"model": {"eos_token_id": [1, "b"]}}, "model.eos_token_id must be an integer or a list"),
    ({"search": []}, r"search must be an object, not \[\]"),
    ({"search": {"top_k": "a"}}, "search.top_k must be an integer from 0 to 2147483647, not 'a'"),
]


def merged(old: object, new: object) -> object:
    if not (isinstance(old, dict) and isinstance(new, dict) and new):
        return new
    return old | {name: merged(old.get(name), value) for name, value in new.items()}


@pytest.mark.parametrize(("values", "reason"), ODD, ids=lambda value: str(value)[:60])
def test_an_odd_value_is_named(tmp_path: Path, values: dict[str, object], reason: str) -> None:
    source = genai_directory(tmp_path / "made", decoder(Form(gqa=True)))
    file = source / "genai_config.json"
    file.write_text(json.dumps(merged(json.loads(file.read_text()), values)))
    with pytest.raises(ExportError, match=rf"genai_config\.json: .*{reason}") as caught:
        import_pair(source, None, tmp_path / "bundle")
    assert "\n" not in str(caught.value)


def test_null_says_nothing(tmp_path: Path) -> None:
    source = genai_directory(tmp_path / "made", decoder(Form(gqa=True)))
    file = source / "genai_config.json"
    nothing = {"model": {"decoder": {"sliding_window": {"window_size": None}}, "type": None}, "search": None}
    file.write_text(json.dumps(merged(json.loads(file.read_text()), nothing)))
    found = read_source(source)
    assert (found.max_context, found.architecture, found.sampling) == (CONTEXT, "unknown", {})


def test_a_fixed_or_integer_cache_is_refused(tmp_path: Path) -> None:
    for change, reason in (("length", "fixed length of 40"), ("type", "int8")):
        model = decoder(Form(gqa=True))
        for port in (*model.graph.input, *model.graph.output):
            if "key" in port.name or "value" in port.name:
                kind = port.type.tensor_type
                if change == "length":
                    kind.shape.dim[2].dim_value = CONTEXT
                else:
                    kind.elem_type = onnx.TensorProto.INT8
        source = genai_directory(tmp_path / change, model)
        with pytest.raises(ExportError, match=reason):
            import_pair(source, None, tmp_path / "bundle")


def test_a_damaged_configuration_is_one_line(tmp_path: Path) -> None:
    source = genai_directory(tmp_path / "made", decoder(Form(gqa=True)))
    for text in ("{", json.dumps([])):
        (source / "genai_config.json").write_text(text)
        with pytest.raises(ExportError, match=r"genai_config\.json") as caught:
            import_pair(source, None, tmp_path / "bundle")
        assert "\n" not in str(caught.value)


def test_other_providers_are_refused_by_name(tmp_path: Path) -> None:
    source = genai_directory(tmp_path / "made", decoder(Form(gqa=True)))
    model = Bundle.read(import_pair(source, None, tmp_path / "bundle")).model("target")
    with pytest.raises(EngineError, match="genai model runs on provider cpu"):
        open_engine(model, provider="cuda")
