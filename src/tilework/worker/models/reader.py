"""Reads components from the disk into the memory of the host, for the workers that serve there.

It runs in its own process: while reading, the libraries change settings of the whole process, and images depend on
these.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from tilework.core.wire.commands import ComponentFiles, ReadWeights
from tilework.core.wire.reports import WeightsRead
from tilework.pipelines.components import weights_of
from tilework.pipelines.loading import load_component
from tilework.worker.models.shared_weights import SharedWeights

_log = logging.getLogger(__name__)
_BLOCK_BYTES = 1 << 20


def read_ahead(command: ReadWeights, files: SharedWeights) -> WeightsRead:
    """Read what the host does not have yet."""
    try:
        is_kept = all(_read(one, files, command.forgets) for one in command.files)
    except Exception as error:
        has_trace = not isinstance(error, OSError)
        _log.error("components could not be read ahead of need: %s", error, exc_info=has_trace)
        is_kept = False
    return WeightsRead(command.read_id, is_kept)


def _read(one: ComponentFiles, files: SharedWeights, forgets: Sequence[str]) -> bool:
    if one.lora:
        return _read_through(Path(one.lora))
    with files.reading(one.component.digest):
        if files.has(one.component.digest):
            return True
        return files.keep_if_possible(one.component, weights_of(load_component(one.source, one.part)), forgets)


def _read_through(file: Path) -> bool:
    """Read a file so that the operating system caches it: workers read it from there."""
    with file.open("rb") as opened:
        while opened.read(_BLOCK_BYTES):
            pass
    return True
