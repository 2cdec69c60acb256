"""What a measured program hears and says: one JSON object a line, in on stdin, out on what was stdout.

An adapter is run as ``python ADAPTER.py prepare JOB`` (write its model files, once) and ``python ADAPTER.py serve JOB``
(answer requests until stdin ends). A job has ``target``, ``draft`` (checkpoint directories), ``models`` (its own
folder), ``precision``, ``threads`` and ``mode``. A request has ``prompt_ids``, ``max_new_tokens``, ``temperature`` and
``seed``; end of text does not end an answer. Its answer has

* ``token_ids``: the new tokens;
* ``seconds``: from the request to the last token;
* ``first_seconds``, ``first_tokens``: when the prompt was in, and how many tokens had come out by then. What is left
  is decoding.

Only the standard library is used here: it runs in every environment.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

Job = dict[str, Any]
Request = dict[str, Any]
Answer = dict[str, Any]


def run(
    prepare: Callable[[Job], None], load: Callable[[Job], Callable[[Request], Answer]], packages: Sequence[str]
) -> None:
    """The adapter's main: ``load`` gives what answers a request. Libraries that print do so on stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = json.loads(sys.argv[2])
    if sys.argv[1] == "prepare":
        prepare(job)
        return
    answer = load(job)
    say(out, {"versions": {name: importlib.metadata.version(name) for name in packages}})
    for line in sys.stdin:
        say(out, answer(json.loads(line)))


def call(command: Sequence[str]) -> None:
    """Run a tool; if it fails, end with its exit code, so that the last line of the log is its own."""
    if code := subprocess.run(command, check=False).returncode:
        raise SystemExit(code)


def say(out: Any, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


def complete(token_ids: Sequence[int], seconds: float, first_seconds: float, first_tokens: int) -> Answer:
    """An answer, of plain numbers."""
    return {
        "token_ids": [int(token) for token in token_ids],
        "seconds": float(seconds),
        "first_seconds": float(first_seconds),
        "first_tokens": int(first_tokens),
    }
