"""Decides what one request may ask for, and which acceptance rule and processors that means."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import accumulate
from operator import mul
from typing import Any, Literal, get_args

from ..errors import UsageError, shown
from .ranges import flag, integer, items, number, one_of, share, spelled

DraftKind = Literal["auto", "model", "suffix", "siblings", "recycling", "ngram", "none"]
DraftAhead = bool | Literal["auto"]
Rule = Literal["greedy", "coupled", "rejection", "block", "typical", "lenient"]

DRAFTS: tuple[str, ...] = get_args(DraftKind)
MODEL_DRAFTS = ("auto", "model")  # may ask the draft model; the others never do
RULES: tuple[str, ...] = ("auto", *get_args(Rule))
LOSSY = ("typical", "lenient")
MAX_DRAFT_LENGTH = 16
MAX_GUESS_LENGTH = 63  # that of free drafters where the length is auto: with the token before it a step of 64
MAX_NODES = 64
TREE_RULES = ("auto", "greedy", "coupled", "rejection")
GRAMMARS = ("json_schema", "regex", "grammar")

_MAX_SEED, _MAX_TOKEN_ID = 2**63 - 1, 2**31 - 1
_INTEGERS = {"max_new_tokens": 1, "min_new_tokens": 0, "top_k": 0}  # the least of each
_NUMBERS = {
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 1e6),
    "presence_penalty": (-1e6, 1e6),
    "frequency_penalty": (-1e6, 1e6),
}
# Further out, what is made of logits in float32 overflows or comes to 0, and a law to NaN.
_COLDEST, _HOTTEST, _MAX_BIAS = 1e-6, 1e6, 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one request is sampled and drafted. Out-of-range values raise UsageError naming field and range.

    ``temperature`` is 0, which is greedy, or from 1e-6 to 1e6; ``top_k`` 0 and ``top_p`` 1 are off. ``top_p`` is in
    (0, 1], ``min_p`` in [0, 1], ``repetition_penalty`` from 1e-6 to 1e6, ``presence_penalty`` and ``frequency_penalty``
    from -1e6 to 1e6, a ``logit_bias`` from -1e12 to 1e12, or -inf. ``max_new_tokens`` is a limit even where
    ``min_new_tokens`` is above it. Numbers may be numpy's, lists and arrays stand for tuples; what is kept is Python's.

    ``draft`` says who proposes (``model`` by default here, ``auto`` where a ``Pair`` is asked): the draft model; text
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
    ``lenient`` (with ``leniency``) are lossy, see ``rules/lossy.py``; all three are in (0, 1], None takes the default
    there, and belong to their rule alone.

    ``json_schema`` (an object, or JSON text of one; text is what is kept), ``regex`` or ``grammar`` (Lark) say what the
    answer must be, see ``grammar.py``. One of them at most; without ``min_new_tokens``, ``ignore_eos`` and a
    ``logit_bias`` of -inf, each of which could leave no token that may follow.
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
    rule: Rule | Literal["auto"] = "auto"
    typical_epsilon: float | None = None
    typical_delta: float | None = None
    leniency: float | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        one_of("draft", self.draft, DRAFTS)
        one_of("rule", self.rule, RULES)
        for name, least in _INTEGERS.items():
            self._keep(name, integer(name, getattr(self, name), least))
        self._keep("temperature", number("temperature", self.temperature, _COLDEST, _HOTTEST, also=0.0))
        for name, (low, high) in _NUMBERS.items():
            self._keep(name, number(name, getattr(self, name), low, high))
        self._keep("top_p", share("top_p", self.top_p))
        self._keep("ignore_eos", flag("ignore_eos", self.ignore_eos))
        if self.seed is not None:
            self._keep("seed", integer("seed", self.seed, 0, _MAX_SEED))
        if not isinstance(self.draft_length, str) or self.draft_length != "auto":
            length = integer("draft_length", self.draft_length, 0, MAX_DRAFT_LENGTH, also="'auto'")
            self._keep("draft_length", length)
        self._check_stops()
        self._check_bias()
        self._check_branches()
        for name in ("typical_epsilon", "typical_delta", "leniency"):
            self._check_lossy(name)
        if self.rule == "greedy" and self.temperature > 0:
            raise UsageError(f"rule 'greedy' needs temperature 0, not {self.temperature:g}")
        self._check_grammar()

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

    @property
    def repeatable(self) -> bool:
        """Whether a seed says which text is written: by a rule that chooses the same whatever is drafted, or from
        drafts that depend on this request alone, neither on earlier ones nor on a clock."""
        fixed = bool(self.branches) or (self.draft in ("model", "ngram") and self.draft_length != "auto")
        return fixed or self.draft == "none" or self.acceptance_rule in ("greedy", "coupled")

    @property
    def asked_grammar(self) -> tuple[str, str] | None:
        """The setting that says what the answer must be, and its text."""
        for name in GRAMMARS:
            if (found := getattr(self, name)) is not None:
                return name, found
        return None

    def _keep(self, name: str, value: object) -> None:
        """Put what was checked in place of what was given."""
        object.__setattr__(self, name, value)

    def _check_lossy(self, name: str) -> None:
        if (value := getattr(self, name)) is None:
            return
        if self.rule != (rule := "lenient" if name == "leniency" else "typical"):
            raise UsageError(f"{name} belongs to rule '{rule}', not to '{self.rule}'")
        self._keep(name, share(name, value))

    def _check_branches(self) -> None:
        what = f"at most {MAX_DRAFT_LENGTH} integers"
        widths = items("branches", self.branches, what)
        if len(widths) > MAX_DRAFT_LENGTH:
            raise UsageError(f"branches must be a list or tuple of {what}, not of {len(widths)}")
        widths = tuple(integer("each of branches", width, 1, MAX_NODES) for width in widths)
        self._keep("branches", widths)
        if not widths:
            return
        if (nodes := sum(accumulate(widths, mul))) > MAX_NODES:
            raise UsageError(f"branches {','.join(map(str, widths))}: {nodes} nodes, a tree has 1 to {MAX_NODES}")
        if self.draft != "model":
            raise UsageError(f"draft '{self.draft}' proposes no trees (with branches: draft model)")
        if self.draft_length != "auto":
            raise UsageError("draft_length and branches exclude each other: a tree is as deep as branches is long")
        if self.rule not in TREE_RULES:
            raise UsageError(f"rule '{self.rule}' verifies no trees (with branches: {', '.join(TREE_RULES)})")

    def _check_stops(self) -> None:
        texts = items("stop", self.stop, "non-empty strings")
        for text in texts:
            if not isinstance(text, str) or not text:
                raise UsageError(f"stop must be non-empty strings, not {shown(text)}")
        self._keep("stop", tuple(spelled("stop", text) for text in texts))
        ids = items("stop_token_ids", self.stop_token_ids, "token ids")
        ids = tuple(integer("a token id in stop_token_ids", token_id, 0, _MAX_TOKEN_ID) for token_id in ids)
        self._keep("stop_token_ids", ids)

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias must be a mapping of token ids to numbers, not {shown(self.logit_bias)}")
        biases = {}
        for key, value in self.logit_bias.items():
            token_id = integer("a token id in logit_bias", key, 0, _MAX_TOKEN_ID)
            bias = number(f"logit_bias of token {token_id}", value, -_MAX_BIAS, _MAX_BIAS, also=-math.inf)
            biases[token_id] = bias
        self._keep("logit_bias", biases)

    def _check_grammar(self) -> None:
        given = [name for name in GRAMMARS if getattr(self, name) is not None]
        if not given:
            return
        if len(given) > 1:
            raise UsageError(f"{given[0]} and {given[1]} exclude each other: one of them says what the answer must be")
        name = given[0]
        self._keep(name, schema(self.json_schema) if name == "json_schema" else spelled(name, getattr(self, name)))
        if self.min_new_tokens:
            raise UsageError(f"min_new_tokens and {name} exclude each other: an answer that is complete must end")
        if self.ignore_eos:
            raise UsageError(f"ignore_eos and {name} exclude each other: an answer that is complete must end")
        if -math.inf in self.logit_bias.values():
            raise UsageError(f"a logit_bias of -inf and {name} exclude each other (-1e12 is possible)")


def schema(value: object) -> str:
    """A JSON schema as text. Raises UsageError for what is no JSON object."""
    try:
        said = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        if isinstance(json.loads(said), dict):
            return spelled("json_schema", said)
    except RecursionError:
        raise UsageError("json_schema must be a JSON object: this one is nested too deep") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"json_schema must be a JSON object, or text of one: {error}") from None
    raise UsageError(f"json_schema must be a JSON object, or text of one, not {shown(value)}")


SETTINGS = {each.name: each for each in fields(Settings)}


def check_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` as a dict. Raises UsageError for a name that is no setting, naming the nearest."""
    if not isinstance(given, Mapping):
        raise UsageError(f"settings must be a mapping of names to values, not {shown(given)}")
    if "n" in given:
        goes = "it goes with a call: generate(prompt, n=8), --n 8"
        raise UsageError(f"'n' is no setting of a request, nor of a stream: {goes}")
    for name in given:
        if name not in SETTINGS:
            near = difflib.get_close_matches(name, SETTINGS, n=1) if isinstance(name, str) else []
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(SETTINGS)}"
            raise UsageError(f"unknown setting {shown(name)} ({hint})")
    return dict(given)
