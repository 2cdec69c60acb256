"""Train the demo pair: a byte-level BPE tokenizer, a Llama target, and a draft distilled from it.

The corpus is the source of CPython's own standard library, as installed with the interpreter that runs this
program; the files in ``HELD_OUT`` are never trained on and give every figure in the model cards.

    python -m leadout.scripts.train_pair tokenizer --out models
    python -m leadout.scripts.train_pair target    --out models
    python -m leadout.scripts.train_pair draft     --out models
"""

from __future__ import annotations

import dataclasses
import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

SEED = 20261120
VOCAB = 4096
CONTEXT = 1024
END = "<|endoftext|>"
Loss = Callable[[torch.Tensor], torch.Tensor]

HELD_OUT = tuple(
    """
    asyncio/locks.py asyncio/queues.py bisect.py cmd.py codeop.py colorsys.py concurrent/futures/thread.py contextlib.py
    csv.py email/policy.py fnmatch.py fractions.py graphlib.py heapq.py http/cookies.py idlelib/percolator.py
    json/decoder.py json/scanner.py logging/config.py multiprocessing/pool.py netrc.py queue.py sched.py shelve.py
    statistics.py tempfile.py textwrap.py tkinter/simpledialog.py unittest/runner.py urllib/robotparser.py wave.py
    xml/dom/pulldom.py zipapp.py test/test_bisect.py test/test_colorsys.py test/test_contextlib.py test/test_csv.py
    test/test_fnmatch.py test/test_fractions.py test/test_graphlib.py test/test_heapq.py test/test_netrc.py
    test/test_queue.py test/test_sched.py test/test_shelve.py test/test_textwrap.py test/test_zipapp.py
    """.split()
)
# Generated tables and prose, byte-order tests, deliberately broken source: not what a Python author writes.
SKIPPED = ("site-packages/", "encodings/", "pydoc_data/", "lib2to3/tests/data/", "test/bad", "test/encoded_modules/")


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """One model's shape and schedule; a step sees ``tokens`` tokens, in windows of half the context until the last
    fifth of the steps, then of the whole context."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    steps: int
    tied: bool = False
    tokens: int = 4096
    matrix_rate: float = 0.025
    vector_rate: float = 4e-3
    decay: float = 0.4

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
            tie_word_embeddings=self.tied,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = LlamaForCausalLM(config)
        for layer in model.model.layers:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
        return model


TARGET = Recipe(hidden=384, layers=6, heads=6, kv_heads=2, intermediate=1024, steps=1000)


# ---- corpus and tokenizer --------------------------------------------------------------------------------------------
def sources(root: Path, *, held_out: bool) -> dict[str, str]:
    """Relative path -> text of the standard library's files, in name order."""
    names = HELD_OUT if held_out else (p.relative_to(root).as_posix() for p in sorted(root.rglob("*.py")))
    texts = {}
    for name in names:
        if not held_out and (name in HELD_OUT or any(part in f"/{name}" for part in map("/{}".format, SKIPPED))):
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


def token_stream(tokenizer: Tokenizer, texts: dict[str, str]) -> np.ndarray:
    """All files one after the other, each preceded by the end-of-text token, int64 [N]."""
    encoded = tokenizer.encode_batch(list(texts.values()))
    return np.concatenate([np.array([0, *e.ids], np.int64) for e in encoded])


