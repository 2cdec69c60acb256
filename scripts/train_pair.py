"""Train the demo pair: a byte-level BPE tokenizer, a Llama target that learns to write and then to copy, and a draft
pruned and distilled from it.

The corpus is the source of CPython's own standard library, as installed with the interpreter that runs this
program; the files named in ``held_out.txt`` are never trained on and give every figure in the model cards.

    python -m leadout.scripts.train_pair target --out models      an hour and a quarter on two CPU cores with AMX
    python -m leadout.scripts.train_pair copy   --out models      an hour on two with AVX2
    python -m leadout.scripts.train_pair draft  --out models      40 minutes on two with AVX-512 bf16, 6 for its text
    python -m leadout.scripts.train_pair refine --out models      the same again, for what is left to gain
    python -m leadout.scripts.train_pair parallel --out models    a draft that says whole drafts in one step, as long
    python -m leadout.scripts.train_pair head   --out models      one that reads its target's features, 75 minutes

Without bfloat16 instructions everything is computed in float32 and takes several times as long; matrices are then
trained by Adam, too, for Muon computes in bfloat16.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar, cast

import click
import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from ..export.drafts.eagle import FeatureHead
from ..export.graphs.levels import int4_to_rows, rows_to_int4
from . import pair_eagle, pair_parallel
from .pair_cards import AGAIN, COPIES, DISTILLED, HEAD_CARD, PARALLEL, PRUNED, WENT_BACK, publish
from .pair_corpus import VOCAB, Corpus, read_corpus, token_stream
from .pair_depth import by_place
from .pair_eagle import head_for, head_loss
from .pair_edits import edited
from .pair_parallel import mask_of, parallel_loss
from .pair_recipes import (
    BACK,
    BFLOAT16,
    CONTEXT,
    COPYING,
    DRAFT,
    HEAD,
    MASKED,
    OWN_TOKENS,
    REFINED,
    SEED,
    SETTLED,
    TAPS,
    TARGET,
    Recipe,
)
from .pair_text import edits, half_edits, held_out_rows, held_out_windows
from .pruning import logits_of, pruned

Loss = Callable[[torch.Tensor], torch.Tensor]
Model = TypeVar("Model", LlamaForCausalLM, FeatureHead)


# ---- training text ---------------------------------------------------------------------------------------------------
def batches(stream: np.ndarray, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Windows [rows, length + 1] in a seeded order; of one length, none is seen twice before all were seen."""
    rng = np.random.default_rng(recipe.seed)
    order: dict[int, list[int]] = {}
    for step in range(recipe.steps):
        length = recipe.length(step)
        rows = recipe.tokens // length
        if len(order.get(length, ())) < rows:
            order[length] = list(rng.permutation((len(stream) - 1) // length))
        starts = [order[length].pop() * length for _ in range(rows)]
        yield torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts]))


# ---- training --------------------------------------------------------------------------------------------------------
def schedule(step: int, recipe: Recipe) -> float:
    """Warm up over 2 % of the steps, hold, then fall linearly to zero."""
    warm = min(1.0, (step + 1) / (0.02 * recipe.steps))
    return warm * min(1.0, (recipe.steps - step) / (recipe.decay * recipe.steps))


def fit(model: LlamaForCausalLM | FeatureHead, stream: np.ndarray, loss_of: Loss, recipe: Recipe, folder: Path) -> None:
    """Muon on the matrices inside the blocks, Adam on the rest (on all, without bfloat16); the weights are written to
    ``folder`` as it goes."""
    blocks = model.inside if isinstance(model, FeatureHead) else model.model.layers
    matrices = [p for p in blocks.parameters() if p.ndim == 2] if BFLOAT16 else []
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    rates = {torch.optim.Adam(others, lr=0.0, betas=(0.9, 0.95), fused=True): recipe.vector_rate}
    if matrices:
        rates[torch.optim.Muon(matrices, lr=0.0, weight_decay=0.05)] = recipe.matrix_rate
    start, smooth, seen = time.time(), float("nan"), 0
    for step, batch in enumerate(batches(stream, recipe)):
        model.config.num_hidden_layers = recipe.depth(step)
        for optimizer, rate in rates.items():
            optimizer.param_groups[0]["lr"] = rate * schedule(step, recipe)
        with contextlib.ExitStack() as stack:
            if step >= (1 - recipe.int4_share) * recipe.steps:
                stack.enter_context(int4_weights(model))
            with torch.autocast("cpu", torch.bfloat16, enabled=BFLOAT16):
                loss = loss_of(batch)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in rates:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        smooth = loss.item() if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss.item()
        seen += batch[:, 1:].numel()
        if step % 20 == 0 or step == recipe.steps - 1:
            speed = seen / (time.time() - start)
            click.echo(f"step {step:5d} of {recipe.steps}  loss {smooth:.3f}  {speed:,.0f} tokens/s", err=True)
        if step % 100 == 99:
            model.save_pretrained(folder)


