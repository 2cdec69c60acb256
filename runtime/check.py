"""What ``leadout check`` proves on this machine, without PyTorch: parity, exactness, identity.

Numbers first (golden logits from transformers; one bit pattern for all step widths, and wherever the states of
recurrent layers stand), then tokens (with and without each drafter, sampled with one seed, in a batch and alone, turn
after turn). Where the answers of two graph variants differ, rounding must explain it. A graph that exact answers do not
use on this processor may round each step width in its own way, but by no more than its logits may differ from
transformers'.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..bundle import Bundle, Model
from ..engines import BUILT, ONE_ROW, PASSED_ON, Engine, Tokens, open_engine
from ..engines.base import FROM_TWO, RAGGED, CommittingEngine, FeatureEngine, Features, LogitArray, RaggedEngine, Widths
from ..engines.golden import TOLERANCE, Golden
from ..errors import EngineError
from .device import cores
from .divergence import NEAR_TIE, first_divergence
from .pair import Pair, load
from .settings import DRAFTS, MAX_DRAFT_LENGTH, MAX_GUESS_LENGTH, Settings

BOUNDS = (64, 128, 192, 256)  # slots in use from which on a kernel may cut its sums in another way
WIDTHS = (*range(1, 10), MAX_DRAFT_LENGTH + 1, 34, MAX_GUESS_LENGTH + 1)  # none of ``rounding.leaves_one``
NEW_TOKENS = 24
STATES = 160, 5  # tokens, more than a trail holds; read in steps of so many
TREE = (3, 2, 1)
SLACK = 2.0  # other precisions: times what the exporter measured, since another processor rounds in another order


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One line of the report: what was checked, whether it held, and the figure behind it."""

    name: str
    ok: bool
    detail: str


def run(
    path: str | Path, *, provider: str = "cpu", draft_provider: str | None = None, threads: int | None = None
) -> Iterator[Check]:
    """Every check of a bundle, one by one. Raises BundleError if it cannot be read at all.

    On a CPU bits must agree. Elsewhere kernels may round each width in their own way, so a difference in numbers must
    be what rounding explains, and a difference in tokens a near-tie (``divergence``).
    """
    bundle = Bundle.read(path)
    yield Check("files", True, "sizes and SHA-256 as in the manifest")
    devices = {"target": provider, "draft": draft_provider or provider}
    for role in bundle.manifest.models:
        yield from check_model(role, bundle.model(role), devices[role], threads or cores())
    try:
        yield from check_tokens(bundle, devices, threads)
    except EngineError as error:  # where no step rounds like another, or logits are no numbers
        yield Check("answers", False, str(error))


def graphs(model: Model, provider: str) -> list[str]:
    """The variants there are to check: every graph of the bundle, or the one engine that was built from it."""
    if provider in PASSED_ON:
        return ["canonical"]
    return ["auto"] if provider in BUILT else list(model.entry.variants)


