"""Decides what a pair can be asked for (prompts, draft lengths and trees that its engines can take), and what a
request's row begins with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Items
from itertools import accumulate, count
from operator import mul

from ..engines.base import Engine, ModelSpec
from ..errors import ContextError, UsageError
from .controller.cascade import Cascade, Commons
from .controller.kinds import Kind, repeats
from .controller.policy import AutoLength, FixedLength, Pace, Policy
from .grammar import Grammar
from .grammars import Grammars
from .rules.noise import Noise
from .rules.sampling import Chain, Sampler
from .samples import MAX_ANSWERS, Sample
from .sequence import Row, Sequence, StopMatcher
from .settings import MODEL_DRAFTS, Settings

NO_TREES = (
    "bundles of leadout export on provider cpu or cuda have one, but where layers are recurrent or attention is MLA or"
    " ALiBi (of one from before there were any: export it again)"
)


def check_request(prompt: Items[int], settings: Settings, engines: Mapping[str, Engine], *, trees: bool) -> None:
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


def check_branches(branches: Items[int], engines: Mapping[str, Engine], *, trees: bool) -> None:
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


class Admission:
    """Makes the rows of one decoder: each knows what those before it left behind (``commons``)."""

    def __init__(
        self,
        spec: ModelSpec,
        pace: Pace,
        *,
        model: bool,
        policy: Policy | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """``spec`` is the target's; ``model``: there is a draft model; ``policy``, ``grammars`` as for ``Decoder``."""
        self._spec, self._pace, self._model, self._given, self._grammars = spec, pace, model, policy, grammars
        self._unrepeatable = count()
        self.commons = Commons()

    def forget(self) -> None:
        """Rows that are made from now on know nothing of earlier ones."""
        self.commons = Commons()
        if self._grammars is not None:
            self._grammars.forget()

    def grammar(self, settings: Settings, eos: Collection[int]) -> Grammar | None:
        """The grammar that an answer ending at ``eos`` must follow; None if none was asked for. Raises UsageError for
        what cannot be compiled."""
        if settings.asked_grammar is None:
            return None
        if self._grammars is None:
            raise UsageError(f"{settings.asked_grammar[0]}: this decoder has no tokenizer (a Pair's has)")
        return self._grammars.of(settings, eos)

    def row(
        self,
        index: int,
        prompt: list[int],
        settings: Settings,
        sample: Sample,
        eos: Collection[int],
        matchers: Callable[[int], StopMatcher | None] | None,
    ) -> Row:
        """The row of request ``index``, whose answer ends at ``eos`` or where ``matchers(index)`` says."""
        spec = self._spec
        ends = frozenset(settings.stop_token_ids) | (frozenset() if settings.ignore_eos else frozenset(eos))
        seed = sample.seed if settings.seed is None else settings.seed
        grammar = self.grammar(settings, eos)
        chain = Chain(settings, spec.vocab_size, prompt, ends, grammar)
        stop = ending(grammar, matchers(index) if matchers is not None else None)
        kind = Kind(settings.temperature > 0, settings.draft != "none" and repeats(prompt), grammar is not None)
        policy = self._policy(settings, kind)
        return Row(
            index=index,
            settings=settings,
            sequence=Sequence(list(prompt), len(prompt), settings.max_new_tokens, spec.max_context, ends, stop),
            sampler=Sampler(settings.acceptance_rule, chain, Noise(seed, self._stream(settings, sample))),
            policy=policy,
            cascade=self._cascade(settings, policy, sample, kind, grammar),
        )

    def _stream(self, settings: Settings, sample: Sample) -> int:
        """Which of a seed's noise streams the request draws from: the sample's own if a seed repeats a text under these
        settings. Otherwise guesses and draft lengths depend on other texts, which may have been drawn with the same
        numbers; to test them with those numbers again would be biased, so the request gets a stream that is new."""
        return sample.number + (0 if settings.repeatable else MAX_ANSWERS * next(self._unrepeatable))

    def _policy(self, settings: Settings, kind: Kind) -> Policy:
        if self._given is not None:
            return self._given
        if settings.draft not in MODEL_DRAFTS or not self._model:
            return FixedLength(0)
        if settings.branches:
            return FixedLength(len(settings.branches))
        if settings.draft == "model" and settings.draft_length != "auto":
            return FixedLength(settings.draft_length)
        return AutoLength(self._pace, kind)

    def _cascade(
        self, settings: Settings, policy: Policy, sample: Sample, kind: Kind, grammar: Grammar | None
    ) -> Cascade | None:
        if settings.draft in ("model", "none"):
            return None
        model = policy if isinstance(policy, AutoLength) else None
        return Cascade(settings, self.commons, self._pace, model, sample.family, kind, grammar)


def ending(grammar: Grammar | None, stop: StopMatcher | None) -> StopMatcher | None:
    """``stop``, which also ends an answer that is complete by its grammar where the target has no end token."""
    if grammar is None or grammar.ends:
        return stop

    def matched(new: list[int]) -> int | None:
        complete = grammar.ending(new)
        told = None if stop is None else stop(new[:complete])
        return complete if told is None else told

    return matched
