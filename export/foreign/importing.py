"""How models that other exporters wrote become a bundle: their graphs unchanged, their word for nothing taken.

There is no transformers to compare with here, so there is no ``golden.npz``. What is checked instead is what
speculation needs: the same tokens must get the same logits in one step, in several with roll-backs between, in a
batch of ragged rows, and whatever comes behind them. A graph whose cache does not really rewind fails that.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import numpy as np

from ...bundle import TOKENIZER, Bundle, Model, ModelEntry, file_entry
from ...engines import Engine, open_engine
from ...engines.foreign import ITSELF
from ...engines.rounding import even_widths, uneven
from ...errors import BundleError, EngineError, ExportError
from ..checkpoints.conversations import MAP, MORE, in_files, keep_conversations
from ..checkpoints.pairing import Vocabulary, match
from ..writing import TEXTS, Progress, aside, destination, write_manifest
from .graph import inside
from .source import Source, read_source

LENGTH, FAR = 24, 128  # tokens of a row that are looked at closely, and of one that only has to go through
# Of the largest logit. A sound graph gives the same numbers but for rounding, which low precision amplifies
# (int4 at width 1 against wider: up to 0.06); a wrong cache gives other numbers altogether.
EXACT, ROUNDED = 1e-4, 0.25
WriteDraft = Callable[[Path, ModelEntry], ModelEntry]  # into a folder that is not there yet, beside this target
ChooseDraft = Callable[[Vocabulary], WriteDraft]  # raises for a target of these tokens, before anything is written
NOTE = "imported as it was: no transformers reference, its steps were compared with each other"


def import_pair(
    target_dir: str | Path,
    draft_dir: str | Path | None,
    out: str | Path,
    *,
    draft: ChooseDraft | None = None,
    progress: Progress = lambda message: None,
) -> Path:
    """Make the bundle ``out`` from directories of optimum, onnx-community or onnxruntime-genai (see ``read_source``).

    Target and draft may be of different kinds; ``draft`` makes one of a checkpoint instead (``beside_import`` of
    ``build.py``). An existing bundle at ``out`` is replaced, anything else is refused. Raises ExportError naming what
    cannot be used and why; then ``out`` is as it was.
    """
    place = destination(out)
    given = {"target": Path(target_dir)} | ({} if draft_dir is None else {"draft": Path(draft_dir)})
    sources = {role: read_source(path) for role, path in given.items()}
    target = sources["target"]
    _require_usable(target)
    tokens = _vocabulary(target)
    _require_logits(target, tokens)
    if tokens.note:
        progress(f"target: {tokens.note}")
    if target.unmet:
        progress(f"target: {target.unmet}")
    if "draft" in sources:
        ids = match(tokens, _vocabulary(sources["draft"]))
        if ids.note:
            progress(f"draft: {ids.note}")
    write = None if draft is None else draft(tokens)
    with aside(place, progress) as folder:
        entries = {}
        for role, source in sources.items():
            others = _others(source) if given[role].is_dir() else ""
            progress(f"{role}: copying {source.graph.path.name} of {source.root.name}{others}")
            if source.note:
                progress(f"{role}: {source.note}")
            entries[role] = _import_model(source, folder / role, progress)
        if "draft" in sources:
            files = ids.save(folder / "draft", np.arange(sources["draft"].vocab_size))
            entries["draft"] = dataclasses.replace(entries["draft"], files={**entries["draft"].files, **files})
        if write is not None:
            entries["draft"] = write(folder / "draft", entries["target"])
        for name in TEXTS:
            if (target.root / name).is_file():
                _copy(target.root / name, target.root, folder)
        tokens.save(folder / TOKENIZER)
        for path in (target.root / MAP, *(target.root / MORE).glob("*.jinja")):
            _require_inside(path, target.root)
        keep_conversations(folder, *in_files(target.root))
        progress("writing the manifest")
        provenance = {role: source.root.resolve().name for role, source in sources.items()}
        write_manifest(folder, entries, target.sampling, provenance | {"onnx": metadata.version("onnx")})
        _require_readable(folder, place)
    return place


def _require_usable(target: Source) -> None:
    """Raise ExportError for a graph that can be a draft alone, or that has no tokenizer."""
    if target.graph.per_tensor:
        raise ExportError(
            f"{target.graph.path}: its activations are quantised per step (DynamicQuantizeLinear), so a token's logits "
            "depend on its neighbours and verification would not be lossless; take another precision "
            "(as a draft it is fine)"
        )
    if not (target.root / "tokenizer.json").is_file():
        raise ExportError(f"'{target.root}' has no tokenizer.json; put the target's beside its graph")


def _others(source: Source) -> str:
    """Which graphs could be taken instead, for people."""
    taken, root = source.graph.path, source.root
    found = sorted({path for folder in (root, root / "onnx") for path in folder.glob("*.onnx")} - {taken})
    names = ", ".join(str(path.relative_to(root)) for path in found)
    return f" (it has others, which are taken if their path is given: {names})" if names else ""


def _import_model(source: Source, folder: Path, progress: Progress) -> ModelEntry:
    folder.mkdir()
    graph = source.graph
    for path in (graph.path, *graph.data):
        _copy(path, source.root, folder)
    entry = ModelEntry(
        directory=folder.name,
        architecture=source.architecture,
        precision=graph.precision,
        dialect=source.dialect,
        dtype=graph.signature.past[0].dtype,
        vocab_size=source.vocab_size,
        max_context=source.max_context,
        parameters=graph.parameters,
        cache=source.cache,
        least_slots=graph.least_slots,
        eos_token_ids=source.eos_token_ids,
        variants={"canonical": file_entry(folder / graph.path.name)},
        files={path.name: file_entry(folder / path.name) for path in graph.data},
        note=f"{NOTE}; {source.note}" if source.note else NOTE,
    )
    try:
        engine = open_engine(Model(folder, entry), threads=os.cpu_count() or 1)
        try:
            parity = _compare(engine, source, progress)
            if folder.name == "target" and even_widths(engine, engine.spec.widths.narrowest) is None:
                progress(str(uneven("target", ITSELF)))  # others may do, and not every answer has to be exact
        finally:
            engine.close()
    except EngineError as error:
        # the folder is about to vanish: name the one the user knows
        raise ExportError(str(error).replace(str(folder), str(graph.path.parent))) from None
    return dataclasses.replace(entry, parity=parity)


def _compare(engine: Engine, source: Source, progress: Progress) -> dict[str, float]:
    """Largest differences of logits between ways to run the same tokens; ExportError if one is not mere rounding."""
    length = min(LENGTH, engine.spec.max_context)
    tokens = np.random.default_rng(0).integers(0, engine.spec.vocab_size, (3, length))
    whole = np.concatenate([_whole(engine, row) for row in tokens])
    far = _whole(engine, np.resize(tokens, min(FAR, engine.spec.max_context)))
    if not (np.isfinite(whole).all() and np.isfinite(far).all()):
        raise ExportError(f"{source.graph.path}: its logits are not finite; look for NaN or infinity among its weights")
    scale = float(np.abs(whole).max())
    ways = {"rewound": _rewound(engine, tokens[0], whole[0]), "ragged": _ragged(engine, tokens, whole)}
    ways |= {"single": _single(engine, tokens[0], whole[0]), "causal": _causal(engine, tokens[0])}
    found = {name: max(map(float, differences), default=0.0) for name, differences in ways.items()}
    progress(f"{source.root.name}: " + ", ".join(f"{name} {value:.1e}" for name, value in found.items()))
    noisy = source.graph.per_tensor and bool(np.isfinite([*found.values()]).all())
    for name, value in found.items():
        same = name == "causal" and not source.graph.per_tensor  # steps of one width: no precision explains more
        allowed = scale * (EXACT if same or source.graph.precision == "fp32" else ROUNDED)
        if noisy and value > allowed:  # or its cache cannot be rewound: it is a draft, and answers do not rest on it
            progress(
                f"{source.root.name}: in other steps the same tokens get other logits, by {value / scale:.0%} of the"
                " largest, for activations are quantised per step; as a draft it may be worth little"
            )
            break
        if not value <= allowed:  # not a number is refused, too
            raise ExportError(
                f"{source.graph.path}: the same tokens get other logits when run in several steps ({name}: difference "
                f"{value:.1e}, allowed {allowed:.1e}); its cache cannot be rewound by length"
            )
    return found


def _whole(engine: Engine, row: np.ndarray) -> np.ndarray:
    engine.reset(1)
    engine.reserve(len(row))
    return np.array(engine.forward(row[None], np.zeros(1, np.int64)))


def _rewound(engine: Engine, row: np.ndarray, whole: np.ndarray) -> Iterator[float]:
    """Each step is taken twice: with wrong tokens, and then, rolled back, with the right ones."""
    engine.reset(1)
    past = 0
    for width in itertools.cycle((5, 2, 3)):
        if (width := min(width, len(row) - past)) < 2:
            return
        new = row[None, past : past + width]
        engine.forward(new[:, ::-1].copy(), np.array([past]))
        yield _distance(engine.forward(new, np.array([past]))[0], whole[past : past + width])
        past += width


def _ragged(engine: Engine, tokens: np.ndarray, whole: np.ndarray) -> Iterator[float]:
    """Three rows of different pasts in one batch."""
    engine.reset(len(tokens))
    lens = np.zeros(len(tokens), np.int64)
    while (width := min(4, tokens.shape[1] - int(lens.max()))) > 1:
        places = lens[:, None] + np.arange(width)
        rows = np.arange(len(tokens))[:, None]
        yield _distance(np.asarray(engine.forward(tokens[rows, places], lens)), whole[rows, places])
        lens += 1 + np.arange(len(tokens)) % width


def _single(engine: Engine, row: np.ndarray, whole: np.ndarray) -> Iterator[float]:
    """One token a step, on top of the first half."""
    half = len(row) // 2
    engine.reset(1)
    engine.forward(row[None, :half], np.zeros(1, np.int64))
    for past in range(half, len(row)):
        yield _distance(engine.forward(row[None, past : past + 1], np.array([past]))[0], whole[past : past + 1])


def _causal(engine: Engine, row: np.ndarray) -> Iterator[float]:
    """What a step on top of a past says before its last token, if that is another one."""
    half = len(row) // 2
    engine.reset(1)
    engine.forward(row[None, :half], np.zeros(1, np.int64))
    new = row[None, half:].copy()
    before = np.array(engine.forward(new, np.array([half]))[0, :-1])
    new[0, -1] = (new[0, -1] + 1) % engine.spec.vocab_size
    if len(before):
        yield _distance(engine.forward(new, np.array([half]))[0, :-1], before)


def _distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max())


def _vocabulary(source: Source) -> Vocabulary:
    path = source.root / "tokenizer.json"
    return Vocabulary.read(str(source.root), path if path.is_file() else None, source.vocab_size)


def _require_logits(target: Source, tokens: Vocabulary) -> None:
    """Raise ExportError for a tokenizer that gives text an id which the graph has no logit for."""
    most = max((tokens.ids or {}).values(), default=-1)
    if most >= target.vocab_size:
        raise ExportError(
            f"{target.root / 'tokenizer.json'}: its ids go up to {most}, the logits of {target.graph.path.name} to"
            f" {target.vocab_size - 1}; take the tokenizer that the graph was exported with"
        )


def _require_readable(folder: Path, place: Path) -> None:
    """Read what was written as whoever loads it will, while what it replaces is still there."""
    try:
        Bundle.read(folder)
    except BundleError as error:
        raise ExportError(f"this cannot become a bundle: {str(error).replace(str(folder), str(place))}") from None


def _require_inside(path: Path, root: Path) -> None:
    if not inside(path, root):
        raise ExportError(f"'{path}' is a link that leaves '{root}'")


def _copy(path: Path, root: Path, folder: Path) -> None:
    _require_inside(path, root)
    shutil.copyfile(path, folder / path.name)
