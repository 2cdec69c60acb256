"""Leadout: speculative decoding you can deploy. A draft leads out; the target decides; the text is the target's own."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
        BundleError,
        CheckError,
        ContextError,
        EngineError,
        ExportError,
        LeadoutError,
        UsageError,
    )
    from .runtime.pair import Chat, Pair, Piece, Prompt, Request, Result, Settings, Stats, Stream, load

__version__ = "0.1.0"

__all__ = [
    "BundleError",
    "Chat",
    "CheckError",
    "ContextError",
    "EngineError",
    "ExportError",
    "LeadoutError",
    "Pair",
    "Piece",
    "Prompt",
    "Request",
    "Result",
    "Settings",
    "Stats",
    "Stream",
    "UsageError",
    "__version__",
    "load",
]


if not TYPE_CHECKING:  # to a type checker a module with this function has every name, misspelt ones, too

    def __getattr__(name: str) -> Any:
        """Import a public name at its first use: `import leadout` itself loads no runtime."""
        if name not in __all__:
            raise AttributeError(f"module 'leadout' has no attribute '{name}'")
        home = ".errors" if name.endswith("Error") else ".runtime.pair"
        return getattr(importlib.import_module(home, __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
