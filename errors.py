"""Every error Leadout raises on purpose, with the exit code the command line gives it.

    LeadoutError            1
    ├── UsageError          2   an option or argument outside its legal range
    ├── BundleError         3   a bundle that is missing, damaged, or of another format
    ├── ExportError         4   a checkpoint or model directory that cannot become a bundle
    ├── EngineError         5   a runtime, provider or device that cannot do what was asked
    ├── ContextError        6   a prompt (with what is to be written) longer than the context
    └── CheckError          7   a check that ran and did not hold

Each message is one line and names the thing and the legal range, or the next command.
"""

from __future__ import annotations


class LeadoutError(Exception):
    """Base of all; catch it to catch whatever Leadout refuses."""

    exit_code = 1


class UsageError(LeadoutError, ValueError):
    exit_code = 2


class BundleError(LeadoutError):
    exit_code = 3


class ExportError(LeadoutError):
    exit_code = 4


class EngineError(LeadoutError):
    exit_code = 5


class ContextError(LeadoutError, ValueError):
    exit_code = 6


class CheckError(LeadoutError):
    exit_code = 7
