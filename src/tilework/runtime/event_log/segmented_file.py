"""Writes an event log in segments: the newest as text, older ones compressed, the oldest deleted."""

from __future__ import annotations

import errno
import fcntl
import gzip
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from threading import Thread
from typing import Literal, TextIO

from tilework.core.time import ns_from_s
from tilework.runtime.event_log.segments import PACKED, PART, START, closed_path, keep_earlier, names_of

_log = logging.getLogger(__name__)
_MOST_FILES = 1000
"""Largest number of files. A server that fails at each start begins a log each time."""
DAY_NS = ns_from_s(86_400)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogBounds:
    """Size and age at which a segment is closed, and the size and age up to which closed ones are kept."""

    segment_bytes: int = 64 * 10**6
    segment_ns: int = DAY_NS
    kept_bytes: int = 2 * 10**9
    kept_ns: int = 7 * DAY_NS


class SegmentedFile:
    """The files of one log.
    Logs of earlier starts are bounded with it: those that match `family`, and an earlier log of the same name. The
    latter is renamed when this log's first line is written, so that a server that does not start changes no log. A file
    is locked while it is written, against another server that was started by the same command.

    A path that is no regular file, such as a pipe, has one segment. All methods raise OSError.
    """

    def __init__(
        self,
        path: Path,
        bounds: LogBounds,
        *,
        family: str | None = None,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        # A segment is not a renamed link.
        self.path = Path(os.path.realpath(path)) if path.is_file() or not path.exists() else path
        self._bounds = bounds
        self._unix_ns = unix_ns
        self._own = names_of(self.path)
        self._family = family
        self.segment = 1
        self._packing: Thread | None = None
        self._is_new = not self.path.exists()
        self._has_begun = False
        self._check()
        self._file = self._open("a")
        self._has_segments = self.path.is_file()

    def _check(self) -> None:
        """Check the file: one that is no event log stays unchanged, and a pipe without a reader is not waited for."""
        if self.path.is_fifo():
            os.close(os.open(self.path, os.O_WRONLY | os.O_NONBLOCK))
        if self.path.is_file():
            with self.path.open("rb") as file:
                start = file.read(len(START))
            if start != START[: len(start)]:
                raise OSError(errno.EEXIST, "the file is no event log; give another name", str(self.path))

    def _begin(self) -> None:
        """Make room for the first line."""
        self._has_begun = True
        claimed = self._file
        if self._has_segments and keep_earlier(self.path):
            self._file = self._open("w")
            claimed.close()
        if self._has_segments:
            self._delete_old()

    def _open(self, mode: Literal["a", "w"]) -> TextIO:
        self._num_bytes = 0
        self._begun_ns = self._unix_ns()
        file = self.path.open(mode, encoding="utf-8")
        if self.path.is_file():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                reason = "a running server writes its event log there; stop that one, or give another file"
                raise OSError(errno.EBUSY, reason, str(self.path)) from None
            except OSError as error:
                _log.warning("%s cannot be locked: start no other server with this event log (%s)", self.path, error)
        return file

    @property
    def is_full(self) -> bool:
        """True if the segment has lines, and is so large or old that the next line belongs to another one."""
        age_ns = self._unix_ns() - self._begun_ns
        is_due = self._num_bytes >= self._bounds.segment_bytes or age_ns >= self._bounds.segment_ns
        return is_due and self._num_bytes > 0 and self._has_segments

    def write(self, text: str) -> None:
        if not self._has_begun:
            self._begin()
        self._file.write(text)
        self._num_bytes += len(text)

    def flush(self) -> None:
        self._file.flush()

    def begin_segment(self) -> None:
        """Close the segment and begin the next. The closed one is compressed on a thread; the oldest are deleted."""
        self._wait()
        closed = closed_path(self.path, self.segment)
        full = self._file
        self.path.rename(closed)
        self._file = self._open("w")
        full.close()
        self.segment += 1
        self._packing = Thread(target=self._pack, args=(closed,), name="compresses the event log")
        self._packing.start()

    def close(self) -> None:
        if self._is_new and not self._has_begun:
            self.path.unlink(missing_ok=True)
        self._file.close()
        self._wait()

    def _wait(self) -> None:
        if self._packing is not None:
            self._packing.join()

    def _pack(self, closed: Path) -> None:
        try:
            pack(closed)
            self._delete_old()
        except OSError as error:
            _log.warning("a closed segment of the event log stays as it is: %s", error)

    def _delete_old(self) -> None:
        """Delete the oldest files until the bounds hold, but never the segment that is written."""
        stats = [
            (stat.st_mtime_ns, path, stat.st_size)
            for path in self.path.parent.iterdir()
            if path != self.path and self._is_ours(path.name) and (stat := path.stat())
        ]
        kept_bytes = sum(size for _, _, size in stats) + self._bounds.segment_bytes
        num_files = len(stats)
        for changed_ns, path, size in sorted(stats):
            is_old = self._unix_ns() - changed_ns > self._bounds.kept_ns
            if not is_old and kept_bytes <= self._bounds.kept_bytes and num_files < _MOST_FILES:
                break
            path.unlink()
            kept_bytes -= size
            num_files -= 1

    def _is_ours(self, name: str) -> bool:
        is_of_family = self._family is not None and fnmatchcase(name, self._family)
        return is_of_family or self._own.fullmatch(name) is not None


def pack(path: Path) -> None:
    """Compress a file in its place, with its time kept. If this is interrupted, the file is as before."""
    packed = path.with_name(path.name + PACKED)
    part = packed.with_name(packed.name + PART)
    stat = path.stat()
    try:
        with path.open("rb") as source, gzip.open(part, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        os.utime(part, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        part.rename(packed)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    path.unlink()
