"""Reading event logs for a command, with progress for long ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.progress import Progress, TaskID

from tilework.cli.console import progress, user_errors
from tilework.control.history import History
from tilework.control.history_recorder import read_history
from tilework.control.log import BadLog

_STRIDE = 500


def is_log(path: Path) -> bool:
    """Whether the first line of a file is the header of an event log. Raises OSError."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        try:
            first = json.loads(lines.readline())
        except ValueError:
            return False
    return isinstance(first, dict) and "tilework_log" in first


def load_history(path: Path, quiet: bool = False) -> History:
    """Raises UserError."""
    with user_errors(BadLog, OSError), progress(quiet) as bar:
        if bar.disable:
            total = None
        else:
            with path.open("rb") as lines:
                total = sum(1 for _ in lines)
        task = bar.add_task(f"reading {path.name}", total=total)
        with path.open(encoding="utf-8", errors="replace") as lines:
            return read_history(_counted(lines, bar, task))


def _counted(lines: Iterable[str], bar: Progress, task: TaskID) -> Iterator[str]:
    for number, line in enumerate(lines):
        if number % _STRIDE == 0:
            bar.update(task, completed=number)
        yield line
