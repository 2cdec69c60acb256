"""Directories of optimum and onnx-community become bundles, or are refused by name and leave nothing behind."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from support_foreign import (
    CONTEXT,
    HIDDEN,
    NEAR,
    VOCAB,
    Form,
    decoder,
    directory,
    genai_directory,
    reference,
    weights,
    words,
)
from tokenizers import Tokenizer

import leadout
from leadout.bundle import Bundle
from leadout.engines import open_engine
from leadout.errors import EngineError, ExportError, UsageError
from leadout.export.checkpoints.pairing import match
from leadout.export.foreign.importing import _vocabulary, import_pair
from leadout.export.foreign.source import read_source


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A concat target with external weights, and a genai draft of other weights."""
    home = tmp_path_factory.mktemp("pair")
    target = directory(home / "target", decoder())
    onnx.save(
        decoder(),
        target / "onnx/model.onnx",
        save_as_external_data=True,
        location="model.onnx_data",
        size_threshold=1000,
    )
    draft = genai_directory(home / "draft", decoder(Form(gqa=True), seed=1))
    return import_pair(target, draft, home / "bundle")


def test_the_bundle_is_the_models_as_they_were(bundle: Path) -> None:
    read = Bundle.read(bundle)
    target, draft = (read.manifest.models[role] for role in ("target", "draft"))
    assert (target.dialect, draft.dialect) == ("concat", "genai")
    assert (target.architecture, target.precision, target.vocab_size) == ("MadeForCausalLM", "fp32", VOCAB)
    assert set(target.files) == {"model.onnx_data"} and set(target.variants) == {"canonical"}
    assert target.parity["rewound"] == 0 and target.parity["ragged"] == 0
    assert "no transformers reference" in target.note
    stored = sum(array.size for array in weights().values())
    assert stored <= target.parameters < stored + 20  # and a dozen constants of the graph
    tokens = np.random.default_rng(5).integers(0, VOCAB, (1, 9))
    out = open_engine(read.model("target")).forward(tokens, np.zeros(1, np.int64))
    np.testing.assert_allclose(out[0], reference(weights(), tokens[0]), atol=NEAR)


def test_every_drafter_gives_the_text_of_the_target_alone(bundle: Path) -> None:
    prompts = [[1, 2, 3], [7], [4, 5, 4, 5, 4]]
    with leadout.load(bundle, threads=1) as pair:
        answers = {
            (draft, length): [
                r.token_ids for r in pair.generate(prompts, draft=draft, draft_length=length, max_new_tokens=20)
            ]
            for draft, length in (("none", 1), ("ngram", 3), ("model", 1), ("model", 4))
        }
        alone = [pair.generate(prompt, draft="none", max_new_tokens=20).token_ids for prompt in prompts]
    assert all(answer == alone for answer in answers.values())
    greedy, text = [], list(prompts[0])
    while len(greedy) < 20 and 0 not in greedy:
        greedy.append(int(reference(weights(), np.array(text))[-1].argmax()))
        text.append(greedy[-1])
    assert alone[0] == greedy


def test_a_conversation_goes_on_from_what_the_caches_hold(tmp_path: Path) -> None:
    """Each dialect as the target: turn by turn the answer is that of caches that have read it whole."""
    roots = [
        directory(tmp_path / "concat", decoder()),
        genai_directory(tmp_path / "genai", decoder(Form(gqa=True))),
    ]
    for target, draft in (roots, roots[::-1]):
        bundle = import_pair(target, draft, tmp_path / "bundle")
        with leadout.load(bundle, threads=1) as talking, leadout.load(bundle, threads=1) as fresh:
            text = [n % VOCAB for n in range(5, 23)]
            for turn in range(3):
                given = {"max_new_tokens": 4, "ignore_eos": True, "draft": ("model", "none")[turn % 2]}
                resumed = talking.generate(text, temperature=0, **given)
                fresh.forget()
                whole = fresh.generate(text, temperature=0, **given)
                assert (resumed.token_ids, whole.stats.held) == (whole.token_ids, 0)
                assert resumed.stats.held == (len(text) - 3 if turn else 0)
                text += [*resumed.token_ids, 3, 1]
            talking.generate([text, text], max_new_tokens=1)
            assert talking.generate(text, max_new_tokens=1).stats.held == 0, "others were in its row"


