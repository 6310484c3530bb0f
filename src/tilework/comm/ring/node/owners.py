"""Record of the processes that may write to a ring, for a consumer that takes over: a locked file for each owner id.

A producer gets an open file that is locked, beside the memory, and nothing else has that open file. The kernel closes
it after it has released the memory of the process. So the lock tells any consumer at any time whether this owner may
still write. Rejected: process ids alone. The kernel may have given one to another process since.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import NamedTuple

_RECORD = Struct("<IIQ")
_PREFIX = "owner-"


class Owner(NamedTuple):
    """Latest holder of an id: the epoch, the process (0: in a namespace that cannot be seen), and when it began."""

    epoch: int
    pid: int
    started: int

    def open_process(self) -> int | None:
        """Return a descriptor of the process; None if it has ended, or cannot be named here."""
        process = open_process(self.pid)
        if process is not None and _started(self.pid) != self.started:
            os.close(process)
            return None
        return process


class OwnerFiles:
    """The files of the owners of the ring in this directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def admit(self, owner: int, epoch: int, pid: int) -> int:
        """Note the new holder of an id; return the locked file, which nothing but the holder may keep."""
        fd = os.open(self._path(owner), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(fd, _RECORD.pack(epoch, pid, _started(pid)), 0)
        except OSError:
            os.close(fd)
            raise
        return fd

    def is_held(self, owner: int) -> bool:
        """Return whether this owner may still write."""
        with self._path(owner).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def read(self) -> dict[int, Owner]:
        """Return the latest holders, by id."""
        found: dict[int, Owner] = {}
        for path in self._directory.glob(f"{_PREFIX}*"):
            record = path.read_bytes()
            if len(record) == _RECORD.size:
                found[int(path.name.removeprefix(_PREFIX))] = Owner(*_RECORD.unpack(record))
        return found

    def _path(self, owner: int) -> Path:
        return self._directory / f"{_PREFIX}{owner}"


def open_process(pid: int) -> int | None:
    """Return a descriptor of a process; None if it has ended, or cannot be named here."""
    with suppress(OSError):
        return os.pidfd_open(pid) if pid else None
    return None


def _started(pid: int) -> int:
    """Return when a process began, in ticks since the machine did; 0 if it has ended or cannot be seen."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19])
    return 0
