"""Decides when a CUDA graph may be recorded: alone in the process, for whoever allocates meanwhile spoils it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition


class Recording:
    """Steps run side by side (a target's and its draft's); those that may record, one at a time and beside none.

    ONNX Runtime records with ``cudaStreamCaptureModeGlobal``: no thread may allocate or copy synchronously meanwhile.
    """

    def __init__(self) -> None:
        self._changed = Condition()
        self._beside, self._alone = 0, False

    @contextmanager
    def step(self, *, records: bool) -> Iterator[None]:
        """Around one step."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone and not (records and self._beside))
            self._alone, self._beside = records, self._beside + 1
        try:
            yield
        finally:
            with self._changed:
                self._alone, self._beside = False, self._beside - 1
                self._changed.notify_all()


RECORDING = Recording()
