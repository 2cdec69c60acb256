"""Stand-ins for the thread that drafts ahead: how far it comes is the test's to say, not the clock's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from leadout.runtime import ahead


class Steps(Executor):
    """Runs what is submitted at once and tells it to stop after ``most`` looks at its event (None: never)."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:  # type: ignore[override]
        drafter, done = work.__self__, Future[Any]()  # type: ignore[attr-defined]
        event, drafter._stop = drafter._stop, Looks(self.most)
        try:
            done.set_result(work(*args, **options))
        except Exception as error:
            done.set_exception(error)
        finally:
            drafter._stop = event
        return done


class Looks:
    """An event that is set once it has been looked at ``most`` times."""

    def __init__(self, most: int | None) -> None:
        self.left = most

    def is_set(self) -> bool:
        if self.left is not None:
            self.left -= 1
        return self.left is not None and self.left < 0


def come_as_far_as(monkeypatch: pytest.MonkeyPatch, most: int | None) -> None:
    """Let every run ahead take so many steps, then meet the end of the target's."""
    monkeypatch.setattr(ahead, "ThreadPoolExecutor", lambda *args, **options: Steps(most))
