"""What the programs beside this have in common: what they refuse is one line, before anything is measured; what was
measured stands in the file that was asked for, however they end."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from leadout.errors import LeadoutError, UsageError, one_line
from leadout.scripts.options import read_text


def run(main: Callable[[], object]) -> None:
    """Run a program. What it refuses ends it with one line and the exit code of the error, Ctrl-C with 130."""
    try:
        main()
    except KeyboardInterrupt:
        end("stopped by SIGINT", 130)
    except LeadoutError as error:
        end(str(error), error.exit_code)
    except OSError as error:
        end(f"{error.filename or ''}: {error.strerror or error}".lstrip(": "), 1)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().splitlines() or [f"ended with code {error.returncode}"]
        end(f"{' '.join(map(str, error.cmd[:4]))} ...: {said[-1]}", 1)


def end(reason: str, code: int) -> None:
    """Say why, and leave."""
    print(f"{Path(sys.argv[0]).name}: {one_line(reason)}", file=sys.stderr)
    sys.exit(code)


def at_least_one(text: str) -> int:
    """A number of an option. Raises ArgumentTypeError for what is none from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 1 on")
    return int(text)


def result_file(text: str) -> Path:
    """A file to write results into. Raises ArgumentTypeError where there will be none."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"'{text}' {'is a directory' if path.is_dir() else 'is in no directory'}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"'{text}' cannot be written")
    return path


def read_kinds(path: str) -> dict[str, list[str]]:
    """The prompts of each kind, in order. Raises UsageError for a line without them."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        try:
            row = json.loads(line)
            kinds[row["kind"]].append(row["prompt"])
        except (ValueError, LookupError, TypeError):
            raise UsageError(f'{path}, line {number}: expected {{"kind": ..., "prompt": ...}}') from None
    if not kinds:
        raise UsageError(f"{path}: no prompts in it")
    return kinds


def keep(path: Path | None, found: Mapping[str, Any]) -> None:
    """Write what was measured so far, if a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