def test_which_graph_is_taken(tmp_path: Path) -> None:
    both = directory(tmp_path / "both", decoder())
    onnx.save(decoder(Form(merged=True)), both / "decoder_model_merged.onnx")
    assert read_source(both).graph.path == both / "decoder_model_merged.onnx"
    onnx.save(decoder(), both / "model.onnx")
    assert read_source(both).graph.path == both / "model.onnx"
    assert read_source(both / "onnx/model.onnx").graph.path == both / "onnx/model.onnx"
    named = directory(tmp_path / "named", decoder(), "onnx/model_q4.onnx")
    with pytest.raises(ExportError, match=r"one of: onnx/model_q4\.onnx"):
        read_source(named)
    assert read_source(named / "onnx/model_q4.onnx").root == named
    split = directory(tmp_path / "split", decoder(), "decoder_with_past_model.onnx")
    with pytest.raises(ExportError, match="two graphs"):
        read_source(split)
    (tmp_path / "none").mkdir()
    (tmp_path / "none/config.json").write_text('{"max_position_embeddings": 9}')
    with pytest.raises(ExportError, match="leadout export"):
        read_source(tmp_path / "none")
    with pytest.raises(ExportError, match=r"no model directory or graph '[^ ]*nowhere'$"):
        read_source(tmp_path / "nowhere")


def test_a_folder_onnx_is_taken_by_its_name(tmp_path: Path) -> None:
    """One beside a configuration belongs to it; one with a configuration of its own is a model directory (optimum's
    output goes where it is told)."""
    beside = directory(tmp_path / "beside", decoder())
    onnx.save(decoder(), beside / "model.onnx")
    assert read_source(beside / "onnx").graph.path == beside / "onnx/model.onnx"
    assert read_source(beside / "onnx").root == beside
    own = directory(tmp_path / "own/onnx", decoder(), "model.onnx")
    for place in (own, own / "model.onnx"):
        assert read_source(place).root == own


def test_names_that_no_graph_can_be_taken_from_are_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="hf download OWNER/NAME --local-dir DIR"):
        read_source("OWNER/NAME")
    (tmp_path / "leadout.json").write_text("{}")
    with pytest.raises(ExportError, match="is a bundle already"):
        read_source(tmp_path)


def test_other_graphs_of_a_directory_are_told(tmp_path: Path) -> None:
    root, told = directory(tmp_path / "many", decoder()), list[str]()
    onnx.save(decoder(), root / "onnx/model_q4.onnx")
    import_pair(root, None, tmp_path / "out", progress=told.append)
    assert any("others" in line and "onnx/model_q4.onnx" in line for line in told)
    told.clear()
    import_pair(root / "onnx/model_q4.onnx", None, tmp_path / "out", progress=told.append)
    assert not any("others" in line for line in told)