def check_model(role: str, model: Model, provider: str, threads: int) -> Iterator[Check]:
    """Golden parity and step widths of every graph variant of one model (a built engine's own self-test, which has
    passed when it is open, looks at its golden logits)."""
    golden = Golden.of(model)
    rounding = float("inf") if golden is None else allowed(model, golden)
    exact, alone = dict[str, Widths](), np.zeros((0, 0), np.float32)
    if (role, provider) == ("target", "cpu"):
        try:
            exact = exact_graphs(model, threads)
        except EngineError as error:
            yield Check(f"{role}: exact answers", False, str(error))
    for variant in graphs(model, provider):
        engine = open_engine(model, provider=provider, threads=threads, variant=variant)
        name = f"{role} {provider if provider in BUILT else variant}"
        try:
            if golden is not None and provider not in BUILT:
                yield check_parity(f"{name}: golden logits", engine, golden, rounding)
            tokens = golden.tokens if golden is not None else np.arange(2, 26, dtype=np.int64)[None]
            widths: dict[str, Any] = {"alike": exact.get(variant, engine.spec.widths)}
            if provider != "cpu":
                widths["slack"] = NEAR_TIE[engine.spec.precision]
            elif variant not in exact:
                widths |= {"slack": rounding, "note": "; no exact answer takes it here"}
            beside = None if golden is None or golden.beside is None else golden.beside[0]
            if golden is not None and golden.texts is not None:
                tokens = tokens[:, : golden.texts[0]]  # a block is one step, of one width
            if not engine.spec.reads_features:
                tokens = tokens % model.entry.vocab_size
            yield check_widths(f"{name}: widths", engine, tokens[:1], beside=beside, **widths)
            if variant in exact and variant in ONE_ROW:
                alone = stepped(engine, tokens[:1], exact[variant].holding(2))
            elif variant in exact and variant in RAGGED and len(alone):
                yield check_rows(f"{name}: rows", engine, tokens[0], alone)
            if engine.spec.recurrent:
                yield check_states(f"{name}: states", engine, tokens, 1 if variant in ONE_ROW else 2)
        finally:
            engine.close()


def exact_graphs(model: Model, threads: int) -> dict[str, Widths]:
    """The graphs that exact answers of one row, some and many use on this processor, and the widths of their steps.
    Raises EngineError if there are none."""
    engine = open_engine(model, threads=threads, exact=True)
    found = {}
    try:
        for rows in (1, *RAGGED.values()):
            engine.reset(rows)
            found[getattr(engine, "variant", "canonical")] = engine.spec.widths
    finally:
        engine.close()
    return found


def allowed(model: Model, golden: Golden) -> float:
    """How far logits may be from transformers': in fp32 as far as rounding explains, in other precisions as far as the
    exporter measured, times SLACK."""
    if model.entry.precision == "fp32":
        return TOLERANCE * max(1.0, float(np.abs(golden.logits).max()))
    return SLACK * max(model.entry.parity.values(), default=0.0)


def farther(one: float, other: float) -> float:
    """The larger difference; not a number, which ``max`` passes over, if one of them is none."""
    return float(np.maximum(one, other))


def check_parity(name: str, engine: Engine, golden: Golden, limit: float) -> Check:
    """Compare with the golden logits, in the widest steps that give all logits. ``limit``: the largest difference
    allowed."""
    worst, agreed = 0.0, []
    for row, (tokens, length) in enumerate(zip(golden.tokens, golden.lengths.tolist(), strict=True)):
        beside = None if golden.beside is None else golden.beside[row, :length]
        logits = stepped(engine, tokens[None, :length], min(length, engine.spec.max_verify), beside)
        found = np.take_along_axis(logits, golden.ids[row, :length].astype(np.int64), axis=-1)
        worst = farther(worst, float(np.abs(found - golden.logits[row, :length]).max()))
        agreed += (logits.argmax(-1) == golden.ids[row, :length, 0]).tolist()
    detail = f"largest difference {worst:.1e} (allowed {limit:.1e}), same first choice in {np.mean(agreed):.1%}"
    return Check(name, worst <= limit, detail)


