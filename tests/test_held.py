"""What a cache holds is read once, and nobody can tell: texts are those of a fresh cache, whatever was done before."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_runtime import collect, toy_pair
from test_mutants import Mutant, must_die

import leadout
from leadout.engines.base import KeepingEngine
from leadout.engines.toy import ToyEngine, table_law
from leadout.errors import EngineError
from leadout.runtime import decoder, held, steps
from leadout.runtime.bench import Bench, Totals
from leadout.runtime.check import answers, check_turns
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters import model_drafter
from leadout.runtime.held import Held, agreement
from leadout.runtime.samples import Sample
from leadout.runtime.settings import Settings
from leadout.runtime.steps import Stepper

HISTORY = [(7 * i) % 11 for i in range(24)]
OPTIONS: tuple[dict[str, Any], ...] = (
    {"draft": "auto"},
    {"draft": "none"},
    {"draft": "suffix"},
    {"draft": "model", "draft_length": 3},
    {"draft": "model", "temperature": 1.0, "seed": 3},
    {"draft": "none", "temperature": 1.0, "seed": 4},
    {"draft": "model", "branches": (2, 1)},
)


class Interrupted(ToyEngine):
    """Its ``fatal``-th step from when that was set writes something else and raises."""

    fatal = 0
    error: BaseException = ValueError()

    def forward(self, tokens: Any, past_lens: Any, logit_index: Any = None) -> Any:
        self.fatal -= 1
        if self.fatal == 0:
            self._cache[: len(past_lens), int(past_lens.min()) :] = 1
            raise self.error
        return super().forward(tokens, past_lens, logit_index)


def interrupted_pair() -> list[Interrupted]:
    return [Interrupted(engine.law, 11, max_context=256) for engine in toy_pair(11, context=256)]


def text_of(making: Decoder, prompt: list[int], given: dict[str, Any]) -> tuple[list[int], int]:
    """The answer, and how much of the prompt was held."""
    (text,), last = collect(making.decode([(prompt, Settings(max_new_tokens=9, **given))]), 1)
    stats = last[0].stats
    assert stats is not None
    return text, stats.held


def a_conversation_is_read_once(*_: Any) -> None:
    """Turn after turn, only what is new goes through the models; the last token of an answer never was."""
    target, draft = toy_pair(11, context=256)
    making, prompt = Decoder(target, draft), list(HISTORY)
    for turn in range(4):
        for engine in (target, draft):
            engine.calls.clear()
        answer, there = text_of(making, prompt, {"draft": "model", "draft_length": 3})
        assert answer == text_of(Decoder(*toy_pair(11, context=256)), prompt, {"draft": "none"})[0]
        assert there == (len(prompt) - 5 if turn else 0)
        assert target.calls[0] == (1, 4 if turn else len(HISTORY) - 1)
        assert draft.calls[0][1] <= (8 if turn else len(HISTORY)), "the draft lacks what it did not propose"
        prompt += [*answer, 5, 2, 8, 1]
    text_of(making, prompt, {"draft": "none"})
    assert target.calls[-1][1] <= 2 and text_of(making, prompt, {"draft": "none"})[1] == len(prompt) - 1


def nobody_can_tell(*_: Any, seed: int = 0, count: int = 60) -> None:
    """Requests of every kind in any order, many that begin alike, among them batches, streams that are left, steps that
    fail, and engines that somebody else uses: texts are those of fresh engines."""
    random = np.random.default_rng(seed)
    engines = interrupted_pair()
    making, said = Decoder(*engines), [HISTORY]
    for _ in range(count):
        base = said[random.integers(len(said))]
        prompt = [*base[: random.integers(12, len(base) + 1)], *random.integers(0, 11, random.integers(1, 4)).tolist()]
        given = OPTIONS[random.integers(len(OPTIONS))]
        request = (prompt, Settings(max_new_tokens=9, **given))
        event = random.integers(8)
        if event == 0:
            stream = making.decode([request])
            for _ in range(random.integers(1, 3)):
                next(stream, None)
        elif event == 1:
            engine = engines[random.integers(2)]
            error = KeyboardInterrupt() if seed % 2 else ValueError()
            engine.fatal, engine.error = int(random.integers(1, 5)), error
            with contextlib.suppress(EngineError, KeyboardInterrupt):
                list(making.decode([request]))
            engine.fatal = 0
        elif event == 2:
            engines[random.integers(2)].reset(1)
        elif event == 3 and not given.get("branches"):
            list(making.decode([request, ([*prompt[:-1], 3], request[1])]))
        elif event == 4:
            list(Decoder(*engines).decode([(prompt[::-1], request[1])]))
        else:
            text, _ = text_of(making, prompt, given)
            assert text == text_of(Decoder(*toy_pair(11, context=256)), prompt, given)[0]
            said = [*said[-3:], [*prompt, *text]]


def what_is_forgotten_is_read_again(*_: Any) -> None:
    target, draft = toy_pair(11, context=256)
    making, given = Decoder(target, draft), {"draft": "model"}
    assert [text_of(making, HISTORY, given)[1] for _ in range(2)] == [0, len(HISTORY) - 1]
    making.forget()
    draft.calls.clear()
    assert text_of(making, HISTORY, given)[1] == 0 and (1, len(HISTORY) - 1) in draft.calls
    assert text_of(making, HISTORY[:14], given)[1] == 0, "too few to matter"


class Even(ToyEngine):
    """One that rounds otherwise where it need not be even."""

    even = True


def only_sound_slots_begin_an_even_text(*_: Any) -> None:
    """What steps that round in their own way have written is no beginning for a text that must round alike."""
    stepper, text = Stepper(Even(table_law(11), 11), "target"), list(range(11)) * 4
    for before, now, found in ((True, True, 40), (False, False, 40), (True, False, 40), (False, True, 0)):
        stepper.reset(1)
        stepper.forget()
        assert stepper.resume(text[:30], even=before) == 0
        stepper.last_logits([text[:30]], [0])
        stepper.last_row(text[30:31], 30)
        stepper.all_logits([text[31:40]], [31])
        assert stepper.resume(text, even=now) == found and stepper.engine.even is now
    stepper.reset(1)
    stepper.resume(text, even=True)
    stepper.last_logits([text[:20]], [0])
    assert stepper.resume(text, even=False) == 20
    stepper.all_logits([text[20:30]], [20])
    assert stepper.resume(text, even=True) == 20, "sound up to there"
    stepper.all_logits([text[20:30]], [20])
    assert stepper.resume(text, even=True) == 30, "written over"


def a_draft_that_has_not_read_a_prompt_makes_up_for_it(*_: Any) -> None:
    """As where it has lost too much to be told of a new text at once."""
    drafts = []
    for prompts in ([HISTORY, [*HISTORY, 1, 2]], [[*HISTORY, 1, 2]]):
        making = Decoder(*toy_pair(11))
        drafter = making._model
        assert drafter is not None
        for prompt in prompts:
            row = making._admission.row(0, prompt, Settings(draft="model"), Sample(), (), None)
            drafter.reset([row])
            drafts.append((len(prompt) - 1 - drafter.unread([row]), drafter.propose([row], [3])[0].tokens))
    assert [there for there, _ in drafts] == [0, len(HISTORY), 0] and drafts[1][1] == drafts[2][1]


def branches_are_no_text(*_: Any) -> None:
    stepper, text = Stepper(ToyEngine(table_law(11), 11), "target"), list(range(11)) * 2
    assert stepper.resume(text) == 0
    stepper.last_logits([text[:20]], [0])
    stepper.tree_logits([text[20:22]], [20], np.eye(2, dtype=bool)[None])
    assert stepper.resume(text) == 20


def slots_are_what_is_claimed(*_: Any) -> None:
    """After any steps, those that fail included, every token that is claimed is in its slot."""
    random = np.random.default_rng(0)
    for _ in range(200):
        kept, slots = Held(), np.full(64, -1)
        for _ in range(random.integers(1, 8)):
            past, tokens = int(random.integers(0, 40)), random.integers(0, 3, random.integers(1, 20)).tolist()
            kept.cut(past)
            slots[past:] = -2
            if random.random() < 0.7:
                slots[past : past + len(tokens)] = tokens
                kept.add(tokens, past, even=bool(random.integers(2)))
            for even in (False, True):
                same = kept.common(slots.tolist(), even=even)
                assert (slots[:same] >= 0).all()
            assert kept.common(slots.tolist(), even=True) <= kept.common(slots.tolist(), even=False)


CHECKS = [
    a_conversation_is_read_once,
    nobody_can_tell,
    what_is_forgotten_is_read_again,
    only_sound_slots_begin_an_even_text,
    a_draft_that_has_not_read_a_prompt_makes_up_for_it,
    branches_are_no_text,
    slots_are_what_is_claimed,
]
MUTANTS = [
    Mutant("slots of a step that failed are claimed", steps.Stepper, "_checked", "self._held.cut(past[0])", "pass"),
    Mutant("rejected tokens are claimed", held.Held, "cut", "del self._tokens[past:]", "pass"),
    Mutant("whoever has reset the engine", steps.Stepper, "resume", "resets == self._resets", "resets >= 0"),
    Mutant("all slots are sound", held.Held, "add", "even and self._sound == past", "self._sound <= past"),
    Mutant("sound slots that were written over stay sound", held.Held, "cut",
           "self._sound = min(self._sound, past)", "pass"),
    Mutant("a branch is text", steps.Stepper, "tree_logits", "self._held.cut(past[0])", "pass"),
    Mutant("the rest of a prompt on the wrong slots", decoder, "prefill", "[held]", "[held + 1]"),
    Mutant("the draft keeps more", model_drafter.ModelDrafter, "reset", "[held] *", "[held + 1] *"),
    Mutant("few are enough", held.Held, "common", "same >= _LEAST", "True"),
    Mutant("caches are not forgotten", steps.Stepper, "forget", "self._held = Held()", "pass"),
    Mutant("all is read again", steps.Stepper, "resume", "if held >=", "if False and held >="),
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check(check: Any) -> None:
    check()


@pytest.mark.parametrize("seed", range(1, 9))
def test_nobody_can_tell(seed: int) -> None:
    nobody_can_tell(seed=seed)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutants_die(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    must_die(mutant, CHECKS, monkeypatch)


@given(st.lists(st.integers(0, 2), max_size=9), st.lists(st.integers(0, 2), max_size=9))
@settings(max_examples=100)
def test_agreement(one: list[int], other: list[int]) -> None:
    same = agreement(one, other)
    assert (one[:same] == other[:same] and one[same : same + 1] != other[same : same + 1]) or one == other
    assert agreement(tuple(one), other) == same


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}, {"draft": "none"}], ids=str)
def test_a_bundle_s_conversation(tiny_bundle: Path, sampling: dict[str, Any]) -> None:
    """On ONNX Runtime, in its bits: the third turn is that of a pair that has read it at once."""
    with leadout.load(tiny_bundle) as talking:
        assert isinstance(talking.target, KeepingEngine)
        prompt = talking.token_ids("def quicksort(values):\n    return values\n\n\ndef ")
        for turn in range(3):
            result = talking.generate(prompt, max_new_tokens=12, ignore_eos=True, **sampling)
            assert result.stats.held == (len(prompt) - 4 if turn else 0)
            with leadout.load(tiny_bundle) as fresh:
                again = fresh.generate(prompt, max_new_tokens=12, ignore_eos=True, **sampling)
            assert (result.token_ids, again.stats.held) == (again.token_ids, 0)
            prompt += [*result.token_ids, 3, 1, 4]
        assert len(talking.generate([prompt, prompt], max_new_tokens=2)) == 2
        assert talking.generate(prompt, max_new_tokens=2).stats.held == 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_seed_repeats_a_text_whatever_was_read_before(tiny_bundle: Path, rule: str) -> None:
    """By a rule that draws from q and p, in whose last bits a cache of other steps shows: it is read whole then."""
    given = {"temperature": 1.0, "rule": rule, "draft": "model", "draft_length": 3, "max_new_tokens": 12}
    with leadout.load(tiny_bundle) as pair:
        prompt = list(range(3, 40))
        for _ in range(2):
            seeded = pair.generate(prompt, seed=4, ignore_eos=True, **given)
            assert seeded.stats.held == 0
        assert pair.generate(prompt, ignore_eos=True, **given).stats.held > 0, "one that was drawn repeats no other"


def test_an_engine_that_somebody_else_used_is_read_anew(tiny_bundle: Path) -> None:
    with leadout.load(tiny_bundle) as pair:
        prompt, given = list(range(3, 40)), {"max_new_tokens": 8, "ignore_eos": True}
        before = pair.generate(prompt, **given)
        assert pair.generate(prompt, **given).stats.held == len(prompt) - 1
        for engine in filter(None, (pair.target, pair.draft)):
            engine.reset(1)
            engine.forward(np.arange(50, 90)[None], np.zeros(1, np.int64))
        after = pair.generate(prompt, **given)
        assert (after.token_ids, after.stats.held) == (before.token_ids, 0)


def test_a_capacity_that_costs_is_not_kept(tiny_bundle: Path) -> None:
    """Where attention takes as long as there are slots, a new text begins with few."""
    with leadout.load(tiny_bundle, variant="grouped") as pair:
        prompt = list(range(3, 40))
        assert [pair.generate(prompt, max_new_tokens=4, draft="none").stats.held for _ in range(2)] == [0, 0]


def test_check_looks_at_the_next_turn(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says so where a cache does not hold what it is taken for."""
    with leadout.load(tiny_bundle) as pair:
        prompts = [list(range(3, 40)), list(range(50, 71))]
        assert check_turns(pair, prompts).ok
        said, generate = list[int](), pair.generate
        with monkeypatch.context() as spied:
            spied.setattr(pair, "generate", lambda *a, **k: said.append((r := generate(*a, **k)).stats.held) or r)
            answers(pair, [prompts[0]] * 2, max_new_tokens=2)
        assert said == [0, 0], "what it compares with is read whole"
        monkeypatch.setattr(Held, "common", lambda self, text, *, even: max(0, len(text) - 3))
        assert not check_turns(pair, prompts).ok


def test_a_benchmark_reads_every_prompt(tiny_bundle: Path) -> None:
    held: list[int] = []
    with leadout.load(tiny_bundle) as pair, leadout.load(tiny_bundle, exact=False) as bare:
        run = Bench(pair, {"max_new_tokens": 6}, plain=bare.target)
        decode = run._time

        def spy(making: Decoder, group: Any, given: Settings, totals: Totals) -> None:
            decode(making, group, given, totals)
            held.extend(row.held for row in totals.stats)

        run._time = spy  # type: ignore[method-assign]
        assert run.run([list(range(3, 40))])["identical_outputs"]
    assert held == [0, 0, 0, 0], "each side once to warm up"
