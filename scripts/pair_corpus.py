"""Decides what the demo pair is trained on: the source of CPython's standard library, and a tokenizer made of it."""

from __future__ import annotations

import dataclasses
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 4096
END = "<|endoftext|>"

HELD_OUT = tuple(Path(__file__).with_name("held_out.txt").read_text(encoding="utf-8").split())
# Generated tables and prose: not what the author of a Python module writes.
SKIPPED = ("/site-packages/", "/encodings/", "/pydoc_data/")


@dataclasses.dataclass(frozen=True, slots=True)
class Corpus:
    texts: dict[str, str]
    held: dict[str, str]
    tokenizer: Tokenizer
    stream: np.ndarray
    held_stream: np.ndarray


def read_corpus(tokenizer_file: Path) -> Corpus:
    """The standard library, tokenised; the tokenizer is trained if its file is not there."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts, held = sources(root, held_out=False), sources(root, held_out=True)
    if not tokenizer_file.exists():
        tokenizer_file.parent.mkdir(parents=True, exist_ok=True)
        train_tokenizer(iter(texts.values())).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    return Corpus(
        texts, held, tokenizer, token_stream(tokenizer, texts.values()), token_stream(tokenizer, held.values())
    )


def sources(root: Path, *, held_out: bool) -> dict[str, str]:
    """Relative path -> text of the standard library's files, test suites included, in name order."""
    names = HELD_OUT if held_out else (p.relative_to(root).as_posix() for p in sorted(root.rglob("*.py")))
    texts = {}
    for name in names:
        if not held_out and (name in HELD_OUT or any(part in f"/{name}" for part in SKIPPED)):
            continue
        try:
            texts[name] = (root / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # files that test source encodings
    return texts


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """All texts one after the other, each preceded by the end-of-text token, int64 [N]."""
    encoded = tokenizer.encode_batch(list(texts))
    return np.concatenate([np.array([0, *e.ids], np.int64) for e in encoded])
