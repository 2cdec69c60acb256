"""Bad input: each a one-line error that names it, and the exit code of its kind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from leadout.bundle import file_entry
from leadout.engines.golden import Golden
from leadout.errors import BundleError
from leadout.scripts.cli import main

pytestmark = pytest.mark.slow
USAGE, BUNDLE, EXPORT, CONTEXT, CHECK = 2, 3, 4, 6, 7
PROMPT = ("-p", "def f(x):")


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def refused(code: int, message: str, *args: object) -> None:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert result.stderr.strip().count("\n") == 0, result.stderr
    assert result.stdout == ""


def edit(bundle: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = bundle / "leadout.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    change(manifest)
    path.write_text(json.dumps(manifest), encoding="utf-8")


def test_a_bundle_that_is_not_there(tmp_path: Path) -> None:
    for name in ("generate", "bench", "check", "inspect"):
        args = PROMPT if name == "generate" else ()
        refused(BUNDLE, "leadout.json is missing", name, tmp_path / "nothing", *args)


@pytest.mark.parametrize(
    "name", ["target/model.onnx", "target/model.onnx.data", "draft/model.gqa.onnx", "tokenizer.json"]
)
def test_a_file_that_is_missing(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    refused(BUNDLE, f"{Path(name).name} is missing", "generate", bundle, *PROMPT)


def test_truncated_weights(bundle: Path) -> None:
    blob = bundle / "target" / "model.onnx.data"
    blob.write_bytes(blob.read_bytes()[:-100])
    refused(BUNDLE, "the copy is incomplete", "generate", bundle, *PROMPT)


def test_a_changed_byte(bundle: Path) -> None:
    blob = bundle / "draft" / "model.onnx.data"
    data = bytearray(blob.read_bytes())
    data[1000] ^= 1
    blob.write_bytes(data)
    refused(BUNDLE, "does not match its SHA-256", "generate", bundle, *PROMPT)


def test_an_unknown_option_in_the_manifest(bundle: Path) -> None:
    edit(bundle, lambda manifest: manifest["models"]["target"].update(speed="fast"))
    refused(BUNDLE, "unknown option 'speed'", "generate", bundle, *PROMPT)


def test_an_unknown_sampling_default(bundle: Path) -> None:
    edit(bundle, lambda manifest: manifest["sampling"].update(temprature=1.0))
    refused(BUNDLE, "unknown option 'temprature'", "generate", bundle, *PROMPT)


def test_another_format(bundle: Path) -> None:
    edit(bundle, lambda manifest: manifest.update(format=99))
    refused(BUNDLE, "format 99", "generate", bundle, *PROMPT)


def test_a_manifest_that_is_not_json(bundle: Path) -> None:
    (bundle / "leadout.json").write_text("{", encoding="utf-8")
    refused(BUNDLE, "not a manifest", "generate", bundle, *PROMPT)


def test_vocabularies_that_differ(bundle: Path) -> None:
    edit(bundle, lambda manifest: manifest["models"]["draft"].update(vocab_size=500))
    refused(BUNDLE, "different vocabularies (target 512, draft 500)", "generate", bundle, *PROMPT)


def test_a_pair_of_checkpoints_whose_vocabularies_differ(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(tiny_pair[1])
    config.vocab_size = 500
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    shutil.copy(tiny_pair[1] / "tokenizer.json", tmp_path / "other")
    result = CliRunner().invoke(
        main, ["export", str(tiny_pair[0]), "--draft", str(tmp_path / "other"), "-o", str(tmp_path / "out")]
    )
    assert result.exit_code == EXPORT and "vocabular" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["../model.onnx", "/etc/passwd", "..", "a/b"])
def test_a_path_in_the_manifest_that_leaves_the_bundle(bundle: Path, name: str) -> None:
    edit(bundle, lambda manifest: manifest["models"]["target"]["variants"]["gqa"].update(file=name))
    refused(BUNDLE, "leaves the bundle", "generate", bundle, *PROMPT)


def test_a_link_that_leaves_the_bundle(bundle: Path, tmp_path: Path) -> None:
    blob = bundle / "target" / "model.onnx.data"
    blob.rename(tmp_path / "elsewhere")
    blob.symlink_to(tmp_path / "elsewhere")
    refused(BUNDLE, "is a link", "generate", bundle, *PROMPT)


def test_weights_outside_the_directory_in_a_graph(bundle: Path, tmp_path: Path) -> None:
    """A graph whose hash is right, but whose external data points out of its folder."""
    import onnx

    path = bundle / "target" / "model.gqa_even.onnx"
    (bundle / "secret.data").write_bytes((bundle / "target" / "model.onnx.data").read_bytes())
    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../secret.data"
    path.write_bytes(model.SerializeToString())
    described = file_entry(path)
    edit(
        bundle,
        lambda manifest: manifest["models"]["target"]["variants"]["gqa_even"].update(
            sha256=described.sha256, bytes=described.bytes
        ),
    )
    result = CliRunner().invoke(main, ["generate", str(bundle), *PROMPT])
    assert result.exit_code in (BUNDLE, 5) and result.stderr.strip().count("\n") == 0 and result.stdout == ""


def test_a_prompt_longer_than_the_context(tiny_bundle: Path) -> None:
    refused(CONTEXT, "at most 255", "generate", tiny_bundle, "-p", "x = 1\n" * 200)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--temperature", "-1"), "temperature must be"),
        (("--top-p", "0"), "top_p must be"),
        (("--top-k", "-2"), "top_k must be"),
        (("--max-new-tokens", "0"), "max_new_tokens must be"),
        (("--seed", "-1"), "seed must be"),
        (("--draft-length", "99"), "draft_length must be"),
        (("--rule", "greedy", "--temperature", "1"), "rule 'greedy' needs"),
        (("--stop", ""), "stop must be non-empty strings, not ''"),
        (("--logit-bias", "3=nan"), "logit_bias of token 3"),
        (("--logit-bias", "99999=1"), "99999"),
        (("--threads", "0"), "threads must be an integer from 1 to 1024, not 0"),
        (("--draft-threads", "0"), "draft_threads must be an integer from 1 to 1024, not 0"),
        (("--batch-size", "0"), "batch_size must be an integer of at least 1, not 0"),
        (("--regex", "("), "regex cannot be compiled: "),
        (("--json-schema", '{"type": "strung"}'), "json_schema cannot be compiled: Invalid type: strung"),
        (("--json-schema", "nowhere.json"), "cannot read 'nowhere.json'"),
        (("--regex", "a", "--json-schema", "{}"), "json_schema and regex exclude each other"),
        (("--regex", "a", "--ignore-eos"), "ignore_eos and regex exclude each other"),
    ],
)
def test_options_outside_their_range(tiny_bundle: Path, options: tuple[str, ...], message: str) -> None:
    refused(USAGE, message, "generate", tiny_bundle, *PROMPT, *options)


def test_an_unknown_variant(tiny_bundle: Path) -> None:
    refused(BUNDLE, "no graph variant 'fast' (it has:", "generate", tiny_bundle, *PROMPT, "--variant", "fast")


def test_a_provider_that_is_not_there(tiny_bundle: Path) -> None:
    refused(5, "provider 'cuda' is not in this onnxruntime", "generate", tiny_bundle, *PROMPT, "--provider", "cuda")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no prompts"),
        ("{", "line 1: not JSON"),
        ('{"text": "x"}', "line 1: expected an object"),
        ('{"prompt": "x"}\n[]', "line 2: expected an object"),
        ('{"prompt": "x", "temprature": 1}', "did you mean 'temperature'"),
        ('{"prompt": "x", "temperature": -1}', "temperature must be"),
    ],
)
def test_batch_files_that_are_wrong(tiny_bundle: Path, tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content, encoding="utf-8")
    refused(USAGE, message, "generate", tiny_bundle, "--batch-file", path)


def test_a_batch_file_that_is_not_there_and_no_prompt_at_all(tiny_bundle: Path, tmp_path: Path) -> None:
    refused(USAGE, "cannot read", "generate", tiny_bundle, "--batch-file", tmp_path / "none.jsonl")
    refused(USAGE, "nothing to continue", "generate", tiny_bundle)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more"])
def test_golden_rows_that_are_no_arrays(bundle: Path, content: bytes) -> None:
    path = bundle / "target" / "golden.npz"
    path.write_bytes(content)
    with pytest.raises(BundleError, match="not golden rows"):
        Golden.read(path)


def test_golden_rows_that_do_not_hold_fail_the_check(bundle: Path) -> None:
    """``leadout check`` must notice a wrong model: golden logits of one row shifted by one."""
    import numpy as np

    path = bundle / "target" / "golden.npz"
    with np.load(path) as stored:
        golden = dict(stored)
    golden["logits"][1] += np.linspace(0, 5, golden["logits"].shape[-1], dtype=np.float32)
    np.savez_compressed(path, **golden)
    described = file_entry(path)
    edit(
        bundle,
        lambda manifest: manifest["models"]["target"]["files"]["golden.npz"].update(
            sha256=described.sha256, bytes=described.bytes
        ),
    )
    result = CliRunner().invoke(main, ["check", str(bundle)])
    assert result.exit_code == CHECK
    assert "FAIL target gqa: golden logits" in result.stdout and "ok   draft gqa: golden logits" in result.stdout
    assert result.stderr.startswith("leadout: 10 of the checks failed")
