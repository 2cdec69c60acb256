"""Cheaper drafts, from checkpoints to answers: a trimmed head, the target itself in int4, fewer or other ids."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

pytest.importorskip("torch")

import leadout
from leadout.bundle import Bundle, ModelEntry
from leadout.errors import BundleError, ExportError, UsageError
from leadout.export.build import export_pair
from leadout.export.checkpoints.pairing import Vocabulary
from leadout.export.drafts.choice import DraftChoice, choose_draft
from leadout.export.drafts.ids import DraftIds
from leadout.scripts.cli import main

pytestmark = pytest.mark.usefixtures("captures_once")

PROMPTS = ["def f(x):\n    return", "class A", "import json\nfor name in"]


def draft_of(bundle: Path) -> ModelEntry:
    return Bundle.read(bundle).manifest.models["draft"]


def answers_are_the_target_s(bundle: Path) -> float:
    """Greedy and coupled, alone and in a batch. The share of drafts that were accepted greedily."""
    with leadout.load(bundle, variant="grouped") as pair:
        for sampling in ({}, {"temperature": 1.0, "seed": 3}):
            wanted: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True} | sampling
            alone = [result.token_ids for result in pair.generate(PROMPTS, draft="none", **wanted)]
            drafted = pair.generate(PROMPTS, draft="model", draft_length=3, **wanted)
            assert [result.token_ids for result in drafted] == alone
            assert [pair.generate(p, draft="model", **wanted).token_ids for p in PROMPTS] == alone
        greedy = pair.generate(PROMPTS, draft="model", draft_length=3, max_new_tokens=24, ignore_eos=True)
        assert all(result.stats.drafted for result in greedy)
        return sum(r.stats.accepted for r in greedy) / sum(r.stats.drafted for r in greedy)


@pytest.fixture(scope="module")
def trimmed(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """The tiny pair with a head of 200 of 512 tokens for its draft."""
    out = tmp_path_factory.mktemp("bundles") / "trimmed"
    texts = [root / "bundle.py", root / "errors.py"]
    return export_pair(*tiny_pair, out, draft_precision="fp32", draft_vocabulary=200, calibration=texts)


def test_a_trimmed_head_says_the_frequent_tokens_alone(trimmed: Path, root: Path) -> None:
    draft, target = draft_of(trimmed), Bundle.read(trimmed).manifest.models["target"]
    assert (draft.vocab_size, target.vocab_size) == (200, 512)
    assert "head of 200 of 512 tokens" in draft.note and "of the calibration texts" in draft.note
    with np.load(trimmed / "draft" / "vocabulary.npz") as stored:
        assert set(stored.files) == {"outputs"}
        kept = stored["outputs"].tolist()
    tokenizer = Tokenizer.from_file(str(trimmed / "tokenizer.json"))
    counts = np.zeros(512, np.int64)
    for name in ("bundle.py", "errors.py"):
        ids = tokenizer.encode((root / name).read_text(encoding="utf-8")).ids
        counts += np.bincount(ids, minlength=512)
    assert kept == sorted(kept) and 0 in kept  # the end of text is never lost, however rare
    assert min(counts[kept[1:]]) >= max(np.delete(counts, kept))
    share = float(draft.note.split(" of the calibration")[0].split(", ")[-1].rstrip("%"))
    assert share == pytest.approx(100 * counts[kept].sum() / counts.sum(), abs=0.06)


def test_a_trimmed_head_takes_less_room(trimmed: Path, tiny_bundle: Path) -> None:
    small, large = ((bundle / "draft" / "model.onnx.data").stat().st_size for bundle in (trimmed, tiny_bundle))
    assert large - small == pytest.approx(4 * 312 * 64, abs=4096)  # the rows that are gone, but for alignment
    assert draft_of(tiny_bundle).vocab_size == 512


def test_a_trimmed_head_changes_no_answer(trimmed: Path) -> None:
    assert answers_are_the_target_s(trimmed) > 0.03
    with leadout.load(trimmed) as pair:
        for rule in ("rejection", "block"):
            result = pair.generate("def f", temperature=0.7, rule=rule, draft="model", draft_length=3, seed=1)
            assert result.lossless and result.stats.drafted


def test_a_bundle_with_a_map_stands_every_check(trimmed: Path) -> None:
    result = CliRunner().invoke(main, ["check", str(trimmed)])
    assert result.exit_code == 0, result.output


def test_the_target_drafts_for_itself_in_fewer_bits_with_listed_tokens(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Its table is tied: it stays whole for looking up, and a small head comes beside it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(tiny_pair[0], tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tied")
    shutil.copy(tiny_pair[0] / "tokenizer.json", tmp_path / "tied")
    (tmp_path / "ids").write_text("\n".join(map(str, range(500, 100, -1))))
    out = tmp_path / "out"
    args = [tmp_path / "tied", "--draft", "self:int8", "--draft-vocabulary", tmp_path / "ids", "-o", out]
    result = CliRunner().invoke(main, ["export", *map(str, args)])
    assert result.exit_code == 0, result.output
    target, draft = (Bundle.read(out).manifest.models[role] for role in ("target", "draft"))
    with np.load(out / "draft" / "vocabulary.npz") as stored:
        assert stored["outputs"].tolist() == [0, *range(101, 501)]  # and the end of text
    assert (target.precision, draft.precision) == ("fp32", "int8") and "the target itself in int8" in draft.note
    assert target.architecture == draft.architecture
    assert draft.parameters - target.parameters == 401 * 64
    assert answers_are_the_target_s(out) > 0.3


def test_what_a_draft_is_made_of() -> None:
    assert choose_draft("t", None, "fp32", None) is None
    assert choose_draft("t", "d", "int8", None) == DraftChoice("d", ("int4", "int8"))
    assert choose_draft("t", "d", "int4-128", None) == DraftChoice("d", ("int4", "int4-128"))
    assert choose_draft("t", "self:int4-128", "int8", None) == DraftChoice("t", ("int4-128",), "self")
    assert choose_draft("t", "d", "fp16", None) == DraftChoice("d", ("fp16",))
    assert choose_draft("t", "d", "int8", "fp32") == DraftChoice("d", ("fp32",))
    assert choose_draft("t", "self", "fp32", None) == DraftChoice("t", ("int4",), "self")
    assert choose_draft("t", "self", "fp32", "int8") == choose_draft("t", "self:int8", "fp32", None)
    with pytest.raises(UsageError, match=r"no cheaper than the target in int8 \(cheaper precisions: int4"):
        choose_draft("t", "self:int8", "int8", None)
    with pytest.raises(UsageError, match="already says its precision"):
        choose_draft("t", "self:int4", "fp32", "int4")
    with pytest.raises(UsageError, match="'int3' is unknown"):
        choose_draft("t", "self:int3", "fp32", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--draft-vocabulary", "100"), "draft-vocabulary trims a draft, and none was given"),
        (("--draft-precision", "int8"), "draft-precision is that of a draft, and none was given"),
        (("--mask-token", "5"), "mask-token is that of a draft with a checkpoint of its own"),
        (("--draft", "self", "--mask-token", "5"), "mask-token is that of a draft with a checkpoint of its own"),
        (("--draft", "DRAFT", "--mask-token", "512"), "mask-token must be from 0 to 511, or none"),
        (("--draft", "DRAFT", "--calibration", "TEXT"), "calibration texts are for draft-vocabulary"),
        (("--draft", "DRAFT", "--draft-vocabulary", "100"), "give --calibration TEXTFILE"),
        (("--draft", "DRAFT", "--draft-vocabulary", "513", "--calibration", "TEXT"), "between 1 and 512 tokens"),
        (("--draft", "DRAFT", "--draft-vocabulary", "0", "--calibration", "TEXT"), "between 1 and 512 tokens"),
        (("--draft", "DRAFT", "--draft-vocabulary", "9", "--calibration", "/nowhere"), "cannot read calibration text"),
        (("--draft", "DRAFT", "--draft-vocabulary", "/nowhere"), "neither a number nor a file of ids"),
        (("--draft", "DRAFT", "--draft-vocabulary", "TEXT"), "'three' is not a token id of the draft (0 to 511)"),
        (("--draft", "self:int4", "--draft-precision", "int4"), "already says its precision"),
    ],
)
def test_options_that_do_not_go_together(
    tiny_pair: tuple[Path, Path], tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "text").write_text("1 2 three")
    given = [{"DRAFT": str(tiny_pair[1]), "TEXT": str(tmp_path / "text")}.get(word, word) for word in options]
    result = CliRunner().invoke(main, ["export", str(tiny_pair[0]), "-o", str(tmp_path / "out"), *given])
    assert result.exit_code == 2 and message in result.stderr.splitlines()[-1], result.output
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def masked(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair's draft as a checkpoint whose config.json names a token for masks."""
    source = Path(shutil.copytree(tiny_pair[1], tmp_path_factory.mktemp("checkpoints") / "masked"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"pard_token": 511}))
    return source


