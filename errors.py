"""Every error Leadout raises on purpose, with the exit code the command line gives it.

    LeadoutError            1
    ├── UsageError          2
    ├── BundleError         3
    ├── ExportError         4
    ├── EngineError         5
    ├── ContextError        6
    └── CheckError          7

Each message is one line and names the thing and the legal range, or the next command.
"""

from __future__ import annotations

import contextlib
import reprlib
import shlex
import sys
from collections.abc import Iterator

_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxstring, _BRIEF.maxlong, _BRIEF.maxother = 2, 60, 60, 60


class LeadoutError(Exception):
    """Base of all; catch it to catch whatever Leadout refuses."""

    exit_code = 1


class UsageError(LeadoutError, ValueError):
    """An option or argument outside its legal range."""

    exit_code = 2


class BundleError(LeadoutError):
    """A bundle that is missing, damaged, or of another format."""

    exit_code = 3


class ExportError(LeadoutError):
    """A checkpoint or model directory that cannot become a bundle."""

    exit_code = 4


class EngineError(LeadoutError):
    """A runtime, provider or device that cannot do what was asked."""

    exit_code = 5


class ContextError(LeadoutError, ValueError):
    """A prompt (with what is to be written) longer than the context."""

    exit_code = 6


class CheckError(LeadoutError):
    """A check that ran and did not hold."""

    exit_code = 7


@contextlib.contextmanager
def named(where: str) -> Iterator[None]:
    """What is refused inside is said to be ``where``, if that says anything."""
    try:
        yield
    except LeadoutError as error:
        if not where:
            raise
        raise type(error)(f"{where}: {error}") from None


def not_installed(error: ImportError) -> ExportError:
    """What to say where an export stops for want of a package, or has one of a version that others do not take."""
    if isinstance(error, ModuleNotFoundError):
        return ExportError(f"exporting needs '{error.name}', which is not installed: pip install 'leadout[export]'")
    return ExportError(
        f"exporting needs other packages than are here ({first_line(error)}): pip install 'leadout[export]'"
    )


def require_docstrings() -> None:
    """Raise ExportError where Python drops docstrings: transformers reads its own as it is imported."""
    if sys.flags.optimize > 1:
        raise ExportError("transformers reads docstrings, which Python drops here: set PYTHONOPTIMIZE=1 or none")


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the name of its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def one_line(message: object) -> str:
    """A message of any number of lines as one line, with single spaces."""
    return " ".join(str(message).split())


def typed(path: object) -> str:
    """A path in a command, as a shell takes it."""
    return shlex.quote(str(path))


def shown(value: object) -> str:
    """``value`` as a message quotes it, whatever it is: on one line, and not at length."""
    try:
        return " ".join(line.strip() for line in _BRIEF.repr(value).splitlines())
    except Exception:  # an int of thousands of digits
        return f"{type(value).__name__} (too long to show)"
