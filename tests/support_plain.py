"""What a target alone writes, decoded by the law and nothing else: no step, no cache, none of the runtime's code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from support_grammar import Letters, mask_after, untouched

from leadout.engines.toy import Law
from leadout.runtime.settings import Settings

TOKENS = ("<end>", "a", "b", "c", "d", "ab", "ba", "cab", "Ã", "©", "Ġ", "1", "dd")  # two of them are é together
BYTES = [token.translate({ord("Ġ"): " "}).encode("latin1") for token in TOKENS]
LETTERS, VOCAB, END = Letters(TOKENS), len(TOKENS), 0


def spelled(ids: Sequence[int]) -> bytes:
    """The bytes of an answer."""
    return b"".join(BYTES[token] for token in ids if token != END)


def ends_of(settings: Settings) -> set[int]:
    return {*settings.stop_token_ids} | (set() if settings.ignore_eos else {END})


def processed(law: Law, prompt: Sequence[int], answer: Sequence[int], settings: Settings) -> np.ndarray:
    """Logits of the token behind ``answer``, after all that comes before the temperature."""
    with np.errstate(divide="ignore"):
        row = np.log(law(np.array([*prompt, *answer], np.int64))).astype(np.float32).astype(np.float64)
    if settings.asked_grammar is not None:
        mask = mask_after(untouched(LETTERS, *settings.asked_grammar, (END,), VOCAB), answer, VOCAB)
        assert mask is not None, "no text of the grammar"
        row[~mask] = -math.inf
    if len(answer) < settings.min_new_tokens:
        row[sorted(ends_of(settings))] = -math.inf
    for token, bias in settings.logit_bias.items():
        row[token] += bias
    for token in {*prompt, *answer} if settings.repetition_penalty != 1.0 else ():
        row[token] *= 1.0 / settings.repetition_penalty if row[token] > 0 else settings.repetition_penalty
    for token in set(answer):
        row[token] -= settings.frequency_penalty * list(answer).count(token) + settings.presence_penalty
    return row


def possible(row: np.ndarray, settings: Settings) -> np.ndarray:
    """Log weights at a temperature above 0, -inf for what is cut."""
    scores = (row - row.max()) / settings.temperature
    if 0 < settings.top_k < scores.size:
        scores[scores < np.sort(scores)[-settings.top_k]] = -math.inf
    weights = np.exp(scores)
    if settings.top_p < 1.0:
        ordered = np.sort(weights)[::-1]
        reached = int(ordered.cumsum().searchsorted(settings.top_p * weights.sum()))
        scores[weights < ordered[min(reached, scores.size - 1)]] = -math.inf
    if settings.min_p > 0.0:
        scores[scores < math.log(settings.min_p)] = -math.inf
    return scores


def gumbel(seed: int, stream: int, position: int, size: int) -> np.ndarray:
    """The noise of what stands at ``position``, from numpy's own Philox."""
    philox = np.random.Philox(key=seed | stream << 64, counter=[0, position, 0, 0])
    with np.errstate(divide="ignore"):
        return np.asarray(-np.log(-np.log(np.random.Generator(philox).random(size))))


def plainly(
    law: Law, prompt: Sequence[int], settings: Settings, seed: int, stream: int, context: int
) -> tuple[list[int], str] | None:
    """The tokens, and why they end; None where nothing is left that could be written."""
    answer: list[int] = []
    while True:
        row = processed(law, prompt, answer, settings)
        if not np.isfinite(row.max()):
            return None
        if settings.temperature > 0:
            row = possible(row, settings) + gumbel(seed, stream, len(prompt) + len(answer), VOCAB)
        answer.append(int(row.argmax()))
        if answer[-1] in ends_of(settings) or stopped(answer, settings):
            return answer, "stop"
        if len(answer) == settings.max_new_tokens:
            return answer, "length"
        if len(prompt) + len(answer) == context:
            return answer, "context"


def stopped(answer: Sequence[int], settings: Settings) -> bool:
    """Whether the last token completes a stop string, which counts beyond the first ``min_new_tokens`` tokens."""
    text, before = spelled(answer), len(spelled(answer[:-1]))
    found = (text.find(stop.encode(), max(0, before - len(stop.encode()) + 1)) for stop in settings.stop)
    return len(answer) > settings.min_new_tokens and any(at >= 0 for at in found)