def external(folder: Path, location: str) -> Path:
    """A model directory whose weights say they lie at ``location``."""
    root = directory(folder, decoder(), "model.onnx")
    onnx.save(decoder(), root / "model.onnx", save_as_external_data=True, location="w.bin", size_threshold=1000)
    model = onnx.load(root / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for item in tensor.external_data:
            if item.key == "location":
                item.value = location
    (root / "model.onnx").write_bytes(model.SerializeToString())
    return root


@pytest.mark.parametrize("location", ["../secret", "{folder}/secret", "sub/w.bin", "..", "model.onnx", "", "a\\b"])
def test_external_data_must_be_a_plain_name(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret").write_bytes(bytes(10**5))
    root = external(tmp_path / "model", location.format(folder=tmp_path))
    with pytest.raises(ExportError, match="not a plain file name"):
        import_pair(root, None, tmp_path / "bundle")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "secret"]


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"


@pytest.mark.parametrize("content", [POINTER, b""], ids=["pointer", "nothing"])
def test_what_was_not_downloaded_whole_is_to_be_downloaded_again(tmp_path: Path, content: bytes) -> None:
    root = external(tmp_path / "model", "w.bin")
    whole = (root / "w.bin").read_bytes()
    (root / "w.bin").write_bytes(content)
    found = refusal(root, tmp_path / "out")
    assert f"'w.bin' are incomplete or a git-lfs pointer ({len(content)} bytes instead of at least" in found
    (root / "w.bin").write_bytes(whole)
    (root / "model.onnx").write_bytes(content)
    found = refusal(root, tmp_path / "out")
    assert re.search(
        r"model\.onnx: not an ONNX graph, incomplete or a git-lfs pointer \(.+\); download it again", found
    )


def test_external_data_may_not_be_missing_or_a_link_outwards(tmp_path: Path) -> None:
    root = external(tmp_path / "model", "w.bin")
    (root / "w.bin").rename(tmp_path / "secret")
    with pytest.raises(ExportError, match=r"'w\.bin' are missing"):
        import_pair(root, None, tmp_path / "bundle")
    (root / "w.bin").symlink_to(tmp_path / "secret")
    with pytest.raises(ExportError, match="a link that leaves"):
        import_pair(root, None, tmp_path / "bundle")


def test_the_hub_cache_own_links_are_followed(tmp_path: Path) -> None:
    root = external(tmp_path / "snapshots/abc", "w.bin")
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(sorted(p for p in root.iterdir() if p.is_file())):
        path.rename(tmp_path / f"blobs/{number}")
        path.symlink_to(f"../../blobs/{number}")
    bundle = import_pair(root, None, tmp_path / "bundle")
    assert not any(path.is_symlink() for path in bundle.rglob("*"))
    assert Bundle.read(bundle).manifest.models["target"].parity["rewound"] == 0


def test_conversations_are_made_as_all_files_say(tmp_path: Path) -> None:
    root = directory(tmp_path / "model", decoder())
    (root / "chat_template.jinja").write_text("{{ bos_token }}plain")
    (root / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}}')
    (root / "additional_chat_templates").mkdir()
    (root / "additional_chat_templates/tool_use.jinja").write_text("{{ bos_token }}with {{ tools | length }}")
    messages = [{"role": "user", "content": "x"}]
    with leadout.load(import_pair(root, None, tmp_path / "bundle"), threads=1) as pair:
        assert pair.chat_template.render(leadout.Chat(messages)) == "<s>plain"
        assert pair.chat_template.render(leadout.Chat(messages, tools=[{}])) == "<s>with 1"
    (tmp_path / "secret").write_text("{}")
    (root / "special_tokens_map.json").unlink()
    (root / "special_tokens_map.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ExportError, match=r"special_tokens_map\.json' is a link that leaves"):
        import_pair(root, None, tmp_path / "bundle")


def refusal(source: Path, out: Path, draft: Path | None = None) -> str:
    """What import says when it refuses; nothing may be left at ``out`` or beside it."""
    before = sorted(out.parent.iterdir())
    with pytest.raises(ExportError) as caught:
        import_pair(source, draft, out)
    assert sorted(out.parent.iterdir()) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_caches_that_do_not_rewind_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out/bundle"
    out.parent.mkdir()
    blind = directory(tmp_path / "blind", decoder(Form(merged=True, blind=True)))
    assert "cannot be rewound by length" in refusal(blind, out)
    trimmed = directory(tmp_path / "trimmed", decoder(Form(window=4, trimmed=True)))
    message = refusal(trimmed, out)
    assert "cannot take this step" in message and str(trimmed / "onnx") in message  # where the graph is
    last = directory(tmp_path / "last", decoder(Form(last_only=True)))
    assert str(last) in refusal(last, out)
    rope = directory(tmp_path / "rope", decoder(), rope_scaling={"type": "dynamic", "factor": 2.0})
    assert "dynamic-NTK" in refusal(rope, out)


def test_a_cache_that_is_written_in_another_type_than_it_is_read_in_is_refused(tmp_path: Path) -> None:
    """As optimum writes a Gemma 2 in fp16."""
    model = decoder()
    port = next(each for each in model.graph.output if each.name == "present.1.key")
    port.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    found = refusal(directory(tmp_path / "made", model), tmp_path / "out")
    assert "'present.1.key' is float16, and 'past_key_values.1.key', which reads it, float32" in found


def test_weights_that_are_named_among_the_inputs_are_not_asked_for(tmp_path: Path) -> None:
    """As graphs before IR version 4 had to name them."""
    model = decoder()
    for weight in model.graph.initializer:
        model.graph.input.append(onnx.helper.make_tensor_value_info(weight.name, weight.data_type, list(weight.dims)))
    out = import_pair(directory(tmp_path / "old", model), None, tmp_path / "out")
    tokens = np.arange(9) % VOCAB
    engine = open_engine(Bundle.read(out).model("target"))
    np.testing.assert_allclose(
        engine.forward(tokens[None], np.zeros(1, np.int64))[0], reference(weights(), tokens), atol=NEAR
    )


@pytest.mark.parametrize(("name", "row", "rows"), [("head", 3, HIDDEN), ("places", 30, CONTEXT), ("places", 30, 30)])
def test_a_row_goes_through_whole_and_is_finite(tmp_path: Path, name: str, row: int, rows: int) -> None:
    """Positions beyond those that steps are compared at, too: NaN from a ``row`` on, or only so many ``rows``."""
    model = decoder()
    weight = next(each for each in model.graph.initializer if each.name == name)
    array = onnx.numpy_helper.to_array(weight).copy()
    array[row:] = np.nan
    weight.CopyFrom(onnx.numpy_helper.from_array(array[:rows], name))
    message = refusal(directory(tmp_path / "odd", model), tmp_path / "out")
    assert ("cannot take this step" if rows == row else "its logits are not finite; look for NaN") in message


def test_activations_quantised_per_step_are_for_drafts_only(tmp_path: Path) -> None:
    good, coarse = (
        directory(tmp_path / "good", decoder()),
        directory(tmp_path / "coarse", decoder(Form(per_tensor=True))),
    )
    assert "not be lossless" in refusal(coarse, tmp_path / "bundle")
    draft = Bundle.read(import_pair(good, coarse, tmp_path / "bundle")).manifest.models["draft"]
    assert draft.precision == "int8" and draft.parity["rewound"] > 0


def test_a_token_that_sees_those_behind_it_is_not_taken_for_rounding(tmp_path: Path) -> None:
    """Attention that changes little, in a precision of which more is forgiven than that."""
    model = decoder(Form(merged=True, blind=True))
    for weight in model.graph.initializer:
        if weight.name in ("o0", "o1"):
            weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * 0.01, weight.name))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((64, 64), np.float16), "largest"))
    assert "(causal: " in refusal(directory(tmp_path / "blind", model), tmp_path / "out")


