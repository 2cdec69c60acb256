"""A thread that does one thing after the other."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import pytest
from support_ahead import interrupts, is_done

from leadout.engines.worker import Worker


def fail() -> None:
    raise ValueError("no")


def test_things_are_done_in_their_order_and_by_one_thread() -> None:
    worker, done = Worker("worker"), []
    for number in range(5):
        worker.begin(lambda number=number: done.append((number, threading.current_thread().name)))  # type: ignore[misc]
    worker.rest()
    assert done == [(number, "worker") for number in range(5)]


def test_who_has_something_done_gets_what_it_raised() -> None:
    worker = Worker("worker")
    assert isinstance(worker.begin(fail).get(), ValueError)
    with pytest.raises(ValueError, match="no"):
        worker.do(fail)
    worker.do(lambda: None)


def test_an_interrupt_waits_for_what_is_being_done() -> None:
    """What it works on would else be written to while others read it."""
    worker, done, count = Worker("worker"), [True], 0

    def work() -> None:
        done.append(False)
        time.sleep(0.02)
        done[-1] = True

    worker.do(work)
    for _ in interrupts(lambda: worker.do(work), ("worker.py",)):
        time.sleep(0.005)  # what was begun and not waited for is at work now
        assert all(done)
        assert is_done(lambda: worker.do(lambda: None))
        count += 1
    assert count > 3


def test_a_thread_whose_end_is_interrupted_is_not_waited_for() -> None:
    """Behind the word to end nothing is done, and who put something there would wait for ever."""
    worker, done, count = Worker("ends"), list[int](), 0

    def begin_and_close() -> None:
        worker.do(lambda: None)
        worker.close()

    begin_and_close()
    for number, _ in enumerate(interrupts(begin_and_close, ("worker.py", "threading.py"))):
        assert is_done(lambda number=number: worker.do(lambda: done.append(number)))  # type: ignore[misc]
        count += 1
    worker.close()
    assert count > 10 and done == list(range(count))
    for thread in [each for each in threading.enumerate() if each.name == "ends"]:
        thread.join(5)  # nor does one stay that nobody knows
        assert not thread.is_alive()


def test_the_thread_ends_with_its_worker_and_with_close() -> None:
    def threads() -> int:  # others' may end meanwhile
        return [each.name for each in threading.enumerate()].count("one of its own")

    worker = Worker("one of its own")
    for _ in range(2):
        worker.do(lambda: None)
        assert worker.running and threads() == 1
        worker.close()
        assert not worker.running and threads() == 0
    worker.do(lambda: None)
    thread = worker._thread
    assert thread is not None
    del worker
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_an_interpreter_that_ends_waits_for_what_is_being_done() -> None:
    program = (
        "import time; from leadout.engines.worker import Worker; worker = Worker('worker');"
        "worker.begin(lambda: (time.sleep(0.3), print('done', flush=True)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
