"""The database of measured costs: one SQLite file per user, shared by all servers and profiles of a machine."""

from __future__ import annotations

import fcntl
import logging
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import TypeVar

from tilework.cost.profile import Profile, ProfileKey, best_table
from tilework.cost.profile_schema import ForeignDatabase, OtherSchema, insert_profile, prepare, select_profiles
from tilework.cost.table import CostTable
from tilework.ownership.own import NotOwn, make_own_file

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_BUSY_S = 10.0
_DAMAGED = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}


class ProfilesUnavailable(RuntimeError):
    """The database cannot be used; the message names the file, the reason and the remedy."""


class Profiles:
    """Profiles in one SQLite file. The first `save` creates the file.

    Any number of processes may use it at once: each call is one transaction that waits for its turn. A file that is
    damaged, or of another schema, is renamed with a warning and a new file is created: the lost rows can be measured
    again. Another program's database is left alone. All methods raise ProfilesUnavailable, also if another user may
    write to the file: a wrong table makes a server promise what it cannot keep.

    It uses the rollback journal instead of WAL: home directories may be on network file systems, where WAL does not
    work, and a server writes here once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, profile: Profile) -> None:
        self._use(lambda connection: insert_profile(connection, profile))

    def latest(self, key: ProfileKey, pipeline: str) -> CostTable | None:
        """Return the best table for `key`, as one of `pipeline` (see `best_table`); None if there is no row."""
        return best_table(self.entries(), key, pipeline)

    def entries(self) -> tuple[Profile, ...]:
        """Return all saved profiles, oldest first."""
        return tuple(self._use(select_profiles)) if self.path.exists() else ()

    def _use(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Do `work` in a transaction; if the file is unreadable, on a new file."""
        examined = self._inode()
        try:
            return self._attempt(work)
        except _Unreadable as error:
            self._move_aside(examined, error.__cause__)
            return self._attempt(work)

    def _attempt(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            make_own_file(self.path)
            with closing(sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                prepare(connection)
                result = work(connection)
                connection.execute("COMMIT")
                return result
        except OtherSchema as error:
            raise _Unreadable(self._message(error)) from error
        except (NotOwn, ForeignDatabase, sqlite3.Error, OSError) as error:
            is_damaged = getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED
            raise (_Unreadable if is_damaged else ProfilesUnavailable)(self._message(error)) from error

    def _message(self, error: Exception) -> str:
        return f"{self.path}: {error}; give another file for the profiles"

    def _inode(self) -> int | None:
        with suppress(OSError):
            return self.path.stat().st_ino
        return None

    def _move_aside(self, examined: int | None, reason: BaseException | None) -> None:
        """Rename the file, unless another process has done so and has put a new file in its place.

        All processes that found the same file unreadable lock the file itself, not its name. The first of them renames
        it; the others then see that the name belongs to another file.
        """
        try:
            with self.path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if self._inode() == examined:
                    aside = self._free_name()
                    self.path.rename(aside)
                    _log.warning("%s: %s; moved to %s, and a new file is created", self.path, reason, aside)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ProfilesUnavailable(self._message(error)) from error

    def _free_name(self) -> Path:
        names = (self.path.with_name(f"{self.path.name}.aside-{number}") for number in count(1))
        return next(name for name in names if not name.exists())


class _Unreadable(ProfilesUnavailable):
    """The file is a profile database, but cannot be read."""
