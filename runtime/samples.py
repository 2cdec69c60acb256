"""The answers that a call asks for: one or several to each prompt, each with its own noise, all with their family."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import UsageError
from .drafters.family import Family
from .ranges import integer
from .settings import Settings

MAX_ANSWERS = 1024  # to one prompt of a call: all wait in memory from the first to the last


@dataclass(frozen=True, slots=True)
class Sample:
    """Which answer to its prompt a row writes: the ``number``-th (from 0), with a noise stream of its own.

    ``family`` holds the answers it may draft from (None: there are no others). ``seed`` is in force where the settings
    have none.
    """

    number: int = 0
    family: Family | None = None
    seed: int = field(default_factory=lambda: secrets.randbits(63))


def samples(prompts: Sequence[Sequence[int]], n: int = 1) -> list[Sample]:
    """``n`` samples of each prompt, prompt by prompt. Equal prompts make one family, asked for once or twice."""
    counts = Counter(tuple(prompt) for prompt in prompts)
    families = {prompt: Family(prompt) if n * count > 1 else None for prompt, count in counts.items()}
    seeds = [secrets.randbits(63) for _ in prompts]
    return [
        Sample(number, families[tuple(prompt)], seed)
        for prompt, seed in zip(prompts, seeds, strict=True)
        for number in range(n)
    ]


def check_n(n: object) -> int:
    """``n`` as given to a call. Raises UsageError unless it is an integer from 1 to 1024."""
    return integer("n", n, 1, MAX_ANSWERS)


def check_sample(settings: Settings, sample: Sample, n: int) -> None:
    """Raise UsageError where ``n`` answers would be one and the same, or where there is nobody to draft from."""
    if n > 1 and settings.temperature == 0:
        raise UsageError(f"n {n} at temperature 0 would be the same answer {n} times (temperature above 0, or n 1)")
    if settings.draft == "siblings" and sample.family is None:
        raise UsageError("draft 'siblings' needs other answers to the same prompt: generate with n of at least 2")
