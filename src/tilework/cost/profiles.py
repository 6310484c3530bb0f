"""The database of measured costs: one SQLite file per user, shared by all servers and profiles of a machine."""

from __future__ import annotations

import fcntl
import json
import logging
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import astuple, dataclass, fields
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from tilework.core.request import Shape
from tilework.core.wire import CostRow
from tilework.cost.batch_latency import BatchLatencyModel
from tilework.cost.rows import Place, place_of
from tilework.cost.table import CostTable

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_APPLICATION_ID = 0x74696C65  # "tile"; marks the file as ours.
_SCHEMA = 2
_BUSY_S = 10.0
_DAMAGED = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}


class ProfilesUnavailable(RuntimeError):
    """The database cannot be used; the message names the file, the reason and the remedy."""


class Kind(StrEnum):
    """A profile was asked for and is thorough; a calibration is what a server's start takes the time for."""

    CALIBRATION = "calibration"
    PROFILE = "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """Under what circumstances durations hold; under others they would have to be measured again.

    `hardware` is one device, `model` the identity of the weights, `threads` those of each worker. `workers` is how
    many measured at the same time on a shared resource (the memory of CPUs), 1 where each has a device of its own.
    """

    hardware: str
    model: str
    dtype: str
    threads: int
    workers: int
    libraries: str

    def table(
        self, rows: tuple[CostRow, ...], batch_models: Mapping[str, BatchLatencyModel] | None = None
    ) -> CostTable:
        source = f"measured: {self.model}, {self.dtype}, {self.workers} x {self.threads} threads, {self.libraries}"
        return CostTable(hardware=self.hardware, source=source, rows=rows, batch_models=batch_models or {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One run of measuring. `created_unix_ns` is wall-clock time, `tilework` the version that measured.

    `batch_model` is what was learned from all batches that were known then; None where there were too few.
    """

    key: ProfileKey
    kind: Kind
    rows: tuple[CostRow, ...]
    tilework: str
    created_unix_ns: int
    batch_model: BatchLatencyModel | None = None


