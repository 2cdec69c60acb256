"""Sees to it that no round runs beside another, while the interpreter ends, or in a process that was forked after
loading."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock, RLock, current_thread
from typing import Final
from weakref import finalize

from ..errors import EngineError, UsageError

_LONGEST: Final = 10.0  # seconds that the interpreter waits for a round


class Turns:
    """The turn and the round of one decoder. ``over`` is set when the interpreter ends, or its owner is gone;
    ``closed`` by whoever closes its engines.

    A daemon thread that returns from C++ to an interpreter which has ended is unwound through C++ code that cannot take
    it, and the whole process aborts. (Python waits for other threads before it ends.)
    """

    def __init__(self) -> None:
        self.over = self.closed = False
        self._turn, self._round = RLock(), Lock()
        self._waiting: list[Callable[[], None]] = []
        self._process = os.getpid()

    @property
    def turn(self) -> RLock:
        """Whose round it is, of several threads. Raises EngineError in a process that was forked since: who holds it
        there may be a thread of its parent, which is waited for in vain."""
        self.require_own()
        return self._turn

    @property
    def round(self) -> Lock:
        """What is held while a round runs, by a thread that has the turn. Raises UsageError where that thread is in the
        middle of a round already, which a signal handler or a finalizer interrupts: the caches are in use; EngineError
        where all is closed."""
        if self.closed:
            self.require_open()
        if self._round.locked() and not self.over:
            raise UsageError(
                "this pair is in the middle of a round of the same thread (a signal handler or a finalizer interrupts"
                " it): ask when that is over"
            )
        return self._round

    def between(self, act: Callable[[], None]) -> None:
        """Call ``act``, which takes the turn, now or, from the middle of a round, behind it."""
        with self.turn:
            self._waiting.append(act)
            self.catch_up()

    def catch_up(self) -> None:
        """A round may have ended: call what waits for that."""
        if self._waiting:
            with self.turn:
                while self._waiting and not self._round.locked():
                    self._waiting.pop(0)()

    @property
    def forked(self) -> bool:
        """Whether this process was forked since."""
        return os.getpid() != self._process

    def require_own(self) -> None:
        """Raise EngineError in a process that was forked since: the threads that its sessions would wait for, and those
        that hold the pair's turn, exist only in its parent."""
        if self.forked:
            raise EngineError("this pair was loaded before the process forked: load the bundle anew in the child")

    def require_open(self) -> None:
        """Raise EngineError where nothing can be asked any more, here or in this process."""
        self.require_own()
        if self.closed:
            raise EngineError("this pair is closed: load the bundle anew (leadout.load)")

    def follow(self, owner: object) -> None:
        """``over`` is set once ``owner`` is gone, at the interpreter's end at the latest."""
        finalize(owner, self._end)

    def leave(self) -> None:
        """End a daemon thread quietly, as the interpreter would. To be called where ``over`` is set."""
        if current_thread().daemon:
            raise SystemExit

    def _end(self) -> None:
        if self.forked:
            return
        self.over = True  # first: who finds the lock taken sees why
        if self._round.acquire(timeout=_LONGEST):
            self._round.release()
