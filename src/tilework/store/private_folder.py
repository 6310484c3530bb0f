"""A folder among the temporary files that belongs to one process and is removed with it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from tilework.ownership.own import NotOwn, open_private_folder

_PREFIX = "tilework-spool-"


class PrivateFolder:
    """A new folder of mode 0700, removed by `close`, by the end of this object or by that of the process.

    A process holds a lock on its folder while it lives. A folder whose lock is free belonged to a killed process, and
    is removed when the next one is made. Folders that other users could have made or changed stay as they are.
    """

    def __init__(self) -> None:
        """Make the folder. Raises OSError if there is no place for temporary files."""
        root = Path(tempfile.gettempdir())
        for path in root.glob(f"{_PREFIX}*"):
            if (lock := _locked(path)) is not None:
                _remove(path, lock)
        self.path, lock = _made()
        self.close = weakref.finalize(self, _remove, self.path, lock)


def _made() -> tuple[Path, int]:
    """Return a new folder with its lock. If another process removes it before it is locked, make another one."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        if (lock := _locked(path)) is not None:
            return path, lock


def _locked(path: Path) -> int | None:
    """Lock a folder and return the lock; None if the folder is in use, gone, or not this user's alone."""
    try:
        lock = open_private_folder(path)
    except (NotOwn, OSError):
        return None
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists():  # Another process may have removed it meanwhile.
            return lock
    os.close(lock)
    return None


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