def in_few_bits(op_type: str, bits: int) -> onnx.ModelProto:
    """The decoder with a random head, [16, 23], whose weights ``op_type`` holds in ``bits``."""
    model = decoder()
    head = next(node for node in model.graph.node if "head" in node.input)
    domain, sizes = "com.microsoft", {"K": HIDDEN, "N": VOCAB, "block_size": 16}
    rng = np.random.default_rng(1)
    arrays = {"levels": rng.integers(0, 256, (VOCAB, 1, 2 * bits), np.uint8), "steps": np.ones(VOCAB, np.float32)}
    if op_type == "MatMulBnb4":
        sizes, arrays["levels"] = sizes | {"quant_type": 1}, arrays["levels"].reshape(-1)
    elif op_type == "MatMulNBits":
        sizes |= {"bits": bits}
    else:
        domain, sizes = "", {"axis": 0, "block_size": 16}
        levels = rng.integers(-8, 8, (HIDDEN, VOCAB)).astype(ml_dtypes.int4)
        arrays = {"levels": levels, "steps": np.ones((1, VOCAB), np.float32)}
    given = ["levels", "steps"] if domain == "" else [head.input[0], "levels", "steps"]
    made = ["few"] if domain == "" else list(head.output)
    node = onnx.helper.make_node(op_type, given, made, domain=domain, **sizes)
    if domain == "":
        head.input[1], at = "few", list(model.graph.node).index(head)
        model.graph.node.insert(at, node)
        model.opset_import[0].version = 21
    else:
        head.CopyFrom(node)
    kept = [weight for weight in model.graph.initializer if weight.name != "head"]
    del model.graph.initializer[:]
    model.graph.initializer.extend([*kept, *(onnx.numpy_helper.from_array(a, n) for n, a in arrays.items())])
    return model


