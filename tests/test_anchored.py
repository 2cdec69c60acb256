"""Whatever the runtime does, it never steps a row behind what it committed: the checks of drafters, laws and caches
hold, and nothing is refused, where every engine has recurrent layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import support_runtime
import test_foreign_draft
import test_held
import test_laws
import test_mutants
import test_mutants_drafters
import test_mutants_siblings
import test_parallel_drafter
import test_reach
import test_siblings
import test_vocabulary

from leadout.bundle import Recurrence
from leadout.engines.toy import ToyEngine
from leadout.engines.trails import Trails
from leadout.runtime import steps
from leadout.runtime.controller.policy import Pace
from leadout.runtime.decoder import Decoder
from leadout.runtime.drafters import foreign_draft, model_drafter
from leadout.runtime.settings import Settings

KEPT = Recurrence(slots=131, context=3, trails=(1,))
LITTLE = Recurrence(slots=27, context=3, trails=(1,))  # of which 12 tokens can be taken back
MODULES = (
    support_runtime,
    test_foreign_draft,
    test_held,
    test_laws,
    test_mutants,
    test_parallel_drafter,
    test_siblings,
    test_vocabulary,
)


class Anchored(ToyEngine):
    """A toy that refuses to go back behind where its states stand."""

    kept = KEPT

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._trails, most = Trails(self.kept, 1), self.kept.widest
        self.spec = dataclasses.replace(self.spec, trees=False, recurrent=True, max_step=most, max_verify=most)

    def forward(self, tokens: Any, past_lens: Any, logit_index: Any = None) -> Any:
        past: list[int] = past_lens.tolist()
        self._trails.turn(past, tokens.shape[1])
        logits = super().forward(tokens, past_lens, logit_index)
        self._trails.took(past, tokens.shape[1])
        return logits

    def reset(self, batch: int) -> None:
        super().reset(batch)
        self._trails = Trails(self.kept, batch)

    def copy_row(self, source: int, destination: int) -> None:
        super().copy_row(source, destination)
        self._trails.copy_row(source, destination)

    def commit(self, lengths: Sequence[int]) -> None:
        self._trails.commit(lengths)

    def earliest(self, row: int) -> int:
        return self._trails.anchors[row]


OTHERWISE = {
    "the_end_of_a_text_is_enough": "prompts go in by 64 tokens",
    "a_conversation_is_read_once": "a prompt that was answered and comes again is read again",
    "what_is_forgotten_is_read_again": "the same",
    "nobody_can_tell": "there are no trees",
    "a_draft_that_may_say_nothing_is_silent": "there are no trees",
    "a_text_of_any_length_is_drafted_to_its_end": "nothing is drafted ahead",
    "ahead_of_the_target_it_reads_no_other_text": "nothing is drafted ahead",
}
ALL = [
    *test_foreign_draft.CHECKS,
    *test_held.CHECKS,
    *test_mutants.CHECKS,
    *test_mutants_drafters.CHECKS,
    *test_mutants_siblings.CHECKS,
    *test_parallel_drafter.CHECKS,
    *test_reach.CHECKS,
    *test_vocabulary.CHECKS,
]
CHECKS = [check for check in ALL if check.__name__ not in OTHERWISE]


@pytest.fixture
def anchored(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        if "ToyEngine" in vars(module):
            monkeypatch.setattr(module, "ToyEngine", Anchored)


def named(check: Any) -> str:
    return f"{check.__module__}-{check.__name__}"


@pytest.mark.parametrize("check", CHECKS, ids=named)
def test_what_holds_holds_for_recurrent_layers(check: Any, anchored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if check.__code__.co_argcount:
        check(monkeypatch)
    else:
        check()


def test_what_is_otherwise_is_still_there() -> None:
    assert OTHERWISE.keys() <= {check.__name__ for check in ALL}


def test_conversations_go_on_from_where_they_were(anchored: None) -> None:
    """Each turn is read once; the same prompt again is read whole, and so is one that parts from it early."""
    making, prompt = Decoder(*support_runtime.toy_pair(11, context=256)), list(test_held.HISTORY)

    def held(text: list[int], **given: Any) -> int:
        fresh = Decoder(*support_runtime.toy_pair(11, context=256))
        answer, there = test_held.text_of(making, text, {"draft": "model"} | given)
        assert answer == test_held.text_of(fresh, text, {"draft": "none"})[0]
        prompt[len(text) :] = [*answer, 5, 2, 8, 1]
        return there

    for turn in range(6):
        assert held(list(prompt), draft_length=3) == (len(prompt) - 9 - 4 - 5 if turn else 0)
    before = list(prompt)
    assert held(before) == len(before) - 5
    assert held(before) == held(before[:30]) == 0


def a_draft_behind_much_unread_text_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not read of a prompt comes with a draft's first step, of whose tokens none may be kept."""
    monkeypatch.setattr(Pace, "abstains", lambda self, policies, tokens: True)
    prompts = [[(7 * i * i + i) % 11 for i in range(length)] for length in (48, 57, 63, 64, 65, 75)]
    plain, drafted = (Settings(max_new_tokens=20, draft_length=16, draft=kind) for kind in ("none", "model"))
    for batch in (*([prompt] for prompt in prompts), prompts[:3], prompts[1:]):
        making, alone = (Decoder(*support_runtime.toy_pair(11, share=0.6, context=256)) for _ in range(2))
        texts, last = support_runtime.collect(making.decode([(prompt, drafted) for prompt in batch]), len(batch))
        assert texts == support_runtime.collect(alone.decode([(prompt, plain) for prompt in batch]), len(batch))[0]
        assert all(each.stats is not None and each.stats.drafted > 40 for each in last.values())


def test_a_draft_behind_much_unread_text_is_taken_back(anchored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    a_draft_behind_much_unread_text_is_taken_back(monkeypatch)


def test_a_text_that_is_cut_anew_far_back_is_read_again(anchored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Anchored, "kept", LITTLE)
    test_foreign_draft.answers_stay()


MUTANTS = [
    test_mutants.Mutant(
        "a text cut anew goes back behind its anchor",
        foreign_draft.ForeignDrafter,
        "_lacking",
        "valid < self._stepper.earliest(place)",
        "False",
    ),
    test_mutants.Mutant(
        "a draft commits a token that it drafts",
        model_drafter.ModelDrafter,
        "_stepped",
        "commit(self._valid)",
        "commit([valid + 2 for valid in self._valid])",
    ),
    test_mutants.Mutant(
        "what came with a draft is no text", model_drafter.ModelDrafter, "_stepped", "self.steps == 1", "False"
    ),
    test_mutants.Mutant(
        "the target commits what it verifies", steps.Stepper, "commit", "(lengths)", "([n + 3 for n in lengths])"
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_mutants_die(mutant: test_mutants.Mutant, anchored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [lambda patch, check=check: check(*[patch] * check.__code__.co_argcount) for check in CHECKS]
    here = [lambda patch: test_a_text_that_is_cut_anew_far_back_is_read_again(None, patch)]
    here += [a_draft_behind_much_unread_text_is_taken_back]
    test_mutants.must_die(mutant, here + others, monkeypatch)  # as the others take a minute