def test_a_draft_that_says_whole_drafts_in_one_step(tiny_pair: tuple[Path, Path], masked: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    out = export_pair(tiny_pair[0], masked, tmp_path / "out", progress=lines.append)
    draft = draft_of(out)
    assert (draft.mask_token, draft.precision) == (511, "int8"), "it takes wide steps"
    assert "says a whole draft in one step, by the mask token 511" in draft.note
    assert Bundle.read(out).manifest.models["target"].mask_token is None
    assert answers_are_the_target_s(out) > 0.1, "it was not trained for more than the first token"
    with leadout.load(out) as pair:
        steps: list[int] = []
        forward = pair.draft.forward
        pair.draft.forward = lambda tokens, *rest: steps.append(tokens.shape[1]) or forward(tokens, *rest)
        stats = pair.generate(PROMPTS, draft="model", draft_length=4, max_new_tokens=24, ignore_eos=True)[0].stats
        assert len(steps) <= stats.rounds + 2 and stats.drafted > 3 * stats.rounds - 4
    with pytest.raises(UsageError, match="draft_ahead: a draft model that says its drafts in one step cannot"):
        leadout.load(out, draft_ahead=True)


def test_it_says_one_token_a_step_where_that_is_asked_for(
    tiny_pair: tuple[Path, Path], masked: Path, foreign_draft: Path, tmp_path: Path
) -> None:
    one = draft_of(export_pair(tiny_pair[0], masked, tmp_path / "one", mask_token="none"))
    assert one.mask_token is None and "one step" not in one.note
    asked = draft_of(export_pair(*tiny_pair, tmp_path / "asked", mask_token=7, draft_precision="fp32"))
    assert (asked.mask_token, asked.precision) == (7, "fp32")
    lines: list[str] = []
    export_pair(
        tiny_pair[0], foreign_draft, tmp_path / "f", mask_token=7, draft_precision="fp32", progress=lines.append
    )
    assert draft_of(tmp_path / "f").mask_token is None
    assert any("another tokenizer, and so says one token a step; its mask token is left out" in line for line in lines)


@pytest.mark.parametrize("token", [512, -1, True, "511", 1.5])
def test_a_mask_that_is_no_token_is_refused(
    tiny_pair: tuple[Path, Path], masked: Path, tmp_path: Path, token: Any
) -> None:
    source = Path(shutil.copytree(masked, tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"pard_token": token}))
    with pytest.raises(ExportError, match=r"config.json: pard_token must be from 0 to 511, not "):
        export_pair(tiny_pair[0], source, tmp_path / "out")
    with pytest.raises(UsageError, match=r"mask-token must be from 0 to 511, or none, for '.*', not "):
        export_pair(tiny_pair[0], masked, tmp_path / "out", mask_token=token)
    assert not (tmp_path / "out").exists()