@contextlib.contextmanager
def int4_weights(model: torch.nn.Module) -> Iterator[None]:
    """The matrices as they are after int4 export. Gradients taken inside belong to the unrounded weights (straight
    through, Bengio et al. 1308.3432), which come back at the end."""
    linears = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    kept = [weight.data for weight in linears]
    try:
        for weight in linears:
            packed, scales = rows_to_int4(weight.data.numpy())
            weight.data = torch.from_numpy(int4_to_rows(packed, scales, weight.shape[1]))
        yield
    finally:
        for weight, data in zip(linears, kept, strict=True):
            weight.data = data


def start_from_bigrams(model: LlamaForCausalLM, stream: np.ndarray, steps: int = 150) -> None:
    """Fit embedding and head to the corpus' token pairs: with identity blocks, that is all the model is."""
    counts = np.bincount(stream[:-1] * VOCAB + stream[1:], minlength=VOCAB * VOCAB).reshape(VOCAB, VOCAB)
    pairs = torch.from_numpy(counts / counts.sum()).float()
    weights = [model.model.embed_tokens.weight, model.lm_head.weight]
    optimizer = torch.optim.Adam(weights, lr=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / steps)
        logits = model.lm_head(model.model.norm(model.model.embed_tokens.weight))
        loss = -(pairs * logits.log_softmax(-1)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            click.echo(f"bigrams: {loss.item():.3f} nats a token", err=True)


def next_token_loss(model: Callable[..., Any]) -> Loss:
    return lambda batch: F.cross_entropy(logits_of(model, batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def divergence(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) plus total variation of laws [..., V], p = target, q = draft.

    The mean acceptance of speculative sampling is exactly 1 - TV (Leviathan et al. 2211.17192, Theorem 3.5), so TV is
    what counts; alone its gradient vanishes where the draft is far off, which is what the KL term is for.
    """
    kl = F.kl_div(log_q, p, reduction="none").sum(-1)
    tv = 0.5 * (log_q.exp() - p).abs().sum(-1)
    return 0.3 * kl + 2.0 * tv


def distillation_loss(draft: Callable[..., Any], target: Callable[..., Any]) -> Loss:
    """The mean ``divergence`` of the text's tokens."""

    def loss(batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            p = logits_of(target, batch[:, :-1]).softmax(-1)
        return divergence(p, logits_of(draft, batch[:, :-1]).log_softmax(-1)).mean()

    return loss


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, stream: np.ndarray) -> float:
    """Mean nats a token."""
    return float(np.mean([next_token_loss(model)(row[None]).item() for row in held_out_rows(stream)]))


@torch.no_grad()
def acceptance(draft: LlamaForCausalLM, target: LlamaForCausalLM, stream: np.ndarray) -> tuple[float, float]:
    """(mean 1 - TV at temperature 1, share of positions where both have the same most likely token)."""
    sampled, greedy = [], []
    for row in held_out_rows(stream):
        p, q = (logits_of(m, row[None, :-1])[0].softmax(-1) for m in (target, draft))
        sampled.append(torch.minimum(p, q).sum(-1).mean().item())
        greedy.append((p.argmax(-1) == q.argmax(-1)).float().mean().item())
    return float(np.mean(sampled)), float(np.mean(greedy))


@torch.no_grad()
def move_back(model: LlamaForCausalLM, before: LlamaForCausalLM, share: float) -> None:
    """Put the weights of ``model`` on the line between what they are (``share`` 0) and those of ``before`` (1): of what
    it learned little is lost, and of what it forgot much comes back (Wortsman et al. 2109.01903)."""
    for weight, old in zip(model.parameters(), before.parameters(), strict=True):
        weight.lerp_(old, share)


@torch.no_grad()
def copying(model: LlamaForCausalLM, tokenizer: Tokenizer, texts: Iterable[str]) -> float:
    """Share of the tokens in the last quarter of each text that ``model`` holds for the most likely ones: of edits
    (``pair_edits``) that quarter is a copy. Texts longer than the context are left out."""
    right = []
    for encoded in tokenizer.encode_batch(list(texts)):
        if len(ids := [0, *encoded.ids]) <= CONTEXT:
            copied = len(ids) // 4
            likeliest = logits_of(model, torch.tensor([ids[:-1]]))[0, -copied:].argmax(-1)
            right.append((likeliest == torch.tensor(ids[-copied:])).float().mean().item())
    return float(np.mean(right))


# ---- drafts ----------------------------------------------------------------------------------------------------------
def distil(
    model: LlamaForCausalLM,
    teacher: LlamaForCausalLM,
    corpus: Corpus,
    recipe: Recipe,
    folder: Path,
    start: str,
    compiled: bool,
    own_tokens: int = OWN_TOKENS,
    back: float = 0.0,
) -> None:
    """Train ``model`` on what ``teacher`` says of ``half_edits``, measure and write it. With ``back`` it is moved back
    so far between, and ``SETTLED`` there."""
    stream, before = half_edits(teacher, corpus, own_tokens), deepcopy(model)
    loss = MAKERS[compiled](distillation_loss(model, teacher))
    fit(model, stream, loss, recipe, folder)
    if back:
        move_back(model, before, back)
        fit(model, stream, loss, shaped_as(model, SETTLED, SETTLED.steps), folder)
    measure(model, teacher, corpus, recipe, folder, DISTILLED.format(tokens=own_tokens, start=start))


def measure(
    model: LlamaForCausalLM, teacher: LlamaForCausalLM, corpus: Corpus, recipe: Recipe, folder: Path, how: str
) -> None:
    """Publish the draft with what it is worth beside ``teacher``."""
    sampled, greedy = acceptance(rounded(model), teacher, corpus.held_stream)
    copied, same = acceptance(model, teacher, token_stream(corpus.tokenizer, edited(corpus.held, SEED)))
    with int4_weights(model):
        sampled4, greedy4 = acceptance(model, teacher, corpus.held_stream)
    figures = {
        "mean_acceptance_at_temperature_1": f"{sampled:.4f} (in int4: {sampled4:.4f})",
        "greedy_agreement": f"{greedy:.4f} (in int4: {greedy4:.4f})",
        "both_on_edits_of_these_files": f"{copied:.4f}, {same:.4f}",
        "loss_in_nats_a_token": f"{held_out_loss(model, corpus.held_stream):.4f}",
    }
    publish(model, recipe, corpus, folder, how, **figures)


def shaped_as(model: LlamaForCausalLM, recipe: Recipe, steps: int) -> Recipe:
    """``recipe`` for a model that is there already, in so many steps."""
    layers, units = model.config.num_hidden_layers, model.config.intermediate_size
    return dataclasses.replace(recipe, layers=layers, shallow=layers, intermediate=units, steps=steps)


def rounded(model: Model) -> Model:
    """The model as shipped: its weights rounded to bfloat16, computing in float32."""
    return cast(Model, model.to(torch.bfloat16).float())


# ---- command line ----------------------------------------------------------------------------------------------------
OUT = click.option("--out", type=click.Path(path_type=Path), default=Path("models"), show_default=True)
COMPILE = click.option("--compile/--no-compile", "compiled", default=True, help="Use torch.compile (needs C++).")
SHARE = click.FloatRange(0, 1, max_open=True)
MAKERS: dict[bool, Callable[[Loss], Loss]] = {True: torch.compile, False: lambda loss: loss}


@click.group()
def main() -> None:
    """Train the demo pair."""


@main.command()
@OUT
@COMPILE
def target(out: Path, compiled: bool) -> None:
    """The tokenizer and the target, from scratch."""
    folder = out / "target"
    corpus = read_corpus(folder / "tokenizer.json")
    model = TARGET.model()
    start_from_bigrams(model, corpus.stream)
    fit(model, corpus.stream, MAKERS[compiled](next_token_loss(model)), TARGET, folder)
    loss = held_out_loss(rounded(model), corpus.held_stream)
    publish(model, TARGET, corpus, folder, "Trained from scratch.", loss_in_nats_a_token=f"{loss:.4f}")


@main.command()
@OUT
@COMPILE
def copy(out: Path, compiled: bool) -> None:
    """The target in --out, trained further to copy what it is given."""
    folder = out / "target"
    corpus = read_corpus(folder / "tokenizer.json")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = deepcopy(model)
    stream = np.concatenate([corpus.stream, edits(corpus, 3 * len(corpus.stream) // 2)])
    fit(model, stream, MAKERS[compiled](next_token_loss(model)), COPYING, folder)
    move_back(model, before, BACK)
    figures = {
        "loss_in_nats_a_token": f"{held_out_loss(rounded(model), corpus.held_stream):.4f}",
        "greedy_accuracy_on_edits_of_these_files": f"{copying(model, corpus.tokenizer, edited(corpus.held, SEED)):.4f}",
    }
    publish(model, COPYING, corpus, folder, COPIES.format(share=1 - BACK), **figures)


@main.command()
@OUT
@COMPILE
@click.option("--layers", default=DRAFT.layers, show_default=True, help="How many of the target's to keep.")
@click.option(
    "--intermediate", default=DRAFT.intermediate, show_default=True, help="How many units of each MLP to keep."
)
@click.option("--steps", default=DRAFT.steps, show_default=True)
@click.option("--name", default="draft", show_default=True, help="Folder to write, below --out.")
def draft(out: Path, compiled: bool, layers: int, intermediate: int, steps: int, name: str) -> None:
    """The draft: a part of the target in --out, distilled from all of it."""
    recipe = dataclasses.replace(DRAFT, layers=layers, shallow=layers, intermediate=intermediate, steps=steps)
    corpus = read_corpus(out / "target" / "tokenizer.json")
    teacher = LlamaForCausalLM.from_pretrained(out / "target", dtype=torch.float32).eval()
    model, kept = pruned(teacher, layers, intermediate, torch.from_numpy(corpus.stream[: CONTEXT + 1])[None])
    start = PRUNED.format(
        layers=", ".join(map(str, kept)),
        of=teacher.config.num_hidden_layers,
        units=intermediate,
        all=teacher.config.intermediate_size,
    )
    distil(model, teacher, corpus, recipe, out / name, start, compiled)


@main.command()
@OUT
@COMPILE
@click.option("--steps", default=REFINED.steps, show_default=True)
@click.option("--own-tokens", default=OWN_TOKENS, show_default=True, help="Of the target's own text.")
@click.option("--seed", default=REFINED.seed, show_default=True, help="Another one, another order of batches.")
@click.option("--back", type=SHARE, default=BACK, show_default=True, help="How far its weights then go back.")
@click.option("--name", default="draft", show_default=True, help="Folder of the draft, below --out.")
def refine(out: Path, compiled: bool, steps: int, own_tokens: int, seed: int, back: float, name: str) -> None:
    """Distil the draft in --out further: other batches, at rates that start low and only fall; then back a share of the
    way, and some steps in int4."""
    folder = out / name
    corpus = read_corpus(out / "target" / "tokenizer.json")
    teacher, model = (LlamaForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (out / "target", folder))
    recipe = dataclasses.replace(shaped_as(model, REFINED, steps), seed=seed)
    start = AGAIN + (WENT_BACK.format(share=1 - back, steps=SETTLED.steps) if back else "")
    distil(model, teacher.eval(), corpus, recipe, folder, start, compiled, own_tokens, back)


@main.command()
@OUT
@COMPILE
@click.option("--steps", default=MASKED.steps, show_default=True)
@click.option("--own-tokens", default=OWN_TOKENS, show_default=True, help="Of the target's own text.")
@click.option("--name", default="parallel", show_default=True, help="Folder to write, below --out.")
def parallel(out: Path, compiled: bool, steps: int, own_tokens: int, name: str) -> None:
    """The draft in --out, taught to say a whole draft in one step."""
    corpus = read_corpus(out / "target" / "tokenizer.json")
    teacher, model = (LlamaForCausalLM.from_pretrained(out / role, dtype=torch.float32) for role in ("target", "draft"))
    model.config.pard_token = mask = mask_of(corpus.tokenizer)
    recipe = shaped_as(model, MASKED, steps)
    stream = half_edits(teacher.eval(), corpus, own_tokens)
    loss = parallel_loss(model, teacher, mask, divergence, SEED, MAKERS[compiled])
    fit(model, stream, loss, recipe, out / name)
    places = pair_parallel.acceptance_by_depth(rounded(model), teacher, mask, held_out_windows(corpus))
    loss_in_nats = f"{held_out_loss(model, corpus.held_stream):.4f}"
    how = PARALLEL.format(mask=mask)
    publish(model, recipe, corpus, out / name, how, **by_place(*places), loss_in_nats_a_token=loss_in_nats)


@main.command()
@OUT
@click.option("--steps", default=HEAD.steps, show_default=True)
@click.option("--own-tokens", default=OWN_TOKENS, show_default=True, help="Of the target's own text.")
@click.option("--name", default="head", show_default=True, help="Folder to write, below --out.")
def head(out: Path, steps: int, own_tokens: int, name: str) -> None:
    """A draft of one layer that reads the features of the target in --out."""
    corpus = read_corpus(out / "target" / "tokenizer.json")
    teacher = LlamaForCausalLM.from_pretrained(out / "target", dtype=torch.float32).eval()
    model, layer = head_for(teacher, TAPS, torch.from_numpy(corpus.stream[: CONTEXT + 1])[None])
    recipe = dataclasses.replace(HEAD, steps=steps)
    loss = head_loss(model, teacher, divergence, SEED)
    fit(model, half_edits(teacher, corpus, own_tokens), loss, recipe, out / name)
    with int4_weights(rounded(model)):
        places = pair_eagle.acceptance_by_depth(model, teacher, held_out_windows(corpus))
    how = HEAD_CARD.format(layer=layer, taps=", ".join(map(str, TAPS)))
    publish(model, recipe, corpus, out / name, how, **by_place(*places))


if __name__ == "__main__":
    main()
