"""Runs what recurses deeply and may not end on a thread of its own, whose stack is as large as that needs."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..errors import EngineError

T = TypeVar("T")

_AT_EXIT = 1.0  # seconds that the interpreter waits for what still runs
_MEBI = 2**20
_starting = threading.RLock()  # the size of new threads' stacks is the whole process's
_running: set[Aside[Any]] = set()


class Aside(Generic[T]):
    """What ``act`` comes to, which runs from now on."""

    def __init__(self, act: Callable[[], T], stack: int) -> None:
        """``stack``: the bytes its thread may use of it (taken from memory as they are used). Raises EngineError where
        there are not as many."""
        self._act, self._found, self._error = act, list[T](), list[BaseException]()
        self._since, self._ends = time.monotonic(), threading.Lock()
        self._ends.acquire()
        thread = threading.Thread(target=self._run, name="leadout aside", daemon=True)
        size = -(-stack // _MEBI) * _MEBI
        try:
            with _starting:
                before = threading.stack_size(size)
                try:
                    thread.start()
                finally:
                    threading.stack_size(before)
        except (RuntimeError, ValueError, MemoryError):
            raise EngineError(f"no thread with a stack of {size // _MEBI} MiB could be started") from None

    def wait(self, seconds: float) -> bool:
        """Whether ``act`` has ended, ``seconds`` after its beginning at the latest. (A lock, for a signal handler may
        wait in the midst of this.)"""
        if ended := self._ends.acquire(timeout=max(0.0, self._since + seconds - time.monotonic())):
            self._ends.release()
        return ended

    def result(self) -> T:
        """What ``act``, which has ended, returned; what it raised is raised."""
        for error in self._error:
            raise error
        return self._found[0]

    def _run(self) -> None:
        _running.add(self)
        try:
            self._found.append(self._act())
        except BaseException as error:  # a panic of Rust's is no Exception
            self._error.append(error)
        finally:
            del self._act
            _running.discard(self)
            self._ends.release()


@atexit.register
def _leave() -> None:
    """Wait a moment: a thread that returns from Rust to an interpreter which has ended crashes the process."""
    until = time.monotonic() + _AT_EXIT
    for each in list(_running):
        each._ends.acquire(timeout=max(0.0, until - time.monotonic()))
