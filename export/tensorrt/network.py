"""Parses a graph for TensorRT, checks that the network is what the graph says, and sets up what the builder needs.

A build that succeeds proves little: the parser silently drops what it does not know and goes on. So everything that the
engine's answers depend on is read back from the parsed network.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...engines.tensorrt.manifest import Profile
from ...engines.worker import Worker
from ...errors import EngineError, one_line
from ..writing import Progress

_ERRORS = ("ERROR", "INTERNAL_ERROR")
_UNUSED = "Unused Input"
_LOGGER_IGNORED = "The logger passed into"
_SILENCE = 2.0  # seconds between two lines of progress


def parse(trt: Any, network: Any, logger: Any, path: Path) -> Any:
    """Read the graph at ``path`` into ``network``. Returns the parser, which owns the weights: keep it until the build.
    Raises EngineError with the parser's own words."""
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        said = [str(parser.get_error(i).desc()) for i in range(parser.num_errors)]
        raise EngineError(f"{path.name} does not parse: {one_line(said[0]) if said else 'no reason given'}")
    return parser


def check_import(trt: Any, network: Any, logger: Any, *, layers: int, attentions: int) -> dict[str, str]:
    """Is the network what the graph says? Returns its aliases: output name to the cache input it is written into.

    ``layers`` caches of keys and of values, each updated in place once; ``attentions`` attention layers, each with
    its mask, no causal kind and no lengths of its own; no input dropped. Raises EngineError naming what is not so.
    """
    check_log(logger)
    read = {tensor.name for layer in _layers(network) for tensor in _inputs(layer)}
    for index in range(network.num_inputs):
        if network.get_input(index).name not in read:
            raise EngineError(f"the parser dropped {network.get_input(index).name}, an input of the graph")
    found = attention_layers(trt, network)
    if len(found) != attentions:
        raise EngineError(f"the graph has {attentions} Attention nodes, the parser made {len(found)} of them")
    for name, attention in found.items():
        if attention.mask is None:
            raise EngineError(f"{name}: the parser left out the mask")
        if kind := _causal(trt, attention):
            raise EngineError(f"{name}: the parser made it {kind}; the mask alone decides")
        if getattr(attention, "key_value_lengths", None) is not None:  # TensorRT 10 has none
            raise EngineError(f"{name}: the parser gave it key-value lengths; the mask alone decides")
    return _aliases(trt, network, layers)


def _causal(trt: Any, attention: Any) -> str:
    """How the layer is causal on its own; nothing where it is not. TensorRT 10 knows one way and names none."""
    kind = getattr(attention, "causal_kind", None)
    if kind is None:
        return "causal" if attention.causal else ""
    return "" if kind == trt.CausalMaskKind.NONE else f"{kind.name} causal"


def check_log(logger: Any) -> None:
    """Raise EngineError for the first error an SDK reported of a graph, or input it dropped: its parser goes on without
    what failed."""
    for severity, text in logger.lines:
        if severity in _ERRORS or _UNUSED in text:
            raise EngineError(f"the SDK reports: {text}")
        if text.removeprefix(f"{severity} ").startswith(_LOGGER_IGNORED):
            raise EngineError("the SDK reports its errors elsewhere in this process; build in a process of its own")


def errors(logger: Any) -> list[str]:
    """What an SDK reported as errors, each once."""
    return list(dict.fromkeys(text for severity, text in logger.lines if severity in _ERRORS))


def attention_layers(trt: Any, network: Any) -> dict[str, Any]:
    """Layer name to its IAttention."""
    found = {}
    for layer in _layers(network):
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # get_layer gives a bare ILayer
            found[str(layer.name)] = layer.attention
    return found


def unscale_keys(trt: Any, network: Any) -> int:
    """Let attention read the keys where they lie. The parser multiplies Q and K by the root of the scale even if that
    is 1, and a product with the whole cache is a pass over it in every step. Returns how many layers read it so."""
    made = {layer.get_output(i).name: layer for layer in _layers(network) for i in range(layer.num_outputs)}
    for layer in _layers(network):
        product = made.get(layer.get_input(1).name) if layer.type == trt.LayerType.ATTENTION_INPUT else None
        if product is not None and product.type == trt.LayerType.ELEMENTWISE and _is_one(trt, made, product):
            layer.set_input(1, product.get_input(0))
    keys = [layer.get_input(1).name for layer in _layers(network) if layer.type == trt.LayerType.ATTENTION_INPUT]
    return sum(name in made and made[name].type == trt.LayerType.KV_CACHE_UPDATE for name in keys)


