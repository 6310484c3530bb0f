"""The journal of a server: accepted calls and their checkpoints, in one SQLite file.

Every method is one transaction, and is done when it returns: a killed process loses nothing of it. A lost machine loses
nothing that was written before a `sync`, and at most the last seconds of the rest; no transaction is kept in part. The
server knows what a call or a record says: here they are documents.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from tilework.core.checkpoint import Checkpoint
from tilework.core.wire.blobs import SavedState, StateBlob

_log = logging.getLogger(__name__)
_APPLICATION_ID = 0x746A726E  # "tjrn"; marks the file as ours.
_VERSION = 6  # Since 6 calls name their model.
_MOST_WAL_PAGES = 16_384  # 64 MiB, in case `tidy` does not run.
_BUSY_S = 10.0
_SCHEMA = """
CREATE TABLE clock (zero_ns INTEGER NOT NULL);
CREATE TABLE call (number INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE, model TEXT NOT NULL, document BLOB NOT NULL);
CREATE TABLE image (uid TEXT PRIMARY KEY, call TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX image_call ON image (call);
CREATE TABLE state (
    uid TEXT NOT NULL, stage INTEGER NOT NULL, position INTEGER NOT NULL, blob TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, PRIMARY KEY (uid, stage)
) WITHOUT ROWID;
CREATE TABLE record (
    number INTEGER PRIMARY KEY, uid TEXT NOT NULL UNIQUE, has_key INTEGER NOT NULL, document BLOB NOT NULL
);
"""
# Not part of the schema: a journal without this table is valid too, so an older version can go on with this one and
# back.
_ADDED = """
CREATE TABLE IF NOT EXISTS added (
    number INTEGER PRIMARY KEY, model TEXT NOT NULL, lora TEXT NOT NULL, document BLOB NOT NULL, UNIQUE (model, lora)
)
"""


class JournalUnusable(RuntimeError):
    """The file cannot be used; the message names it, the reason and the remedy."""


class NotWritten(Exception):
    """A write that failed, for instance because the disk is full. The journal is as it was before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCall:
    """A call that was accepted and has not ended, with a checkpoint of each image by its uid."""

    uid: str
    model: str
    document: bytes
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A model, or a LoRA of a model, that was added while the server ran; `lora` is empty for a model."""

    model: str
    lora: str
    document: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A call that has ended. `has_key`: a repeated call with its idempotency key leads to it."""

    uid: str
    has_key: bool
    document: bytes


class Journal:
    """A `CheckpointKeeper` and the list of calls. For one process and one thread at a time; `tidy` runs on any."""

    def __init__(
        self,
        path: Path,
        on_failed: Callable[[sqlite3.Error | OSError], None] = lambda _error: None,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the journal, or make it.

        `on_failed` is called with the error of each write that fails. `confirm` is called, on a thread, after data have
        reached the disk, and does not return if another process owns the journal by then. Raises JournalUnusable,
        OSError.
        """
        path.touch(mode=0o600)  # It holds prompts; SQLite gives its other files the same mode.
        self._path = path
        self._on_failed = on_failed
        self._confirm = confirm
        self._num_written = self._num_synced = 0  # Transactions.
        self._syncing: asyncio.Task[None] | None = None
        self._next_sync: asyncio.Task[None] | None = None
        self._is_failing = False
        self._owed: dict[str, Ended] = {}  # Ends that could not be written: tried again with the next end, or on close.
        with ExitStack() as stack:
            try:
                self._connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
                stack.callback(self._connection.close)
                self._open()
                self._wal = os.open(f"{path}-wal", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                stack.callback(os.close, self._wal)
                # `tidy` opens no path: by then the path may belong to another process, on another machine.
                self._tidying = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
                self._tidying.execute("SELECT count(*) FROM call")  # SQLite opens its files with the first statement.
            except sqlite3.Error as error:
                raise JournalUnusable(f"{path} cannot be used: {error}; give another directory") from error
            stack.pop_all()

    def _open(self) -> None:
        (application,) = self._connection.execute("PRAGMA application_id").fetchone()
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        (num_tables,) = self._connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if application != _APPLICATION_ID and (application or num_tables):
            raise JournalUnusable(f"{self._path} is no journal of a tilework server; give another directory")
        if version not in (0, _VERSION):
            age = "a newer" if version > _VERSION else "an older"
            raise JournalUnusable(
                f"{self._path} has version {version}, and this tilework reads version {_VERSION}: it was written by"
                f" {age} one; start that one, or give another directory"
            )
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")  # Commits do not wait for the disk: `sync` does.
        self._connection.execute(f"PRAGMA wal_autocheckpoint={_MOST_WAL_PAGES}")
        if not version:
            marks = f"PRAGMA application_id={_APPLICATION_ID}; PRAGMA user_version={_VERSION};"
            self._connection.executescript(f"BEGIN; {_SCHEMA} {marks} COMMIT;")
        self._connection.execute(_ADDED)

    def close(self) -> None:
        if self._owed:
            with suppress(NotWritten):
                self._write_owed()
        self._tidying.close()
        self._connection.close()
        os.close(self._wal)

    async def sync(self) -> None:
        """Wait until everything written is on the disk. Calls that wait at the same time share an fsync.

        Raises:
            NotWritten: it may not be on the disk.
        """
        if self._num_synced == self._num_written:
            return
        if self._next_sync is None:
            self._next_sync = asyncio.create_task(self._sync_after(self._syncing))
        await asyncio.shield(self._next_sync)

    async def _sync_after(self, before: asyncio.Task[None] | None) -> None:
        if before is not None and not before.done():
            await asyncio.wait({before})
        self._syncing, self._next_sync, num_written = self._next_sync, None, self._num_written
        try:
            await asyncio.to_thread(self._sync)
        except OSError as error:
            self._on_failed(error)
            raise NotWritten(f"{self._path}: {error.strerror}") from error
        self._num_synced = num_written

    def _sync(self) -> None:
        os.fdatasync(self._wal)
        self._confirm()

    def tidy(self) -> None:
        """Move the write-ahead log into the file, which waits for the disk. May be called on any thread."""
        self._tidying.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def zero_ns(self, unix_ns: int, least_ns: int = 0) -> int:
        """Return the Unix time, given that it is `unix_ns` now, at which the server's clock showed zero.

        That is the time of the first start, or an earlier one if the clock would otherwise show less than `least_ns`.
        """
        with self._transaction() as connection:
            row = connection.execute("SELECT zero_ns FROM clock").fetchone()
            before_ns = unix_ns if row is None else int(row[0])
            zero_ns = min(before_ns, unix_ns - least_ns)
            if row is None:
                connection.execute("INSERT INTO clock VALUES (?)", (zero_ns,))
            elif zero_ns != before_ns:
                connection.execute("UPDATE clock SET zero_ns = ?", (zero_ns,))
            return zero_ns

    # Calls.

    def begin(self, call: OpenCall) -> None:
        """Keep a call, with the checkpoints that its images begin with, until it ends. Raises NotWritten."""
        with self._transaction() as connection:
            values = call.uid, call.model, call.document
            connection.execute("INSERT INTO call (uid, model, document) VALUES (?, ?, ?)", values)
            images = [(uid, call.uid) for uid in call.checkpoints]
            connection.executemany("INSERT INTO image (uid, call) VALUES (?, ?)", images)
            for uid, checkpoint in call.checkpoints.items():
                for state in checkpoint.states:
                    _insert(connection, uid, state)

    def end(self, ended: Ended) -> None:
        """Replace an open call by the record of its end.

        A record that cannot be written is kept in memory, and written with the next end, or when the journal is closed.

        Raises:
            NotWritten: if the process is killed before then, the next start finds the call open.
        """
        self._owed[ended.uid] = ended
        self._write_owed()

    def _write_owed(self) -> None:
        with self._transaction() as connection:
            for one in self._owed.values():
                _remove_open(connection, one.uid)
                values = one.uid, one.has_key, one.document
                connection.execute("INSERT INTO record (uid, has_key, document) VALUES (?, ?, ?)", values)
        self._owed.clear()

    def change(self, uid: str, document: bytes) -> None:
        """Replace the record of an ended call. Raises NotWritten."""
        if uid in self._owed:
            self._owed[uid] = replace(self._owed[uid], document=document)
        with self._transaction() as connection:
            connection.execute("UPDATE record SET document = ? WHERE uid = ?", (document, uid))

    def forget(self, uid: str) -> None:
        """Delete an open call without a record. Raises NotWritten."""
        with self._transaction() as connection:
            _remove_open(connection, uid)

    def free_key(self, uid: str) -> None:
        """Remove the idempotency key of an ended call. Raises NotWritten."""
        if uid in self._owed:
            self._owed[uid] = replace(self._owed[uid], has_key=False)
        with self._transaction() as connection:
            connection.execute("UPDATE record SET has_key = 0 WHERE uid = ?", (uid,))

    def drop(self, uids: Collection[str]) -> None:
        """Delete records. Raises NotWritten."""
        owed = [uid for uid in uids if uid in self._owed]
        with self._transaction() as connection:
            connection.executemany("DELETE FROM record WHERE uid = ?", [(uid,) for uid in uids])
            for uid in owed:
                _remove_open(connection, uid)
        for uid in owed:
            del self._owed[uid]

    def open_calls(self) -> list[OpenCall]:
        """Return open calls in order of arrival."""
        rows = self._connection.execute("SELECT uid, model, document FROM call ORDER BY number")
        calls = {uid: OpenCall(uid=uid, model=model, document=document) for uid, model, document in rows}
        states: dict[str, list[SavedState]] = {}
        columns = "uid, stage, position, blob, num_bytes"
        for uid, index, position, *blob in self._connection.execute(f"SELECT {columns} FROM state ORDER BY uid, stage"):
            states.setdefault(uid, []).append(SavedState(index, position, StateBlob(*blob)))
        for call, uid in self._connection.execute("SELECT call, uid FROM image ORDER BY uid"):
            calls[call].checkpoints[uid] = Checkpoint(tuple(states.get(uid, ())))
        return list(calls.values())

    def records(self) -> list[Ended]:
        """Return ended calls in order of their ends."""
        rows = self._connection.execute("SELECT uid, has_key, document FROM record ORDER BY number")
        return [Ended(uid=uid, has_key=bool(has_key), document=document) for uid, has_key, document in rows]

    # Models and LoRAs that were added while the server ran.

    def add(self, *added: Added) -> None:
        """Keep models and LoRAs until they are removed; each replaces the one of its name.

        A model replaces the former one with all its LoRAs. Raises NotWritten.
        """
        with self._transaction() as connection:
            models = [(one.model,) for one in added if not one.lora]
            connection.executemany("DELETE FROM added WHERE model = ?", models)
            values = [(one.model, one.lora, one.document) for one in added]
            connection.executemany("INSERT OR REPLACE INTO added (model, lora, document) VALUES (?, ?, ?)", values)

    def remove(self, model: str, lora: str = "") -> None:
        """Forget a LoRA that was added; without `lora`, forget a model and all its LoRAs. Raises NotWritten."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM added WHERE model = ? AND ? IN (lora, '')", (model, lora))

    def added(self) -> list[Added]:
        """Return the models and LoRAs in the order in which they were added."""
        rows = self._connection.execute("SELECT model, lora, document FROM added ORDER BY number")
        return [Added(model=model, lora=lora, document=document) for model, lora, document in rows]

    # Checkpoints. A failed write does not end a call: without a checkpoint the call would start over.

    def keep(self, uid: str, state: SavedState) -> None:
        try:
            with self._transaction() as connection:
                connection.execute("DELETE FROM state WHERE uid = ? AND stage > ?", (uid, state.index))
                _insert(connection, uid, state)
            self._is_failing = False
        except NotWritten as error:
            if not self._is_failing:  # Once, not for every step.
                _log.warning("checkpoints are not kept for the next start: %s", error)
            self._is_failing = True

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield self._connection
            self._connection.execute("COMMIT")
            self._num_written += 1
        except sqlite3.IntegrityError:  # A bug.
            raise
        except sqlite3.Error as error:
            self._on_failed(error)
            raise NotWritten(f"{self._path}: {error}") from error
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")


def _insert(connection: sqlite3.Connection, uid: str, state: SavedState) -> None:
    """Insert the state of an image unless its call has ended meanwhile."""
    connection.execute(
        "INSERT OR REPLACE INTO state SELECT ?, ?, ?, ?, ? WHERE EXISTS (SELECT 1 FROM image WHERE uid = ?)",
        (uid, state.index, state.position, state.blob.name, state.blob.num_bytes, uid),
    )


def _remove_open(connection: sqlite3.Connection, uid: str) -> None:
    connection.execute("DELETE FROM state WHERE uid IN (SELECT uid FROM image WHERE call = ?)", (uid,))
    connection.execute("DELETE FROM image WHERE call = ?", (uid,))
    connection.execute("DELETE FROM call WHERE uid = ?", (uid,))