@pytest.mark.parametrize(
    ("op_type", "bits"), [("MatMulNBits", 2), ("MatMulNBits", 4), ("MatMulBnb4", 4), ("DequantizeLinear", 4)]
)
def test_how_few_bits_there_are_is_told_however_they_are_held(tmp_path: Path, op_type: str, bits: int) -> None:
    out = import_pair(directory(tmp_path / "few", in_few_bits(op_type, bits)), None, tmp_path / "out")
    few = Bundle.read(out).manifest.models["target"]
    assert few.precision == f"int{bits}"
    plain = read_source(directory(tmp_path / "plain", decoder())).graph
    steps = VOCAB if op_type == "DequantizeLinear" else 0
    assert few.parameters - steps == plain.parameters


def test_a_target_that_rounds_by_width_is_told_with_what_helps(tmp_path: Path) -> None:
    even, uneven = (directory(tmp_path / str(odd), decoder(Form(by_width=odd))) for odd in (False, True))
    said: list[str] = []
    import_pair(even, uneven, tmp_path / "as a draft", progress=said.append)
    assert not any("round by their width" in line for line in said)
    out = import_pair(uneven, None, tmp_path / "out", progress=said.append)
    told = next(line for line in said if "round by their width" in line)
    assert "leadout export" in told and "--no-exact" in told
    with pytest.raises(EngineError, match=r"round by their width.*: export the checkpoint itself with: leadout export"):
        leadout.load(out)
    with leadout.load(out, exact=False) as pair:
        assert len(pair.generate([3, 4], max_new_tokens=4, ignore_eos=True).token_ids) == 4


def test_a_draft_that_rounding_per_step_leaves_little_of_is_told_and_taken(tmp_path: Path) -> None:
    """One token is a thousand times as loud as the others, in a channel that no logit reads."""
    model = decoder(Form(per_tensor=True))
    for weight in model.graph.initializer:
        array = onnx.numpy_helper.to_array(weight).copy()
        if weight.name == "tokens":
            array[3, 0] = 1000
        elif weight.name == "head_int":
            array[0] = 0
        weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
    said: list[str] = []
    good, loud = directory(tmp_path / "good", decoder()), directory(tmp_path / "loud", model)
    import_pair(good, loud, tmp_path / "out", progress=said.append)
    assert [line for line in said if line.startswith("loud: in other steps") and "worth little" in line]