def _is_one(trt: Any, made: dict[str, Any], product: Any) -> bool:
    """Is it a multiplication by a constant of nothing but ones?"""
    product.__class__ = trt.IElementWiseLayer
    factor = made.get(product.get_input(1).name)
    while factor is not None and factor.type == trt.LayerType.CAST:
        factor = made.get(factor.get_input(0).name)
    if product.op != trt.ElementWiseOperation.PROD or factor is None or factor.type != trt.LayerType.CONSTANT:
        return False
    factor.__class__ = trt.IConstantLayer
    return bool((factor.weights == 1).all())


def _layers(network: Any) -> Iterator[Any]:
    return (network.get_layer(index) for index in range(network.num_layers))


def _inputs(layer: Any) -> Iterator[Any]:
    return filter(None, (layer.get_input(index) for index in range(layer.num_inputs)))


def _aliases(trt: Any, network: Any, layers: int) -> dict[str, str]:
    inputs = {network.get_input(i).name for i in range(network.num_inputs)}
    outputs = {network.get_output(i).name for i in range(network.num_outputs)}
    found: dict[str, str] = {}
    for layer in _layers(network):
        if layer.type == trt.LayerType.KV_CACHE_UPDATE:
            past, present = str(layer.get_input(0).name), str(layer.get_output(0).name)
            if past not in inputs or present not in outputs:
                raise EngineError(f"{layer.name} updates {past} into {present}: not a cache of the graph")
            found[present] = past
    names = [f"{i}.{kind}" for i in range(layers) for kind in ("key", "value")]
    wanted = {f"present.{name}": f"past_key_values.{name}" for name in names}
    if found != wanted:
        off = sorted(found.items() ^ wanted.items())[0][0]
        raise EngineError(f"{off}: the caches updated in place are not one a layer for keys and one for values")
    return found


def add_profile(builder: Any, network: Any, config: Any, profile: Profile, wanted: int) -> None:
    """One optimization profile: 1 .. max_batch rows of 1 .. max_width tokens, logits of 1 .. ``wanted`` positions.

    Sizes go by the names of dimensions: by place, an input that has no rows would get theirs.
    """
    wide = profile.max_width
    tensors = {network.get_input(i).name: network.get_input(i) for i in range(network.num_inputs)}
    sizes = {
        tensors["input_ids"].get_dimension_name(0): (1, 1, profile.max_batch),
        tensors["input_ids"].get_dimension_name(1): (1, wide, wide),
        tensors["logit_index"].get_dimension_name(1): (1, wanted if wide == wanted else 1, wanted),
    }
    shapes = builder.create_optimization_profile()
    for name, tensor in tensors.items():
        if -1 in tuple(tensor.shape):
            free = [sizes.get(tensor.get_dimension_name(i), (size,) * 3) for i, size in enumerate(tensor.shape)]
            shapes.set_shape(name, *zip(*free, strict=True))
    if config.add_optimization_profile(shapes) < 0:
        raise EngineError(f"the SDK refuses the profile of {profile.max_batch} x {profile.max_width} tokens")


def monitor(trt: Any, tell: Progress) -> Any:
    """A progress monitor that tells the running phase, now and then, and cancels a build that is not ``wanted``."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}
            self.told = time.monotonic()
            self.wanted = True

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.steps[phase] = steps

        def step_complete(self, phase: str, step: int) -> bool:
            if time.monotonic() - self.told > _SILENCE:
                self.told = time.monotonic()
                tell(f"{phase.lower()}, {step + 1} of {self.steps.get(phase, step + 1)}")
            return self.wanted

        def phase_finish(self, phase: str) -> None:
            self.steps.pop(phase, None)

    return Monitor()


def awaited(build: Callable[[], Any], watch: Any) -> Any:
    """What ``build`` gives, which ``watch`` (see ``monitor``) looks at. It runs in a thread of its own: TensorRT drops
    an interrupt that comes in a callback, and says that the build failed. Here one cancels the build, and is raised
    when that has ended."""
    worker, found = Worker("leadout-build"), list[Any]()
    done = worker.begin(lambda: found.append(build()))
    try:
        error = done.get()
    except BaseException:
        watch.wanted = False
        raise
    finally:
        worker.close()
    if error is not None:
        raise error
    return found[0]


@contextlib.contextmanager
def timing_cache(sdk: str, config: Any, path: Path) -> Iterator[None]:
    """Let TensorRT's timings of kernels outlive the build, in ``path``: the next one on this device is then faster.

    One that is damaged, or of another version or device, is begun anew. TensorRT-RTX times nothing when it builds, and
    gets none.
    """
    if sdk != "tensorrt":
        yield
        return
    known = path.read_bytes() if path.is_file() else b""
    cache = config.create_timing_cache(known)
    if cache is None or not config.set_timing_cache(cache, False):
        config.set_timing_cache(config.create_timing_cache(b""), False)
    yield
    fresh = path.with_name(f".{path.name}.partial")
    fresh.write_bytes(memoryview(config.get_timing_cache().serialize()))
    fresh.replace(path)