def check_rows(name: str, engine: Engine, text: NDArray[np.int64], alone: LogitArray) -> Check:
    """Three rows of a ``text`` [T], each at another place of it, that bring another number of tokens each: logits must
    be the bits that the graph for one row has ``alone`` [T, vocab_size]."""
    assert isinstance(engine, RaggedEngine)
    places = [len(text) * row // 3 for row in range(3)]
    pieces = [text[place : place + width].tolist() for place, width in zip(places, (5, 1, 3), strict=True)]
    engine.reset(3)
    engine.reserve(len(text))
    for row in (2, 1):  # those before it are given what they hold later
        engine.forward(np.tile(text[: places[row]], (row + 1, 1)), np.zeros(row + 1, np.int64))
    found = engine.forward_ragged(pieces, places)
    wanted = [alone[place : place + len(piece)] for place, piece in zip(places, pieces, strict=True)]
    apart = max(float(np.abs(np.asarray(ours) - theirs).max()) for ours, theirs in zip(found, wanted, strict=True))
    detail = "the bits of one row alone" if apart == 0.0 else f"differ by {apart:.1e} from one row alone"
    return Check(name, apart == 0.0, detail)


def check_widths(
    name: str,
    engine: Engine,
    tokens: Tokens,
    slack: float = 0.0,
    alike: Widths = FROM_TWO,
    note: str = "",
    beside: Features | None = None,
) -> Check:
    """Feed one row ([1, T]) in steps of each width that is meant to round alike, as ``alike`` says. Logits must be
    the same bits, or differ by no more than ``slack`` (``note`` says why they may). ``beside`` as in ``stepped``. Where
    the engine reads no features, a longer row is also looked at where it grows beyond each of BOUNDS."""
    widths = [width for width in WIDTHS if alike.holding(width) == width <= engine.spec.max_verify]
    reference = stepped(engine, tokens, widths[0], beside)
    apart = {width: float(np.abs(reference - stepped(engine, tokens, width, beside)).max()) for width in widths[1:]}
    if not engine.spec.reads_features:
        for width, difference in crossings(engine, tokens[0], widths):
            apart[width] = farther(apart.get(width, 0.0), difference)
    differing = ", ".join(f"{width} (by {apart[width]:.1e})" for width in apart if apart[width] != 0.0)
    ok = all(value <= slack for value in apart.values())
    detail = f"differ: {differing}{note}" if differing else "one bit pattern"
    return Check(f"{name} {widths[0]} to {widths[-1]}", ok, detail)


def check_states(name: str, engine: Engine, tokens: Tokens, rows: int) -> Check:
    """Read ``rows`` texts in equal steps, with and without committing what was read. Recurrent layers take in one token
    after the other, so no bit may depend on where states stand. (Unlike ``check_widths`` this allows no rounding: it
    sees the states of a draft in int4, too, whose widths may be as far apart as its logits are from transformers'.)"""
    total, width = STATES
    total = min(total, engine.spec.max_context) // width * width
    texts = np.stack([np.resize(np.roll(tokens, -row), total) for row in range(rows)])
    kept = list(_in_steps(engine, texts, width, commits=True))
    apart = zip(kept, _in_steps(engine, texts, width, commits=False), strict=True)
    worst = functools.reduce(farther, (float(np.abs(one - other).max()) for one, other in apart), 0.0)
    return Check(name, worst == 0.0, f"differ by {worst:.1e} where they are carried on" if worst else "one bit pattern")


def _in_steps(engine: Engine, texts: Tokens, width: int, *, commits: bool) -> Iterator[NDArray[np.float32]]:
    """Logits [B, width, vocab_size] of each step of texts [B, T]; with ``commits`` states follow each."""
    assert isinstance(engine, CommittingEngine)
    rows, total = texts.shape
    engine.reset(rows)
    engine.reserve(total)
    for past in range(0, total, width):
        engine.commit([past if commits else 0] * rows)
        yield np.array(engine.forward(texts[:, past : past + width], np.full(rows, past)))


def stepped(engine: Engine, tokens: Tokens, width: int, beside: Features | None = None) -> NDArray[np.float32]:
    """Logits [T, vocab_size] of a row fed ``width`` tokens at a time, each read beside its features [T, D] if there are
    any; the last step is filled up with padding."""
    total = tokens.shape[1]
    padded = np.pad(tokens, ((0, 0), (0, -total % width)))
    engine.reset(1)
    engine.reserve(padded.shape[1])
    parts = []
    for at in range(0, padded.shape[1], width):
        if beside is not None and isinstance(engine, FeatureEngine):
            read = beside[at : at + width]
            engine.beside(np.pad(read, ((0, width - len(read)), (0, 0)))[None])
        parts.append(np.array(engine.forward(padded[:, at : at + width], np.array([at], np.int64))[0]))
    return np.concatenate(parts)[:total]


def crossings(engine: Engine, tokens: NDArray[np.int64], widths: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Yields (width, difference) for each of BOUNDS and ``widths``: how far the logits of a step that ends just at the
    bound, and of one that crosses it, are from those of one wide step across it. The row is ``tokens`` [T], repeated.
    """
    window = min(max(widths), engine.spec.max_verify)
    row = np.resize(tokens, max(BOUNDS) + window)[None]
    past = 0
    engine.reset(1)
    for bound in BOUNDS:
        start, end = bound - window // 2, bound - window // 2 + window
        if end > engine.spec.max_context:
            return
        engine.reserve(end)
        while past < start:
            step = min(start - past, engine.spec.max_step)
            engine.forward(row[:, past : past + step], np.array([past], np.int64), np.zeros((1, 1), np.int64))
            past += step
        wide = np.array(engine.forward(row[:, start:end], np.array([start], np.int64))[0])
        for width in widths:
            for at in (bound - width, bound - width // 2):
                if start <= at and at + width <= end:
                    found = np.asarray(engine.forward(row[:, at : at + width], np.array([at], np.int64))[0])
                    yield width, float(np.abs(found - wide[at - start : at - start + width]).max())


def check_tokens(bundle: Bundle, devices: Mapping[str, str], threads: int | None) -> Iterator[Check]:
    """Identity of answers: each drafter against none, greedy and coupled; a batch against each prompt alone; the next
    turn of a conversation; several answers to one prompt."""
    prompts, bits = ragged(bundle), devices["target"] == "cpu"
    missing = {"none", "siblings"} if "draft" in bundle.manifest.models else {"none", "siblings", "model"}
    drafters = [name for name in DRAFTS if name not in missing]
    where: dict[str, Any] = {"provider": devices["target"], "draft_provider": devices["draft"], "threads": threads}
    with load(bundle.path, **where) as pair:
        for title, sampling in (("greedy", {"temperature": 0.0}), ("coupled", {"temperature": 1.0, "seed": 7})):
            wanted: dict[str, Any] = sampling | {"rule": title, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
            alone = answers(pair, prompts, draft="none", **wanted)
            for draft in drafters:
                name, found = f"{title}: draft {draft} against none", answers(pair, prompts, draft=draft, **wanted)
                yield same(name, alone, found) if bits else alike(name, pair, prompts, alone, found, wanted)
        if pair.decoder.branches:
            yield check_trees(pair, prompts)
        yield check_batch(pair, prompts, "auto")
        if bits:
            yield check_turns(pair, prompts)
            yield check_siblings(pair, prompts)
    beside = graphs(bundle.model("draft"), devices["draft"]) if "draft" in bundle.manifest.models else None
    for variant in graphs(bundle.model("target"), devices["target"]) if bits else []:
        if variant in ONE_ROW:  # there is no batch to compare with
            continue
        if beside is not None and variant not in beside:  # a pin is for both models
            yield Check(f"greedy: batch against alone, {variant}", True, "left out: the draft has no such graph")
            continue
        try:
            with load(bundle.path, **where, variant=variant) as pair:
                yield check_batch(pair, prompts, variant, bits=True)
        except EngineError as error:  # it cannot be had exact here, and is never taken
            yield Check(f"greedy: batch against alone, {variant}", True, str(error))


def check_trees(pair: Pair, prompts: list[list[int]]) -> Check:
    """A draft tree against no draft. Sums over the slots of a tree are rounded in another order, so answers may differ,
    but only at near-ties."""
    wanted: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    alone = answers(pair, prompts, draft="none", **wanted)
    found = answers(pair, prompts, draft="model", branches=TREE, **wanted)
    name = f"greedy: draft model, branches {','.join(map(str, TREE))}, against none"
    return alike(name, pair, prompts, alone, found, wanted)


def check_batch(pair: Pair, prompts: list[list[int]], variant: str, *, bits: bool = False) -> Check:
    """A batch against each alone. With ``bits`` they are the same; "auto" takes the fastest variant for each, and
    differences must be near-ties."""
    wanted: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS}
    batch = [result.token_ids for result in pair.generate(prompts, **wanted)]
    alone = answers(pair, prompts, **wanted)
    name = f"greedy: batch against alone, {variant}"
    return same(name, alone, batch) if bits else alike(name, pair, prompts, alone, batch, wanted)


def check_turns(pair: Pair, prompts: list[list[int]]) -> Check:
    """The second turn of a conversation, continued from what the cache holds of the first, against the same prompt read
    as a whole. In a short context the first answer is cut, so that the second turn fits."""
    wanted: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS // 3, "ignore_eos": True}
    name, context = "greedy: the next turn against read whole", pair.target.spec.max_context
    turns, found = [], []
    for prompt in prompts:
        said = prompt[:2]
        if (room := context - len(prompt) - len(said) - 1) < 1:
            return Check(name, True, f"left out: a context of {context} tokens is too short for two turns")
        first = wanted | {"max_new_tokens": min(NEW_TOKENS // 3, room)}
        turns.append([*prompt, *pair.generate(prompt, **first).token_ids, *said])
        found.append(pair.generate(turns[-1], **wanted).token_ids)
    return same(name, answers(pair, turns, **wanted), found)


def check_siblings(pair: Pair, prompts: list[list[int]]) -> Check:
    """Four answers to each prompt that draft from each other, against four that draft from nobody."""
    wanted: dict[str, Any] = {"n": 4, "temperature": 1.0, "seed": 7, "max_new_tokens": NEW_TOKENS}
    plain, found = (
        [result.token_ids for each in pair.generate(prompts, draft=draft, **wanted) for result in each]
        for draft in ("none", "siblings")
    )
    return same("coupled: 4 answers each, draft siblings against none", plain, found)


def alike(
    name: str,
    pair: Pair,
    prompts: list[list[int]],
    expected: list[list[int]],
    found: list[list[int]],
    settings: Mapping[str, Any],
) -> Check:
    """Whether the first differences of two sets of answers are near-ties."""
    rows = zip(prompts, expected, found, strict=True)
    parted = [divergence for row in rows if (divergence := first_divergence(pair, *row, Settings(**settings)))]
    detail = ", ".join(f"token {d.position} by {d.margin:.1e}{'' if d.near_tie else ' (FAULT)'}" for d in parted)
    ok = all(divergence.near_tie for divergence in parted)
    return Check(name, ok, f"near-ties at {detail}" if parted else "the same tokens")


def ragged(bundle: Bundle) -> list[list[int]]:
    """Prompts of different lengths from the golden rows (or plain ids where a bundle has none)."""
    model = bundle.model("target")
    if (golden := Golden.of(model)) is not None:
        rows = golden.rows()
    else:
        rows = [[(i * 7 + j) % model.entry.vocab_size for j in range(24)] for i in range(3)]
    room = model.entry.max_context - NEW_TOKENS - 1
    return [row[: max(1, min(room, len(row) - 3 * i))] for i, row in enumerate(rows)]


def answers(pair: Pair, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    """The new tokens of each prompt, asked one at a time; none goes on from what a cache holds."""
    found = []
    for prompt in prompts:
        pair.target.reset(1)
        found.append(pair.generate(prompt, **settings).token_ids)
    return found


def same(name: str, expected: list[list[int]], found: list[list[int]]) -> Check:
    """Whether two sets of answers are the same tokens."""
    parted = [i for i, (ours, theirs) in enumerate(zip(expected, found, strict=True)) if ours != theirs]
    tokens = sum(map(len, expected))
    detail = f"{tokens} tokens of {len(expected)} prompts" if not parted else f"prompt {parted[0]} differs"
    return Check(name, not parted, detail)
