"""Weights that stay 16 bits wide, as in their file, and are widened to float32 where something is computed with them.

A checkpoint in bfloat16 is mapped, not read: its pages are loaded and dropped as they are used, and nothing of the size
of the model is ever in memory. ``Stored`` widens what a computation reads, a piece of a matrix at a time where that is
enough; each bfloat16 and float16 is a float32, so nothing is rounded. The graph is traced with ``Standins``, memory
that nobody touches, and its weights are made of the stored ones when they are written.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import onnx_ir as ir
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from ..graphs.pieces import Array, Pieces, steps

LEAST = 1 << 18  # elements of a matrix that stays as it is: smaller ones are few megabytes together
NARROW = {"BF16": torch.bfloat16, "F16": torch.float16}  # as safetensors calls them
_NUMBERS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "C64")
# Attributes that describe a tensor without reading it (but not its dtype), and methods that return the same tensor.
_TOLD = frozenset(
    ("shape", "size", "stride", "dim", "ndim", "numel", "device", "is_floating_point", "data_ptr", "untyped_storage")
)
_SAME = frozenset(("detach", "data", "requires_grad_"))


class Stored(Tensor):  # type: ignore[misc]
    """A weight in bfloat16 or float16 that says it is float32; all that is computed from it is float32."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_property = func.__name__ in ("__get__", "__set__")
        name = getattr(func, "__self__").__name__ if is_property else func.__name__  # noqa: B009
        with torch._C.DisableTorchFunctionSubclass():
            if name == "dtype" and func.__name__ == "__get__":
                return torch.float32
            if name in _TOLD or func.__name__ == "__set__":
                return func(*args, **kwargs)
            if name in _SAME:
                return func(*args, **kwargs).as_subclass(cls)
            if name == "linear" and len(args) > 1 and isinstance(args[1], cls):
                return _linear(*args, **kwargs)
            if name in ("embedding", "__getitem__"):  # what is picked is widened, not what it is picked from
                found = func(*args, **kwargs)
                return found.as_subclass(cls) if _is_part(found, args[0]) else found.float()
            return func(*tree_map(_widened, args), **tree_map(_widened, kwargs))

    def narrow_form(self) -> Tensor:
        """The weight as it is stored."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


def _is_part(found: Tensor, whole: Tensor) -> bool:
    here, there = (tensor.untyped_storage().data_ptr() for tensor in (found, whole))
    return bool(here == there)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Stored) else value


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``functional.linear``, by as many rows of the weight at a time as stay in a processor's cache when widened: that
    is sooner done than to read all of it in float32."""
    made, wide = torch.empty(*rows.shape[:-1], len(weight)), None
    for at in steps(weight.shape):
        part = weight[at]
        wide = torch.empty(part.shape) if wide is None else wide[: len(part)]
        made[..., at] = functional.linear(rows, wide.copy_(part))
    return made if bias is None else made + _widened(bias)


def keep_stored(model: nn.Module) -> None:
    """Let the narrow weights of ``model`` be Stored, in place. Experts are looked at one by one then: other ways want
    all of a layer's at once."""
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None and weight.dtype in NARROW.values() and not isinstance(weight, Stored):
                if id(weight) not in found:
                    found[id(weight)] = nn.Parameter(weight.detach().contiguous().as_subclass(Stored), False)
                setattr(module, name, found[id(weight)])
    if found and isinstance(model, PreTrainedModel) and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")


def _is_large(shape: Sequence[int]) -> bool:
    return len(shape) > 1 and math.prod(shape) >= LEAST


def narrow_type(files: Iterable[Path]) -> torch.dtype | None:
    """In which type narrower than float32 all large tensors of safetensors files are, but for packed ones (mxfp4);
    None if in none. Reads no tensor."""
    found = set[str]()
    for path in files:
        with safe_open(path, "pt") as file:
            tensors = (file.get_slice(name) for name in file.keys())  # noqa: SIM118  (no mapping)
            found |= {tensor.get_dtype() for tensor in tensors if _is_large(tensor.get_shape())}
    found.discard("U8")
    return NARROW.get(found.pop()) if len(found) == 1 else None


