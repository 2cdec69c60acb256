"""Whatever is asked of a pair, in whatever order, and whatever went wrong before: batches whose requests differ in all
settings, several answers, streams that are left or ended, engines that fail, interrupts, texts that go on. Greedy and
seeded answers are what a plain decode by the law writes (``support_plain``); of the others what must hold of any text
does. Sessions at random, with fixed seeds."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_features import BlockLaws, Laws
from support_grammar import mask_after, untouched
from support_plain import END, LETTERS, VOCAB, ends_of, plainly, possible, processed, spelled
from support_runtime import parallel, toy_pair
from test_anchored import Anchored
from test_api import entry, manifest

from leadout.bundle import Bundle
from leadout.engines.toy import ToyEngine
from leadout.errors import EngineError, UsageError
from leadout.runtime import ahead, decoder, stats
from leadout.runtime.controller import cascade
from leadout.runtime.pair import Pair, Request, Result, Stream
from leadout.runtime.settings import Settings
from leadout.runtime.vocabulary import VocabularyMap

CONTEXT, SESSIONS, CALLS = 90, 6, 14
ACTS = ("batch", "batch", "answers", "several", "stream", "left", "fault", "fault", "forget")
FAULTS = (RuntimeError("device lost"), MemoryError("no more"), KeyboardInterrupt())
RULES = ("auto", "rejection", "block", "typical", "lenient")
REGEXES = ("(a|b)*c", "[abc]{3,9}", "(a|ab)(c|bcd)*d{0,3}", "[a-d ]+1", "(é|a)+b")
KNOWN = [0, 1, 2, 3, 5, 9]  # tokens of a draft whose head was cut
Making = tuple[Any, Any, dict[str, Any]]


class Fault:
    """What an engine that fails once raises, in its n-th call of a method from now on, before it or after."""

    def __init__(self, where: str, error: BaseException, calls: int, *, late: bool) -> None:
        self.where, self.error, self.left, self.late = where, error, calls, late

    def around(self, method: Any) -> Any:
        def call(*given: Any) -> Any:
            self.left -= 1
            if self.left == 0 and not self.late:
                raise self.error
            found = method(*given)
            if self.left == 0:
                raise self.error
            return found

        return call


def a_model() -> Making:
    return *toy_pair(VOCAB, order=3, context=CONTEXT), {}


def one_that_works_ahead() -> Making:
    return *toy_pair(VOCAB, order=3, context=CONTEXT), {"draft_ahead": True}


def none() -> Making:
    return toy_pair(VOCAB, order=3, context=CONTEXT)[0], None, {}


def one_with_few_tokens() -> Making:
    target, draft = toy_pair(VOCAB, order=3, context=CONTEXT)

    def law(context: Any) -> np.ndarray:
        found: np.ndarray = draft.law(context)[KNOWN]
        return found / found.sum()

    return target, ToyEngine(law, len(KNOWN), max_context=40), {"vocabulary": VocabularyMap(np.array(KNOWN), VOCAB)}


def one_with_masks_beside_recurrent_layers() -> Making:
    target, draft = toy_pair(VOCAB, order=3, context=CONTEXT)
    masked = ToyEngine(parallel(draft.law, VOCAB), VOCAB, max_context=CONTEXT, mask_token=VOCAB)
    return Anchored(target.law, VOCAB, max_context=CONTEXT), masked, {}


def recurrent_layers() -> Making:
    laws = [each.law for each in toy_pair(VOCAB, order=3)]
    return *(Anchored(law, VOCAB, max_context=CONTEXT) for law in laws), {}  # type: ignore[return-value]


def a_head() -> Making:
    laws = Laws(VOCAB)
    return laws.target(CONTEXT), laws.head(40), {}


def a_head_for_blocks() -> Making:
    laws = BlockLaws(VOCAB)
    return laws.target(CONTEXT), laws.head(CONTEXT), {}


MAKINGS = [
    a_model,
    one_that_works_ahead,
    none,
    one_with_few_tokens,
    one_with_masks_beside_recurrent_layers,
    recurrent_layers,
    a_head,
    a_head_for_blocks,
]


class Session:
    """A pair, and what was written with it so far."""

    def __init__(self, rng: random.Random, making: Making) -> None:
        self.rng, (target, draft, options) = rng, making
        self.law, self.texts = target.law, list[list[int]]()
        self.left: Stream | None = None
        models = {"target": entry(vocab_size=VOCAB, max_context=CONTEXT)}
        bundle = Bundle(Path("toy"), manifest(models if draft is None else models | {"draft": entry()}))
        how = {"exact": True, "batch_size": rng.choice((1, 2, 3, 5))} | options
        self.pair = Pair(bundle, LETTERS, target, draft, **how)
        self.modelled = draft is not None
        self.trees = self.pair.decoder.branches

    def drawn(self) -> tuple[list[int], dict[str, Any]]:
        """A prompt, often one that begins as a text before did, and settings."""
        rng, some = self.rng, [self.rng.randrange(VOCAB) for _ in range(self.rng.choice((1, 4, VOCAB)))]
        length = rng.choice((1, 2, rng.randint(1, 20), rng.randint(20, 60), rng.randint(1, CONTEXT - 1), CONTEXT - 1))
        prompt = [rng.choice(some) for _ in range(length)]
        if self.texts and rng.random() < 0.45:
            text = rng.choice(self.texts[-3:])
            more = [rng.randrange(VOCAB) for _ in range(rng.choice((0, 0, 1, 5)))]
            prompt = [*text[: rng.choice((len(text), len(text), rng.randint(1, len(text))))], *more][: CONTEXT - 1]
        chosen: dict[str, Any] = {
            "draft": rng.choice(("auto", "auto", "model", "model", "suffix", "recycling", "ngram", "none")),
            "draft_length": rng.choice(("auto", "auto", rng.randint(0, 16))),
            "max_new_tokens": rng.choice((1, 2, rng.randint(1, 40), 200)),
        }
        if chosen["draft"] == "model" and not self.modelled:
            chosen["draft"] = "auto"
        if rng.random() < 0.65:
            chosen |= {"temperature": rng.choice((0.3, 1.0, 1.7, 20.0))}
            chosen |= rng.choice(({"rule": "coupled"}, {"seed": rng.randrange(99)}, {"rule": rng.choice(RULES)}))
            chosen |= rng.choice(({}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.9}))
        penalties = {"repetition_penalty": 1.4}, {"frequency_penalty": 0.7}, {"presence_penalty": -0.5}
        chosen |= rng.choice(({}, {}, *penalties, {"logit_bias": {3: 2.0, 4: -1.0}}))
        chosen |= rng.choice(({}, {}, {"stop": ("ab",)}, {"stop": ("abc", "ba")}, {"stop": ("d d", "dd", "cabd")}))
        if rng.random() < 0.3:
            return prompt, chosen | {"regex": rng.choice(REGEXES)}
        ends = {"stop_token_ids": (2, 7), "min_new_tokens": rng.choice((0, 1, 9))}, {"ignore_eos": True}
        return prompt, chosen | rng.choice(({}, {}, {"min_new_tokens": 5}, *ends, {"logit_bias": {1: -math.inf}}))

    def several(self) -> list[tuple[list[int], dict[str, Any]]]:
        """A batch: of several whose settings differ, a prompt perhaps twice; or all with trees."""
        asked = [self.drawn() for _ in range(self.rng.choice((1, 2, 3, 7)))]
        asked += asked[:1] if self.rng.random() < 0.3 else []
        if self.trees and self.rng.random() < 0.2:
            shape = {"draft": "model", "draft_length": "auto", "branches": (2, 2, 1), "rule": "auto"}
            asked = [(prompt, chosen | shape) for prompt, chosen in asked]
        return asked

    def wrote(self, prompt: list[int], chosen: dict[str, Any], result: Result) -> None:
        """The answer is what it must be, and a text from now on."""
        check(self.law, prompt, Settings(**({"draft": "auto"} | chosen)), result)
        self.texts.append([*prompt, *result.token_ids][: CONTEXT - 1])

    def call(self) -> None:
        """One of what can be done with a pair. A stream that was left before says so, if it was not at its end."""
        act, left = self.rng.choice(ACTS), self.left
        self.left = None
        self.do(act)
        if left is not None and act not in ("left", "forget"):
            with contextlib.suppress(StopIteration), pytest.raises(UsageError, match="ended by a later one"):
                for _ in range(CONTEXT):
                    next(left)

    def do(self, act: str) -> None:
        if act == "forget":
            self.pair.forget()
        elif act in ("stream", "left"):
            self.stream(*self.drawn(), left=act == "left")
        elif act == "several":
            prompt, chosen = self.drawn()
            chosen |= {"temperature": chosen.get("temperature", 1.0), "draft": self.rng.choice(("siblings", "auto"))}
            for result in self.pair.generate(prompt, n=self.rng.randint(2, 5), **chosen):
                self.wrote(prompt, chosen, result)
        else:
            asked = self.several()
            requests = [Request(prompt, **chosen) for prompt, chosen in asked]
            if act == "fault":
                with pytest.MonkeyPatch.context() as patch, contextlib.suppress(EngineError, KeyboardInterrupt):
                    self.fail(patch)
                    self.pair.generate(requests)
                self.texts.append(asked[0][0])
                return
            found = dict(self.pair.answers(requests)) if act == "answers" else self.pair.generate(requests)
            for i, (prompt, chosen) in enumerate(asked):
                self.wrote(prompt, chosen, found[i])

    def stream(self, prompt: list[int], chosen: dict[str, Any], *, left: bool) -> None:
        stream = self.pair.stream(prompt, **chosen)
        pieces = list(itertools.islice(stream, self.rng.randint(0, 4) if left else None))
        if left:
            self.left = stream if pieces else None
            self.texts.append([*prompt, *(token for piece in pieces for token in piece.token_ids)][: CONTEXT - 1])
            return
        assert "".join(piece.text for piece in pieces) == stream.result.text
        self.wrote(prompt, chosen, stream.result)

    def fail(self, patch: pytest.MonkeyPatch) -> None:
        """Let one of the engines fail soon."""
        rng, engines = self.rng, [each for each in (self.pair.target, self.pair.draft) if each is not None]
        engine, where = rng.choice(engines), rng.choice(("forward", "forward", "reserve", "reset", "copy_row"))
        fault = Fault(where, rng.choice(FAULTS), rng.randint(1, 9), late=rng.random() < 0.5)
        patch.setattr(engine, where, fault.around(getattr(engine, where)))


def check(law: Any, prompt: list[int], settings: Settings, result: Result) -> None:
    """What must hold of any answer, and what an exact and deterministic rule writes."""
    counted, ids, text = result.stats, result.token_ids, spelled(result.token_ids)
    assert 1 <= len(ids) == counted.tokens <= settings.max_new_tokens and len(prompt) + len(ids) <= CONTEXT
    assert counted.drafted >= counted.tested >= counted.accepted and counted.held < len(prompt)
    for name in ("rounds", "drafted", "tested", "accepted"):
        assert sum(share[name] for share in counted.by_drafter.values()) == getattr(counted, name)
    assert sum(counted.tested_per_position) == counted.tested
    assert sum(counted.accepted_per_position) == counted.accepted >= counted.tokens - counted.rounds
    ends = [i for i, token in enumerate(ids) if token in ends_of(settings)]
    assert ends in ([], [len(ids) - 1]) and min(ends, default=99) >= settings.min_new_tokens
    stops = bool(ends) or any(stop.encode() in text for stop in settings.stop)
    assert {
        "stop": stops,
        "length": len(ids) == settings.max_new_tokens,
        "context": len(prompt) + len(ids) == CONTEXT,
    }[result.finish_reason]
    if settings.asked_grammar is not None:
        said = ids[:-1] if ids[-1] == END else ids
        assert mask_after(untouched(LETTERS, *settings.asked_grammar, (END,), VOCAB), said, VOCAB) is not None
    if result.finish_reason != "stop" and 8 not in prompt:  # no character that the answer would finish
        assert result.text == text.decode("utf-8", "replace")
    if result.rule in ("greedy", "coupled"):
        assert result.distance == 0.0
        wanted = plainly(law, prompt, settings, result.seed or 0, result.sample, CONTEXT)
        assert (ids, result.finish_reason) == wanted
        return
    for i, token in enumerate(ids[:20]):
        row = processed(law, prompt, ids[:i], settings)
        if result.rule in ("rejection", "block") and settings.temperature > 0:
            row = possible(row, settings)
        assert row[token] > -math.inf, "of what the target could not have written there is nothing"


def sessions(making: Any) -> Iterator[Session]:
    for seed in range(SESSIONS):
        yield Session(random.Random(f"{making.__name__} {seed}"), making())


def by_clock(tick: Callable[[], float], patch: pytest.MonkeyPatch) -> None:
    """Let the time between two looks at the clock be what ``tick`` says."""
    now = 0.0

    def look() -> float:
        nonlocal now
        now += tick()
        return now

    for module in (decoder, ahead, stats, cascade):
        patch.setattr(module, "perf_counter", look)


@pytest.mark.parametrize("making", MAKINGS)
def test_whatever_is_asked_and_whatever_went_wrong_before(making: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    by_clock(lambda: rng.expovariate(1e5), monkeypatch)  # what ``auto`` does hangs on it
    for session in sessions(making):
        for _ in range(CALLS):
            try:
                session.call()
            except UsageError as error:
                assert "no token" in str(error), "a ban on all that may follow shows where the text comes to it"


@pytest.mark.parametrize("making", [a_model, none])
@pytest.mark.parametrize("tick", [0.0, 1e-12, 1e5, -1e-3])
def test_no_clock_is_an_error(making: Any, tick: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stands still, as tests make them, is too coarse for a step, jumps, or is put back."""
    by_clock(lambda: tick, monkeypatch)
    session = Session(random.Random(3), making())
    for draft in ("auto", "suffix", "auto", "auto"):
        for prompt in ([3, 1, 2] * 9, [4, 5, 6, 7]):
            chosen = {"draft": draft, "max_new_tokens": 40}
            session.wrote(prompt, chosen, session.pair.generate(prompt, **chosen))
