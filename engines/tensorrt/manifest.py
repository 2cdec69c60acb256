"""What is written beside a built engine, and how the engine for a device is found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from ...bundle import Model, file_entry, parse, read_json
from ...errors import EngineError, typed

PORTABLE = "portable"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The largest step one optimization profile takes: rows, and tokens a row."""

    max_batch: int
    max_width: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineManifest:
    """``<sdk>-<compute capability>-<precision>.json``, beside the engine of the same name.

    ``compute_capability``: "86", "120", or "portable" (any that the SDK knows). ``capacity``: slots a row, fixed.
    ``profiles``: prefill first, then verify (its ``max_width`` is the longest draft and one); in either at most that
    many positions of a row may want logits. ``aliases``: output name to the input whose memory it shares. ``heads``:
    the outputs beside ``logits`` (greedy, logsumexp, and top_ids and top_logits of the ``top``
    largest; 0: without). ``graph_sha256``: the canonical graph it was built from, as in leadout.json. ``log``: what
    the build decided, and the SDK warned of or reported as errors that it built on after.
    """

    sdk: str
    version: str
    compute_capability: str
    precision: str
    capacity: int
    profiles: tuple[Profile, ...]
    aliases: Mapping[str, str]
    heads: tuple[str, ...]
    top: int
    graph_sha256: str
    engine_sha256: str
    engine_bytes: int
    log: tuple[str, ...]

    @property
    def name(self) -> str:
        """Of the engine's files, without ``.engine`` or ``.json``."""
        return f"{self.sdk}-{self.compute_capability}-{self.precision}"

    def command(self, bundle: Path) -> str:
        """The command that builds this engine again."""
        prefill, verify = self.profiles[0], self.profiles[-1]
        sizes = f"--max-batch {verify.max_batch} --max-draft {verify.max_width - 1} --max-prefill {prefill.max_width}"
        kind = f"--sdk {self.sdk} --precision {self.precision}{_sm_option(self.sdk, self.compute_capability)}"
        return f"leadout build {typed(bundle)} {kind} {sizes} --capacity {self.capacity} --top {self.top}"


def _sm_option(sdk: str, compute_capability: str) -> str:
    """The option of `leadout build` for a device: TensorRT takes none, it builds for the GPU at hand."""
    return "" if sdk == "tensorrt" else f" --sm {compute_capability}"


def dump(manifest: EngineManifest) -> str:
    """The text of a manifest."""
    return json.dumps(dataclasses.asdict(manifest), indent=1) + "\n"


def read(path: Path) -> EngineManifest:
    """A manifest from disk. Raises BundleError naming what is wrong and where."""
    manifest: EngineManifest = parse(EngineManifest, read_json(path, "a manifest"), str(path))
    return manifest


def find(model: Model, sdk: str, version: str, compute_capability: str) -> tuple[Path, EngineManifest]:
    """The engine of ``model`` for this SDK and device, checked: its file and its manifest.

    One built for the device itself goes before a portable one. Raises EngineError, with the command that builds it, for
    an engine that is missing, of another SDK version or device, built from another graph, or damaged; BundleError for a
    manifest that cannot be read.
    """
    path = _candidate(model, sdk, compute_capability)
    manifest = read(path)
    again = f"rebuild it: {manifest.command(model.folder.parent)}"
    if manifest.name != path.stem:
        raise EngineError(f"{path} describes {manifest.name}; {again}")
    if manifest.version != version:
        raise EngineError(f"{path.stem} was built with {sdk} {manifest.version}, here is {version}; {again}")
    if manifest.graph_sha256 != model.entry.variants["canonical"].sha256:
        raise EngineError(f"{path.stem} was built from another graph than {model.folder} holds now; {again}")
    engine = path.with_suffix(".engine")
    if not engine.is_file():
        raise EngineError(f"{engine} is missing; {again}")
    found = file_entry(engine)
    if (found.sha256, found.bytes) != (manifest.engine_sha256, manifest.engine_bytes):
        raise EngineError(f"{engine} does not match its SHA-256 in {path.name}; {again}")
    return engine, manifest


def of_device(folder: Path, sdk: str, compute_capability: str) -> list[Path]:
    """The manifests in ``folder`` of engines for a device: one, of whichever precision was built last."""
    return sorted(folder.glob(f"{sdk}-{compute_capability}-*.json"))


def _candidate(model: Model, sdk: str, compute_capability: str) -> Path:
    for kind in (compute_capability, PORTABLE):
        found = of_device(model.folder, sdk, kind)
        if len(found) > 1:  # a build leaves one: others were copied there
            names = ", ".join(path.stem for path in found)
            raise EngineError(f"{model.folder} has several engines for one device ({names}): remove all but one")
        if found:
            return found[0]
    others = [path.stem for path in of_device(model.folder, sdk, "*")]
    have = f" (it has: {', '.join(others)})" if others else ""
    wanted = f"{sdk} engine for compute capability {compute_capability}"
    command = f"leadout build {typed(model.folder.parent)} --sdk {sdk}{_sm_option(sdk, compute_capability)}"
    raise EngineError(f"{model.folder} has no {wanted}{have}; build it: {command}")