def code_of(tensor: Tensor) -> str | None:
    """The type (``int8``) of a tensor that holds no floating-point numbers, else None."""
    return None if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")


def codes_in(path: Path) -> dict[str, str]:
    """The tensors of a file, safetensors or PyTorch's own, that hold no floating-point numbers, and their types
    (``I8``, ``int8``): masks and positions, or weights in a code of fewer bits. Reads no tensor of safetensors."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            kinds = {name: str(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118  (no mapping)
        return {name: kind for name, kind in kinds.items() if not kind.startswith(_NUMBERS)}
    tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    return {name: code for name, each in tensors.items() if isinstance(each, Tensor) and (code := code_of(each))}


def unreadable(paths: Iterable[Path]) -> str | None:
    """What is wrong with the first of these files of weights that cannot be read; None where all can be."""
    for path in paths:
        try:
            codes_in(path)
        except Exception:  # pickle, zip and safetensors raise what they like
            return f"{path.name} is incomplete, a git-lfs pointer or more than tensors; download it again"
    return None


@contextlib.contextmanager
def narrow_weights(dtype: torch.dtype) -> Iterator[None]:
    """Models that are made inside, to be loaded, ask for their large weights in ``dtype``, for all others in the type
    that they would ask for."""
    finish = PreTrainedModel.post_init

    def post_init(model: PreTrainedModel) -> None:
        finish(model)
        for weight in model.parameters():
            if _is_large(weight.shape) and weight.dtype == torch.float32:
                weight.data = weight.data.to(dtype)

    PreTrainedModel.post_init = post_init
    try:
        yield
    finally:
        PreTrainedModel.post_init = finish


def narrowly(files: Iterable[Path]) -> contextlib.AbstractContextManager[None]:
    """Models that are made inside, to be loaded from ``files``, keep their large weights as narrow as those have
    them."""
    narrow = narrow_type(files)
    return contextlib.nullcontext() if narrow is None else narrow_weights(narrow)


class Standins:
    """Stand-ins for a model's Stored weights while it is traced: memory as large as the weights in float32, which is
    never read nor written and so costs nothing. The address of a weight in the traced graph tells which stored weight
    it is, and which part, even if the trace has transposed or cut it."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[nn.Parameter, Tensor]] = {}  # by the id of a stored weight, which is in here, too

    @contextlib.contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """The stored weights of ``model`` are replaced inside; one that is shared stays shared."""
        back = []
        for module in model.modules():
            for name, weight in module._parameters.items():
                if isinstance(weight, Stored):
                    if id(weight) not in self._of:
                        empty = nn.Parameter(torch.empty(weight.shape, dtype=torch.float32), requires_grad=False)
                        self._of[id(weight)] = (empty, weight)
                    back.append((module, name, weight))
        try:
            for module, name, weight in back:
                setattr(module, name, self._of[id(weight)][0])
            yield
        finally:
            for module, name, weight in back:
                setattr(module, name, weight)

    def fill(self, graph: ir.Graph) -> None:
        """Let the initializers that lie in here be what they stand for, read when they are asked for."""
        spans = [(empty.data_ptr(), empty.nbytes, weight) for empty, weight in self._of.values()]
        for value in graph.initializers.values():
            if spans and value.const_value is not None and value.const_value.size >= LEAST:
                array = value.const_value.numpy()
                address = array.__array_interface__["data"][0]
                for start, length, weight in spans:
                    if start <= address < start + length:
                        value.const_value = _view_of(weight.narrow_form(), array, address - start)


def _view_of(narrow: Tensor, array: Array, offset: int) -> Pieces:
    """Of a stored weight what ``array`` is of its standin, in float32."""
    strides = [stride // array.itemsize for stride in array.strides]
    view = narrow.as_strided(array.shape, strides, offset // array.itemsize)

    def make(rows: slice, columns: slice) -> Array:
        part = view[rows, columns]
        widened: Array = torch.empty(part.shape, dtype=torch.float32).copy_(part).numpy()
        return widened

    return Pieces(make, ir.DataType.FLOAT, array.shape, narrow)
