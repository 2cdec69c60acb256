"""What many tests share: a tiny pair that agrees about half the time, and the bundles made from it and from models/."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support_captures import folder_of, shared
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[1]
TINY_VOCAB, TINY_CONTEXT = 512, 256

# A model that is traced is a million small objects that all live: to look for garbage among them takes a tenth of the
# time of an export.
gc.set_threshold(200_000, 20, 20)
# Two test processes' worth of spinning threads on two cores would measure nothing but each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def operators_read_once() -> None:
    """torch's exporter reads all the operators it has anew for each export, a sixth of what a tiny model's takes."""
    if "torch" in sys.modules:  # which every file that exports has imported by now
        with contextlib.suppress(ImportError, AttributeError):  # of a version that has it elsewhere
            from torch.onnx._internal.exporter._registration import ONNXRegistry

            ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 512 entries; id 0 is the special end of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([(ROOT / "bundle.py").read_text(encoding="utf-8")], trainer)
    assert tokenizer.get_vocab_size() == TINY_VOCAB
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> tuple[Path, Path]:
    """Checkpoints of a random Llama and of the same with noise on its weights: they agree on about half the tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TINY_VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=TINY_CONTEXT,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=0,
    )
    target, draft = LlamaForCausalLM(config), LlamaForCausalLM(config)
    with torch.no_grad():
        for ours, theirs in zip(draft.parameters(), target.parameters(), strict=True):
            ours.copy_(theirs + (0.05 * theirs.std() * torch.randn_like(theirs) if theirs.dim() > 1 else 0))
    return save_checkpoint(target, "target", tmp_path_factory, tokenizer_file), save_checkpoint(
        draft, "draft", tmp_path_factory, tokenizer_file
    )


def save_checkpoint(model: object, name: str, factory: pytest.TempPathFactory, tokenizer_file: Path) -> Path:
    folder = factory.mktemp(name)
    model.save_pretrained(folder)  # type: ignore[attr-defined]
    (folder / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    return folder


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory, tiny_pair: tuple[Path, Path]) -> Path:
    """The tiny pair, exported once in fp32. Read-only: copy it to change it."""
    from leadout.export.build import export_pair

    with shared(folder_of(tmp_path_factory.getbasetemp())):
        return export_pair(*tiny_pair, tmp_path_factory.mktemp("bundles") / "tiny", draft_precision="fp32")


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The demo pair of models/, exported once per precision."""
    folder, made = tmp_path_factory.mktemp("demo"), dict[str, Path]()

    def bundle(precision: str) -> Path:
        if precision not in made:
            from leadout.export.build import export_pair, silent

            pair = (ROOT / "models" / "target", ROOT / "models" / "draft")
            with shared(folder_of(tmp_path_factory.getbasetemp())):
                made[precision] = export_pair(*pair, folder / precision, precision=precision, progress=silent)
        return made[precision]

    return bundle


@pytest.fixture(scope="session")
def held_out() -> list[str]:
    """The prompts of benchmarks/prompts.jsonl, from files the demo pair was not trained on."""
    lines = (ROOT / "benchmarks" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


@pytest.fixture(scope="module")
def captures_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For tests of what becomes of captures, not of capturing."""
    with shared(folder_of(tmp_path_factory.getbasetemp())):
        yield
