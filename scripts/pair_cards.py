"""Decides what a model of the demo pair is published with: weights in bfloat16, tokenizer, and a card that says how it
was made."""

from __future__ import annotations

import platform
from pathlib import Path

import click
import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ..export.drafts.eagle import FeatureHead
from .pair_corpus import END, Corpus
from .pair_recipes import CONTEXT, Recipe

CARD = """---
license: apache-2.0
library_name: transformers
---
# Leadout demo {role}

A {parameters:,}-parameter Llama ({layers} layers, hidden size {hidden}) that writes Python. It exists to show and test
speculative decoding; it is far too small to be useful otherwise.

{how}

| measured on the held-out files | |
|---|---|
{figures}

* Corpus: the source of CPython {python}'s standard library, {files:,} files, {tokens:,} tokens; the tables in
  `encodings/` and `pydoc_data/` are left out.
* Schedule: {steps:,} steps of {step_tokens:,} tokens, seed {seed}, context {context}.
* Held out ({held_tokens:,} tokens): {held}.
* Made by `python -m leadout.scripts.train_pair {role}`. The standard library is under the PSF licence.
"""

COPIES = """Trained from scratch (`train_pair target`), then to copy (`train_pair copy`): three windows in five of the
schedule below are edits (functions of the corpus, written again with names changed), the others the corpus. Of what the
weights changed by, {share:.0%} is kept."""
DISTILLED = """Distilled from the demo target (KL and total variation), on the corpus, on half as many tokens of
edits (functions of the corpus, written again with names changed) and on {tokens:,} or more of the target's own text.
{start}"""
PRUNED = """It began as a part of the target: of its {of} layers {layers}, of the {all} units of each MLP
the busiest {units}."""
AGAIN = """It began as a draft that was distilled before, from this target or from what it was before it was trained
further; the schedule below is that of the last time, `train_pair refine`."""
WENT_BACK = """
Of what the weights changed by in that, {share:.0%} is kept; {steps} steps in int4 followed."""

PARALLEL = """The demo draft, taught to say a whole draft in one step: behind the text it reads a mask, token {mask}
(the byte 0xFF), for each token of the draft but the first (PARD, arXiv 2504.18583)."""
HEAD_CARD = """A head, no model by itself: it drafts from the features of the demo target, whose streams {taps} it reads
(EAGLE-3, arXiv 2503.01840; 0 is the embedding, 8 what leaves the last layer). It began as the target with its layer
{layer} alone."""


def publish(
    model: LlamaForCausalLM | FeatureHead, recipe: Recipe, corpus: Corpus, folder: Path, how: str, **figures: str
) -> None:
    """Write weights in bfloat16, tokenizer, configurations and the model card."""
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0)
    model.to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=corpus.tokenizer, bos_token=END, eos_token=END).save_pretrained(folder)
    card = CARD.format(
        role=folder.name,
        parameters=sum(p.numel() for p in model.parameters()),
        layers=recipe.layers,
        hidden=recipe.hidden,
        how=how,
        figures="\n".join(f"| {name.replace('_', ' ')} | {value} |" for name, value in figures.items()),
        python=platform.python_version(),
        files=len(corpus.texts),
        tokens=len(corpus.stream),
        steps=recipe.steps,
        step_tokens=recipe.tokens,
        seed=recipe.seed,
        context=CONTEXT,
        held_tokens=len(corpus.held_stream),
        held=", ".join(f"`{name}`" for name in corpus.held),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    click.echo("\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in figures.items()))
