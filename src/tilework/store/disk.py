"""Checks that the disk of a directory can be written."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path

CHECK_S = 5.0
_CHECK_BYTES = 4 << 20  # More than most writes: a smaller test would pass while the next write fails again.
_CHECK_FILE = ".room"

_log = logging.getLogger(__name__)


class Disk:
    """The disk of `directory`. After a write that a caller reports as failed, a test write is tried every `CHECK_S`.

    Rejected: a least number of free bytes. It says nothing of quotas, inodes and disks that have become read-only.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._problem = ""
        self._is_suspected = False

    @property
    def problem(self) -> str:
        """Reason why the disk cannot be written; empty if it can, as far as is known."""
        return self._problem

    @property
    def free_bytes(self) -> int:
        """Free bytes. Raises OSError."""
        return shutil.disk_usage(self._directory).free

    def failed(self, error: Exception) -> None:
        """Note that a write has failed. May be called on any thread."""
        if not self._problem:
            _log.error("%s cannot be written, so calls are refused: %s", self._directory, error)
        self._problem = (error.strerror if isinstance(error, OSError) else None) or str(error)

    def suspect(self) -> None:
        """Note that a write has failed that may have been on another disk: the next check tries this one."""
        self._is_suspected = True

    def check(self) -> None:
        """Try a write if the last one failed or the disk is suspected. Waits for the disk."""
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
        """Check every `CHECK_S` seconds, on a thread."""
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
