"""What interrupts a pair at its work, and would use it, too: signal handlers and finalizers of the same thread, threads
that share one stream. Nobody's text is another's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support_plain import LETTERS, VOCAB
from support_runtime import toy_pair
from test_api import entry, manifest

from leadout.bundle import Bundle
from leadout.errors import EngineError, UsageError
from leadout.runtime import grammars
from leadout.runtime.pair import Pair

PROMPT, ASKED = [1, 2, 3], {"max_new_tokens": 30, "ignore_eos": True}
IN_THE_MIDDLE = "in the middle of a round of the same thread"


@pytest.fixture
def pair() -> Iterator[Pair]:
    models = {"target": entry(vocab_size=VOCAB, max_context=96), "draft": entry()}
    with Pair(Bundle(Path("toy"), manifest(models)), LETTERS, *toy_pair(VOCAB), exact=True, batch_size=4) as made:
        yield made


def interrupt(pair: Pair, act: Callable[[], object], step: int) -> list[str]:
    """Let ``act`` be called by the engine's ``step``-th step from now on, as a signal handler is in the midst of one.
    Returns a list that will have what it was refused with."""
    forward, refused, left = pair.target.forward, list[str](), [step]

    def interrupted(*given: Any) -> Any:
        found = forward(*given)
        left[0] -= 1
        if left[0] == 0:
            try:
                act()
            except UsageError as error:
                refused.append(str(error))
        return found

    pair.target.forward = interrupted  # type: ignore[method-assign]
    return refused


@pytest.mark.parametrize("draft", ["auto", "model", "none"])
@pytest.mark.parametrize("step", [1, 2, 4])  # the first reads the prompt
@pytest.mark.parametrize("how", ["generate", "stream", "answers", "a stream that was left"])
def test_a_round_is_not_interrupted_by_another(pair: Pair, draft: str, step: int, how: str) -> None:
    wanted = pair.generate(PROMPT, draft=draft, **ASKED).token_ids
    left = pair.stream([4, 5], **ASKED)
    next(left)
    pair.forget()
    acts: dict[str, Callable[[], object]] = {
        "generate": lambda: pair.generate([5, 6, 7], **ASKED),
        "stream": lambda: list(pair.stream([5, 6, 7], **ASKED)),
        "answers": lambda: list(pair.answers([[5, 6, 7], [8]], **ASKED)),
        "a stream that was left": lambda: list(left),
    }
    refused = interrupt(pair, acts[how], step)
    assert pair.generate(PROMPT, draft=draft, **ASKED).token_ids == wanted
    assert len(refused) == 1 and IN_THE_MIDDLE in refused[0]
    assert len(pair.generate([5, 6, 7], **ASKED).token_ids) == 30, "and is asked again when it is over"


def test_what_is_forgotten_in_the_middle_of_a_round_changes_no_text(pair: Pair) -> None:
    wanted = pair.generate(PROMPT, **ASKED).token_ids
    assert not interrupt(pair, pair.forget, 3)
    assert pair.generate(PROMPT, **ASKED).token_ids == wanted


@pytest.mark.parametrize("fails", [False, True])
def test_a_pair_is_closed_behind_a_round_that_is_interrupted(
    pair: Pair, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, it would be closed under a step; and at the latest when somebody closes it who interrupts nothing."""
    wanted, closed = pair.generate(PROMPT, **ASKED).token_ids, list[int]()
    taken: list[int] = []
    monkeypatch.setattr(pair.target, "close", lambda: closed.append(len(taken)))

    def close() -> None:
        pair.close()
        assert not closed
        if fails:
            raise SystemExit

    interrupt(pair, close, 3)
    stream = pair.stream(PROMPT, draft="none", **ASKED)
    try:
        for piece in stream:
            taken += piece.token_ids
    except EngineError as error:
        assert "this pair is closed" in str(error) and not fails
    except SystemExit:
        pair.close()
    assert closed == ([1, 1] if fails else [1]) and 0 < len(taken) < len(wanted) and taken == wanted[: len(taken)]


def test_a_grammar_that_is_being_compiled_may_be_forgotten(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    check = grammars.Grammar.check

    def interrupted(grammar: grammars.Grammar) -> None:
        check(grammar)
        pair.forget()

    monkeypatch.setattr(grammars.Grammar, "check", interrupted)
    done = threading.Event()

    def ask() -> None:
        pair.settings({"regex": "[ab]+c"})
        done.set()

    threading.Thread(target=ask, daemon=True).start()
    if not done.wait(timeout=20):
        monkeypatch.setattr(pair, "close", lambda: None)  # it would wait, too
        pytest.fail("waits for itself for ever")


@pytest.mark.parametrize("how", ["stream", "answers"])
def test_threads_do_not_share_a_stream(pair: Pair, how: str) -> None:
    taken: Iterator[Any] = pair.stream(PROMPT, **ASKED) if how == "stream" else pair.answers([PROMPT], **ASKED)
    inside, told = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert told.wait(timeout=20)

    interrupt(pair, wait, 2)
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(next(taken)))
    thread.start()
    try:
        assert inside.wait(timeout=20)
        with pytest.raises(UsageError, match="is waiting for the next already: take a stream, or answers, in one"):
            next(taken)
    finally:
        told.set()
        thread.join()
    assert [*got, *taken], "and who waited goes on"


def test_an_error_of_the_engine_s_own_is_no_word_of_threads(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise ValueError("of another kind")

    monkeypatch.setattr(pair.codec, "decode", failing)
    with pytest.raises(ValueError, match="of another kind"):
        list(pair.stream(PROMPT, **ASKED))


def test_a_stream_that_failed_has_no_result_for_another_reason_than_a_later_call(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = pair.stream(PROMPT, **ASKED)
    next(stream)

    def failing(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(pair.target, "forward", failing)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    with pytest.raises(UsageError, match=r"not taken to the end$"):
        _ = stream.result
