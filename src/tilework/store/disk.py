"""Whether the disk of a directory takes what is written to it."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path

CHECK_S = 5.0
_CHECK_BYTES = 4 << 20  # More than most of what is written at once: else the next write would fail again.
_CHECK_FILE = ".room"

_log = logging.getLogger(__name__)


class Disk:
    """The disk of `directory`. Who writes there says when that failed; then it is tried every `CHECK_S`.

    Rejected: a least number of free bytes. It says nothing of quotas, inodes and disks that have become read-only.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._problem = ""
        self._is_suspected = False

    @property
    def problem(self) -> str:
        """Why it cannot be written; empty: as far as is known, it can."""
        return self._problem

    @property
    def free_bytes(self) -> int:
        """Raises OSError."""
        return shutil.disk_usage(self._directory).free

    def failed(self, error: Exception) -> None:
        """Something could not be written. On any thread."""
        if not self._problem:
            _log.error("%s cannot be written, so calls are refused: %s", self._directory, error)
        self._problem = (error.strerror if isinstance(error, OSError) else None) or str(error)

    def suspect(self) -> None:
        """Something could not be written that may have been on another disk: find out."""
        self._is_suspected = True

    def check(self) -> None:
        """Try to write, if that is not known to be possible. Waits for the disk."""
        if not self._problem and not self._is_suspected:
            return
        path = self._directory / _CHECK_FILE
        self._is_suspected = False
        try:
            path.write_bytes(bytes(_CHECK_BYTES))
        except OSError as error:
            self.failed(error)
        else:
            if self._problem:
                _log.warning("%s can be written again", self._directory)
            self._problem = ""
        finally:
            path.unlink(missing_ok=True)

    async def watch(self) -> None:
        """Check now and then, on a thread."""
        while True:
            await asyncio.sleep(CHECK_S)
            await asyncio.to_thread(self.check)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
