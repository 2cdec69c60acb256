"""Decides what one request may ask for, and which acceptance rule and processors that means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..errors import UsageError

DraftKind = Literal["auto", "model", "suffix", "recycling", "ngram", "none"]
DraftAhead = bool | Literal["auto"]
Rule = Literal["greedy", "coupled", "rejection", "block"]

DRAFTS = ("auto", "model", "suffix", "recycling", "ngram", "none")
MODEL_DRAFTS = ("auto", "model")  # may ask the draft model; the others never do
RULES = ("auto", "greedy", "coupled", "rejection", "block")
MAX_DRAFT_LENGTH = 16

_RANGES: dict[str, tuple[float, float]] = {
    "max_new_tokens": (1, math.inf),
    "min_new_tokens": (0, math.inf),
    "temperature": (0, math.inf),
    "top_k": (0, math.inf),
    "min_p": (0, 1),
    "presence_penalty": (-math.inf, math.inf),
    "frequency_penalty": (-math.inf, math.inf),
}
_INTEGERS = ("max_new_tokens", "min_new_tokens", "top_k")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one request is sampled and drafted. Out-of-range values raise UsageError naming field and range.

    ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 are off. ``draft`` says who proposes: the draft model; text
    that repeats (``ngram``: in the answer and its prompt; ``suffix``: in earlier requests too); ``recycling``, what
    the target found likeliest after each token; nobody (``none``); or, with ``auto``, the most promising of model,
    suffix and recycling, each round. ``draft_length`` is a number of tokens a round (0..16) or ``auto``. ``rule``
    ``auto`` is greedy at temperature 0, else coupled if a seed was given or the draft is deterministic, else block.
    With ``rejection`` and ``block`` a seed repeats a text only at a fixed draft length of ``model`` or ``ngram``.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    draft: DraftKind = "model"
    draft_length: int | Literal["auto"] = "auto"
    rule: Literal["auto", "greedy", "coupled", "rejection", "block"] = "auto"

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            _check_number(name, getattr(self, name), low, high, integer=name in _INTEGERS)
        for name, high in (("top_p", 1.0), ("repetition_penalty", math.inf)):
            _check_number(name, getattr(self, name), 0, high)
            if getattr(self, name) == 0:
                raise UsageError(f"{name} must be above 0, not 0")
        if self.seed is not None:
            _check_number("seed", self.seed, 0, 2**63 - 1, integer=True)
        if self.draft_length != "auto":
            _check_number("draft_length", self.draft_length, 0, MAX_DRAFT_LENGTH, integer=True, also="'auto'")
        self._check_names()
        self._check_tokens()
        if self.rule == "greedy" and self.temperature > 0:
            raise UsageError(f"rule 'greedy' needs temperature 0, not {self.temperature:g}")

    @property
    def acceptance_rule(self) -> Rule:
        """The rule in force, never ``auto``. At temperature 0 every rule is greedy."""
        if self.temperature == 0:
            return "greedy"
        if self.rule != "auto":
            return self.rule
        return "coupled" if self.seed is not None or self.draft not in MODEL_DRAFTS else "block"

    def _check_names(self) -> None:
        if self.draft not in DRAFTS:
            raise UsageError(f"draft '{self.draft}' is unknown (one of: {', '.join(DRAFTS)})")
        if self.rule not in RULES:
            raise UsageError(f"rule '{self.rule}' is unknown (one of: {', '.join(RULES)})")
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise UsageError("stop must be a tuple of non-empty strings")

    def _check_tokens(self) -> None:
        for token in (*self.stop_token_ids, *self.logit_bias):
            _check_number("a token id in stop_token_ids or logit_bias", token, 0, math.inf, integer=True)
        for token, bias in self.logit_bias.items():
            if math.isnan(bias) or bias == math.inf:
                raise UsageError(f"logit_bias of token {token} must be finite or -inf, not {bias}")


def _check_number(
    name: str, value: object, low: float, high: float, *, integer: bool = False, also: str | None = None
) -> None:
    kind = "an integer" if integer else "a finite number"
    legal = f"{kind} of at least {low:g}" if high == math.inf else f"{kind} from {low:g} to {high:g}"
    legal = kind if low == -math.inf else legal
    right = isinstance(value, int) if integer else isinstance(value, int | float)
    if isinstance(value, bool) or not right or not (math.isfinite(value) and low <= value <= high):  # type: ignore[arg-type, operator]
        raise UsageError(f"{name} must be {legal}{f' or {also}' if also else ''}, not {value!r}")