def test_draft_and_target_must_share_their_tokens(tmp_path: Path) -> None:
    target, draft = (directory(tmp_path / name, decoder()) for name in ("target", "draft"))
    words(("other",)).save(str(draft / "tokenizer.json"))
    assert "another vocabulary" in refusal(target, tmp_path / "bundle", draft)
    words().save(str(draft / "tokenizer.json"))
    source = read_source(draft)
    wider = dataclasses.replace(source, vocab_size=VOCAB + 8)
    known = Tokenizer.from_file(str(draft / "tokenizer.json")).get_vocab_size()
    found = match(_vocabulary(read_source(target)), _vocabulary(wider))
    assert found.outputs.tolist() == [*range(known), *[-1] * (VOCAB + 8 - known)]
    (draft / "tokenizer.json").write_text("{}")
    assert "not a tokenizer" in refusal(target, tmp_path / "bundle", draft)
    (draft / "tokenizer.json").unlink()
    import_pair(target, draft, tmp_path / "bundle")
    (target / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refusal(target, tmp_path / "bundle", draft)
    assert "no tokenizer.json" in refusal(target, tmp_path / "other")


def test_special_tokens_without_a_logit_are_text(tmp_path: Path) -> None:
    """Gemma 3's tokenizer has one for images, also beside the sizes that read none and have no logit for it."""
    target, draft = (directory(tmp_path / name, decoder()) for name in ("target", "draft"))
    longer = words()
    longer.add_special_tokens(["<start>", "<end>", "<image>", "<soft>"])
    assert longer.token_to_id("<image>") == VOCAB
    longer.save(str(target / "tokenizer.json"))
    said: list[str] = []
    with leadout.load(import_pair(target, draft, tmp_path / "bundle", progress=said.append), threads=1) as pair:
        assert pair.token_ids("w3 <end> <image> <soft> w4") == [3, VOCAB - 1, 0, 0, 4]
        assert len(pair.generate("w3", max_new_tokens=4, ignore_eos=True).token_ids) == 4
    names = "'<image>', '<soft>'"
    assert f"target: no logit for special tokens of its tokenizer.json, whose names become text: {names}" in said


def test_the_configuration_is_taken_at_its_word(tmp_path: Path) -> None:
    root = directory(tmp_path / "model", decoder(), eos_token_id=[3, 4], rope_scaling={"type": "longrope"})
    config = json.loads((root / "config.json").read_text()) | {"original_max_position_embeddings": 30}
    (root / "config.json").write_text(json.dumps(config))
    (root / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.7, "top_p": 0.9, "eos_token_id": 2}'
    )
    source = read_source(root)
    assert (source.max_context, source.eos_token_ids) == (30, (2,))
    assert source.sampling == {"temperature": 0.7, "top_p": 0.9}
    assert "one set of rope factors" in source.note
    del config["max_position_embeddings"], config["original_max_position_embeddings"]
    (root / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match="no context length"):
        read_source(root)
    (root / "config.json").unlink()
    with pytest.raises(ExportError, match=r"config\.json is missing"):
        read_source(root)


ODD_CONFIG = [
    ({"max_position_embeddings": "x"}, "max_position_embeddings must be an integer from 3 to 2147483647, not 'x'"),
    ({"max_position_embeddings": [40]}, r"max_position_embeddings must be an integer from 3 .*, not \[40\]"),
    ({"max_position_embeddings": 40.5}, "max_position_embeddings must be an integer from 3 .*, not 40.5"),
    ({"eos_token_id": [0, "a"]}, r"eos_token_id must be an integer or a list of integers, not \[0, 'a'\]"),
    ({"eos_token_id": [0, None]}, "eos_token_id must be an integer or a list"),
    ({"eos_token_id": True}, "eos_token_id must be an integer or a list"),
    ({"rope_scaling": "x"}, "rope_scaling must be an object, not 'x'"),
    ({"rope_scaling": [1]}, "rope_scaling must be an object"),
    ({"rope_parameters": {"rope_type": 5}}, "rope_parameters.rope_type must be text, not 5"),
    ({"text_config": "x"}, "text_config must be an object, not 'x'"),
    ({"architectures": [5]}, r"architectures must be a list of names, not \[5\]"),
    ({"architectures": "Made"}, "architectures must be a list of names, not 'Made'"),
]
ODD_GENERATION = [
    ({"do_sample": True, "temperature": "x"}, "temperature must be 0, or from 1e-06 to .*, not 'x'"),
    ({"do_sample": True, "temperature": [1]}, r"temperature must be 0, or .*, not \[1\]"),
    ({"do_sample": True, "top_p": float("nan")}, "top_p must be above 0 and at most 1, not nan"),
    ({"do_sample": True, "top_k": 10**400}, "top_k must be an integer from 0 to 2147483647, not 1000"),
    ({"eos_token_id": "x"}, "eos_token_id must be an integer or a list of integers, not 'x'"),
]


@pytest.mark.parametrize(("values", "reason"), ODD_CONFIG, ids=lambda value: str(value)[:40])
def test_an_odd_value_is_named(tmp_path: Path, values: dict[str, object], reason: str) -> None:
    root = directory(tmp_path / "model", decoder(), **values)
    assert re.search(rf"{re.escape(str(root))}/config\.json: {reason}", refusal(root, tmp_path / "bundle"))


