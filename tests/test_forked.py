"""A process that was forked of one that holds a pair: it is told so in one line, and ends like any other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support_runtime import toy_pair

import leadout
from leadout.errors import EngineError
from leadout.runtime.decoder import Decoder
from leadout.runtime.settings import Settings

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]
ENDS = """
import os, signal, sys
import leadout

with leadout.load(sys.argv[1], threads=2) as pair:
    pair.generate("x", max_new_tokens=4)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(pair.generate("x", max_new_tokens=4, ignore_eos=True).token_ids) == 4
"""


def holds_in_a_child(said: Callable[[], bool]) -> bool:
    """Whether ``said`` is true in a process forked here. One that hangs ends by a signal."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            os._exit(0 if said() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def refuses(call: Callable[[], object]) -> bool:
    try:
        call()
    except EngineError as error:
        return "before the process forked" in str(error)
    return False


def test_a_pair_is_not_used_in_a_fork(tiny_bundle: Path) -> None:
    """Whether its parent's threads had been in the middle of a request or not: to wait for one is to wait for ever."""
    with leadout.load(tiny_bundle, threads=2) as pair:
        stream = pair.stream("x = 1", max_new_tokens=60, ignore_eos=True)
        next(stream)

        def refused() -> bool:
            calls = (
                lambda: pair.generate("x", max_new_tokens=2),
                lambda: next(pair.stream("x", max_new_tokens=2)),
                lambda: list(pair.answers(["x"], max_new_tokens=2)),
                lambda: list(stream),
                lambda: pair.turn.acquire(),
                lambda: pair.settings({}),
                pair.forget,
            )
            found = all(refuses(call) for call in calls)
            pair.close()
            return found

        assert holds_in_a_child(refused)
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with pair.turn:
                held.set()
                done.wait()

        other = threading.Thread(target=hold)
        other.start()
        held.wait()
        try:
            assert holds_in_a_child(refused)
        finally:
            done.set()
            other.join()
        assert len(pair.generate("x", max_new_tokens=2, ignore_eos=True).token_ids) == 2, "the parent goes on"


def test_what_a_fork_has_of_a_worker_is_not_waited_for() -> None:
    decoder = Decoder(*toy_pair(11, share=0.1), draft_ahead=True)
    request = [([1, 2, 3], Settings(max_new_tokens=30, draft_length=3))]
    expected = [event.tokens for event in decoder.decode(request)]
    assert holds_in_a_child(lambda: refuses(lambda: list(decoder.decode(request))))
    assert [event.tokens for event in decoder.decode(request)] == expected


@pytest.mark.slow
def test_a_fork_of_a_process_with_a_pair_ends(tiny_bundle: Path) -> None:
    """As a daemon does that leaves its terminal: the threads that its sessions' ends wait for are the parent's."""
    command = [sys.executable, "-W", "ignore", "-c", ENDS, str(tiny_bundle)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
