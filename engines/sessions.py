"""Keeps the sessions of a model's graphs: each is opened when it is first needed, with CUDA graphs where that is wanted
and possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..bundle import FileEntry, Model, check_file
from ..errors import BundleError, EngineError
from .declared import require_declared
from .pages import Pages
from .providers import open_session
from .recording import OneThread

RECORDABLE = "cuda, of models without features or recurrent layers"


class Sessions:
    """Sessions on one provider. ``kept`` has those that are open, by variant and whether they record CUDA graphs,
    ``pages`` where their weights are, ``thread`` where steps of those that record are taken.

    ``graphs`` is whether steps become CUDA graphs, as they do from the first where they are ``recordable``: nothing
    they read or write is the host's. ``error`` says why they cannot, and is empty while they can. ``lean``: see
    ``open_session``.
    """

    def __init__(self, model: Model, *, provider: str, threads: int, lean: bool) -> None:
        self._model, self._closed = model, False
        self._how: dict[str, Any] = {"provider": provider, "threads": threads, "lean": lean}
        self.pages = Pages(provider == "cpu" and not lean)
        self.kept: dict[tuple[str, bool], Any] = {}
        self.thread = OneThread()
        self.recordable = provider == "cuda" and model.entry.features is None and model.entry.recurrence is None
        self.graphs, self.error = self.recordable, ""
        files = (*model.entry.variants.values(), *model.entry.files.values())
        self._stamps = {each.file: stamp(model.folder / each.file) for each in files}

    def open(self, variant: str, *, branching: bool = False) -> Any:
        """The session of a variant, of which the steps of trees (``branching``) are not recorded. Without CUDA graphs,
        for good, where one that has them cannot be opened. Raises EngineError where none can, and after ``close``,
        BundleError for one that the manifest does not describe."""
        self.require_open()
        which = variant, self.graphs and not branching
        if which not in self.kept:
            try:
                path = self._model.path(variant)
                for each in (self._model.entry.variants[variant], *self._model.entry.files.values()):
                    self._require_the_same(each)
                with self.pages.opening():
                    session = open_session(path, graphs=which[1], **self._how)
                require_declared(self._model.entry, session, f"{self._model.folder.name}/{path.name}")
                self.kept[which] = session
            except EngineError as error:
                if not which[1]:
                    raise
                self.refuse_graphs(str(error))
                return self.open(variant)
        return self.kept[which]

    def _require_the_same(self, described: FileEntry) -> None:
        """Raise BundleError if a file is not the one that was there when the bundle was opened. Sessions that are open
        go on with what they have read, and must not be mixed with graphs of another export."""
        path = self._model.folder / described.file
        if (now := stamp(path)) != self._stamps[described.file]:
            try:
                check_file(self._model.folder, described)
            except BundleError:
                happened = "was changed" if path.exists() else "is gone"
                raise BundleError(f"{path} {happened} since this bundle was opened; open it again") from None
            self._stamps[described.file] = now

    def want_graphs(self, wanted: bool) -> None:
        """Record steps, or do not, from now on. Raises EngineError where they cannot be."""
        if wanted and not self.recordable:
            provider = self._how["provider"]
            raise EngineError(f"provider '{provider}' runs without CUDA graphs here (possible: {RECORDABLE})")
        self.graphs, self.error = wanted, ""

    def refuse_graphs(self, reason: str) -> None:
        """Open no session that records any more, until ``graphs`` is set again."""
        self.graphs, self.error = False, reason

    def require_open(self) -> None:
        """Raise EngineError after ``close``."""
        if self._closed:
            raise EngineError(f"the engine of {self._model.folder.name} is closed")

    def clear(self) -> None:
        """Let go of all."""
        self.kept.clear()
        self.thread.close()

    def close(self) -> None:
        """The same for good."""
        self._closed = True
        self.clear()


def stamp(path: Path) -> tuple[int, ...]:
    """Numbers that change when a file is replaced, and are read faster than its SHA-256 is computed; () without one."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
