"""The directory of data that outlives a server; one server at a time."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tilework.ownership.own import NotOwn, make_own_folder
from tilework.store.disk import Disk
from tilework.store.files import FileStore
from tilework.store.given_pictures import GivenPictures
from tilework.store.journal import Journal, JournalUnusable, NotWritten

JOURNAL = "tilework.sqlite"
LOGS = "events-*.jsonl*"
"""The event logs of all starts, with their segments (`runtime/event_log`, which bounds them)."""
_NUMBER = re.compile(r"events-(\d+)\.")
_LOCK = "lock"


class DurableDirectory:
    """`path` holds the journal, the pictures of open calls and the results as files, and the latest event logs.

    Event logs are files beside the journal, since nothing is restored from them: every command reads them as they
    are, and who runs the server may delete old ones, which take five times what the journal does.
    """

    def __init__(self, path: Path, on_wait: Callable[[], None] | None = None) -> None:
        """Create the directory, or open that of an earlier server.

        With `on_wait`, which is called then, wait for as long as another server uses it.

        Raises:
            JournalUnusable: another server uses it, it is not ours, or other users may write to it; the message says
                what to do.
            OSError: it cannot be made or written to.
        """
        try:
            self.path = make_own_folder(path)
        except NotOwn as error:
            raise JournalUnusable(f"durable: {error}, since prompts, results and states lie there") from error
        self.disk = Disk(self.path)
        with ExitStack() as stack:
            self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, self._lock)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait is None:
                    raise JournalUnusable(
                        f"{path} is used by a running server; stop that one, give another, or wait for its end with "
                        "--standby"
                    ) from None
                on_wait()
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.close(os.open(self.path / JOURNAL, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            self.journal = Journal(self.path / JOURNAL, on_failed=self.disk.failed)
            stack.pop_all()

    def now_ns(self) -> int:
        """The time on the server's clock, which continues from one start to the next. Raises JournalUnusable."""
        unix_ns = time.time_ns()
        try:
            return max(0, unix_ns - self.journal.zero_ns(unix_ns))
        except NotWritten as error:
            raise JournalUnusable(f"{error}; make room there, or give another directory") from error

    def results(self, *, max_bytes: int, ttl_ns: int) -> FileStore:
        """Raises OSError."""
        return FileStore(self.path / "results", max_bytes=max_bytes, ttl_ns=ttl_ns, on_failed=self.disk.failed)

    def given_pictures(self) -> GivenPictures:
        """Raises JournalUnusable, OSError."""
        try:
            return GivenPictures(self.path / "pictures", self.disk.failed)
        except NotOwn as error:
            raise JournalUnusable(f"durable: {error}, since pictures of clients lie there") from error
        except FileExistsError as error:
            raise JournalUnusable(f"durable: {error.filename} is no folder; remove it") from error

    def new_log(self) -> Path:
        """The path for the event log of this start: `events-N.jsonl`, with a number above that of all `LOGS`."""
        numbers = [int(match[1]) for path in self.path.glob(LOGS) if (match := _NUMBER.match(path.name))]
        return self.path / f"events-{max(numbers, default=0) + 1}.jsonl"

    def close(self) -> None:
        self.journal.close()
        os.close(self._lock)
