"""``leadout.json``: values that no pair has are refused by file, key and what is legal; nothing else is opened."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from leadout.bundle import Bundle, read_manifest
from leadout.errors import BundleError, UsageError
from leadout.runtime.settings import Settings
from leadout.scripts.cli import main

HUGE = 10**399
BUNDLE = 3


def model(**changes: Any) -> dict[str, Any]:
    layer = {"heads": 2, "key_dim": 16, "value_dim": 16}
    return {
        "directory": "target",
        "architecture": "Toy",
        "precision": "fp32",
        "dialect": "slots",
        "dtype": "float32",
        "vocab_size": 512,
        "max_context": 256,
        "parameters": 10_000,
        "cache": [layer, layer],
        "eos_token_ids": [0],
        "variants": {"canonical": {"file": "model.onnx", "sha256": "", "bytes": 1}},
        "files": {"model.onnx.data": {"file": "model.onnx.data", "sha256": "", "bytes": 40_000}},
        **changes,
    }


def manifest(**changes: Any) -> dict[str, Any]:
    models = {"target": model(), "draft": model(directory="draft")}
    whole = {"format": 1, "leadout": "0", "models": models, "files": {}, "sampling": {}, "provenance": {}}
    return whole | changes


def write(folder: Path, content: dict[str, Any]) -> Path:
    (folder / "leadout.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def refused(folder: Path, message: str) -> None:
    """By the reader, and by a command that looks at nothing else; each in one line that begins with the file."""
    with pytest.raises(BundleError) as error:
        read_manifest(str(folder))
    text = str(error.value)
    assert text.startswith(f"{folder / 'leadout.json'}: ") and message in text and len(text) < 500, text
    for command in ("plan", "inspect"):
        result = CliRunner().invoke(main, [command, str(folder)])
        assert result.exit_code == BUNDLE and result.stdout == "", result.output
        assert result.stderr.startswith("leadout: ") and message in result.stderr and result.stderr.count("\n") == 1


def of_target(**changes: Any) -> Callable[[], dict[str, Any]]:
    return lambda: manifest(models={"target": model(**changes)})


def layer(**changes: int) -> list[dict[str, int]]:
    return [{"heads": 2, "key_dim": 16, "value_dim": 16, **changes}]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: manifest(models={}), "models: 'target' is missing"),
        (lambda: manifest(models={"draft": model()}), "models: 'target' is missing"),
        (
            lambda: manifest(models={"target": model(), "judge": model()}),
            "models: unknown option 'judge' (known: target, draft)",
        ),
        (of_target(max_context=0), "models: target: max_context must be from 2 to 2147483647, not 0"),
        (of_target(max_context=10**12), "max_context must be from 2 to 2147483647, not 1000000000000"),
        (of_target(max_context=HUGE), "max_context must be from 2 to 2147483647, not 1000"),
        (of_target(max_context=1e12), "max_context: expected int, found 1000000000000.0"),
        (of_target(vocab_size=0), "vocab_size must be from 1 to 2147483647, not 0"),
        (of_target(parameters=-1), "parameters must be from 0 to 9223372036854775807, not -1"),
        (of_target(cache=[]), "cache must have at least 1 layer, not 0"),
        (of_target(cache=layer(heads=-2)), "cache[0]: heads must be from 1 to 2147483647, not -2"),
        (of_target(cache=layer(value_dim=0)), "cache[0]: value_dim must be from 1"),
        (of_target(precision="int3"), "precision must be one of fp32, fp16, bf16, int8, int4, int2, not 'int3'"),
        (of_target(dtype="float99"), "dtype must be one of float32, float16, not 'float99'"),
        (of_target(dialect="latin"), "dialect must be one of slots, concat, genai, not 'latin'"),
        (of_target(eos_token_ids=[0, -1]), "eos_token_ids[1] must be from 0 to 511, not -1"),
        (of_target(eos_token_ids=[512]), "eos_token_ids[0] must be from 0 to 511, not 512"),
        (of_target(variants={}), "variants: 'canonical' is missing"),
        (
            of_target(variants={"warp": {"file": "a", "sha256": "", "bytes": 1}}),
            "variants: unknown option 'warp'"
            " (known: canonical, gqa, gqa_even, grouped, nonpad, tree, tree_gqa, ragged_4, ragged_8, ragged_16)",
        ),
        (
            of_target(dialect="genai", variants={"gqa": {"file": "a", "sha256": "", "bytes": 1}}),
            "variants: unknown option 'gqa' (known: canonical)",
        ),
        (
            of_target(files={"a": {"file": "a", "sha256": "", "bytes": HUGE}}),
            "files: a: bytes must be from 0 to 9223372036854775807, not 1000",
        ),
        (of_target(parity={"gqa": math.nan}), "parity: gqa must be a finite number of at least 0, not nan"),
        (of_target(parity={"gqa": HUGE}), "parity: gqa: expected float, found 1000"),
        (lambda: manifest(sampling={"logit_bias": 1.0}), "sampling: unknown option 'logit_bias' (known: temperature,"),
        (lambda: manifest(sampling={"top_k": HUGE}), "sampling: top_k: expected float, found 1000"),
        (lambda: manifest(format=2), "format 2, written by a newer Leadout (this one reads 1): upgrade leadout"),
        (lambda: manifest(format=HUGE), "written by a newer Leadout"),
        (lambda: manifest(format=0), "format 0, this Leadout reads 1; export the pair again"),
        (lambda: manifest(format="1"), "format '1', this Leadout reads 1"),
    ],
)
def test_what_no_pair_is_like_is_refused(tmp_path: Path, make: Callable[[], dict[str, Any]], message: str) -> None:
    refused(write(tmp_path, make()), message)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", (0, 0.7, 1e-6, 1e6, -1, 1e-9, 1e7, math.nan, math.inf)),
        ("top_k", (0, 40, 50.0, 1.5, -1, math.nan, math.inf)),
        ("top_p", (0.5, 1, 0, 1.1, -0.5, math.nan)),
        ("min_p", (0, 0.5, 1, 1.5, -0.1, math.inf)),
        ("repetition_penalty", (1, 1.3, 1e-6, 0, -1, 1e7, math.nan)),
    ],
)
def test_a_default_is_legal_where_the_setting_is(tmp_path: Path, name: str, values: tuple[float, ...]) -> None:
    verdicts = set()
    for value in values:
        write(tmp_path, manifest(sampling={name: value}))
        whole = name == "top_k" and float(value).is_integer()
        try:
            Settings(**{name: int(value) if whole else value})
        except UsageError:
            refused(tmp_path, f"sampling: {name} must be ")
            verdicts.add("refused")
        else:
            assert read_manifest(tmp_path).sampling == {name: value}
            verdicts.add("read")
    assert verdicts == {"read", "refused"}


def test_a_trimmed_draft_keeps_the_ids_of_its_checkpoint(tmp_path: Path) -> None:
    models = {"target": model(), "draft": model(vocab_size=100, eos_token_ids=[511])}
    assert read_manifest(write(tmp_path, manifest(models=models))).models["draft"].eos_token_ids == (511,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "not a manifest: its brackets are nested too deep"),
        ("{", "not a manifest: Expecting"),
        ("[]", "format None, this Leadout reads 1"),
    ],
)
def test_a_file_that_is_no_manifest(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "leadout.json").write_text(text, encoding="utf-8")
    refused(tmp_path, message)


def test_a_manifest_that_cannot_be_opened(tmp_path: Path) -> None:
    for place in ("", "x" * 5000):
        with pytest.raises(BundleError, match=f"^no bundle at '{place}': "):
            read_manifest(place)
        with pytest.raises(BundleError, match=f"^no bundle at '{place}': "):
            Bundle.read(place)
    (tmp_path / "leadout.json").write_bytes(b"\xff")
    refused(tmp_path, "not a manifest: 'utf-8' codec")
    content = manifest()
    content["files"] = {"x": {"file": "x" * 300, "sha256": "", "bytes": 1}}
    with pytest.raises(BundleError, match="cannot be read: "):
        Bundle.read(write(tmp_path, content))
