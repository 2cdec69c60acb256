"""May this engine be used on this device? A build that succeeded proves nothing about its numbers, so they are looked
at once, before anything is generated; the answer is kept beside the engine.

Asked for: finite logits; the same bits whether the slots behind a row's length hold zeros or rubbish; the same logits
from steps of every width; and, up to what the precision explains, the engine's or that of the model it was built from,
the logits that transformers gave (golden.npz).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from ...bundle import Model, parse, read_json
from ...errors import BundleError, EngineError
from ..base import LogitArray
from ..golden import Golden
from .engine import TensorRTEngine

# Largest difference allowed, in parts of the largest golden logit: float32 products may be rounded to TF32.
TOLERANCE = {"fp32": 1e-2, "fp16": 5e-2, "bf16": 2e-1, "int4": 1.0}
RUBBISH = 0x42  # every byte: 48.6 in float32 and bfloat16, 3.1 in float16; finite, and far from any masked-out key
PAST, LONGEST = 8, 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was found out, and for which device, driver and engine it holds."""

    device: str
    driver: str
    engine_sha256: str
    passed: bool
    detail: str


def require(engine: TensorRTEngine, model: Model) -> None:
    """Raise EngineError unless the engine may be used here. Runs the test where no answer is kept, and keeps it (if
    the directory can be written)."""
    record = engine.path.with_suffix(".selftest")
    asked = (engine.cuda.name, engine.cuda.driver, engine.manifest.engine_sha256)
    answer = _known(record)
    if answer is None or (answer.device, answer.driver, answer.engine_sha256) != asked:
        detail = fault(engine, Golden.of(model), model.entry.precision)
        device, driver, digest = asked
        answer = Answer(
            device=device, driver=driver, engine_sha256=digest, passed=not detail, detail=detail or "as it should be"
        )
        _keep(record, answer)
    if not answer.passed:
        raise EngineError(
            f"{engine.path} is refused on {answer.device}: {answer.detail} (self-test; to repeat it delete {record})"
        )


def fault(engine: TensorRTEngine, golden: Golden | None, stored: str) -> str:
    """What is wrong with the engine, or nothing; ``stored`` is the precision of the model it was built from (a draft's
    is int4, if nothing else was asked for), whose weights it has in its own. Forgets all rows."""
    if golden is not None and int(golden.lengths[0]) <= PAST:
        golden = None
    tokens = _tokens(engine, golden)
    widest = min(engine.spec.max_verify, min(tokens.shape[1], engine.capacity) - PAST)
    clean = _step(engine, tokens, widest, 0)
    if not np.isfinite(clean).all():
        return "logits are not finite"
    scale = max(1.0, float(np.abs(clean).max()))
    allowed = min(TOLERANCE[engine.manifest.precision], TOLERANCE["fp16"]) * scale
    for width in range(1, widest + 1):
        poisoned = _step(engine, tokens, width, RUBBISH)
        if not np.array_equal(poisoned, _step(engine, tokens, width, 0)):
            return f"a step of {width} tokens reads slots behind its row's length"
        if not (apart := float(np.abs(poisoned - clean[:width]).max())) <= allowed:
            return f"a step of {width} tokens gives logits {apart:.1e} away from those of a step of {widest}"
    coarser = max(engine.manifest.precision, stored, key=TOLERANCE.__getitem__)
    return "" if golden is None else _away(clean, golden, widest, coarser)


def _away(found: LogitArray, golden: Golden, width: int, precision: str) -> str:
    places = slice(PAST, PAST + width)
    expected = golden.logits[0, places]
    ours = np.take_along_axis(found, golden.ids[0, places].astype(np.int64), axis=-1)
    apart, scale = float(np.abs(ours - expected).max()), max(1.0, float(np.abs(expected).max()))
    if apart <= TOLERANCE[precision] * scale:
        return ""
    return f"logits are {apart:.1e} from the golden ones ({precision} explains {TOLERANCE[precision] * scale:.1e})"


def _step(engine: TensorRTEngine, tokens: np.ndarray, width: int, byte: int) -> LogitArray:
    """Logits [width, V] of a step on top of PAST tokens, in a cache whose every byte was ``byte`` before."""
    engine.reset(1)
    engine.fill_cache(byte)
    zero = np.zeros(1, np.int64)
    for first in range(0, PAST, engine.spec.max_step):
        piece = tokens[:, first : min(PAST, first + engine.spec.max_step)]
        engine.forward(piece, zero + first, zero[None])
    return np.array(engine.forward(tokens[:, PAST : PAST + width], zero + PAST)[0])


def _tokens(engine: TensorRTEngine, golden: Golden | None) -> np.ndarray:
    """[1, T] int64: a golden row, or some ids where there is none."""
    if golden is not None:
        return golden.tokens[:1, : int(golden.lengths[0])]
    return (np.arange(LONGEST, dtype=np.int64)[None] * 7 + 1) % engine.spec.vocab_size


def _known(record: Path) -> Answer | None:
    try:
        answer: Answer = parse(Answer, read_json(record, "an answer"), str(record))
    except BundleError:
        return None  # never asked, or by another version: ask again
    return answer


def _keep(record: Path, answer: Answer) -> None:
    try:
        record.write_text(json.dumps(dataclasses.asdict(answer), indent=1) + "\n", encoding="utf-8")
    except OSError:
        return  # a bundle on a medium that cannot be written is tested at every load