@pytest.mark.parametrize(("values", "reason"), ODD_GENERATION, ids=lambda value: str(value)[:40])
def test_an_odd_default_is_named(tmp_path: Path, values: dict[str, object], reason: str) -> None:
    root = directory(tmp_path / "model", decoder())
    (root / "generation_config.json").write_text(json.dumps(values))
    assert re.search(rf"generation_config\.json: {reason}", refusal(root, tmp_path / "bundle"))


def test_defaults_that_no_answer_will_get_are_told(tmp_path: Path) -> None:
    asked = {"suppress_tokens": [3], "repetition_penalty": 1.2, "num_beams": 1, "no_repeat_ngram_size": 0}
    one, other = directory(tmp_path / "one", decoder()), genai_directory(tmp_path / "other", decoder(Form(gqa=True)))
    (one / "generation_config.json").write_text(json.dumps(asked))
    config = json.loads((other / "genai_config.json").read_text())
    (other / "genai_config.json").write_text(json.dumps(config | {"search": asked | {"do_sample": True}}))
    for source, said in (
        (one, "generation_config.json asks for repetition_penalty, suppress_tokens"),
        (other, "genai_config.json asks for suppress_tokens"),
    ):
        lines: list[str] = []
        import_pair(source, None, tmp_path / "bundle", progress=lines.append)
        assert f"target: {said}: not among the bundle's defaults" in lines


def test_nested_too_deep_is_no_configuration(tmp_path: Path) -> None:
    root = directory(tmp_path / "model", decoder())
    (root / "config.json").write_text("[" * 200_000)
    assert "config.json: not JSON" in refusal(root, tmp_path / "bundle")


def test_a_text_configuration_stands_over_the_one_around_it(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 30, "vocab_size": None, "eos_token_id": None}
    source = read_source(directory(tmp_path / "model", decoder(), text_config=text, eos_token_id=[1, 6]))
    assert (source.max_context, source.eos_token_ids, source.architecture) == (30, (1, 6), "MadeForCausalLM")
    source = read_source(directory(tmp_path / "other", decoder(), text_config=text | {"eos_token_id": 3}))
    assert source.eos_token_ids == (3,)
    assert read_source(directory(tmp_path / "none", decoder(), text_config=None)).max_context == CONTEXT


def test_only_what_a_graph_leaves_open_is_asked_for(tmp_path: Path) -> None:
    """Configurations say heads layer by layer, too."""
    assert read_source(directory(tmp_path / "model", decoder(), num_key_value_heads=[2, 2])).cache[0].heads == 2
    left = decoder()
    for port in (*left.graph.input, *left.graph.output):
        if "key" in port.name or "value" in port.name:
            port.type.tensor_type.shape.dim[1].dim_param = "H"
    with pytest.raises(ExportError, match="num_key_value_heads must be an integer from 1"):
        read_source(directory(tmp_path / "left", left, num_key_value_heads=[2, 2]))
    assert read_source(directory(tmp_path / "said", left)).cache[0].heads == 2


def test_a_head_without_a_width_of_its_own_has_its_part_of_the_hidden_size(tmp_path: Path) -> None:
    """As Qwen 2's and Llama's, in graphs of onnxruntime-genai 0.18, whose caches leave the width open."""
    left = decoder()
    for port in (*left.graph.input, *left.graph.output):
        if "key" in port.name or "value" in port.name:
            port.type.tensor_type.shape.dim[3].dim_param = "kv_cache_dim"
    with pytest.raises(ExportError, match="leaves heads or width open"):
        read_source(directory(tmp_path / "nothing", left))
    target = directory(tmp_path / "model", left, hidden_size=HIDDEN)
    with leadout.load(import_pair(target, None, tmp_path / "bundle"), threads=1) as pair:
        assert pair.bundle.manifest.models["target"].cache[0].key_dim == HIDDEN // 2
        assert len(pair.generate([1, 2], max_new_tokens=4, ignore_eos=True).token_ids) == 4


def test_a_graph_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = directory(tmp_path / "model", decoder())
    monkeypatch.chdir(root / "onnx")
    assert read_source("model.onnx").root == root
    monkeypatch.chdir(root)
    assert read_source(".").graph.path == root / "onnx/model.onnx"


