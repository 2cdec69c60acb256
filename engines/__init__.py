"""Engines: how one exported model takes one step on one device."""

from __future__ import annotations

from ..bundle import Model
from ..errors import UsageError
from .base import Engine, Logits, ModelSpec, Tokens

__all__ = ["PROVIDERS", "Engine", "Logits", "ModelSpec", "Tokens", "open_engine"]

PROVIDERS = ("cpu", "cuda")


def open_engine(model: Model, *, provider: str = "cpu", threads: int = 1, variant: str = "auto") -> Engine:
    """Open a model of a bundle for one row (``reset`` for more).

    ``provider`` is one of PROVIDERS; ``threads`` (>= 1) are the runtime's own; ``variant`` pins a graph of the
    bundle, ``auto`` takes the fastest for the provider and the number of rows.
    Raises UsageError for an unknown provider, EngineError if the runtime or the provider is not there.
    """
    if provider not in PROVIDERS:
        raise UsageError(f"provider '{provider}' is unknown (one of: {', '.join(PROVIDERS)})")
    if threads < 1:
        raise UsageError(f"threads must be at least 1, not {threads}")
    if model.entry.dialect == "slots":
        from .ort import SlotEngine

        return SlotEngine(model, provider=provider, threads=threads, variant=variant)
    from .foreign import ForeignEngine

    return ForeignEngine(model, provider=provider, threads=threads, variant=variant)
