"""The two SDKs that share one Python interface: TensorRT and TensorRT-RTX, imported when first asked for."""

from __future__ import annotations

import importlib
from typing import Any

from ...errors import EngineError

SDKS = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}  # provider name -> module


def sdk(name: str) -> Any:
    """The module of an SDK. Raises EngineError with the line that installs it if it is not there."""
    try:
        return importlib.import_module(SDKS[name])
    except ImportError as error:
        raise EngineError(f"provider '{name}' does not load ({error}): pip install 'leadout[{name}]'") from None


def version(name: str) -> str:
    """The version of an SDK, as engines record it."""
    return str(sdk(name).__version__)
