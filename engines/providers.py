"""Which onnxruntime is installed, what it can run on, and how a session is opened."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import os
import sys
import weakref
from pathlib import Path
from typing import Any

from ..errors import EngineError, first_line
from .saturation import EXACT_SUMS, saturates

DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu")
EXECUTION_PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "ort-tensorrt": "TensorrtExecutionProvider",
    "ort-tensorrt-rtx": "NvTensorRTRTXExecutionProvider",
}
_GPU_BUILD = "pip install 'leadout[cuda]'"
_MISSING = {
    "cpu": "pip install 'leadout[cpu]'",
    "cuda": _GPU_BUILD,
    "ort-tensorrt": f"{_GPU_BUILD}; TensorrtExecutionProvider also needs TensorRT's own libraries",
    "ort-tensorrt-rtx": "NvTensorRTRTXExecutionProvider is a plugin of NVIDIA's, which leadout[cuda] does not bring,"
    " and needs TensorRT's own libraries; engines of leadout build need no plugin: pip install 'leadout[tensorrt-rtx]'",
}  # what helps
_LIBRARIES = {"cuda": "cuda", "ort-tensorrt": "tensorrt"}  # libonnxruntime_providers_*.so
_NOT_FOUND, _DRIVER = ": cannot open shared object file", "libcuda.so.1"
_SPIN_US = "200"  # microseconds
_OPTIONS: dict[str, dict[str, str]] = {
    "cpu": {},
    "cuda": {"use_tf32": "0"},
    "ort-tensorrt": {},
    "ort-tensorrt-rtx": {},
}  # float32 is float32: who wants speed exports float16
_LARGEST_FOLD = str(1 << 20)  # bytes of a constant that is made of others
_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()  # sessions
_FATAL_ONLY = 4  # onnxruntime writes to stderr from C++; what it raises is told once, by EngineError


def installed() -> dict[str, str]:
    """The onnxruntime distributions that are installed, name to version."""
    return {name: version for name in DISTRIBUTIONS if (version := version_of(name)) is not None}


def version_of(distribution: str) -> str | None:
    """The installed version of a Python distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def onnxruntime() -> Any:
    """Import onnxruntime. Raises EngineError if it is missing, or installed twice over.

    Its official builds write what they were used for into the user's home and report it to Microsoft, unless they are
    told otherwise before they are loaded: they are, where the environment says nothing.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    found = installed()
    if len(found) > 1:
        names = " and ".join(found)
        raise EngineError(
            f"{names} are both installed and overwrite each other: "
            f"pip uninstall -y {' '.join(found)}, then pip install 'leadout[cpu]' or 'leadout[cuda]'"
        )
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        if (interrupt := interrupted(error)) is not None:
            raise interrupt from None
        if found:
            raise EngineError(f"onnxruntime is installed but does not load: {first_line(error)}") from None
        raise EngineError("no onnxruntime installed: pip install 'leadout[cpu]' or 'leadout[cuda]'") from None


def interrupted(error: BaseException | None) -> KeyboardInterrupt | None:
    """The Ctrl-C (or signal) that a module in C told as its own failure to load, if that is what it was."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def require(provider: str) -> Any:
    """onnxruntime, if it was built with ``provider`` and the libraries which that needs are here. Raises EngineError
    saying what to install if not."""
    ort = onnxruntime()
    have = ort.get_available_providers()
    if EXECUTION_PROVIDERS[provider] not in have:
        helps = _MISSING[provider]
        if helps.startswith(_GPU_BUILD) and "onnxruntime" in installed():  # beside each other neither would work
            helps = f"pip uninstall -y onnxruntime, then {helps}"
        raise EngineError(f"provider '{provider}' is not in this onnxruntime (it has: {', '.join(have)}): {helps}")
    if provider != "cpu":
        _find_libraries(ort, provider)
    return ort


