"""Reading event logs for a command, with progress for long ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from rich.progress import Progress, TaskID

from tilework.cli.console import console, progress, user_errors
from tilework.control.history import History
from tilework.control.history_recorder import read_history
from tilework.control.log import BadLog
from tilework.runtime.event_log.segments import lines_of, segments_of

T = TypeVar("T")
_STRIDE = 500


def is_log(place: Path) -> bool:
    """Return whether a file begins with the header of an event log, or a directory has such a file. Raises OSError."""
    with closing(lines_of(segments_of(place))) as lines:
        try:
            first = json.loads(next(lines, ""))
        except ValueError:
            return False
    return isinstance(first, dict) and "tilework_log" in first


def load_history(place: Path, quiet: bool = False) -> History:
    """Return the history of a log, or of the newest in a directory, with all its segments. Raises UserError."""
    return read_with_progress(place, read_history, quiet)


def read_with_progress(
    place: Path, read: Callable[[Iterable[str], Callable[[str], None]], T], quiet: bool = False
) -> T:
    """Let `read` read the lines of all segments of a log; its warnings go to stderr. Raises UserError."""
    with user_errors(BadLog, OSError), progress(quiet) as bar:
        paths = segments_of(place)
        total = None if bar.disable else sum(1 for _ in lines_of(paths))
        task = bar.add_task(f"reading {place.name}", total=total)
        return read(_counted(lines_of(paths), bar, task), lambda text: _warn(place, text))


def _warn(place: Path, text: str) -> None:
    console.print(f"warning: {place}: {text}", markup=False, highlight=False, soft_wrap=True)


def _counted(lines: Iterable[str], bar: Progress, task: TaskID) -> Iterator[str]:
    for number, line in enumerate(lines):
        if number % _STRIDE == 0:
            bar.update(task, completed=number)
        yield line
