"""The user's face: a bundle becomes a ``Pair``; prompts become ``Result``s, or ``Piece``s as they are written."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, overload

from ..bundle import TOKENIZER, VOCABULARY, Bundle, Manifest, read_manifest
from ..engines import PROVIDERS, Engine, open_engine
from ..errors import BundleError, UsageError, named, shown
from .ahead import check_ahead
from .answers import Answer, Piece, Result, Stream, Taken
from .controller.costs import Cost, Costs
from .controller.tuned import read as read_tuned
from .decoder import Decoder, Event
from .device import Device, this_device
from .grammars import Grammars
from .prompts import Chat, Ids, Prompt, Request, check_ids, is_single
from .ranges import flag, integer, one_of, whole
from .samples import Sample, check_n, check_sample, samples
from .settings import DRAFTS, LOSSY, SETTINGS, DraftAhead, Settings, check_names
from .stats import Stats
from .text import Codec, TextStream, behind_text
from .vocabulary import VocabularyMap

if TYPE_CHECKING:
    from .chat_template import ChatTemplate

__all__ = ["Chat", "Pair", "Piece", "Prompt", "Request", "Result", "Settings", "Stats", "Stream", "load"]


class Pair:
    """A target, perhaps a draft, and a tokenizer, ready to write. A context manager.

    One answer (or batch) at a time: a new call ends a stream that was not taken to its end. Threads that share a pair
    wait for each other, in ``generate`` for the whole call, in ``stream`` and ``answers`` for a round: ``pair.turn``,
    held around one, keeps the others waiting to its end.
    """

    def __init__(
        self,
        bundle: Bundle,
        codec: Codec,
        target: Engine,
        draft: Engine | None,
        *,
        exact: bool,
        batch_size: int,
        vocabulary: VocabularyMap | None = None,
        known: Sequence[Cost] = (),
        note: str = "",
        draft_ahead: DraftAhead = False,
    ) -> None:
        """Made by ``load``; takes the engines over and closes them. ``known`` is what steps cost on this device by
        ``tuned.json``; ``note`` says why that file, if there is one, was of no use."""
        self.bundle, self.codec, self.target, self.draft, self.exact = bundle, codec, target, draft, exact
        self.batch_size, self.vocabulary, self.draft_ahead = batch_size, vocabulary, draft_ahead
        self.known, self.note = known, note
        self.grammars = Grammars(codec, target.spec.vocab_size)
        self.decoder = Decoder(
            target,
            draft,
            exact=exact,
            costs=Costs(known) if known else None,
            vocabulary=vocabulary,
            draft_ahead=draft_ahead,
            grammars=self.grammars,
        )
        self._defaults = {"draft": "auto", **sampling_defaults(bundle.manifest)}

    @overload
    def generate(self, /, prompt: str | Chat | Request, *, n: None = None, **settings: Any) -> Result: ...
    @overload
    def generate(self, /, prompt: Ids, *, n: None = None, **settings: Any) -> Result: ...
    @overload
    def generate(self, /, prompt: Sequence[Prompt], *, n: None = None, **settings: Any) -> list[Result]: ...
    @overload
    def generate(self, /, prompt: str | Chat | Request, *, n: int, **settings: Any) -> list[Result]: ...
    @overload
    def generate(self, /, prompt: Ids, *, n: int, **settings: Any) -> list[Result]: ...
    @overload
    def generate(self, /, prompt: Sequence[Prompt], *, n: int, **settings: Any) -> list[list[Result]]: ...

    def generate(
        self, /, prompt: Any, *, n: int | None = None, **settings: Any
    ) -> Result | list[Result] | list[list[Result]]:
        """Answer one prompt (text, token ids, Chat or Request), or a list of them as a batch.

        With ``n`` a list of n answers in place of each: independent samples, each with noise of its own, that share the
        prompt's cache and may draft from each other. At temperature 0 they would all be the same, and n > 1 is refused.

        Ids may also come in an array of one dimension. ``settings`` are the fields of ``Settings``, the command line's
        options. Raises UsageError for an unknown or illegal one, for what is no prompt, and for n above 1024;
        ContextError for a prompt that does not fit. More answers than ``batch_size`` run in groups, one after the
        other: later ones may draft from what the earlier have finished.
        """
        single, each = is_single(prompt), 1 if n is None else check_n(n)
        prompts = [prompt] if single else list(prompt)
        with self.turn:
            found = dict(self.answers(prompts, n=each, **settings))
        results = [found[index] for index in range(len(found))]
        if n is None:
            return results[0] if single else results
        answers = [results[at : at + each] for at in range(0, len(results), each)]
        return answers[0] if single else answers

    def answers(self, /, prompts: Sequence[Prompt], *, n: int = 1, **settings: Any) -> Iterator[tuple[int, Result]]:
        """The answers to a list of prompts as each is finished, with its index: n to a prompt, one prompt's after the
        other's. Arguments and errors as for ``generate``, raised before the first is asked for."""
        if is_single(prompts):
            raise UsageError("answers takes a list of prompts, not one: generate takes either")
        return Taken(self._results(self._start(prompts, settings, check_n(n))))

    def stream(self, /, prompt: Prompt, **settings: Any) -> Stream:
        """Answer one prompt piece by piece; arguments and errors as for ``generate``. Leave it to stop early."""
        if not is_single(prompt):
            raise UsageError(
                "stream takes one prompt (text, token ids, a Chat or a Request), not a list: generate takes several"
            )
        return Stream(self._pieces(self._start([prompt], settings)))

    @property
    def turn(self) -> RLock:
        """A lock: whoever of several threads holds it has the pair to itself. Raises EngineError in a process that was
        forked since the pair was loaded."""
        return self.decoder.turn

    def settings(self, given: Mapping[str, Any]) -> Settings:
        """The bundle's defaults with ``given`` on top, checked; a grammar is compiled. Where a stop string is the name
        of a special token, which is no text, that token is a stop token."""
        self.decoder.turns.require_open()  # a thread that only its parent has may hold the grammars
        given = {**self._defaults, **check_names(given)}
        if isinstance(stop := given.get("stop"), str):
            given["stop"] = (stop,)
        settings = Settings(**given)
        if named := self.codec.special_ids(settings.stop):
            ends = dict.fromkeys((*settings.stop_token_ids, *named))
            settings = dataclasses.replace(settings, stop_token_ids=tuple(ends))
        if settings.draft == "model" and self.draft is None:
            possible = ", ".join(draft for draft in DRAFTS if draft != "model")
            raise UsageError(f"draft 'model': this bundle has no draft model (possible: {possible})")
        self.grammars.of(settings, self.bundle.manifest.models["target"].eos_token_ids)
        return settings

    def _start(self, prompts: Sequence[Any], given: Mapping[str, Any], n: int = 1) -> Iterator[tuple[Answer, Event]]:
        """Check everything now, run when iterated: each round of each answer, n answers a prompt."""
        check_names(given)
        several = len({id(prompt) for prompt in prompts}) > 1
        where = [f"prompts[{place}]" if several else "" for place in range(len(prompts))]
        asked = [self._request(prompt, given, place) for prompt, place in zip(prompts, where, strict=True)]
        siblings = samples([token_ids for token_ids, _ in asked], n)
        requests = [request for request in asked for _ in range(n)]
        for at, ((_, settings), sample) in enumerate(zip(requests, siblings, strict=True)):
            with named(where[at // n]):
                check_sample(settings, sample, n)
        groups = [slice(start, start + self.batch_size) for start in range(0, len(requests), self.batch_size)]
        runs = [self._admit(group.start, requests[group], siblings[group]) for group in groups]
        return itertools.chain.from_iterable(runs)

    def _request(self, prompt: Any, given: Mapping[str, Any], where: str) -> tuple[list[int], Settings]:
        """A prompt's ids and settings, checked. What is wrong with it alone, not with ``given``, is ``where``."""
        own: Mapping[str, Any] = {}
        if isinstance(prompt, Request):
            prompt, own = prompt.prompt, prompt.settings
        with named(where if own else ""):
            settings = self.settings({**given, **own})
        with named(where):
            token_ids = self.token_ids(prompt)
            self.decoder.check(token_ids, settings)
        return token_ids, settings

    def token_ids(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt: text, ids, a Chat or a Request, whose settings do not matter. Raises UsageError for what
        is none of them, and BundleError for a Chat where the bundle has no chat template."""
        if isinstance(prompt, Request):
            prompt = prompt.prompt
        if isinstance(prompt, Chat):
            return self.codec.encode(whole("a prompt", self.chat_template.render(prompt)), framed=True)
        if isinstance(prompt, str):
            return self.codec.encode(whole("a prompt", prompt))
        return check_ids(prompt, self.target.spec.vocab_size)

    @functools.cached_property
    def chat_template(self) -> ChatTemplate:
        """What makes a prompt of a conversation. Raises BundleError if the bundle has none."""
        from .chat_template import ChatTemplate

        return ChatTemplate.read(self.bundle)

    def _admit(
        self, start: int, requests: list[tuple[list[int], Settings]], siblings: list[Sample]
    ) -> Iterator[tuple[Answer, Event]]:
        """One group; ``start`` is the index of its first answer. The decoder checks it now and runs when iterated."""

        def text(ids: list[int], settings: Settings) -> TextStream:
            before = ids if settings.asked_grammar is None else behind_text(self.codec, ids)
            return TextStream(self.codec, before, settings.stop, settings.min_new_tokens)

        answers = [
            Answer(index, settings, sample.number, text(ids, settings))
            for index, ((ids, settings), sample) in enumerate(zip(requests, siblings, strict=True), start)
        ]
        events = self.decoder.decode(
            requests,
            eos_token_ids=self.bundle.manifest.models["target"].eos_token_ids,
            stop_matcher_factory=lambda index: answers[index].text.push,
            siblings=siblings,
        )
        return ((answers[event.index], event) for event in events)

    def _results(self, rounds: Iterator[tuple[Answer, Event]]) -> Iterator[tuple[int, Result]]:
        for answer, event in rounds:
            answer.take(event)
            if event.stats is not None:
                yield answer.index, self._result(answer, event)

    def _pieces(self, rounds: Iterator[tuple[Answer, Event]]) -> Iterator[Piece | Result]:
        for answer, event in rounds:
            yield from answer.pieces(event)
            if event.stats is not None:
                yield self._result(answer, event)

    def _result(self, answer: Answer, event: Event) -> Result:
        assert event.finish_reason is not None and event.stats is not None
        branches = answer.settings.branches
        return Result(
            text=answer.text.text[: answer.text.visible],
            token_ids=answer.token_ids,
            finish_reason="stop" if answer.text.stopped else event.finish_reason,
            lossless=answer.settings.draft == "none" or (self.exact and event.rule not in LOSSY and not branches),
            distance=event.stats.distance,
            rule=event.rule,
            seed=None if answer.settings.temperature == 0 else event.seed,
            draft=answer.settings.draft,
            stats=event.stats,
            sample=answer.sample,
        )

    def forget(self) -> None:
        """Drop what ``draft`` suffix, recycling and auto remember of earlier requests, their grammars, and what the
        models' caches hold of the last (speed alone depends on it). What is running goes on with what it has."""
        self.decoder.forget()

    def close(self) -> None:
        """Release both models, and what is remembered; where a signal handler asks in the middle of a round, behind it.
        Calling it twice is fine. In a process that was forked since nothing happens: all is its parent's."""
        if not self.decoder.turns.forked:
            self.decoder.turns.between(self._close)

    def _close(self) -> None:
        self.decoder.turns.closed = True
        self.forget()
        self.target.close()
        if self.draft is not None:
            self.draft.close()

    def __reduce__(self) -> NoReturn:
        """Neither copied nor sent to another process: its sessions are this one's."""
        raise UsageError("a Pair cannot be copied or pickled: load the bundle once in each process")

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load(
    bundle: str | Path,
    *,
    provider: str = "cpu",
    draft_provider: str | None = None,
    threads: int | None = None,
    draft_threads: int | None = None,
    variant: str = "auto",
    exact: bool = True,
    batch_size: int = 16,
    draft_ahead: DraftAhead = "auto",
) -> Pair:
    """Open a bundle for generating.

    ``provider`` says where the models run (``engines.PROVIDERS``), ``draft_provider`` where the draft does if that
    is elsewhere. ``threads`` (1 to 1024) are the target's (all cores by default), ``draft_threads`` the draft's (by
    default as many: they take turns). ``variant`` pins a graph of the bundle. ``exact`` keeps the target to graphs and
    steps that round alike whatever the draft's length, so that greedy and coupled answers are bit for bit the target's
    own (for the other rules, which draw from a law, a step of one token may round as is fastest). ``batch_size`` (at
    least 1) is the most prompts that run at once. Costs start from what ``leadout tune`` measured on this device.
    ``draft_ahead``: while one prompt runs, the draft model works on the next round as the target verifies (True, False,
    or "auto": while that is seen to pay, and never where both share a device), but for trees. Raises BundleError,
    EngineError or UsageError.
    """
    exact, batch_size = flag("exact", exact), integer("batch_size", batch_size, 1)
    one_of("provider", provider, PROVIDERS)
    if draft_provider is not None:
        one_of("draft_provider", draft_provider, PROVIDERS)
    if not isinstance(variant, str):
        raise UsageError(f"variant must be 'auto' or the name of a graph of the bundle, not {shown(variant)}")
    device = this_device(
        provider=provider,
        draft_provider=draft_provider,
        threads=threads,
        draft_threads=draft_threads,
        variant=variant,
        exact=exact,
    )
    found = Bundle.read(check_path(bundle))
    codec = Codec(found.path / TOKENIZER)
    vocabulary = check_vocabulary(found, codec)
    entry = found.manifest.models.get("draft")
    ahead = check_ahead(draft_ahead, {provider, device.draft_provider}, draft=entry, vocabulary=vocabulary)
    if entry is None and (draft_threads is not None or device.draft_provider != provider):
        raise UsageError("draft_provider, draft_threads: this bundle has no draft model")
    known, note = read_tuned(found, device)
    found = dataclasses.replace(found, path=found.path.absolute())  # some is read later, wherever the process is then
    target, draft = opened(found, device)
    return Pair(
        found,
        codec,
        target,
        draft,
        exact=exact,
        batch_size=batch_size,
        vocabulary=vocabulary,
        known=known,
        note=note,
        draft_ahead=ahead,
    )


def opened(bundle: Bundle, device: Device) -> tuple[Engine, Engine | None]:
    """The engines of a bundle's target and of its draft, if it has one, as ``device`` says. Raises EngineError, and
    BundleError where another bundle has taken this one's place since it was read: some of this would be of that."""
    target = open_engine(
        bundle.model("target"),
        provider=device.provider,
        threads=device.threads,
        variant=device.variant,
        exact=device.exact,
    )
    draft = None
    try:
        if "draft" in bundle.manifest.models:
            draft = open_engine(
                bundle.model("draft"),
                provider=device.draft_provider,
                threads=device.draft_threads,
                variant=device.variant,
            )
        if read_manifest(bundle.path) != bundle.manifest:
            raise BundleError(f"'{bundle.path}' was replaced while it was opened; open it again")
    except BaseException:
        for engine in (target, draft):
            if engine is not None:
                engine.close()
        raise
    return target, draft


def check_path(bundle: object) -> str:
    """``bundle`` as the text of a path, whatever is there. Raises UsageError for what is none."""
    try:
        path = os.fspath(bundle)  # type: ignore[call-overload]
        if isinstance(path, str) and b"\0" not in os.fsencode(path):
            return path
    except (TypeError, UnicodeEncodeError):
        pass
    raise UsageError(f"bundle must be the path of a directory (str or Path), not {shown(bundle)}")


def sampling_defaults(manifest: Manifest) -> dict[str, Any]:
    """The bundle's own sampling defaults. Raises BundleError for one that Leadout does not know."""
    if unknown := sorted(set(manifest.sampling) - set(SETTINGS)):
        raise BundleError(f"leadout.json: sampling: unknown option '{unknown[0]}' (known: {', '.join(SETTINGS)})")
    found: dict[str, Any] = {
        name: int(value) if type(SETTINGS[name].default) is int and value.is_integer() else value
        for name, value in manifest.sampling.items()
    }
    return found


def check_vocabulary(bundle: Bundle, codec: Codec) -> VocabularyMap | None:
    """The map between the ids of draft and target, if the bundle has one. Raises BundleError unless target, draft and
    tokenizer agree on the token ids."""
    sizes = {role: model.vocab_size for role, model in bundle.manifest.models.items()}
    if codec.vocab_size() > sizes["target"]:
        raise BundleError(f"the tokenizer has {codec.vocab_size()} ids, the target only {sizes['target']}")
    vocabulary = VocabularyMap.read(bundle.model("draft"), sizes["target"], codec) if "draft" in sizes else None
    if vocabulary is None and len(set(sizes.values())) > 1:
        named = ", ".join(f"{role} {size}" for role, size in sizes.items())
        raise BundleError(f"draft and target have different vocabularies ({named}) and no {VOCABULARY} relates them")
    return vocabulary
