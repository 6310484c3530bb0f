"""The data of a durable directory: each owner that fences another one makes a new epoch of them.

A stopped process may go on at any time, in the middle of anything. On another machine it may hold locks of SQLite,
whose write-ahead log two machines cannot share. So a fenced owner keeps its journal, and the next epoch begins with a
copy of it. Folders of files move into the new epoch, so that no path of the former owner leads to them.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from tilework.store.disk import sync

JOURNAL = "tilework.sqlite"
_WAL = f"{JOURNAL}-wal"
_FOLDERS = ("results", "pictures", "batches")
_NAME = re.compile(r"epoch-(\d+)")
_WAL_HEAD_BYTES = 32


def newest(directory: Path) -> int:
    """Return the number of the newest complete epoch. The first epoch is the directory itself."""
    return max((int(match[1]) for one in directory.iterdir() if (match := _NAME.fullmatch(one.name))), default=1)


def folder_of(directory: Path, epoch: int) -> Path:
    return directory if epoch == 1 else directory / f"epoch-{epoch}"


def enter(directory: Path, epoch: int) -> Path:
    """Return the folder of an epoch, which must not be older than the newest one.

    A new epoch gets a folder with a copy of the journal; otherwise data of older epochs are removed. Raises OSError,
    sqlite3.Error.
    """
    before = newest(directory)
    folder = folder_of(directory, epoch)
    is_new = before < epoch
    if is_new:
        _copy(folder_of(directory, before), folder)
    for older in _older(directory, epoch):
        for name in _FOLDERS:
            if (older / name).is_dir() and not (folder / name).exists():
                (older / name).rename(folder / name)
    if not is_new:
        for older in _older(directory, epoch):
            _remove(older)
    return folder


def _older(directory: Path, epoch: int) -> list[Path]:
    return [one for number in range(1, epoch) if (one := folder_of(directory, number)).is_dir()]


def _remove(older: Path) -> None:
    """Remove the data of an older epoch, also what its owner has written there after it was fenced."""
    if _NAME.fullmatch(older.name):
        shutil.rmtree(older)
        return
    for name in _FOLDERS:
        shutil.rmtree(older / name, ignore_errors=True)
    for path in older.glob(f"{JOURNAL}*"):
        path.unlink()


def _copy(old: Path, folder: Path) -> None:
    """Make `folder`, with the journal of `old` as one file. The folder appears when all of that is on the disk."""
    new = folder.with_name(f".{folder.name}")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o700)
    _copy_journal(old, new)
    with closing(sqlite3.connect(new / JOURNAL, isolation_level=None)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    sync(new / JOURNAL)
    sync(new)
    new.rename(folder)
    sync(folder.parent)


def _copy_journal(old: Path, new: Path) -> None:
    """Copy a journal and its write-ahead log while the former owner may still write.

    What that owner moves from the log into the file is still in the log until it begins another log, whose head
    differs: then both are copied again.
    """
    while True:
        head = _wal_head(old)
        for name in (JOURNAL, _WAL):
            with suppress(FileNotFoundError):
                shutil.copy(old / name, new / name)
        if _wal_head(old) == head:
            return


def _wal_head(folder: Path) -> bytes:
    try:
        with (folder / _WAL).open("rb") as file:
            return file.read(_WAL_HEAD_BYTES)
    except FileNotFoundError:
        return b""
