"""What /proc tells of other processes. They may end between any two of these calls, or while one reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Zombies are not; whoever inherits an orphan may take its time to bury it."""
    return any(state != "Z" for state in _states([Path(f"/proc/{pid}/stat")]))


def stands_still(pid: int) -> bool:
    """Whether all threads of a process are stopped."""
    return set(_states(Path(f"/proc/{pid}/task").glob("*/stat"))) == {"T"}


def title(pid: int) -> str:
    """Its command line; nothing of one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have started."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        for fields in _fields([path]):
            parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = list[int]()
    pending = parents.get(pid, [])
    while pending:
        found.append(pending.pop())
        pending += parents.get(found[-1], [])
    return found


def _states(paths: Iterable[Path]) -> Iterator[str]:
    return (fields[0] for fields in _fields(paths))


def _fields(paths: Iterable[Path]) -> Iterator[list[str]]:
    """The fields behind the name, which may have spaces."""
    for path in paths:
        try:
            yield path.read_text("utf-8", "replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