def test_a_graph_in_onnx_is_not_the_one_that_genai_describes(tmp_path: Path) -> None:
    root = directory(tmp_path / "model", decoder(), "onnx/model_q4.onnx")
    genai_directory(root, decoder(Form(gqa=True)))
    assert read_source(root).dialect == read_source(root / "model.onnx").dialect == "genai"
    assert read_source(root / "onnx/model_q4.onnx").dialect == "concat"


def test_a_bundle_is_not_replaced_by_what_no_pair_can_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = directory(tmp_path / "model", decoder())
    bundle = import_pair(root, None, tmp_path / "bundle")
    good = (bundle / "leadout.json").read_bytes()
    (root / "tokenizer.json").write_text("{}")
    assert "tokenizer.json: not a tokenizer" in refusal(root, bundle)
    words(tuple(f"more{i}" for i in range(9))).save(str(root / "tokenizer.json"))
    longer = Tokenizer.from_file(str(root / "tokenizer.json"))
    longer.add_tokens(["a", "b", "c"])
    longer.save(str(root / "tokenizer.json"))
    assert f"its ids go up to {VOCAB}, the logits of model.onnx to {VOCAB - 1}" in refusal(root, bundle)
    words().save(str(root / "tokenizer.json"))
    with monkeypatch.context() as odd:
        odd.setattr("leadout.export.foreign.source.Fields.names", lambda self, name: [5])
        assert f"{bundle}/leadout.json: models: target: architecture: expected str" in refusal(root, bundle)
    assert (bundle / "leadout.json").read_bytes() == good
    leadout.load(bundle, threads=1).close()


def test_what_a_draft_without_a_tokenizer_is_taken_for_is_told(tmp_path: Path) -> None:
    target, draft = (directory(tmp_path / name, decoder()) for name in ("target", "draft"))
    (draft / "tokenizer.json").unlink()
    told: list[str] = []
    import_pair(target, draft, tmp_path / "bundle", progress=told.append)
    assert "draft: no tokenizer of its own: its token ids are taken to be the target's" in told


def test_a_place_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    source = directory(tmp_path / "model", decoder())
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/mine").write_text("x")
    with pytest.raises(ExportError, match="not a bundle"):
        import_pair(source, None, tmp_path / "taken")
    first = import_pair(source, None, tmp_path / "bundle")
    assert import_pair(source, None, tmp_path / "bundle") == first  # a bundle is replaced
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "model", "taken"]
    assert Bundle.read(first).manifest.models["target"].max_context == CONTEXT


def test_a_checkpoint_drafts_for_an_imported_target(tmp_path: Path) -> None:
    """Nothing of an imported graph keeps a draft of Leadout's own from it; the answers are the target's."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from leadout.export.build import beside_import

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCAB, max_position_embeddings=CONTEXT, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "draft")
    words().save(str(tmp_path / "draft/tokenizer.json"))
    (tmp_path / "head").mkdir()
    (tmp_path / "head/config.json").write_text('{"model_type": "llama", "draft_vocab_size": 9, "num_hidden_layers": 1}')
    for draft in ("self:int4", "mtp", tmp_path / "head"):
        with pytest.raises(UsageError, match="needs its target's checkpoint"):
            beside_import(draft)
    target = directory(tmp_path / "target", decoder(Form(keep=True)))
    out = import_pair(target, None, tmp_path / "pair", draft=beside_import(tmp_path / "draft", draft_precision="fp32"))
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["draft", "target"]
    with leadout.load(out, threads=1) as pair:
        for drawn in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
            given = {"max_new_tokens": 16, "ignore_eos": True} | drawn
            prompts = [[1, 2, 3], [4] * 9, [5]]
            alone = [pair.generate(prompt, draft="none", **given).token_ids for prompt in prompts]
            for draft in ("model", "auto"):
                for length in (1, 4):
                    found = [pair.generate(prompt, draft=draft, draft_length=length, **given) for prompt in prompts]
                    assert [each.token_ids for each in found] == alone
                    assert draft == "auto" or all(each.stats.by_drafter["model"]["tested"] for each in found)
                assert [each.token_ids for each in pair.generate(prompts, draft=draft, **given)] == alone
