"""Contents of the files of a node's models, to compare with other nodes. Imports no torch, since agents call it."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tilework.core.model import ModelSource
from tilework.core.wire.content import FileContent, ModelContent
from tilework.pipelines.content.digests import Stopped, is_sampled, quick_content
from tilework.pipelines.content.files import source_files
from tilework.pipelines.errors import ModelError
from tilework.pipelines.model_index import name_of
from tilework.worker.models.whole_digests import WholeDigests, stamp

_LOWEST = 19


@dataclass(slots=True)
class _KnownFile:
    path: Path
    stamped: str
    content: FileContent


class NodeContents:
    """The contents of models by name. Samples are read at once, whole weights on a thread of the lowest priority."""

    def __init__(self) -> None:
        self._models: dict[str, dict[str, _KnownFile]] = {}
        self._whole = WholeDigests()
        self._is_closed = threading.Event()
        self.thread = ThreadPoolExecutor(1, "contents", _step_back)

    @property
    def models(self) -> dict[str, ModelContent]:
        """Contents known now. A model with unreadable files has none: loading it reports the reason."""
        return {name: {each: one.content for each, one in files.items()} for name, files in list(self._models.items())}

    def add(self, sources: Sequence[ModelSource]) -> None:
        """Read the files of models, but only a sample of weights; takes a second on a slow disk."""
        for source in sources:
            files: dict[str, _KnownFile] = {}
            with suppress(ModelError, OSError):
                files = {name: self._quick(path) for name, path in source_files(source).items()}
            self._models[name_of(source)] = files

    def remove(self, model: str) -> None:
        """Forget a model."""
        self._models.pop(model, None)

    def read_whole(self) -> bool:
        """Read all weights that were not read whole yet; return whether a digest was found."""
        unread = [one for files in list(self._models.values()) for one in files.values() if _is_unread(one)]
        for one in unread:
            with suppress(OSError, Stopped):
                whole = self._whole.read(one.path, one.stamped, self._is_closed.is_set)
                one.content = replace(one.content, whole=whole)
        return any(one.content.whole for one in unread)

    def close(self) -> None:
        """Stop reading."""
        self._is_closed.set()
        self.thread.shutdown(wait=False, cancel_futures=True)

    def _quick(self, path: Path) -> _KnownFile:
        stamped = stamp(path)
        content = quick_content(path)
        return _KnownFile(
            path, stamped, replace(content, whole=self._whole.known(stamped)) if is_sampled(path) else content
        )


def _is_unread(file: _KnownFile) -> bool:
    return is_sampled(file.path) and not file.content.whole


def _step_back() -> None:
    """Let this thread, and no other, run only when nothing else wants to."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
