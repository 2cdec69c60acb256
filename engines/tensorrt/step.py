"""One shape of call: where its inputs and small outputs lie on both sides, and how they go over in one piece each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import Tokens
from .cuda import Cuda
from .session import Session, Shapes

_ALIGNMENT = 256  # bytes; every tensor begins at a multiple, as TensorRT wants it
_DTYPES: dict[str, type[Any]] = {"INT64": np.int64, "INT32": np.int32, "FLOAT": np.float32}


class Arena:
    """A block of pinned host memory and its twin on the device, holding arrays one after the other."""

    def __init__(self, cuda: Cuda, session: Session, shapes: Shapes) -> None:
        dtypes = {name: np.dtype(_DTYPES[session.type_name(name)]) for name in shapes}
        sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
        offsets, total = {}, 0
        for name, size in sizes.items():
            offsets[name] = total
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._cuda, self.host, self.device = cuda, cuda.pinned(total), cuda.allocate(total)
        self.addresses = {name: self.device + offset for name, offset in offsets.items()}
        self.arrays: dict[str, NDArray[Any]] = {
            name: self.host[offsets[name] : offsets[name] + sizes[name]].view(dtypes[name]).reshape(shape)
            for name, shape in shapes.items()
        }

    def close(self) -> None:
        """Release both; no array may be used after."""
        self.arrays.clear()
        self._cuda.unpin(self.host)
        self._cuda.free(self.device)


class Step:
    """``rows`` x ``width`` tokens, logits of ``wanted`` a row: bindings made once. ``graph`` is its CUDA graph once it
    has one, and ``context`` what that was captured from."""

    def __init__(
        self,
        session: Session,
        cuda: Cuda,
        profile: int,
        size: tuple[int, int, int, int],
        shared: Mapping[str, int],
        caches: Shapes,
    ) -> None:
        """``size``: rows, width, wanted, k of the top-k head. ``shared``: addresses of what all steps share (caches
        and logits); ``caches``: the shapes of the caches' inputs."""
        rows, width, wanted, top = size
        inputs: dict[str, tuple[int, ...]] = {
            "input_ids": (rows, width),
            "position_ids": (rows, width),
            "past_lens": (rows,),
            "logit_index": (rows, wanted),
        }
        outputs: dict[str, tuple[int, ...]] = {
            "greedy": (rows, wanted),
            "logsumexp": (rows, wanted),
            "top_ids": (rows, wanted, top),
            "top_logits": (rows, wanted, top),
        }
        self._cuda, self.profile, self.width = cuda, profile, width
        self._asked = Arena(cuda, session, {name: s for name, s in inputs.items() if name in session.inputs})
        self._answered = Arena(cuda, session, {name: s for name, s in outputs.items() if name in session.outputs})
        self.shapes: Shapes = inputs | dict(caches)
        self.addresses = {**shared, **self._asked.addresses, **self._answered.addresses}
        self.bytes = self._asked.host.nbytes + self._answered.host.nbytes
        self.graph: Any = None
        self.context: Any = None
        self._offsets = np.arange(width, dtype=np.int64)
        self._every = np.tile(np.arange(wanted, dtype=np.int64), (rows, 1))

    def fill(self, tokens: Tokens, past_lens: Tokens, logit_index: Tokens | None, last_position: int) -> None:
        """Put a call's numbers where they are copied from. ``last_position``: padding behind it repeats it."""
        asked = self._asked.arrays
        index = self._every if logit_index is None else logit_index
        asked["input_ids"][...] = tokens
        asked["past_lens"][...] = past_lens
        if "position_ids" in asked:
            asked["position_ids"][...] = np.minimum(past_lens[:, None] + self._offsets, last_position)
        asked["logit_index"][...] = index

    def enqueue(self, session: Session, context: Any) -> None:
        """Queue the inputs' way over, the step, and the answers' way back."""
        self._cuda.upload(self._asked.device, self._asked.host)
        session.enqueue(context)
        self._cuda.download(self._answered.host, self._answered.device)

    def best(self) -> tuple[Tokens, NDArray[np.float32]]:
        """Of each position, flat: the greedy token, and its logit (not finite where a row holds anything that is
        not). Copies: the next step of this shape overwrites the originals."""
        answered = self._answered.arrays
        total = answered["logsumexp"]
        peaks = np.where(np.isfinite(total), answered["top_logits"][..., 0], total)
        return answered["greedy"].astype(np.int64).reshape(-1), peaks.reshape(-1)

    def tops(self) -> tuple[Tokens, NDArray[np.float32]] | None:
        """Of each position, flat, the ids and logits [R, k] of its largest, largest first; None without that head.
        Copies, as in ``best``."""
        answered = self._answered.arrays
        if "top_ids" not in answered:
            return None
        k = answered["top_ids"].shape[-1]
        return answered["top_ids"].astype(np.int64).reshape(-1, k), answered["top_logits"].reshape(-1, k).copy()

    def close(self) -> None:
        """Release its memory and its graph."""
        if self.graph is not None:
            self._cuda.discard(self.graph)
            self.context = None
        self._asked.close()
        self._answered.close()
