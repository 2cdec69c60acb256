"""How a measured program runs: a process that answers one request at a time and is stopped while others compute, so
that no pool of threads spins beside them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from pathlib import Path
from time import monotonic
from typing import Any

LOAD_SECONDS, ANSWER_SECONDS = 300.0, 180.0


class PeerError(Exception):
    """A program could not be installed, prepared, started or asked; the message is the reason, in one line."""


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


class Child:
    """One program in one mode, loaded. ``hello`` is its first message."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        """Start it and wait until it is loaded; then it is stopped. Raises PeerError."""
        self.log, self._rest = log, b""
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | environment,
                start_new_session=True,
            )
        try:
            self.hello = self._receive(LOAD_SECONDS)
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Its answer. Raises PeerError if it dies, says no JSON, or takes too long."""
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            return self._receive(ANSWER_SECONDS)
        except OSError:
            raise PeerError(self._reason("ended")) from None
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End it. Calling it twice is fine."""
        self._signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue

    def _receive(self, seconds: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        descriptor, until = self.process.stdout.fileno(), monotonic() + seconds
        while b"\n" not in self._rest:
            if not select.select([descriptor], [], [], max(0.0, until - monotonic()))[0]:
                raise PeerError(f"no answer within {seconds:.0f} s")
            if not (block := os.read(descriptor, 65536)):
                raise PeerError(self._reason("ended"))
            self._rest += block
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            return dict(json.loads(line))
        except ValueError:
            raise PeerError(f"said something that is not JSON: {line[:60]!r}") from None

    def _reason(self, what: str) -> str:
        self.process.wait()
        return last_line(self.log) or f"{what} with code {self.process.returncode}"

    def _signal(self, number: int) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)
