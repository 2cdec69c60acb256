"""Decides what a pair can be asked for: prompts, draft lengths and trees that its engines can take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

from ..engines.base import Engine
from ..errors import ContextError, UsageError
from .settings import Settings

NO_TREES = "only bundles of leadout export on provider cpu or cuda have (one from before they could: export it again)"


def check_request(prompt: Sequence[int], settings: Settings, engines: Mapping[str, Engine], *, trees: bool) -> None:
    """Raise UsageError or ContextError, naming the legal range, for what ``engines`` (the target, perhaps the draft)
    cannot take. ``trees``: the draft could propose them."""
    spec = engines["target"].spec
    if not prompt:
        raise UsageError("a prompt must have at least one token, not 0")
    if min(prompt) < 0 or max(prompt) >= spec.vocab_size:
        raise UsageError(f"prompt token ids must be from 0 to {spec.vocab_size - 1}, not {min(prompt)}..{max(prompt)}")
    if len(prompt) >= spec.max_context:
        raise ContextError(f"the prompt has {len(prompt)} tokens; this target takes at most {spec.max_context - 1}")
    for name in ("logit_bias", "stop_token_ids"):
        if (token := max(getattr(settings, name), default=0)) >= spec.vocab_size:
            raise UsageError(f"{name}: token id {token} is outside the vocabulary (0 to {spec.vocab_size - 1})")
    if settings.draft != "none" and settings.draft_length != "auto" and settings.draft_length >= spec.max_verify:
        raise UsageError(f"draft_length {settings.draft_length}: this target verifies 0 to {spec.max_verify - 1}")
    if settings.draft == "model" and "draft" not in engines:
        raise UsageError("draft 'model' needs a draft model, and there is none (use: draft auto or none)")
    if settings.branches:
        check_branches(settings.branches, engines, trees=trees)


def check_branches(branches: Sequence[int], engines: Mapping[str, Engine], *, trees: bool) -> None:
    """Raise UsageError if ``engines`` have no graph for a draft of this shape, or the draft proposes no trees."""
    nodes, most = sum(accumulate(branches, mul)), engines["target"].spec.max_verify - 1
    if "draft" in engines and not trees:
        reads = engines["draft"].spec.reads_features
        kind = "head that reads its target's features" if reads else "draft with another tokenizer"
        raise UsageError(f"branches: a {kind} proposes no trees (without branches it does propose)")
    for name, engine in engines.items():
        if engine.spec.recurrent:
            raise UsageError(f"branches: the {name} has recurrent layers, which read tokens one after the other")
        if not engine.spec.trees:
            raise UsageError(f"branches: the {name} has no graph for trees: {NO_TREES}")
    if nodes > most:
        raise UsageError(f"branches: {nodes} nodes; this target verifies 1 to {most}")
