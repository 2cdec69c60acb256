"""How much memory a bundle's models will take on a device, from ``leadout.json`` alone: nothing is opened or loaded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..bundle import Model, ModelEntry, Recurrence
from ..errors import UsageError, shown
from . import foreign, variants
from .base import ANY, MAX_STEP, MOST_ROWS, ONE_ROW, READ_ALONE, ModelSpec
from .golden import GOLDEN
from .memory import bucket, logit_rows, steady
from .tensorrt.buildable import PRECISIONS, require_buildable

PLANNED = ("cpu", "cuda", "tensorrt", "tensorrt-rtx")
_WEIGHT_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int4": 0.5 + 2 / 32}  # of an engine
MOST_DRAFTED = 64  # by a tree; by text that repeats 63, else 16
_LIVE = 16  # hidden-sized activations a token that are alive at once, measured on Llama graphs
_KERNELS = 8 << 20  # what an engine holds beside its weights, measured with TensorRT-RTX 1.7


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is planned for: rows, drafted tokens a round, tokens of context; ``capacity``: an engine's slots a row
    (None: context and draft), ``precision``: of an engine (None: fp16). Both are an engine's alone."""

    provider: str
    batch: int
    draft_length: int
    context: int
    precision: str | None = None
    capacity: int | None = None

    def __post_init__(self) -> None:
        """Raises UsageError naming the legal range."""
        for name, choices in (("provider", PLANNED), ("precision", PRECISIONS)):
            if (value := getattr(self, name)) is not None and value not in choices:
                raise UsageError(f"{name} '{value}' is unknown (one of: {', '.join(choices)})")
        if self.precision is not None and not self.built:
            raise UsageError(
                f"precision is an engine's; provider '{self.provider}' runs a bundle in that of its export"
            )
        for name, (least, most) in {"batch": (1, MOST_ROWS), "draft_length": (0, MOST_DRAFTED)}.items():
            if not least <= (value := getattr(self, name)) <= most:
                raise UsageError(f"{name.replace('_', '-')} must be from {least} to {most}, not {shown(value)}")
        if self.context < 1:
            raise UsageError(f"context must be at least 1, not {self.context}")
        if self.capacity is not None:
            self._check_capacity(self.capacity)

    @property
    def built(self) -> bool:
        """Whether the provider runs engines."""
        return self.provider.startswith("tensorrt")

    @property
    def engine_precision(self) -> str:
        """Of engines, where the provider runs them."""
        return "fp16" if self.precision is None else self.precision

    def _check_capacity(self, capacity: int) -> None:
        if not self.built:
            raise UsageError(f"capacity is an engine's; with provider '{self.provider}' a cache grows as it is needed")
        context, step = self.context + self.draft_length, self.draft_length + 1
        if capacity < context:
            raise UsageError(
                f"capacity must be at least {context} slots (context {self.context} and a draft of"
                f" {self.draft_length}), not {capacity}"
            )
        if capacity < 2 * step:
            raise UsageError(f"capacity must be at least {2 * step} slots (two steps of {step}), not {capacity}")


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one model: weights, cache and logits are exact (an engine's weights nearly), ``steps`` is an estimate
    of what lives during the widest step."""

    weights: int
    cache: int
    logits: int
    steps: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.logits + self.steps


def plan(model: ModelEntry, load: Load) -> Memory:
    """The memory of one model. Raises UsageError if context or capacity are beyond the model's, what opening it raises
    for a provider that runs no such model, ExportError for one of which no such engine can be built."""
    if load.built:
        require_buildable(model, load.engine_precision)
    elif model.dialect == "slots":
        variants.require_possible(Model(Path(model.directory), model), load.provider, "auto")
    else:
        foreign.require_possible(Model(Path(model.directory), model), load.provider)
    if load.context > model.max_context:
        raise UsageError(f"context {load.context} exceeds the model's {model.max_context} tokens")
    if load.capacity is not None and load.capacity > (most := longest(load, model)):
        raise UsageError(
            f"capacity must be at most {most} slots (the model's context and a draft of {load.draft_length}), not"
            f" {load.capacity}"
        )
    slots = _slots(model, load)
    number, active = _bytes_of_numbers(model, load)
    hidden = _hidden(model)
    # Fused attention on a GPU keeps no scores; ONNX Runtime holds them twice, before and after the softmax.
    scores = 0 if load.built else 2 * (hidden / model.cache[0].key_dim) * slots
    rows = load.batch * (load.draft_length + 1)
    rows = logit_rows(rows, load.batch) if load.provider == "cuda" else rows
    grown = 2 if model.dialect == "concat" else 1  # the cache of a step is written beside that of the last
    kept = (model.features or 0) + sum(c.heads * (c.key_dim + c.value_dim) for c in model.cache)  # numbers a slot
    return Memory(
        weights=_weights(model, load),
        cache=grown * load.batch * slots * number * kept + load.batch * _beside(model.recurrence),
        logits=rows * model.vocab_size * 4,
        steps=int(_at_once(model, load) * active * (_LIVE * hidden + scores)),
    )


def longest(load: Load, model: ModelEntry) -> int:
    """Slots of a row that an engine of ``model`` can come to use."""
    return model.max_context + load.draft_length


def fitting(load: Load, model: ModelEntry) -> Load:
    """``load`` for a draft: one of less context serves as far as it goes."""
    capacity = None if load.capacity is None else min(load.capacity, longest(load, model))
    return dataclasses.replace(load, context=min(load.context, model.max_context), capacity=capacity)


def describe(memories: Mapping[str, Memory], load: Load, models: Mapping[str, ModelEntry]) -> dict[str, Any]:
    """The plan as JSON can hold it; sizes in bytes. ``precision`` is the engines', or that of each model."""
    precisions = {role: load.engine_precision if load.built else model.precision for role, model in models.items()}
    described = {
        role: {"precision": precisions[role], **dataclasses.asdict(memory), "total": memory.total}
        for role, memory in memories.items()
    }
    total = sum(memory.total for memory in memories.values())
    return dataclasses.asdict(load) | {"precision": precisions["target"], "models": described, "total": total}


def _slots(model: ModelEntry, load: Load) -> int:
    """Of a row's buffers."""
    slots = load.context + load.draft_length
    if load.built:
        return load.capacity or slots
    if model.dialect != "slots":
        grown = -(-slots // foreign.BUCKET) * foreign.BUCKET
        return max(min(grown, model.max_context), model.least_slots or 0)
    coarse = steady(variants.choose(model, load.batch, load.provider, variants.SOONEST), load.provider)
    return bucket(slots, coarse=coarse, gpu=load.provider == "cuda")


def _at_once(model: ModelEntry, load: Load) -> int:
    """Tokens of the widest step, in all rows: of prompts, or of drafts."""
    spec, rows, context = ModelSpec.of(model, ANY, trees=False), load.batch, load.context
    read = rows * min(MAX_STEP if load.built else spec.chunk(rows), context)
    one = variants.choose(model, 1, load.provider, variants.SOONEST)
    if rows > 1 and load.provider == "cpu" and one in ONE_ROW and not spec.recurrent:  # ``SlotEngine.reads_alone``
        read = max(min(spec.chunk(1), context), min(read, rows * (READ_ALONE - 1)))
    return max(read, rows * (load.draft_length + 1))


def _bytes_of_numbers(model: ModelEntry, load: Load) -> tuple[int, int]:
    """Of the cache, and of activations: on a CPU ONNX Runtime computes in float32 whatever is stored."""
    if load.built:
        size = 4 if load.engine_precision == "fp32" else 2
        return size, size
    size = 2 if model.dtype == "float16" else 4
    return size, 4 if load.provider == "cpu" else size


def _beside(recurrence: Recurrence | None) -> int:
    """What a row keeps beside its slots: trails, and states twice (``trails.py``)."""
    if recurrence is None:
        return 0
    states = sum(state.heads * state.key_dim * state.value_dim for state in recurrence.states)
    return 4 * (recurrence.slots * sum(recurrence.trails) + 2 * states)


def _weights(model: ModelEntry, load: Load) -> int:
    if load.built:
        table = min(model.parameters, int(model.vocab_size * _hidden(model)))  # the embedding stays 16 bits wide
        rest = model.parameters - table
        size = _WEIGHT_BYTES[load.engine_precision]
        return _KERNELS + int(rest * size + table * max(size, 2.0))
    stored = sum(entry.bytes for name, entry in model.files.items() if name != GOLDEN)
    if model.dialect != "slots":
        stored += model.variants["canonical"].bytes  # where weights may be, too
    if load.provider != "cpu":
        return stored
    if model.precision == "fp16":
        stored *= 2  # a session keeps them as float32: few products on a CPU take any other
    if model.precision == "int4":
        stored += model.parameters // 32 * 4  # packed beside them: what each block of 32 sums to
    # One row and many take two graphs of the bundle, and each session packs the weights for itself.
    exact = model.directory != "draft"  # bits are a target's concern
    return stored * variants.sessions(model, load.batch, exact=exact)


def _hidden(model: ModelEntry) -> float:
    """The hidden size of a Llama with this many parameters: two tables of V x h, and 12 h^2 in each layer."""
    recurrent = 0 if model.recurrence is None else len(model.recurrence.states or model.recurrence.trails)
    a, b = 12 * (len(model.cache) + recurrent), 2 * model.vocab_size
    return (-b + math.sqrt(b * b + 4 * a * model.parameters)) / (2 * a)