def batches(stream: np.ndarray, recipe: Recipe) -> Iterator[torch.Tensor]:
    """Windows [rows, length + 1] in a seeded order, none seen twice before all were seen."""
    rng = np.random.default_rng(SEED)
    order: list[int] = []
    for step in range(recipe.steps):
        length = CONTEXT // 2 if step < 0.8 * recipe.steps else CONTEXT
        rows = recipe.tokens // length
        if len(order) < recipe.tokens // (CONTEXT // 2):
            order = list(rng.permutation((len(stream) - 1) // (CONTEXT // 2) - 1))
        starts = [order.pop() * (CONTEXT // 2) for _ in range(rows)]
        yield torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts]))


# ---- training --------------------------------------------------------------------------------------------------------
class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz iteration (Jordan et al. 2024), in float32.

    ``torch.optim.Muon`` iterates in bfloat16, which processors without bfloat16 units run at a third of the speed.
    """

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.05)
                update = orthogonal(torch.lerp(p.grad, momentum, 0.95))
                p.mul_(1 - 0.05 * group["lr"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonal(matrix: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values end between 0.7 and 1.2."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        a = x @ x.T
        x = torch.addmm(x, torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.T if tall else x


def schedule(step: int, recipe: Recipe) -> float:
    """Warm up over 2 % of the steps, hold, then fall linearly to zero."""
    warm = min(1.0, (step + 1) / (0.02 * recipe.steps))
    return warm * min(1.0, (recipe.steps - step) / (recipe.decay * recipe.steps))


def fit(model: LlamaForCausalLM, stream: np.ndarray, loss_of: Loss, recipe: Recipe, folder: Path) -> None:
    """Muon on the matrices inside the blocks, Adam on the rest; the weights are written to ``folder`` as it goes."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    muon, adam = Muon(matrices, lr=0.0), torch.optim.Adam(others, lr=0.0, betas=(0.9, 0.95))
    start, smooth, seen = time.time(), float("nan"), 0
    for step, batch in enumerate(batches(stream, recipe)):
        muon.param_groups[0]["lr"] = recipe.matrix_rate * schedule(step, recipe)
        adam.param_groups[0]["lr"] = recipe.vector_rate * schedule(step, recipe)
        loss = loss_of(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        smooth = loss.item() if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss.item()
        seen += batch[:, 1:].numel()
        if step % 20 == 0 or step == recipe.steps - 1:
            speed = seen / (time.time() - start)
            click.echo(f"step {step:5d} of {recipe.steps}  loss {smooth:.3f}  {speed:,.0f} tokens/s", err=True)
        if step % 100 == 99:
            model.save_pretrained(folder)


def next_token_loss(model: Callable[..., torch.Tensor]) -> Loss:
    def loss(batch: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    return loss


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, stream: np.ndarray) -> float:
    """Mean nats a token over consecutive windows of the whole context."""
    rows = torch.from_numpy(np.stack([stream[s : s + CONTEXT + 1] for s in range(0, len(stream) - CONTEXT, CONTEXT)]))
    return float(np.mean([next_token_loss(model)(row[None]).item() for row in rows]))


# ---- command line ----------------------------------------------------------------------------------------------------
def save(model: LlamaForCausalLM, out: Path, name: str) -> None:
    """Weights in bfloat16, with the tokenizer beside them."""
    model.to(torch.bfloat16).save_pretrained(out / name)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (out / file).exists():
            (out / name / file).write_bytes((out / file).read_bytes())


@click.group()
def main() -> None:
    """Train the demo pair."""


@main.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("models"), show_default=True)
@click.option("--compile/--no-compile", "compiled", default=True, help="Use torch.compile (needs a C++ compiler).")
def target(out: Path, compiled: bool) -> None:
    """The tokenizer and the target, from scratch."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts, held = sources(root, held_out=False), sources(root, held_out=True)
    tokenizer = train_tokenizer(iter(texts.values()))
    (out / "target").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "target" / "tokenizer.json"))
    stream, held_stream = token_stream(tokenizer, texts), token_stream(tokenizer, held)
    click.echo(f"{len(texts)} files, {len(stream):,} tokens; held out: {len(held)} files, {len(held_stream):,}", err=True)
    model = TARGET.model()
    fit(model, stream, next_token_loss(torch.compile(model) if compiled else model), TARGET, out / "target")
    click.echo(f"held-out loss {held_out_loss(model, held_stream):.4f} nats a token")
    model.save_pretrained(out / "target")
    model.to(torch.bfloat16)
    click.echo(f"held-out loss in bfloat16 weights {held_out_loss(model.float(), held_stream):.4f}")


if __name__ == "__main__":
    main()
