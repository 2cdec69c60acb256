"""What a checkpoint's files say about using it: what no bundle can hold is refused, or left out and named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

pytest.importorskip("torch")
pytest.importorskip("transformers")

from leadout.bundle import GENERATION_CONFIG, TOKENIZER
from leadout.errors import ExportError
from leadout.export.build import export_pair
from leadout.export.checkpoints.checkpoint import open_tokenizer, other_reading, read_config, vocabulary
from leadout.export.checkpoints.defaults import choose_sampling, keep_readable


@pytest.fixture
def source(tiny_pair: tuple[Path, Path], tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(tiny_pair[0], tmp_path / "source"))


@pytest.mark.parametrize("text", ["{", "[]", "\x00", "[" * 100_000])
def test_a_generation_config_that_cannot_be_read_is_named_and_not_copied(tmp_path: Path, text: str) -> None:
    said: list[str] = []
    (tmp_path / GENERATION_CONFIG).write_text(text)
    keep_readable(tmp_path, said.append)
    assert said == ["target: generation_config.json is not a JSON object and is left out, with the defaults in it"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sampling", "kept", "line"),
    [
        ({"temperature": 0.6, "top_k": 20.0}, {"temperature": 0.6, "top_k": 20.0}, None),
        ({"temperature": 0.0}, {"temperature": 0.0}, None),
        (
            {"temperature": 1.0, "top_k": -1.0},
            {"temperature": 1.0},
            "top_k must be an integer from 0 to 2147483647, not -1.0",
        ),
        ({"temperature": 1.0, "top_p": 0.0}, {"temperature": 1.0}, "top_p must be above 0 and at most 1, not 0.0"),
        ({"repetition_penalty": 0.0}, {}, "repetition_penalty must be from 1e-06 to 1e+06, not 0.0"),
        ({"min_p": float("nan")}, {}, "min_p must be from 0 to 1, not nan"),
    ],
)
def test_defaults_that_no_request_may_have_are_left_out(
    tmp_path: Path, sampling: dict[str, float], kept: dict[str, float], line: str | None
) -> None:
    said: list[str] = []
    assert choose_sampling(tmp_path, sampling, said.append) == kept
    assert said == ([] if line is None else [f"target: generation_config.json: {line}; left out"])


@pytest.mark.parametrize(
    ("asked", "sampling", "named"),
    [
        ({"repetition_penalty": 1.1}, {}, "repetition_penalty"),
        ({"repetition_penalty": 1.1}, {"temperature": 1.0, "repetition_penalty": 1.1}, None),
        ({"suppress_tokens": [1, 2], "no_repeat_ngram_size": 2}, {}, "no_repeat_ngram_size, suppress_tokens"),
        ({"typical_p": 0.9}, {"temperature": 1.0}, "typical_p"),
        ({"repetition_penalty": 1.0, "num_beams": 1, "suppress_tokens": [], "typical_p": 1.0}, {}, None),
        ({"max_new_tokens": 100, "temperature": 0.6}, {}, None),
    ],
)
def test_what_else_it_asks_for_is_named(
    tmp_path: Path, asked: dict[str, Any], sampling: dict[str, float], named: str | None
) -> None:
    said: list[str] = []
    (tmp_path / GENERATION_CONFIG).write_text(json.dumps(asked))
    assert choose_sampling(tmp_path, sampling, said.append) == sampling
    line = f"target: generation_config.json asks for {named}: not among the bundle's defaults"
    assert said == ([] if named is None else [line])


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "is not a JSON object"),
        ("null", "is not a JSON object"),
        ('{"repetition_penalty": 1.1}', "asks for repetition_penalty"),
    ],
)
def test_an_export_says_so(source: Path, tmp_path: Path, text: str, line: str) -> None:
    said: list[str] = []

    def stop(message: str) -> None:
        said.append(message)
        if "reference logits" in message:
            raise KeyboardInterrupt

    (source / GENERATION_CONFIG).write_text(text)
    with pytest.raises(KeyboardInterrupt):
        export_pair(source, None, tmp_path / "out", progress=stop)
    assert any(each.startswith(f"target: generation_config.json {line}") for each in said), said


def test_a_target_whose_tokenizer_says_more_than_its_head_is_refused(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"vocab_size": 400}))
    with pytest.raises(ExportError, match=r"has 400 logits, too few for its tokenizer.json of 512 ids"):
        export_pair(source, None, tmp_path / "out")
    (source / "tokenizer.json").write_text("{")
    with pytest.raises(ExportError, match="not a tokenizer"):
        export_pair(source, None, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.usefixtures("captures_once")
def test_what_transformers_reads_otherwise_is_said(source: Path, tmp_path: Path) -> None:
    """Tokens that a later training added may be nowhere but in the tokenizer's settings."""
    own = vocabulary(str(source), read_config(source))
    assert other_reading(open_tokenizer(str(source)), own) is None
    token = {"content": "<|im_start|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {"511": {**token, "single_word": False}},
    }
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    said: list[str] = []
    export_pair(source, None, tmp_path / "out", progress=said.append)
    (line,) = [line for line in said if "tokenizer.json" in line]
    assert line.startswith("target: transformers' ") and "reads ' <|im_start|>' as other tokens" in line
    settings = {"tokenizer_class": "OfItsOwn", "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    assert open_tokenizer(str(source)) is None and other_reading(None, own) is None


def test_special_tokens_that_the_head_has_no_logit_for_become_text(source: Path, tmp_path: Path) -> None:
    """As in Gemma 3's sizes that read no images, whose tokenizer has a token for one."""
    tokenizer = Tokenizer.from_file(str(source / TOKENIZER))
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(source / TOKENIZER))
    said, kept = [], []

    def stop(message: str) -> None:
        said.append(message)
        if message.startswith("target: reading"):
            kept.extend(
                Tokenizer.from_file(str(path)) for path in tmp_path.glob(f"*/{TOKENIZER}") if path.parent != source
            )
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_pair(source, None, tmp_path / "out", progress=stop)
    assert said[0] == "target: no logit for special tokens of its tokenizer.json, whose names become text: '<image>'"
    assert max(kept[0].encode("a<image>b").ids) < size == kept[0].get_vocab_size() and len(said) == 2
