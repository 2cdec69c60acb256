"""Decides what one request may ask for, and which acceptance rule and processors that means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Literal

from ..errors import UsageError

DraftKind = Literal["auto", "model", "suffix", "siblings", "recycling", "ngram", "none"]
DraftAhead = bool | Literal["auto"]
Rule = Literal["greedy", "coupled", "rejection", "block", "typical", "lenient"]

DRAFTS = ("auto", "model", "suffix", "siblings", "recycling", "ngram", "none")
MODEL_DRAFTS = ("auto", "model")  # may ask the draft model; the others never do
RULES = ("auto", "greedy", "coupled", "rejection", "block", "typical", "lenient")
LOSSY = ("typical", "lenient")
MAX_DRAFT_LENGTH = 16
MAX_GUESS_LENGTH = 63  # that of free drafters where the length is auto: with the token before it a step of 64
MAX_NODES = 64
TREE_RULES = ("auto", "greedy", "coupled", "rejection")

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
    that repeats (``ngram``: in the answer and its prompt; ``suffix``: in earlier requests too; ``siblings``: in other
    answers of the call to the same prompt); ``recycling``, what the target found likeliest after each token; nobody
    (``none``); or, with ``auto``, the most promising of model, suffix and siblings, each round (of recycling, too,
    where there is no draft model).
    ``draft_length`` is a number of tokens a round (0..16) or ``auto``: up to 16 of the draft model, up to 63 of text
    that repeats. ``rule`` ``auto`` is greedy at temperature 0, else coupled if a seed was given or the draft is
    deterministic, else block. With ``rejection`` and ``block`` a seed repeats a text only at a fixed draft length of
    ``model`` or ``ngram``.

    ``branches`` makes the draft model's draft a tree: so many children a node at each depth (up to 16 deep, 64 nodes),
    verified by greedy, coupled or rejection. ``typical`` (with ``typical_epsilon`` and ``typical_delta``) and
    ``lenient`` (with ``leniency``) are lossy, see ``lossy.py``; all three are in (0, 1], None takes the default there,
    and belong to their rule alone.
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
    branches: tuple[int, ...] = ()
    rule: Literal["auto", "greedy", "coupled", "rejection", "block", "typical", "lenient"] = "auto"
    typical_epsilon: float | None = None
    typical_delta: float | None = None
    leniency: float | None = None

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
        if self.branches:
            self._check_branches()
        for name in ("typical_epsilon", "typical_delta", "leniency"):
            self._check_lossy(name)
        if self.rule == "greedy" and self.temperature > 0:
            raise UsageError(f"rule 'greedy' needs temperature 0, not {self.temperature:g}")

    @property
    def acceptance_rule(self) -> Rule:
        """The rule in force, never ``auto``. At temperature 0 every rule but ``lenient`` is greedy (``typical``, too:
        a law of one token has no other typical one)."""
        if self.temperature == 0:
            return "lenient" if self.rule == "lenient" else "greedy"
        if self.rule != "auto":
            return self.rule
        if self.seed is not None or self.draft not in MODEL_DRAFTS:
            return "coupled"
        return "rejection" if self.branches else "block"

    def _check_lossy(self, name: str) -> None:
        if (value := getattr(self, name)) is None:
            return
        if self.rule != (rule := "lenient" if name == "leniency" else "typical"):
            raise UsageError(f"{name} belongs to rule '{rule}', not to '{self.rule}'")
        _check_number(name, value, 0, 1)
        if value == 0:
            raise UsageError(f"{name} must be above 0, not 0")

    def _check_branches(self) -> None:
        if not isinstance(self.branches, tuple) or len(self.branches) > MAX_DRAFT_LENGTH:
            raise UsageError(f"branches must be a tuple of at most {MAX_DRAFT_LENGTH} integers, not {self.branches!r}")
        for width in self.branches:
            _check_number("each of branches", width, 1, MAX_NODES, integer=True)
        if (nodes := sum(accumulate(self.branches, mul))) > MAX_NODES:
            raise UsageError(
                f"branches {','.join(map(str, self.branches))}: {nodes} nodes, a tree has 1 to {MAX_NODES}"
            )
        if self.draft != "model":
            raise UsageError(f"draft '{self.draft}' proposes no trees (with branches: draft model)")
        if self.draft_length != "auto":
            raise UsageError("draft_length and branches exclude each other: a tree is as deep as branches is long")
        if self.rule not in TREE_RULES:
            raise UsageError(f"rule '{self.rule}' verifies no trees (with branches: {', '.join(TREE_RULES)})")

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
