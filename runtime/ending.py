"""Sees to it that no round runs while the interpreter ends, nor in a process that was forked after loading."""

from __future__ import annotations

import os
from threading import RLock, current_thread
from typing import Final
from weakref import finalize

from ..errors import EngineError

_LONGEST: Final = 10.0  # seconds that the interpreter waits for a round


class Ending:
    """``lock`` is held while a round runs; ``over`` is set when the interpreter ends, or its owner is gone.

    A daemon thread that returns from C++ to an interpreter which has ended is unwound through C++ code that cannot take
    it, and the whole process aborts. (Python waits for other threads before it ends.)
    """

    def __init__(self) -> None:
        self.lock, self.over = RLock(), False
        self._process = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process was forked since."""
        return os.getpid() != self._process

    def require_own(self) -> None:
        """Raise EngineError in a process that was forked since: the threads that its sessions would wait for, and those
        that hold the pair's turn, exist only in its parent."""
        if self.forked:
            raise EngineError("this pair was loaded before the process forked: load the bundle anew in the child")

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
        held = self.lock.acquire(timeout=_LONGEST)
        self.over = True
        if held:
            self.lock.release()
