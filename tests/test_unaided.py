"""Which texts teach about each other, and what the draft model is compared with where a text repeats itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support_runtime import FixedCosts, collect, toy_pair
from test_cascade import cascade, choose
from test_mutants import Mutant, must_die
from tokenizers import Tokenizer

from leadout.runtime import decoder as decoder_module
from leadout.runtime.controller import cascade as cascade_module
from leadout.runtime.controller import kinds, unaided
from leadout.runtime.controller.joint import Plan
from leadout.runtime.controller.kinds import Kind
from leadout.runtime.controller.unaided import Unaided
from leadout.runtime.decoder import Decoder
from leadout.runtime.settings import Settings

SECONDS = [1.0 + 0.1 * length for length in range(64)]
PERIOD = [4, 9, 2, 7, 1, 8]


def test_edits_repeat_and_other_texts_hardly_ever_do(root: Path) -> None:
    tokenizer = Tokenizer.from_file(str(root / "models" / "target" / "tokenizer.json"))
    found: dict[str, list[bool]] = {}
    for line in (root / "benchmarks" / "kinds.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found.setdefault(row["kind"], []).append(kinds.repeats(tokenizer.encode(row["prompt"]).ids))
    assert all(found.pop("edit")) and sum(map(sum, found.values())) <= 1 and len(found) == 3


def only_the_end_of_a_prompt_counts(*_):
    new = list(range(100, 300))
    assert kinds.repeats(3 * PERIOD + 3 * PERIOD) and not kinds.repeats(new) and not kinds.repeats([])
    assert not kinds.repeats(12 * [5]), "a dozen tokens say nothing"
    assert kinds.repeats(new + new[:150]) and not kinds.repeats(new[:150] + new[:40] + list(range(400, 470)))
    assert not kinds.repeats([*new, *range(600, 5000), *new]), "nor does what stood long ago"


def free_drafters_alone_go_over_the_text(*_):
    after = {3: (40, 50)}
    text = [10, 20, 30, 40, 50, 60, 70]

    def took(new, first):
        return unaided.replayed(new, first, lambda written: after.get(written, ()), SECONDS)

    assert took([10], ()) == pytest.approx(1.0)
    assert took([10, 20], ()) == pytest.approx(2.0), "a step a token where nothing is guessed"
    assert took([10, 20, 30], (10, 20)) == pytest.approx(1.2), "two hits and the target's own"
    assert took(text[:4], (10, 21)) == pytest.approx(1.2 + 1.0 + 1.2 * 1 / 3), "what goes on beyond counts in part"
    assert took(text, (10, 20)) == pytest.approx(1.2 + 1.2 + 1.0), "two hits, two hits, a miss"
    assert took(text[:5], (10, 20)) == pytest.approx(1.2 + 1.2 * 2 / 3)


def what_was_seen_outvotes_the_guess(*_):
    found = Unaided()
    assert found.speed(1.0, 0.0) == 0.0
    assert found.speed(1.0, 2.5) == pytest.approx(1.3 * 2.5), "at first it is a little more than the guess says"
    for _ in range(40):
        found.record(1.0, 5.0, 1.0)
    assert found.speed(1.1, 1.0) == pytest.approx(206 / (6 / 1.3 + 40)), "of its class"
    assert found.speed(9.0, 1.0) == pytest.approx(1.3), "and of no other"
    for _ in range(400):
        found.speed(1.1, 1.0)
    assert found.speed(1.1, 1.0) == pytest.approx(1.3, abs=0.1), "what is not seen again is forgotten: it is tried anew"


def it_is_seldom_gone_over_what_is_known(*_):
    found = Unaided()
    assert all(found.wants(1.0) for _ in range(9))
    found.record(1.0, 100.0, 50.0)
    assert sum(found.wants(1.0) for _ in range(40)) == 10 and all(found.wants(9.0) for _ in range(9))


def the_model_is_compared_with_it(*_):
    """Its three tokens in 1.4 seconds with a guess of 1.6 in one, or with what free drafters go on to do."""
    for kind, seconds, by in (
        (Kind(repeats=True), 0.2, "fixed"),
        (Kind(repeats=True), 5.0, "model"),
        (Kind(), 0.2, "model"),
    ):
        chooser, model = cascade([5], model=True, rate=0.6)
        chooser._experience = chooser._commons.experience(kind)
        model.tokens = [1.0, 1.9, 2.6, 3.1]
        if chooser._experience.unaided is not None:
            for promised in (1.1, 1.5, 2.0):
                for _ in range(40):
                    chooser._experience.unaided.record(promised, 1.0, seconds)
        plan = choose(chooser, 9, 9)
        assert plan.by == by and chooser._choice.this.otherwise > 1.0 / 5.0, (kind, seconds)
        if by == "fixed":
            assert chooser._choice.this.otherwise > 3.0, "the draft model's bill knows it, too"


def a_round_of_the_model_is_gone_over(*_):
    """On a text of a period free drafters know all that the model writes, and would have written it in one step."""
    records, found = [], decoder_module.Decoder(*toy_pair(11, share=0.0, order=1), costs=FixedCosts(per_draft=0.01))
    text = found.decode([([1, 2], Settings(draft="none", max_new_tokens=80))])
    prompt = [1, 2, *collect(text, 1)[0][0]]
    assert kinds.repeats(prompt)
    decoder = Decoder(*toy_pair(11, share=0.0, order=1), costs=FixedCosts(per_draft=1e-6, per_token=0.02))
    experience = decoder._admission.commons.experience(Kind(repeats=True))
    assert experience.unaided is not None and decoder._admission.commons.experience(Kind()).unaided is None
    experience.unaided.record = lambda *given: records.append(given)
    experience.unaided.speed = lambda promised, guess: 1e-9  # the model it is
    _, last = collect(decoder.decode([(prompt, Settings(draft="auto", max_new_tokens=60))]), 1)
    stats = last[0].stats
    assert stats.by_drafter["model"]["rounds"] >= 3 and records
    told = [(tokens, seconds) for _, tokens, seconds in records]
    assert all(0 < seconds < 2.0 for _, seconds in told) and max(tokens for tokens, _ in told) > 4
    assert sum(tokens for tokens, _ in told) <= stats.tokens


def it_is_gone_over_from_its_beginning(*_):
    chooser, _ = cascade([99], model=True)
    texts, found = [], Unaided()
    chooser._drafters[0].drafter.take = lambda tokens: texts.append(list(tokens))
    chooser._known, chooser._choice.plan = 3, Plan(instead=Plan())
    found.record = lambda *given: texts.append(given)
    chooser._replay([1, 2, 3, 4, 5, 6], found)
    assert texts[:-1] == [[1, 2, 3, 4], [1, 2, 3, 4, 5]], "what stood there when a step began, and no more"
    assert texts[-1][:2] == (1.0, 3) and texts[-1][2] >= 3.0


CHECKS = [
    it_is_gone_over_from_its_beginning,
    only_the_end_of_a_prompt_counts,
    free_drafters_alone_go_over_the_text,
    what_was_seen_outvotes_the_guess,
    it_is_seldom_gone_over_what_is_known,
    the_model_is_compared_with_it,
    a_round_of_the_model_is_gone_over,
]
MUTANTS = [
    Mutant("all of a prompt counts", kinds, "repeats", "stood[-_END:]", "stood"),
    Mutant("what stood long ago counts", kinds, "repeats", "prompt[-_LONGEST:]", "prompt"),
    Mutant("a few tokens say all", kinds, "repeats", "len(end) >= _FEWEST", "True"),
    Mutant("a miss costs nothing", unaided, "replayed", "written + hits + 1", "written + hits + 2"),
    Mutant("what goes on beyond counts in whole", unaided, "replayed", "* rest / (len(guess) + 1)", "* 1"),
    Mutant("the first guess is no guess", unaided, "replayed", "0.0, 0, first", "0.0, 0, ()"),
    Mutant("steps are plain", unaided, "replayed", "took + seconds[len(guess)], written", "took + seconds[0], written"),
    Mutant("one class for all", unaided.Unaided, "record", "class_of(promised)", "0"),
    Mutant("nothing is forgotten", unaided.Unaided, "speed", "_DECAY * tokens, _DECAY * seconds", "tokens, seconds"),
    Mutant("the guess is all", unaided.Unaided, "speed", "_GOES_ON * guess", "guess"),
    Mutant("all is gone over", unaided.Unaided, "wants", "% _SELDOM == 0", "% 1 == 0"),
    Mutant("nothing known is gone over", unaided.Unaided, "wants", "or self._round % _SELDOM == 0", ""),
    Mutant("everywhere", cascade_module.Commons, "experience", "if kind.repeats else None", "if True else None"),
    Mutant("compared with nothing", cascade_module.Cascade, "choose", "speed = unaided.speed", "_ = unaided.speed"),
    Mutant("nothing is gone over", cascade_module.Cascade, "take", "self._replay(tokens, unaided)", "pass"),
    Mutant("guesses of the end", cascade_module.Cascade, "_replay", "tokens[: begin + written]", "tokens"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_healthy_code_passes(check):
    check()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutant_is_killed(mutant, monkeypatch):
    must_die(mutant, CHECKS, monkeypatch)