def open_session(path: Path, *, provider: str, threads: int, graphs: bool = False, lean: bool = False) -> Any:
    """Open the graph at ``path`` with ``threads`` threads of its own.

    A small model has a node every ten microseconds: waking a thread for each takes longer than the node, so they spin,
    through what lies between two steps and no longer: draft and target take turns, and threads of one that still spin
    are in the way of the other's. ``graphs``: steps may be recorded as CUDA graphs (cuda only). What TensorRT's
    providers do not take runs on CUDA's. Products in int8 are exact on every processor (``saturation``). ``lean``:
    weights are read from the file, step by step, and nothing is made of them that needs memory of its own.
    Raises EngineError if the provider is not there, falls back to another, or the file cannot be loaded.
    """
    name = native(path)
    ort = require(provider)
    wanted = EXECUTION_PROVIDERS[provider]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _FATAL_ONLY
    # A plan of a shape's memory stands beside what its first step took: a prompt's twice over. It makes steps of 16 M
    # parameters 1 to 2 % sooner, those of larger models not at all.
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.intra_op.spin_duration_us", _SPIN_US)
    if lean:
        read_weights_in_place(options)
    if provider == "cpu" and saturates(ort):
        options.add_session_config_entry(EXACT_SUMS, "1")
    chosen = [(wanted, _OPTIONS[provider] | ({"enable_cuda_graph": "1"} if graphs else {}))]
    if provider not in ("cpu", "cuda"):
        chosen.append((EXECUTION_PROVIDERS["cuda"], _OPTIONS["cuda"]))
    try:
        # Off: onnxruntime's own way to fall back, which says so on stdout.
        session = ort.InferenceSession(name, options, providers=chosen, enable_fallback=0)
    except Exception as error:  # onnxruntime's own exceptions share no base class below this
        raise EngineError(f"{path}: onnxruntime cannot load it: {first_line(error)}") from error
    if (taken := session.get_providers()[0]) != wanted:
        raise EngineError(f"provider '{provider}' fell back to {taken}: run leadout doctor --provider {provider}")
    _OPEN.add(session)
    return session


def _never_end() -> None:
    """Keep the sessions of a forked process alive until it ends: to close one would wait for threads that exist only in
    its parent."""
    for session in _OPEN:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_never_end)


def native(path: Path) -> str:
    """``path`` as onnxruntime wants it: it reads text as UTF-8, whatever the locale calls the same bytes. Raises
    EngineError for a name that is none."""
    try:
        return str(path) if os.name == "nt" else os.fsencode(path).decode("utf-8")
    except UnicodeError:
        shown = os.fsencode(path).decode("utf-8", "replace")
        raise EngineError(f"{shown}: onnxruntime opens names in UTF-8 alone; rename the bundle") from None


def _find_libraries(ort: Any, provider: str) -> None:
    """Load CUDA's libraries from the packages that onnxruntime-gpu's extras install: no loader looks there. Raises
    EngineError for one that ``provider`` needs and is nowhere: ONNX Runtime tells it in pages, and takes another."""
    with contextlib.redirect_stdout(sys.stderr):  # where what is missing is told
        ort.preload_dlls()
    library = Path(ort.__file__).parent / "capi" / f"libonnxruntime_providers_{_LIBRARIES.get(provider)}.so"
    if not library.is_file():
        return
    try:
        ctypes.CDLL(str(library))
    except OSError as error:  # what else may be wrong with it, as it is loaded out of its turn, shows when it is used
        missing, found, _ = str(error).partition(_NOT_FOUND)
        if found:
            helps = "run this on the machine with the GPU" if missing == _DRIVER else _MISSING[provider]
            raise EngineError(f"provider '{provider}' needs {missing}, which is not here: {helps}") from None


def read_weights_in_place(options: Any) -> None:
    """Let a session of ``options`` neither pack weights nor fold what is made of them alone."""
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.add_session_config_entry("optimization.constant_folding_max_output_size_in_bytes", _LARGEST_FOLD)