def test_a_smaller_padding_of_the_same_tokens(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The target has 40 ids more than the tokenizer, all of them padding that a prompt may still hold."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(tiny_pair[0])
    config.vocab_size = 552
    LlamaForCausalLM(config).save_pretrained(tmp_path / "padded")
    shutil.copy(tiny_pair[0] / "tokenizer.json", tmp_path / "padded")
    out = export_pair(tmp_path / "padded", tiny_pair[1], tmp_path / "out", draft_precision="fp32")
    assert draft_of(out).vocab_size == 512
    with leadout.load(out) as pair:
        for prompt in ([1, 2, 551, 540], [551]):
            result = pair.generate(prompt, draft="model", draft_length=3, max_new_tokens=12)
            assert result.token_ids == pair.generate(prompt, draft="none", max_new_tokens=12).token_ids
            assert result.stats.drafted


@pytest.fixture(scope="module")
def foreign_draft(tmp_path_factory: pytest.TempPathFactory, tiny_pair: tuple[Path, Path], root: Path) -> Path:
    """A random model with a tokenizer of its own, of 400 tokens in another order."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([(root / "bundle.py").read_text(encoding="utf-8")], trainer)
    config = LlamaConfig.from_pretrained(tiny_pair[1], vocab_size=400, eos_token_id=1)
    folder = tmp_path_factory.mktemp("foreign")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_draft_with_another_tokenizer(tiny_pair: tuple[Path, Path], foreign_draft: Path, tmp_path: Path) -> None:
    out = export_pair(tiny_pair[0], foreign_draft, tmp_path / "out", draft_precision="fp32")
    draft = draft_of(out)
    assert {"vocabulary.npz", "tokenizer.json"} <= set(draft.files) and draft.vocab_size == 400
    assert re.search(r"another tokenizer: 39\d of its 400 tokens \((9\d|100)%\) are among the target's 512", draft.note)
    with np.load(out / "draft" / "vocabulary.npz") as stored:
        outputs = stored["outputs"]
    ours, theirs = (Tokenizer.from_file(str(path / "tokenizer.json")) for path in (out, out / "draft"))
    assert outputs[:2].tolist() == [-1, 0]  # no padding; its end of text is the target's
    for i, target_id in enumerate(outputs.tolist()):
        if i > 1 and target_id >= 0:
            assert ours.id_to_token(target_id) == theirs.id_to_token(i)
    answers_are_the_target_s(out)
    with leadout.load(out) as pair:
        for rule in ("rejection", "block"):
            result = pair.generate("def f", temperature=0.7, rule=rule, draft="model", draft_length=3, seed=1)
            assert result.lossless and result.stats.drafted
    checked = CliRunner().invoke(main, ["check", str(out)])
    assert checked.exit_code == 0, checked.output
    (out / "draft" / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json has 2 bytes"):
        leadout.load(out)


def test_an_end_of_text_that_is_no_token_is_no_end(tiny_pair: tuple[Path, Path], foreign_draft: Path) -> None:
    """Small models may keep the id that another's text ends with."""
    read = (
        Vocabulary.read(str(path), path / "tokenizer.json", size)
        for path, size in ((tiny_pair[0], 512), (foreign_draft, 400))
    )
    ids = DraftIds.choose(*read, None, ())
    ids._join_ends((50256, -1), (0,))
    assert ids.match.outputs[-1] != 0 and not np.isin(ids.match.outputs, 0).any()
    ids._join_ends((50256, 1), (50256, -1, 0))
    assert ids.match.outputs[1] == 0


def test_a_draft_whose_tokenizer_is_too_far_away(
    tiny_pair: tuple[Path, Path], foreign_draft: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(foreign_draft, tmp_path / "far"))
    settings = json.loads((source / "tokenizer.json").read_text())
    vocabulary = settings["model"]["vocab"]
    settings["model"] |= {"vocab": {f"ZZ{t}" if i > 150 else t: i for t, i in vocabulary.items()}, "merges": []}
    (source / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(ExportError, match=r"the target has with \d+% of its probability, needed are 80%"):
        export_pair(tiny_pair[0], source, tmp_path / "out", draft_precision="fp32")
    settings["decoder"] = None
    (source / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(ExportError, match="neither byte-level nor SentencePiece"):
        export_pair(tiny_pair[0], source, tmp_path / "out", draft_precision="fp32")
    with pytest.raises(UsageError, match="trims a draft of the target's tokenizer"):
        export_pair(tiny_pair[0], source, tmp_path / "out", draft_vocabulary=9, calibration=[source / "config.json"])
    assert not (tmp_path / "out").exists()
