"""Digests of whole files of weights. Each is computed once: all processes of a user find it in the user's cache."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from tilework.ownership.cache import cache_directory
from tilework.ownership.own import NotOwn, make_own_folder
from tilework.pipelines.content.digests import whole_digest

_log = logging.getLogger(__name__)
_MOST = 4096
"""Number of files whose digests are kept: those that were written last."""
_LINE = re.compile(r"(?P<digest>[0-9a-f]{32}) (?P<check>[0-9a-f]{16})\n")


class WholeDigests:
    """A cache with a small file for each file of weights, written whole or not at all.

    A cache file is named after the `stamp` of the weights. So the digest of a file that has changed is not found, and
    two processes that write the same one agree. A damaged cache file counts as missing.
    """

    @cached_property
    def _folder(self) -> Path | None:
        try:
            return make_own_folder(cache_directory() / "contents")
        except (NotOwn, OSError, RuntimeError) as error:
            _log.warning("weights are read anew at each start to compare them with other nodes: %s", error)
            return None

    def known(self, stamped: str) -> str:
        """Return the digest of the file that had this stamp; empty if it was not read."""
        if self._folder is None:
            return ""
        try:
            line = _LINE.fullmatch((self._folder / stamped).read_text(encoding="ascii"))
        except (OSError, ValueError):
            return ""
        return line["digest"] if line is not None and line["check"] == _check(stamped, line["digest"]) else ""

    def read(self, path: Path, stamped: str, is_stopped: Callable[[], bool]) -> str:
        """Read a file and return its digest; empty if its stamp has changed. Raises OSError, Stopped."""
        digest = whole_digest(path, is_stopped)
        if stamp(path) != stamped:
            return ""
        self._keep(stamped, digest)
        return digest

    def _keep(self, stamped: str, digest: str) -> None:
        if self._folder is None:
            return
        try:
            descriptor, name = tempfile.mkstemp(dir=self._folder)
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(f"{digest} {_check(stamped, digest)}\n")
            Path(name).replace(self._folder / stamped)
            self._drop_oldest(self._folder)
        except OSError as error:
            _log.warning("weights will be read anew at the next start to compare them with other nodes: %s", error)

    @staticmethod
    def _drop_oldest(folder: Path) -> None:
        kept = list(os.scandir(folder))
        for entry in sorted(kept, key=lambda one: one.stat().st_mtime_ns)[: max(0, len(kept) - _MOST)]:
            with suppress(FileNotFoundError):  # Another process has dropped it.
                os.unlink(entry)


def stamp(path: Path) -> str:
    """Return a name of a file as it is now, from its path, size, times, device and inode. Raises OSError."""
    status = path.stat()
    what = status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino
    return sha256(f"{path.resolve()} {what}".encode()).hexdigest()


def _check(stamped: str, digest: str) -> str:
    return sha256(f"{stamped} {digest}".encode()).hexdigest()[:16]
