"""What the inputs and outputs of somebody else's decoder graph mean, and which graphs cannot be rewound by length."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from ..bundle import CacheShape
from ..errors import EngineError

_CACHE = re.compile(r"(past_key_values|present)\.(\d+)\.(key|value)")
_SIDES = {"attention_mask": "mask", "position_ids": "positions", "use_cache_branch": "branch"}
_SIDES |= {"num_logits_to_keep": "keep", "logits_to_keep": "keep"}


@dataclasses.dataclass(frozen=True, slots=True)
class Port:
    """An input or output: its name, numpy dtype name, and dimensions (None where the graph leaves one open)."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The ports of one decoder, by meaning. ``past`` and ``present`` run key, value, key, value ... in layer order."""

    ids: Port
    logits: Port
    past: tuple[Port, ...]
    present: tuple[Port, ...]
    mask: Port | None = None
    positions: Port | None = None
    branch: Port | None = None
    keep: Port | None = None

    @classmethod
    def read(cls, inputs: Iterable[Port], outputs: Iterable[Port]) -> Signature:
        """Sort the ports of a graph by meaning.

        Raises EngineError naming the port, if one is missing, unknown, or a state that has no length to rewind.
        """
        given, made = {p.name: p for p in inputs}, {p.name: p for p in outputs}
        for need, ports in (("input_ids", given), ("logits", made)):
            if need not in ports:
                raise EngineError(f"the graph has no '{need}' (it has: {', '.join(ports)})")
        named = {_SIDES[name]: port for name, port in given.items() if name in _SIDES}
        for name in given.keys() - {"input_ids", *_SIDES}:
            if not _CACHE.fullmatch(name):
                raise EngineError(
                    f"graph input '{name}' is neither tokens, mask, positions nor past_key_values.N.key or .value; "
                    "such a model cannot be rewound by length"
                )
        past = _layers(given, "past_key_values")
        present = _layers(made, "present")
        if not past or [_key(p) for p in past] != [_key(p) for p in present]:
            raise EngineError("every past_key_values.N.key/value needs its present.N.key/value; export with a cache")
        for read, written in zip(past, present, strict=True):
            if read.dtype != written.dtype:
                raise EngineError(
                    f"'{written.name}' is {written.dtype}, and '{read.name}', which reads it, {read.dtype}"
                )
        if len(made["logits"].shape) != 3 or made["logits"].shape[1] == 1:
            raise EngineError("'logits' holds one position only; verifying a draft needs all positions of a step")
        return cls(ids=given["input_ids"], logits=made["logits"], past=past, present=present, **named)

    def cache(self, heads: int | None = None, width: int | None = None) -> tuple[CacheShape, ...]:
        """The cache of each layer; ``heads`` and ``width`` stand in for dimensions the graph leaves open."""
        shapes = []
        for key, value in zip(self.past[::2], self.past[1::2], strict=True):
            found = (key.shape[1] or heads, key.shape[3] or width, value.shape[3] or width)
            if not all(found):
                raise EngineError(f"'{key.name}' leaves heads or width open, and the configuration does not say")
            shapes.append(CacheShape(*(n for n in found if n)))
        return tuple(shapes)


def _key(port: Port) -> tuple[int, str]:
    match = _CACHE.fullmatch(port.name)
    assert match
    return int(match[2]), match[3]


def _layers(ports: dict[str, Port], prefix: str) -> tuple[Port, ...]:
    """The cache ports under ``prefix``, sorted by layer, each layer complete and of floating point."""
    found = [p for p in ports.values() if (m := _CACHE.fullmatch(p.name)) and m[1] == prefix]
    found.sort(key=_key)
    layers = sorted({_key(p)[0] for p in found})
    if [_key(p) for p in found] != [(n, kind) for n in layers for kind in ("key", "value")]:
        raise EngineError(f"a layer of {prefix} has a key without a value, or a value without a key")
    for port in found:
        if len(port.shape) != 4:
            raise EngineError(
                f"'{port.name}' has {len(port.shape)} dimensions instead of 4 ([batch, heads, length, width])"
            )
        if port.dtype not in ("float32", "float16"):
            raise EngineError(f"'{port.name}' is {port.dtype}; a cache must be float32 or float16")
        if port.shape[2] is not None:
            raise EngineError(f"'{port.name}' has a fixed length of {port.shape[2]}; it cannot be rewound by length")
    return tuple(found)


_ORT_TYPES = {"float": "float32", "double": "float64"}


def ort_ports(arguments: Iterable[object]) -> list[Port]:
    """Ports of an onnxruntime session's ``get_inputs()`` or ``get_outputs()``."""
    ports = []
    for argument in arguments:
        name, kind, shape = (getattr(argument, field) for field in ("name", "type", "shape"))
        kind = kind.removeprefix("tensor(").removesuffix(")")
        ports.append(Port(name, _ORT_TYPES.get(kind, kind), tuple(n if isinstance(n, int) else None for n in shape)))
    return ports
