"""How a bundle's models become TensorRT engines: which are built, for what, and what is written. Needs no PyTorch.

TensorRT builds for the GPU it runs on; TensorRT-RTX builds ahead of time, on any machine, for the devices named.
"""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...bundle import Bundle, Model
from ...engines.base import MOST_ROWS
from ...engines.plan import MOST_DRAFTED
from ...engines.tensorrt import compat
from ...engines.tensorrt.buildable import PRECISIONS, require_buildable
from ...engines.tensorrt.manifest import PORTABLE, EngineManifest, Profile, dump, of_device
from ...errors import EngineError, ExportError, UsageError
from ..writing import Progress
from .graph import lower
from .network import (
    add_profile,
    attention_layers,
    awaited,
    check_import,
    errors,
    monitor,
    parse,
    timing_cache,
    unscale_keys,
)

DEFAULT_PREFILL = 512
_MOST_TOP = 3840  # of both SDKs' TopK
_NO_KERNEL = "dedicated kernel"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The largest steps of an engine: rows, drafted tokens, tokens of a prompt at once (None: 512, or what fits);
    ``capacity``: slots a row (None: the model's context and a draft beyond it); ``top``: k of the top-k head."""

    max_batch: int = 4
    max_draft: int = 8
    max_prefill: int | None = None
    capacity: int | None = None
    top: int = 64

    def check(self, models: Sequence[Model]) -> None:
        """Raise UsageError naming the legal range."""
        for name, most in {"max_batch": MOST_ROWS, "max_draft": MOST_DRAFTED}.items():
            if not 1 <= (value := getattr(self, name)) <= most:
                raise UsageError(f"{name.replace('_', '-')} must be from 1 to {most}, not {value}")
        if not 1 <= self.top <= _MOST_TOP:
            raise UsageError(f"top must be from 1 to {_MOST_TOP}, not {self.top}")
        least, most = 2 * (self.max_draft + 1), max(self._most(model) for model in models)
        if self.capacity is not None and not least <= self.capacity <= most:
            raise UsageError(
                f"capacity must be from {least} (two steps of the longest draft) to {most} slots (the context and a"
                f" draft), not {self.capacity}"
            )
        fits = max(self.slots(model) for model in models)
        if self.max_prefill is not None and not self.max_draft < self.max_prefill <= fits:
            raise UsageError(
                f"max-prefill must be from {self.max_draft + 1} (the longest draft and one) to {fits} (the capacity),"
                f" not {self.max_prefill}"
            )

    def slots(self, model: Model) -> int:
        """Of a row; a model with less context than the other gets no more than it can use, nor takes more at once."""
        return self._most(model) if self.capacity is None else min(self.capacity, self._most(model))

    def _most(self, model: Model) -> int:
        return model.entry.max_context + self.max_draft

    def prefill(self, model: Model) -> int:
        return min(DEFAULT_PREFILL if self.max_prefill is None else self.max_prefill, self.slots(model))

    def profiles(self, model: Model) -> tuple[Profile, Profile]:
        """Prefill and verify."""
        widths = (self.prefill(model), self.max_draft + 1)
        prefill, verify = (Profile(max_batch=self.max_batch, max_width=width) for width in widths)
        return prefill, verify


_DEFAULT_SIZES = Sizes()


def build_engines(
    bundle: Bundle,
    sdk: str,
    *,
    precision: str = "fp16",
    sizes: Sizes = _DEFAULT_SIZES,
    capabilities: Sequence[str] = (),
    progress: Progress = lambda message: None,
) -> list[Path]:
    """Build an engine of every model of ``bundle`` for each compute capability ("86", ... or "portable").

    ``precision``: one of PRECISIONS; of a bundle in fp16 only fp16. Without ``capabilities`` TensorRT-RTX builds a
    portable engine; TensorRT builds for the GPU at hand and takes none. Each engine and its manifest are written
    beside their place and renamed; earlier ones for the device are replaced, in whichever precision. Raises
    UsageError, ExportError (a bundle that cannot be built, or written to), EngineError (an SDK or device that is not
    there, or a build that failed).
    """
    models = [bundle.model(role) for role in bundle.manifest.models]
    for model in models:
        check_buildable(model, precision)
    sizes.check(models)
    targets = check_capabilities(sdk, capabilities)
    try:
        return [path for model in models for path in _build_model(model, sdk, precision, sizes, targets, progress)]
    except OSError as error:  # no room, or nobody may write there
        raise ExportError(
            f"cannot write engines into '{bundle.path}': {error.strerror or error}; build in a copy of the bundle"
        ) from None


def check_buildable(model: Model, precision: str) -> None:
    """Raise UsageError for an unknown precision, ExportError for a graph that TensorRT cannot read."""
    if precision not in PRECISIONS:
        raise UsageError(f"precision '{precision}' is unknown (one of: {', '.join(PRECISIONS)})")
    require_buildable(model.entry, precision)


def check_capabilities(sdk: str, capabilities: Sequence[str]) -> tuple[str, ...]:
    """What will be built for. Raises UsageError naming what the SDK can build for, and for what no SDK could before one
    is loaded; EngineError without the SDK (or, for TensorRT, a GPU)."""
    if sdk == "tensorrt" and capabilities:
        raise UsageError("TensorRT builds for the GPU at hand and takes no --sm; tensorrt-rtx does")
    for wanted in capabilities:
        if wanted != PORTABLE and not (wanted.isascii() and wanted.isdigit()):
            raise UsageError(f"sm must be a compute capability without its dot (86, 120) or {PORTABLE}, not '{wanted}'")
    trt = compat.sdk(sdk)
    if sdk == "tensorrt":
        return (compat.compute_capability(),)
    known = [name.removeprefix("SM") for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    for wanted in capabilities:
        if wanted not in (*known, PORTABLE):
            raise UsageError(f"{sdk} builds for no sm '{wanted}' (it does for: {', '.join(known)}, {PORTABLE})")
    return tuple(dict.fromkeys(capabilities)) or (PORTABLE,)


def write_graph(model: Model, folder: Path, precision: str, sizes: Sizes) -> tuple[Path, ir.Model, list[str]]:
    """The very file an engine is built from, in ``folder``: its path, its graph, and notes on it."""
    graph = ir.load(model.path("canonical"))
    notes = lower(graph, precision, sizes.slots(model), sizes.top)
    path = folder / f"{model.folder.name}.onnx"
    ir.save(graph, path, external_data=f"{path.name}.data")
    return path, graph, notes


class _Build:
    """One model's network, parsed and checked once, built for any number of devices."""

    def __init__(self, model: Model, sdk: str, precision: str, sizes: Sizes, folder: Path) -> None:
        self.model, self.sdk, self.precision, self.sizes = model, sdk, precision, sizes
        path, self.graph, self.notes = write_graph(model, folder, precision, sizes)
        self.trt, self.logger = compat.sdk(sdk), compat.logger(sdk)
        self.logger.lines.clear()
        self.builder = self.trt.Builder(self.logger)
        self.network = self.builder.create_network(compat.network_flags(sdk))
        self.parser = parse(self.trt, self.network, self.logger, path)
        counts = {
            "layers": len(model.entry.cache),
            "attentions": sum(n.op_type == "Attention" for n in self.graph.graph),
        }
        self.aliases = check_import(self.trt, self.network, self.logger, **counts)
        straight = unscale_keys(self.trt, self.network)
        if straight < counts["attentions"]:
            self.notes.append(
                f"{counts['attentions'] - straight} layers compute their keys anew from the cache in each step"
            )
        if precision == "fp32":  # no fused attention kernel computes in fp32
            self._decompose()

    def engine(self, target: str, tell: Progress) -> Any:
        """The serialized engine for a compute capability. Errors that did not keep the SDK from building (a kernel it
        tried and passed over, timings it could not use) are told; the self-test is who judges what was built. Raises
        EngineError, with what the SDK reported, where there is none."""
        blob = self._serialized(target, tell)
        if blob is None and any(_NO_KERNEL in text for _, text in self.logger.lines):
            self.notes.append("no fused attention kernel for these heads: attention is decomposed")
            tell(self.notes[-1])
            self._decompose()
            blob = self._serialized(target, tell)
        said = errors(self.logger)
        if blob is None:
            reason = "; ".join(said) or "no reason given"
            raise EngineError(f"{self.sdk} built no engine of the {self.model.folder.name}: {reason}")
        for line in said:
            tell(f"the SDK reports, and goes on: {line}")
        return blob

    def manifest(self, target: str, blob: Any) -> EngineManifest:
        outputs = {str(v.name): v for v in self.graph.graph.outputs}
        return EngineManifest(
            sdk=self.sdk,
            version=compat.version(self.sdk),
            compute_capability=target,
            precision=self.precision,
            capacity=self.sizes.slots(self.model),
            profiles=self.sizes.profiles(self.model),
            aliases=self.aliases,
            heads=tuple(name for name in outputs if name != "logits" and name not in self.aliases),
            top=int(outputs["top_ids"].shape[-1]) if "top_ids" in outputs else 0,
            graph_sha256=self.model.entry.variants["canonical"].sha256,
            engine_sha256=hashlib.sha256(blob).hexdigest(),
            engine_bytes=len(blob),
            log=(*self.notes, *dict.fromkeys(text for _, text in self.logger.lines)),
        )

    def _serialized(self, target: str, tell: Progress) -> Any:
        self.logger.lines.clear()
        config = self.builder.create_builder_config()
        config.clear_flag(self.trt.BuilderFlag.TF32)  # on by default, and 10 bits of mantissa are not fp32
        if self.sdk == "tensorrt-rtx":  # no memory allocated during a step, so that a CUDA graph can hold it
            config.set_flag(self.trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
        if target != PORTABLE and self.sdk == "tensorrt-rtx":
            config.num_compute_capabilities = 1
            config.set_compute_capability(getattr(self.trt.ComputeCapability, f"SM{target}"), 0)
        prefill, verify = self.sizes.profiles(self.model)
        for profile in (prefill, verify):
            add_profile(self.builder, self.network, config, profile, verify.max_width)
        config.progress_monitor = watch = monitor(self.trt, tell)
        with timing_cache(self.sdk, config, self.model.folder.parent / f"{self.sdk}-{target}.timing"):
            blob = awaited(lambda: self.builder.build_serialized_network(self.network, config), watch)
        del watch  # lived as long as the build
        return None if blob is None else memoryview(blob)

    def _decompose(self) -> None:
        for attention in attention_layers(self.trt, self.network).values():
            attention.decomposable = True


def _build_model(
    model: Model, sdk: str, precision: str, sizes: Sizes, targets: Sequence[str], progress: Progress
) -> list[Path]:
    role, written = model.folder.name, []

    def tell(line: str) -> None:
        progress(f"{role}: {line}")

    with tempfile.TemporaryDirectory(dir=model.folder, prefix=".build-") as scratch:
        tell(f"lowering to {precision}, {sizes.slots(model)} slots a row")
        build = _Build(model, sdk, precision, sizes, Path(scratch))
        tell(f"parsed and checked: {len(build.aliases)} caches in place")
        for target in targets:
            tell(f"building, {target if target == PORTABLE else f'sm {target}'}")
            blob = build.engine(target, tell)
            manifest = build.manifest(target, blob)
            for old in of_device(model.folder, sdk, target):
                if old.stem != manifest.name:
                    tell(f"{manifest.name} replaces {old.stem}")
            written.append(_write(model.folder, Path(scratch), manifest, blob))
            tell(f"{written[-1].name}, {len(blob) / 1e6:.1f} MB")
    return written


def _write(folder: Path, scratch: Path, manifest: EngineManifest, blob: Any) -> Path:
    """Write engine and manifest so that, after a failure, there are both or no manifest: then the engine is not
    opened."""
    for suffix, content in ((".engine", blob), (".json", dump(manifest).encode())):
        (scratch / f"{manifest.name}{suffix}").write_bytes(content)
    for old in of_device(folder, manifest.sdk, manifest.compute_capability):
        old.unlink()
        if old.stem != manifest.name:
            old.with_suffix(".engine").unlink(missing_ok=True)
    for suffix in (".engine", ".json"):
        (scratch / f"{manifest.name}{suffix}").replace(folder / f"{manifest.name}{suffix}")
    return folder / f"{manifest.name}.engine"
