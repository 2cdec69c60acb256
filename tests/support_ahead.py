"""Stand-ins for the thread that drafts ahead: how far it comes, and where an interrupt does, is the test's to say."""

from __future__ import annotations

import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from leadout.engines.worker import Outcome, Worker


class Looks:
    """A word to stop that is true once it has been looked at ``most`` times (None: never)."""

    def __init__(self, most: int | None) -> None:
        self.left = most

    def __bool__(self) -> bool:
        if self.left is not None:
            self.left -= 1
        return self.left is not None and self.left < 0


def come_as_far_as(monkeypatch: pytest.MonkeyPatch, most: int | None) -> None:
    """Let every run ahead take so many steps, at once, then meet the end of the target's."""

    def at_once(_: Worker, work: Callable[[], Any]) -> Outcome:
        drafter, done = work.func.__self__, Outcome()  # type: ignore[attr-defined]
        stop, drafter._stop = drafter._stop, Looks(most)
        try:
            done.put(work())
        except Exception as error:
            done.put(error)
        finally:
            drafter._stop = stop
        return done

    monkeypatch.setattr(Worker, "begin", at_once)


def interrupts(work: Callable[[], object], where: tuple[str, ...]) -> Iterator[None]:
    """Do ``work`` again and again, each time interrupted one place later where the interpreter looks for signals: as a
    function begins, and behind calls of C. Those in files whose names end like one of ``where`` alone count."""
    for last in itertools.count(1):
        seen = 0

        def look(frame: Any, event: str, _: Any, last: int = last) -> None:
            nonlocal seen
            begins = event == "call" and not frame.f_code.co_flags & inspect.CO_GENERATOR
            seen += (begins or event == "c_return") and frame.f_code.co_filename.endswith(where)
            if seen == last:
                raise KeyboardInterrupt

        sys.setprofile(look)
        try:
            work()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
        if seen < last:
            return
        yield


def is_done(work: Callable[[], object]) -> bool:
    """Whether a thread of its own comes to the end of ``work`` in good time."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(5)
    return not thread.is_alive()
