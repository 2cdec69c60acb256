"""Decides when a CUDA graph may be recorded (while no other thread takes a step, for an allocation spoils it), and by
which thread: ONNX Runtime keeps separate graphs for each thread, as long as the session lives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import RLock, Thread, current_thread
from weakref import WeakKeyDictionary, ref

from .worker import Worker

Lock = AbstractContextManager[object]


class Recording:
    """Steps run side by side (a target's and its draft's); those that may record, one at a time and beside none.

    ONNX Runtime records with ``cudaStreamCaptureModeGlobal``: no thread may allocate or copy synchronously meanwhile.
    Each thread has a lock for its steps, and who records holds those of all. A bare lock in a ``with`` is given back
    wherever an interrupt comes; a ``Condition``, which is written in Python, may stay taken, and all others wait.
    """

    def __init__(self) -> None:
        self._alone = RLock()
        self._locks: WeakKeyDictionary[Thread, Lock] = WeakKeyDictionary()  # of those that are alive

    def step(self, *, records: bool) -> Lock:
        """What to be in around one step."""
        if records:
            return self._held()
        if (own := self._locks.get(current_thread())) is None:
            with self._alone:  # nobody records whom a new thread could disturb
                own = self._locks[current_thread()] = RLock()
        return own

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._alone:
            yield from _all(list(self._locks.values()))


def _all(locks: Sequence[Lock]) -> Iterator[None]:
    if not locks:
        yield
        return
    with locks[0]:
        yield from _all(locks[1:])


class OneThread:
    """Takes the steps of sessions that record: directly in the first thread that comes, and once others come, in one
    worker thread for all. (A server may have a thread for each request. Each would record all graphs anew, and they
    would stay on the device together with what ONNX Runtime keeps for each thread.)"""

    def __init__(self) -> None:
        self._first: ref[Thread] | None = None
        self._worker: Worker | None = None

    def take(self, step: Callable[[], float]) -> float:
        """What ``step`` gives, once it was taken there. Raises what it does."""
        if self._first is None:
            self._first = ref(current_thread())
        if self._worker is None:
            if self._first() is current_thread():
                return step()
            self._worker = Worker("leadout-graphs")
        given: list[float] = []
        self._worker.do(lambda: given.append(step()))
        return given[0]

    def close(self) -> None:
        """Let the thread end. Who comes next is the first again."""
        if self._worker is not None:
            self._worker.close()
        self._first = self._worker = None


RECORDING = Recording()
