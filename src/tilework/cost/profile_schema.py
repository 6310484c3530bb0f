"""The SQLite tables of the profile database: creates them, writes a profile, reads all profiles."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import astuple, fields
from typing import Any

from tilework.core.cache import CacheChoice
from tilework.core.cost_row import CostRow
from tilework.core.request import Shape
from tilework.cost.batch_latency import BatchLatencyModel
from tilework.cost.profile import Profile, ProfileKey, ProfileOrigin

APPLICATION_ID = 0x74696C65  # "tile": marks the file as a profile database.
SCHEMA = 8
_WITH_NAMES = 6  # Its rows have the names that models had when they were measured.
_WITHOUT_ARCHITECTURES = 7  # Its rows were measured for a model; later ones are for an architecture.

_KEY_COLUMNS = tuple(column.name for column in fields(ProfileKey))
_ROW_COLUMNS = tuple(column.name for column in fields(CostRow) if column.name != "pipeline")
_CREATE_PROFILES = """
CREATE TABLE profiles (
    id INTEGER PRIMARY KEY,
    hardware TEXT NOT NULL, architecture TEXT NOT NULL, model TEXT NOT NULL, dtype TEXT NOT NULL,
    threads INTEGER NOT NULL, workers INTEGER NOT NULL, libraries TEXT NOT NULL,
    origin TEXT NOT NULL, tilework TEXT NOT NULL, created_unix_ns INTEGER NOT NULL, batch_model TEXT
)"""
_CREATE_ROWS = """
CREATE TABLE rows (
    profile_id INTEGER NOT NULL REFERENCES profiles (id),
    stage TEXT NOT NULL,
    height INTEGER NOT NULL, width INTEGER NOT NULL, frames INTEGER NOT NULL,
    degree INTEGER NOT NULL, batch NOT NULL, link TEXT NOT NULL,
    seconds REAL NOT NULL, p99_seconds REAL,
    peak_bytes INTEGER, activation_bytes INTEGER, state_bytes INTEGER, num_runs INTEGER,
    cache TEXT, skipped REAL NOT NULL, skipped_std REAL NOT NULL
)"""


class ForeignDatabase(Exception):
    """The file is another program's database."""


class OtherSchema(Exception):
    """The file is a profile database of another version."""


def prepare(connection: sqlite3.Connection) -> None:
    """Create the tables in an empty database; in an older one, drop the names of models and add architectures.

    The architecture of the older profiles is not known (`ProfileKey.covers`).

    Raises ForeignDatabase or OtherSchema if it holds something else.
    """
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (schema,) = connection.execute("PRAGMA user_version").fetchone()
    if num_tables == 0:
        connection.execute(_CREATE_PROFILES)
        connection.execute(_CREATE_ROWS)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
    elif application_id != APPLICATION_ID:
        raise ForeignDatabase("this is another program's database")
    elif schema in (_WITH_NAMES, _WITHOUT_ARCHITECTURES):
        if schema == _WITH_NAMES:
            connection.execute("ALTER TABLE rows DROP COLUMN pipeline")
        connection.execute("ALTER TABLE profiles ADD COLUMN architecture TEXT NOT NULL DEFAULT ''")
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
    elif schema != SCHEMA:
        raise OtherSchema(f"its schema is {schema}, and this version reads {SCHEMA}")


def insert_profile(connection: sqlite3.Connection, profile: Profile) -> None:
    batch_model = None if profile.batch_model is None else json.dumps(profile.batch_model.to_json())
    values = (*astuple(profile.key), profile.origin.value, profile.tilework, profile.created_unix_ns, batch_model)
    columns = (*_KEY_COLUMNS, "origin", "tilework", "created_unix_ns", "batch_model")
    cursor = connection.execute(_insert("profiles", columns), values)
    rows = ((cursor.lastrowid, *_row_values(row)) for row in profile.rows)
    connection.executemany(_insert("rows", ("profile_id", *_ROW_COLUMNS)), rows)


def select_profiles(connection: sqlite3.Connection) -> list[Profile]:
    """Return all profiles, oldest first."""
    columns = ", ".join(("id", "origin", "tilework", "created_unix_ns", "batch_model", *_KEY_COLUMNS))
    found = connection.execute(f"SELECT {columns} FROM profiles ORDER BY created_unix_ns, id").fetchall()
    return [
        Profile(
            key=ProfileKey(**dict(zip(_KEY_COLUMNS, key, strict=True))),
            origin=ProfileOrigin(origin),
            rows=tuple(_select_rows(connection, profile_id)),
            tilework=version,
            created_unix_ns=created,
            batch_model=None if batch_model is None else BatchLatencyModel.parse(json.loads(batch_model)),
        )
        for profile_id, origin, version, created, batch_model, *key in found
    ]


def _select_rows(connection: sqlite3.Connection, profile_id: int) -> Iterator[CostRow]:
    columns = ", ".join(_ROW_COLUMNS)
    found = connection.execute(f"SELECT {columns} FROM rows WHERE profile_id = ? ORDER BY rowid", (profile_id,))
    return map(_row, found.fetchall())


def _row_values(row: CostRow) -> list[object]:
    """Return the values of a row. A mixed batch is text, its shapes separated by commas; so is a cache."""
    texts: dict[str, object] = {}
    if not isinstance(row.batch, int):
        texts["batch"] = ",".join(map(str, row.batch))
    if row.cache is not None:
        texts["cache"] = str(row.cache)
    return [texts.get(name, getattr(row, name)) for name in _ROW_COLUMNS]


def _row(values: Sequence[Any]) -> CostRow:
    given = dict(zip(_ROW_COLUMNS, values, strict=True))
    if isinstance(given["batch"], str):
        given["batch"] = tuple(map(Shape.parse, given["batch"].split(",")))
    if given["cache"] is not None:
        given["cache"] = CacheChoice.parse(given["cache"])
    return CostRow(pipeline="", **given)


def _insert(table: str, columns: tuple[str, ...]) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
