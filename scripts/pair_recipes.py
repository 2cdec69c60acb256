"""Decides what the models of the demo pair are shaped like, and for how long and at which rates they are trained."""

from __future__ import annotations

import dataclasses

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .pair_corpus import VOCAB

# Where the processor only emulates it, bfloat16 is slower than float32.
BFLOAT16 = any(torch.cpu.get_capabilities().get(unit) for unit in ("amx_bf16", "avx512_bf16"))
SEED = 20261120
CONTEXT = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """One model's shape and schedule.

    A step sees ``tokens`` tokens, in windows of a quarter of the context, in the last ``long_share`` of the steps of
    the whole. The first ``shallow_share`` train only the first ``shallow`` layers: with so little compute a small model
    on many tokens learns faster, and layers whose output projections are zero join without a jump. In the last
    ``int4_share`` of the steps the forward pass sees the weights as int4 export rounds them.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    steps: int
    shallow: int
    shallow_share: float = 0.5
    long_share: float = 0.15
    tokens: int = 4096
    matrix_rate: float = 0.025
    vector_rate: float = 4e-3
    decay: float = 0.3
    int4_share: float = 0.0
    seed: int = SEED

    def depth(self, step: int) -> int:
        return self.shallow if step < self.shallow_share * self.steps else self.layers

    def length(self, step: int) -> int:
        return CONTEXT if step >= (1 - self.long_share) * self.steps else CONTEXT // 4

    def model(self) -> LlamaForCausalLM:
        """Freshly initialised; the blocks start as the identity (output projections zero)."""
        torch.manual_seed(SEED)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = LlamaForCausalLM(config)
        for layer in model.model.layers:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
        return model


TARGET = Recipe(hidden=384, layers=8, heads=6, kv_heads=2, intermediate=1024, steps=4000, shallow=4)
# Steps of half as many tokens, all of them windows of the whole context: copies are long.
COPYING = dataclasses.replace(
    TARGET, steps=1900, shallow_share=0.0, long_share=1.0, tokens=2048, matrix_rate=4e-3, vector_rate=6e-4, decay=0.7
)
# Of the way to where weights were before a stage: half of it they are better than at both ends (docs/notes.md).
BACK = 0.5
# Rates are low: what is left of the target still knows most of it.
DRAFT = dataclasses.replace(
    TARGET,
    layers=3,
    intermediate=512,
    steps=1400,
    shallow=3,
    matrix_rate=8e-3,
    vector_rate=1.6e-3,
    int4_share=0.4,
)
REFINED = dataclasses.replace(
    DRAFT, steps=1200, long_share=0.5, matrix_rate=6e-3, vector_rate=1.2e-3, decay=0.98, int4_share=0.25, seed=SEED + 1
)
# Half of the way back a draft is better than before, but not in int4: so it gets used to being rounded once more.
SETTLED = dataclasses.replace(REFINED, steps=200, matrix_rate=1.5e-3, vector_rate=3e-4, int4_share=1.0, seed=11)
# Windows stay short, for each is followed by three times as many masks, and weights in float, for such a draft is int8.
MASKED = dataclasses.replace(DRAFT, steps=900, long_share=0.0, decay=0.9, int4_share=0.0, seed=SEED + 2)
# Rates are high, for most of a head is new; of its drafts each step is learnt from.
HEAD = dataclasses.replace(
    TARGET,
    layers=1,
    shallow=1,
    steps=3700,
    matrix_rate=0.04,
    vector_rate=7e-3,
    decay=0.9,
    int4_share=0.15,
    seed=SEED + 3,
)
TAPS = (2, 5, 8)  # of the target's streams: before its third and sixth layer, behind its last
OWN_TOKENS = 600_000  # of the target's own text that the draft sees beside the corpus
