"""Conversations after an export: a bundle's prompts are those of transformers, in whichever files a checkpoint says how
they are made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from leadout.bundle import file_entry  # noqa: E402
from leadout.errors import ExportError  # noqa: E402
from leadout.export import build  # noqa: E402
from leadout.export.checkpoints.checkpoint import open_tokenizer, save_texts  # noqa: E402
from leadout.export.checkpoints.conversations import in_files, keep_conversations  # noqa: E402
from leadout.runtime.chat_template import ChatTemplate  # noqa: E402
from leadout.runtime.prompts import Chat  # noqa: E402
from leadout.scripts.chat_probe import MESSAGES, TOOLS, difference  # noqa: E402
from leadout.scripts.cli import main  # noqa: E402

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role ~ m.content ~ eos_token }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}>{% endif %}"
    "[{{ pad_token }}|{{ unk_token }}|{{ image_token }}]"
)
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
MAPPED = NAMES | {"eos_token": {"content": "</s>", "lstrip": False, "rstrip": False, "normalized": False}}
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
IMAGE = {"image_token": "<img>"}
Files = dict[str, Any]
CASES: dict[str, Files] = {
    "settings": {"tokenizer_config.json": FAST | NAMES | {"chat_template": TEMPLATE}},
    "a map": {"tokenizer_config.json": FAST | {"chat_template": TEMPLATE}, "special_tokens_map.json": MAPPED},
    "a map alone": {"chat_template.jinja": TEMPLATE, "special_tokens_map.json": MAPPED},
    "a class": {"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "chat_template": TEMPLATE}},
    "extra tokens": {
        "tokenizer_config.json": FAST | NAMES | {"chat_template": TEMPLATE, "extra_special_tokens": IMAGE},
    },
    "a list": {
        "tokenizer_config.json": FAST
        | NAMES
        | {
            "chat_template": [
                {"name": "tool_use", "template": "with" + TEMPLATE},
                {"name": "default", "template": TEMPLATE},
            ]
        }
    },
    "more files": {
        "tokenizer_config.json": FAST | NAMES | {"chat_template": "old"},
        "chat_template.jinja": TEMPLATE,
        "additional_chat_templates/tool_use.jinja": "with" + TEMPLATE,
        "additional_chat_templates/rag.jinja": "rag",
    },
}


def written(files: Files, place: Path, tokenizer_file: Path) -> Path:
    """A checkpoint's directory with these files, and without weights."""
    for name, content in files.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    shutil.copy(tokenizer_file, place)
    (place / "config.json").write_text('{"model_type": "llama"}')
    return place


def saved(source: Path, folder: Path, theirs: Any) -> ChatTemplate:
    """The template that a bundle of ``source`` has."""
    folder.mkdir()
    save_texts(str(source), folder, theirs)
    names = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {path.name for path in folder.iterdir()} <= names
    return ChatTemplate.read(files_of(folder))


def files_of(folder: Path) -> Any:
    """A bundle of nothing else."""
    files = {path.name: file_entry(path) for path in folder.iterdir()}
    return SimpleNamespace(path=folder, manifest=SimpleNamespace(files=files))


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_those_of_transformers(name: str, tmp_path: Path, tokenizer_file: Path) -> None:
    source = written(CASES[name], tmp_path / "source", tokenizer_file)
    theirs = open_tokenizer(str(source))
    template = saved(source, tmp_path / "bundle", theirs)
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True)
        assert template.render(Chat(MESSAGES, tools=tools)) == expected
        assert "</s>" in expected or name == "a class"


@pytest.mark.parametrize("name", [name for name in CASES if name != "a class"])
def test_so_they_are_where_transformers_knows_no_such_tokenizer(
    name: str, tmp_path: Path, tokenizer_file: Path
) -> None:
    """From the files alone."""
    source = written(CASES[name], tmp_path / "source", tokenizer_file)
    theirs, template = open_tokenizer(str(source)), saved(source, tmp_path / "bundle", None)
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True)
        assert template.render(Chat(MESSAGES, tools=tools)) == expected


def test_settings_that_say_it_all_are_copied_as_they_are(tmp_path: Path, tokenizer_file: Path) -> None:
    for name in ("settings", "a list"):
        source = written(CASES[name], tmp_path / name, tokenizer_file)
        saved(source, tmp_path / f"bundle of {name}", open_tokenizer(str(source)))
        copy = tmp_path / f"bundle of {name}" / "tokenizer_config.json"
        assert copy.read_bytes() == (source / "tokenizer_config.json").read_bytes()


@pytest.mark.parametrize("text", ["{", "[1]", '{"add_bos_token": true}'])
def test_where_there_is_no_template_nothing_is_written(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(NAMES))
    keep_conversations(tmp_path, *in_files(tmp_path))
    assert (tmp_path / "tokenizer_config.json").read_text() == text


def test_a_template_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").mkdir(parents=True)
    with pytest.raises(ExportError, match=r"tool_use\.jinja' cannot be read: "):
        in_files(tmp_path)


def test_another_prompt_than_transformers_is_told(tmp_path: Path, tokenizer_file: Path) -> None:
    source = written(CASES["more files"], tmp_path / "source", tokenizer_file)
    saved(source, tmp_path / "bundle", open_tokenizer(str(source)))

    def told() -> str | None:
        return difference(files_of(tmp_path / "bundle"), str(source))

    assert told() is None
    path = tmp_path / "bundle" / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"with', '"without').replace("</s>", "<end>"))
    beginning = "target: of a conversation transformers' "
    line = told()
    assert line and line.startswith(beginning) and "'/s>assistant" in line and "'end>assistant" in line
    path.write_text(path.read_text().replace("<end>", "</s>"))
    line = told()
    assert line and line.startswith("target: of a conversation with tools ") and "the bundle's has 'out<s>" in line
    path.write_text("{}")
    line = told()
    assert line and line.endswith("its model continues text; give it a prompt")
    own = {"tokenizer_class": "OfItsOwn", "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}
    (source / "tokenizer_config.json").write_text(json.dumps(own))
    assert told() is None, "nobody knows"


def test_an_export_tells_it(
    tiny_bundle: Path, tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = written(CASES["settings"], tmp_path / "source", tokenizer_file)
    monkeypatch.setattr(build, "export_pair", lambda _target, _draft, out, **_: shutil.copytree(tiny_bundle, out))
    result = CliRunner().invoke(main, ["export", str(source), "-o", str(tmp_path / "out")])
    assert result.exit_code == 0 and "makes another prompt: bundle '" in result.stderr, result.output


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ((), r"has no tokenizer\.json; put that of its tokenizer into its directory$"),
        (("tokenizer.model",), r"; pip install sentencepiece tiktoken, then make one of its tokenizer\.model with .*"),
        (("vocab.json", "merges.txt"), r"; make one of its vocab\.json with transformers\.AutoTokenizer\..*"),
        (("tekken.json", "vocab.json"), r"; make one of its tekken\.json with .*, and copy it beside that$"),
    ],
)
def test_who_has_a_tokenizer_in_another_form_is_told_what_to_do(
    there: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    for name in ("config.json", *there):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ExportError, match=message):
        save_texts(str(tmp_path), tmp_path, None)
