"""Decides how a thread of its own is given work and waited for: an interrupt leaves no lock taken and no work lost."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from weakref import WeakSet, finalize

Outcome = SimpleQueue[BaseException | None]
_Tasks = SimpleQueue[Callable[[], None] | None]


class Worker:
    """One thread that does one thing after the other, begun when there is something to do.

    Queues written in C are all that is waited for: an interrupt may leave an ``Event``, a ``Future`` or the semaphore
    of a thread pool taken. A process that was forked since has none of its parent's threads, and begins one of its own.
    The thread ends with its worker, and before the interpreter does.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: Thread | None = None
        self._tasks = _Tasks()
        self._process = 0

    @property
    def running(self) -> bool:
        """Whether there is a thread, in this process."""
        return self._thread is not None and self._process == os.getpid()

    def begin(self, work: Callable[[], None]) -> Outcome:
        """Have ``work`` done after all earlier work. The Outcome then gives what it raised, or None."""
        if not self.running:
            self._start()
        done = Outcome()

        def told() -> None:
            try:
                work()
            except BaseException as error:
                done.put(error)
            else:
                done.put(None)

        self._tasks.put(told)
        return done

    def do(self, work: Callable[[], None]) -> None:
        """Have ``work`` done and wait until it is, also where something interrupts the wait. Raises what it does."""
        try:
            error = self.begin(work).get()
        except BaseException:
            self.rest()  # what it works on is nobody else's yet
            raise
        if error is not None:
            raise error

    def rest(self) -> None:
        """Wait until nothing is worked on."""
        if self.running:
            self.begin(_nothing).get()

    def close(self) -> None:
        """Let the thread finish and end. The next work begins another."""
        self.rest()  # a thread that is waited for may count as ended, though it works on, where its end is not awaited
        if (thread := self._thread) is not None and self.running:
            self._thread = None  # now: what is put behind the word to end is never done
            self._tasks.put(None)
            thread.join()
        self._thread = None

    def _start(self) -> None:
        tasks = _Tasks()
        thread = Thread(target=_serve, args=(tasks,), name=self._name, daemon=True)
        finalize(self, tasks.put, None).atexit = False  # there ``_close_all`` waits for it, too
        _ALL.add(self)
        try:
            thread.start()
        except BaseException:  # it may have begun
            tasks.put(None)
            raise
        self._thread, self._tasks, self._process = thread, tasks, os.getpid()


def _serve(tasks: _Tasks) -> None:
    while (work := tasks.get()) is not None:
        work()
        del work  # what it holds is not this thread's to keep


def _nothing() -> None:
    pass


def _close_all() -> None:
    """A thread that comes back from C++ to an interpreter which has ended aborts the process."""
    for worker in list(_ALL):
        worker.close()


_ALL: WeakSet[Worker] = WeakSet()
atexit.register(_close_all)
