"""The very graph an engine is built from, run without TensorRT: on ONNX Runtime, or on onnx's reference evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from leadout.bundle import Model
from leadout.engines.providers import open_session
from leadout.export.tensorrt.build import Sizes, write_graph

Array = NDArray[Any]
CACHE = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16, "int4": np.float16}


class Lowered:
    """A lowered model with a cache of ``rows`` rows. bf16 has no kernels on a CPU: it runs on the evaluator, which
    takes vocabularies up to 64 only."""

    def __init__(self, model: Model, folder: Path, precision: str, sizes: Sizes, rows: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.graph, self.notes = write_graph(model, folder, precision, sizes)
        evaluator = precision == "bf16"
        self.session = (
            ReferenceEvaluator(str(self.path)) if evaluator else open_session(self.path, provider="cpu", threads=1)
        )
        self.slots = sizes.slots(model)
        self.cache = {
            f"past_key_values.{i}.{kind}": np.zeros((rows, layer.heads, self.slots, dim), CACHE[precision])
            for i, layer in enumerate(model.entry.cache)
            for kind, dim in (("key", layer.key_dim), ("value", layer.value_dim))
        }

    def step(self, tokens: Array, past: Array, index: Array | None = None) -> dict[str, Array]:
        """Outputs by name but the caches, which are kept."""
        index = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1)) if index is None else index
        feeds = {
            "input_ids": tokens,
            "position_ids": past[:, None] + np.arange(tokens.shape[1]),
            "past_lens": past,
            "logit_index": index,
        }
        names = [str(v.name) for v in self.graph.graph.outputs]
        found = dict(zip(names, self.session.run(None, feeds | self.cache), strict=True))
        for name in self.cache:
            self.cache[name] = found.pop(name.replace("past_key_values", "present"))
        return found


def relative(found: Array, wanted: Array) -> float:
    """Root mean square of the error over that of what is wanted."""
    return float(np.sqrt(((found - wanted) ** 2).mean() / (wanted**2).mean()))
