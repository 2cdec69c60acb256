"""Engines: how one exported model takes one step on one device."""

from __future__ import annotations

from ..bundle import Model
from ..errors import UsageError
from .base import ONE_ROW, Engine, Logits, ModelSpec, Tokens

__all__ = ["BUILT", "ONE_ROW", "PROVIDERS", "Engine", "Logits", "ModelSpec", "Tokens", "open_engine", "require"]

BUILT = ("tensorrt", "tensorrt-rtx")  # these run an engine that was built for the device
PASSED_ON = ("ort-tensorrt", "ort-tensorrt-rtx")  # ONNX Runtime hands the graph to TensorRT
PROVIDERS = ("cpu", "cuda", *BUILT, *PASSED_ON)


def open_engine(
    model: Model, *, provider: str = "cpu", threads: int = 1, variant: str = "auto", exact: bool = False
) -> Engine:
    """Open a model of a bundle for one row (``reset`` for more).

    ``provider`` is one of PROVIDERS: cpu and cuda run the bundle's graphs on ONNX Runtime, tensorrt and tensorrt-rtx
    an engine that was built from them for this device, ort-tensorrt and ort-tensorrt-rtx ONNX Runtime's providers of
    these SDKs. ``threads`` (>= 1) are ONNX Runtime's own; ``variant`` pins a graph of the bundle, ``auto`` takes the
    fastest for the provider and the number of rows; with ``exact``, the fastest whose steps round alike on this
    processor (``rounding``) in the widths of ``spec.widths``.
    Raises UsageError for an unknown provider, EngineError if the runtime or the provider is not there, or if nothing
    is exact here.
    """
    if provider not in PROVIDERS:
        raise UsageError(f"provider '{provider}' is unknown (one of: {', '.join(PROVIDERS)})")
    if threads < 1:
        raise UsageError(f"threads must be at least 1, not {threads}")
    if provider in BUILT:
        return _open_tensorrt(model, provider, variant)
    if model.entry.dialect == "slots":
        from .ort import SlotEngine

        return SlotEngine(model, provider=provider, threads=threads, variant=variant, exact=exact)
    from .foreign import ForeignEngine

    return ForeignEngine(model, provider=provider, threads=threads, variant=variant, exact=exact)


def require(provider: str) -> None:
    """Raise EngineError saying what is missing, and what to do, where ``provider`` cannot run on this machine."""
    from . import providers
    from .tensorrt import compat
    from .tensorrt.cuda import Cuda

    if provider in BUILT:
        compat.sdk(provider)
    else:
        providers.require(provider)
    if provider != "cpu":
        compat.compute_capability()
        Cuda().close()


def _open_tensorrt(model: Model, provider: str, variant: str) -> Engine:
    """A built engine that has passed its self-test on this device."""
    if variant != "auto":
        raise UsageError(f"variant '{variant}' pins a graph of ONNX Runtime's; provider '{provider}' has one engine")
    from .tensorrt import selftest
    from .tensorrt.engine import TensorRTEngine

    engine = TensorRTEngine(model, provider=provider)
    try:
        selftest.require(engine, model)
        engine.reset(1)
    except BaseException:
        engine.close()
        raise
    return engine
