"""What ``gpu_check`` measures, through the contracts alone: every function runs on a CPU as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..engines import Engine
from ..engines.ort import SlotEngine
from ..engines.tensorrt.engine import TensorRTEngine
from ..errors import EngineError, LeadoutError
from ..runtime.bench import Bench, decode, step_ms
from ..runtime.check import alike, answers
from ..runtime.decoder import Decoder
from ..runtime.pair import Pair
from ..runtime.settings import Settings

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "rule": "greedy"},
    "coupled": {"temperature": 1.0, "rule": "coupled", "seed": 7},
}
PAST, STEP = 12, 4


def identity(reference: Pair, pair: Pair, prompts: Sequence[list[int]], tokens: int) -> dict[str, Any]:
    """Answers of ``pair`` against those of ``reference`` without a draft: every drafter, alone and as a ragged batch.

    {mode: {what: {same, near_ties, detail}}}; a difference that no rounding explains is a FAULT in ``detail``.
    """
    drafts = ["none", "ngram", *(["model"] if pair.draft is not None else [])]
    found: dict[str, Any] = {}
    for mode, sampling in MODES.items():
        common = sampling | {"max_new_tokens": tokens, "ignore_eos": True}
        expected = answers(reference, list(prompts), draft="none", **common)
        found[mode] = {}
        for draft in drafts:
            wanted = common | {"draft": draft}
            batch = [result.token_ids for result in pair.generate(list(prompts), **wanted)]
            for how, texts in (("alone", answers(pair, list(prompts), **wanted)), ("batch", batch)):
                check = alike("", pair, list(prompts), expected, texts, wanted)
                found[mode][f"{draft}, {how}"] = {
                    "ok": check.ok,
                    "same": sum(a == b for a, b in zip(expected, texts, strict=True)),
                    "of": len(texts),
                    "detail": check.detail,
                }
    return found


def stale_slots(engine: Engine) -> dict[str, Any]:
    """How far a step's logits move when rejected tokens were written behind its row's length; 0 is right."""
    tokens = (np.arange(64, dtype=np.int64)[None] * 7 + 1) % engine.spec.vocab_size
    width, past = min(STEP, engine.spec.max_verify), np.array([PAST], np.int64)
    logits = []
    for rejected in (0, min(40, engine.spec.max_verify)):
        engine.reset(1)
        engine.reserve(64)
        engine.forward(tokens[:, :PAST], np.zeros(1, np.int64), np.zeros((1, 1), np.int64))
        if rejected:
            engine.forward(np.flip(tokens)[:, :rejected], past)
        logits.append(np.array(engine.forward(tokens[:, PAST : PAST + width], past)))
    return {"difference": float(np.abs(logits[0] - logits[1]).max()), "finite": bool(np.isfinite(logits[1]).all())}


def cost_table(engine: Engine, widths: Sequence[int], batches: Sequence[int], past: int) -> dict[str, Any]:
    """Milliseconds of a step by rows and width on top of ``past`` tokens a row: {rows: {width: ms}}; a shape the
    engine does not take has its reason instead."""
    table: dict[str, Any] = {}
    for rows in batches:
        try:
            table[str(rows)] = {
                str(width): step_ms(engine, rows, width, np.full(rows, past, np.int64))
                for width in widths
                if width <= engine.spec.max_verify
            }
        except LeadoutError as error:
            table[str(rows)] = {"skipped": str(error)}
    return table


def speed(pair: Pair, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Plain and speculative tokens a second (greedy), and the bytes that crossed a round by mode, target and draft."""
    engines = {"target": pair.target} | ({} if pair.draft is None else {"draft": pair.draft})
    report = Bench(pair, {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}).run(prompts)
    moved: dict[str, dict[str, float]] = {}
    for mode, sampling in MODES.items():
        before = {role: getattr(engine, "bytes_moved", 0) for role, engine in engines.items()}
        results = pair.generate(prompts, **sampling, max_new_tokens=tokens, ignore_eos=True)
        rounds = max(result.stats.rounds for result in results)
        after = {role: getattr(engine, "bytes_moved", 0) for role, engine in engines.items()}
        moved[mode] = {role: (after[role] - before[role]) / rounds for role in engines}
    dropped = ("hardware", "versions")
    return {name: value for name, value in report.items() if name not in dropped} | {"bytes_moved_a_round": moved}


def ahead_gain(pair: Pair, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Tokens a second of the draft model alone, greedy and one prompt at a time, without and with drafting ahead; how
    often that was tried and of use; whether both wrote the same."""
    if pair.draft is None:
        raise EngineError("this bundle has no draft model")
    settings = Settings(draft="model", max_new_tokens=tokens, ignore_eos=True)
    found: dict[str, Any] = {}
    texts = []
    for ahead in (False, True):
        decoder = Decoder(pair.target, pair.draft, exact=pair.exact, draft_ahead=ahead)
        decode(decoder, prompts[:1], settings, pair)
        runs = [decode(decoder, [prompt], settings, pair) for prompt in prompts]
        stats = [each for _, (each,) in runs]
        texts.append([output for (output,), _ in runs])
        spent = sum(each.total_seconds - each.seconds["prefill"] for each in stats)
        found["with" if ahead else "without"] = sum(each.tokens for each in stats) / spent
        if decoder.ahead is not None:
            found |= decoder.ahead.counts()
    return found | {"identical_outputs": texts[0] == texts[1]}


def graph_gain(engine: Engine, width: int, past: int) -> dict[str, Any]:
    """Milliseconds of a step with and without CUDA graphs, where the engine has them; whether both gave one result."""
    if not isinstance(engine, TensorRTEngine | SlotEngine):
        raise EngineError(f"{type(engine).__name__} takes its steps without CUDA graphs")
    before, found = engine.graphs, dict[str, Any]()
    tokens, lengths = np.arange(width, dtype=np.int64)[None, :], np.array([past], np.int64)
    logits = []
    for graphs in (True, False):
        engine.graphs = graphs
        found["with" if graphs else "without"] = step_ms(engine, 1, width, lengths)
        logits.append(np.array(engine.forward(tokens, lengths)))
    engine.graphs = before
    return found | {"identical_logits": np.array_equal(logits[0], logits[1]), "error": engine.graph_error}


def units_for(parameters: float, hidden: int, layers: int) -> int:
    """The units of each MLP that give a Llama of ``layers`` layers about so many parameters."""
    return round((parameters / layers - 3 * hidden * hidden) / (3 * hidden) / 256) * 256
