"""The directory of data that outlives a server; one server uses it at a time."""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NoReturn

from tilework.ownership.own import NotOwn, make_own_folder
from tilework.store.disk import Disk
from tilework.store.epochs import JOURNAL, enter, newest
from tilework.store.files import FileStore
from tilework.store.given_pictures import GivenPictures
from tilework.store.journal import Journal, JournalUnusable, NotWritten
from tilework.store.lease import LeaseTimes, end_process, try_lock
from tilework.store.standby import Standby

LOGS = "events-*.jsonl*"
"""The event logs of all starts, with their segments (`runtime/event_log`, which bounds them)."""
_NUMBER = re.compile(r"events-(\d+)\.")
_LOCK = "lock"


class DurableDirectory:
    """The directory that one server at a time uses.

    `path` holds a lock, the latest event logs, and `data`: the journal, the pictures of open calls and the results as
    files. `data` is `path` itself until one server had to fence another.

    Event logs are files beside the journal, since nothing is restored from them: every command reads them as they are,
    and operators may delete old ones, which take five times what the journal does.
    """

    def __init__(
        self,
        path: Path,
        on_wait: Callable[[], None] | None = None,
        *,
        times: LeaseTimes | None = None,
        on_lost: Callable[[str], NoReturn] = end_process,
    ) -> None:
        """Create the directory, or open the one of an earlier server.

        With `on_wait`, wait while another server uses the directory and does not hang; `on_wait` is called before that.
        `on_lost` is called, on any thread, when another server has taken over the directory.

        Raises:
            JournalUnusable: another server uses it, it is not ours, or other users may write to it; the message says
                what to do.
            OSError: it cannot be made or written to.
        """
        try:
            self.path = make_own_folder(path)
        except NotOwn as error:
            raise JournalUnusable(f"durable: {error}, since it holds prompts, results and states") from error
        self.disk = Disk(self.path)
        standby = Standby(self.path / _LOCK, partial(newest, self.path), times or LeaseTimes(), on_lost)
        with ExitStack() as stack:
            descriptor = try_lock(self.path / _LOCK)
            if descriptor is None:
                if on_wait is None:
                    raise JournalUnusable(
                        f"{path} is used by a running server; stop that one, give another, or wait for its end with "
                        "--standby"
                    )
                on_wait()
                self.lease = standby.wait()
            else:
                self.lease = standby.begin(descriptor)
            stack.callback(self.lease.close)
            self.data = self._enter()
            os.close(os.open(self.data / JOURNAL, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            self.journal = Journal(self.data / JOURNAL, on_failed=self.disk.failed, confirm=self.lease.confirm)
            stack.pop_all()

    def _enter(self) -> Path:
        try:
            return enter(self.path, self.lease.epoch)
        except sqlite3.Error as error:
            raise JournalUnusable(f"{self.path}: its journal cannot be copied: {error}; give another") from error

    @property
    def was_served(self) -> bool:
        """True if a server used the directory before this one."""
        return self.lease.last_ns > 0

    def now_ns(self) -> int:
        """Return the time on the server's clock, which continues from one start to the next and runs on from here.

        The machine's clock may have been set to an earlier time: then no time has passed since the last start. Raises
        JournalUnusable.
        """
        unix_ns, since_ns = time.time_ns(), time.monotonic_ns()
        try:
            begin_ns = max(0, unix_ns - self.journal.zero_ns(unix_ns, self.lease.last_ns))
        except NotWritten as error:
            raise JournalUnusable(f"{error}; make room there, or give another directory") from error
        self.lease.now_ns = lambda: begin_ns + time.monotonic_ns() - since_ns
        return begin_ns

    def results(self, *, max_bytes: int, ttl_ns: int) -> FileStore:
        """Open the store of results. Raises OSError."""
        return FileStore(self.data / "results", max_bytes=max_bytes, ttl_ns=ttl_ns, on_failed=self.disk.failed)

    def given_pictures(self) -> GivenPictures:
        """Open the folder of pictures that calls were given. Raises JournalUnusable, OSError."""
        try:
            return GivenPictures(self.data / "pictures", self.disk.failed)
        except NotOwn as error:
            raise JournalUnusable(f"durable: {error}, since it holds images of clients") from error
        except FileExistsError as error:
            raise JournalUnusable(f"durable: {error.filename} is no folder; remove it") from error

    def new_log(self) -> Path:
        """Return the path for the event log of this start: `events-N.jsonl`, with a number above that of all `LOGS`."""
        numbers = [int(match[1]) for path in self.path.glob(LOGS) if (match := _NUMBER.match(path.name))]
        return self.path / f"events-{max(numbers, default=0) + 1}.jsonl"

    def close(self) -> None:
        self.journal.close()
        self.lease.close()