class Profiles:
    """Profiles in one SQLite file, which the first one that is saved brings about.

    Any number of processes may use it at once: each call is one transaction that waits for its turn. A file that is
    damaged, or of another schema, is moved aside with a warning and a new one begun: what is lost can be measured
    again. Another program's database is left alone. All methods raise ProfilesUnavailable.

    The rollback journal and not WAL: homes lie on network file systems, where WAL does not work, and a server writes
    here once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, profile: Profile) -> None:
        self._use(lambda connection: _save(connection, profile))

    def latest(self, key: ProfileKey) -> CostTable | None:
        """The best that is known under `key`: for each stage, shape, degree, batch and link the newest row.

        Rows of profiles come before those of calibrations. The newest batch_model counts. None if there is no row.
        """
        rows: dict[Place, CostRow] = {}
        batch_models: dict[str, BatchLatencyModel] = {}
        for profile in sorted(self.entries(), key=lambda profile: profile.kind is Kind.PROFILE):
            if profile.key == key:
                rows.update((place_of(row), row) for row in profile.rows)
                if profile.batch_model is not None:
                    batch_models[profile.rows[0].pipeline] = profile.batch_model
        return key.table(tuple(rows.values()), batch_models) if rows else None

    def entries(self) -> tuple[Profile, ...]:
        """Everything that was saved, oldest first."""
        return tuple(self._use(_entries)) if self.path.exists() else ()

    def _use(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Do `work` in a transaction; if the file is unreadable, on a new one."""
        examined = self._inode()
        try:
            return self._attempt(work)
        except _Unreadable as error:
            self._dropped_to_best_effort(examined, error.__cause__)
            return self._attempt(work)

    def _attempt(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                _prepare(connection)
                result = work(connection)
                connection.execute("COMMIT")
                return result
        except ProfilesUnavailable as error:
            raise type(error)(self._message(error)) from error
        except (sqlite3.Error, OSError) as error:
            is_damaged = getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED
            raise (_Unreadable if is_damaged else ProfilesUnavailable)(self._message(error)) from error

    def _message(self, error: Exception) -> str:
        return f"{self.path}: {error}; give another file for the profiles"

    def _inode(self) -> int | None:
        with suppress(OSError):
            return self.path.stat().st_ino
        return None

    def _dropped_to_best_effort(self, examined: int | None, reason: BaseException | None) -> None:
        """Move the file away, unless another process already has and has put a new one there.

        Those who found the same file unreadable lock the file itself and not its name; so the first of them moves it,
        and the others then see another one under its name.
        """
        try:
            with self.path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if self._inode() == examined:
                    aside = self._free_name()
                    self.path.rename(aside)
                    _log.warning("%s: %s; moved to %s, and a new one is begun", self.path, reason, aside)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ProfilesUnavailable(self._message(error)) from error

    def _free_name(self) -> Path:
        names = (self.path.with_name(f"{self.path.name}.aside-{number}") for number in count(1))
        return next(name for name in names if not name.exists())


class _Unreadable(ProfilesUnavailable):
    """The file is ours but of no use."""


_KEY_COLUMNS = tuple(column.name for column in fields(ProfileKey))
_ROW_COLUMNS = tuple(column.name for column in fields(CostRow))
_CREATE_PROFILES = """
CREATE TABLE profiles (
    id INTEGER PRIMARY KEY,
    hardware TEXT NOT NULL, model TEXT NOT NULL, dtype TEXT NOT NULL,
    threads INTEGER NOT NULL, workers INTEGER NOT NULL, libraries TEXT NOT NULL,
    kind TEXT NOT NULL, tilework TEXT NOT NULL, created_unix_ns INTEGER NOT NULL, batch_model TEXT
)"""
_CREATE_ROWS = """
CREATE TABLE rows (
    profile_id INTEGER NOT NULL REFERENCES profiles (id),
    pipeline TEXT NOT NULL, stage TEXT NOT NULL,
    height INTEGER NOT NULL, width INTEGER NOT NULL, frames INTEGER NOT NULL,
    degree INTEGER NOT NULL, batch NOT NULL, link TEXT NOT NULL,
    seconds REAL NOT NULL, p99_seconds REAL, peak_bytes INTEGER, num_runs INTEGER
)"""


def _prepare(connection: sqlite3.Connection) -> None:
    """Make the tables of an empty database; raise ProfilesUnavailable if it holds something else."""
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (schema,) = connection.execute("PRAGMA user_version").fetchone()
    if num_tables == 0:
        connection.execute(_CREATE_PROFILES)
        connection.execute(_CREATE_ROWS)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {_SCHEMA}")
    elif application_id != _APPLICATION_ID:
        raise ProfilesUnavailable("this is another program's database")
    elif schema != _SCHEMA:
        raise _Unreadable(f"its schema is {schema}, and this version reads {_SCHEMA}")


def _save(connection: sqlite3.Connection, profile: Profile) -> None:
    batch_model = None if profile.batch_model is None else json.dumps(profile.batch_model.to_json())
    values = (*astuple(profile.key), profile.kind.value, profile.tilework, profile.created_unix_ns, batch_model)
    columns = (*_KEY_COLUMNS, "kind", "tilework", "created_unix_ns", "batch_model")
    cursor = connection.execute(_insert("profiles", columns), values)
    rows = ((cursor.lastrowid, *_row_values(row)) for row in profile.rows)
    connection.executemany(_insert("rows", ("profile_id", *_ROW_COLUMNS)), rows)


def _row_values(row: CostRow) -> list[object]:
    """A mixed batch is text: its shapes, separated by commas."""
    batch = row.batch if isinstance(row.batch, int) else ",".join(map(str, row.batch))
    return [batch if name == "batch" else getattr(row, name) for name in _ROW_COLUMNS]


def _row(values: Sequence[Any]) -> CostRow:
    given = dict(zip(_ROW_COLUMNS, values, strict=True))
    if isinstance(given["batch"], str):
        given["batch"] = tuple(map(Shape.parse, given["batch"].split(",")))
    return CostRow(**given)


def _insert(table: str, columns: tuple[str, ...]) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"


def _entries(connection: sqlite3.Connection) -> list[Profile]:
    columns = ", ".join(("id", "kind", "tilework", "created_unix_ns", "batch_model", *_KEY_COLUMNS))
    found = connection.execute(f"SELECT {columns} FROM profiles ORDER BY created_unix_ns, id").fetchall()
    return [
        Profile(
            key=ProfileKey(**dict(zip(_KEY_COLUMNS, key, strict=True))),
            kind=Kind(kind),
            rows=tuple(_rows(connection, profile_id)),
            tilework=version,
            created_unix_ns=created,
            batch_model=None if batch_model is None else BatchLatencyModel.parse(json.loads(batch_model)),
        )
        for profile_id, kind, version, created, batch_model, *key in found
    ]


def _rows(connection: sqlite3.Connection, profile_id: int) -> Iterator[CostRow]:
    columns = ", ".join(_ROW_COLUMNS)
    found = connection.execute(f"SELECT {columns} FROM rows WHERE profile_id = ? ORDER BY rowid", (profile_id,))
    return map(_row, found.fetchall())
