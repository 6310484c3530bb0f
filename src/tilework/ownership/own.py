"""Folders and files that no other user of the machine can change or replace."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EACCES, ELOOP, ENOTDIR, ENXIO
from pathlib import Path

ONLY_OURS = 0o077
"""The umask of processes that write what no other user may read: states, prompts, results."""
_FOLDER, _FILE = 0o700, 0o600
_OTHERS_WRITE = 0o022
_ANYONE = 0o777
_ROOT = 0


class NotOwn(Exception):
    """A folder or file that other users control; the message names it, the reason and the remedy.

    `is_anothers`: it belongs to another user.
    """

    def __init__(self, message: str, *, is_anothers: bool = False) -> None:
        super().__init__(message)
        self.is_anothers = is_anothers


def open_private_folder(path: Path) -> int:
    """Return a descriptor of a folder that belongs to this user, has mode 0700 and is no link.

    Raises:
        NotOwn: the folder is not like that.
        FileNotFoundError: there is none.
    """
    return _opened(path, os.O_RDONLY | os.O_DIRECTORY, _FOLDER)


def open_private_file(name: str, folder: int, flags: int) -> int:
    """Return a descriptor of a file in an open folder; it belongs to this user, has mode 0600, one name and is no link.

    Raises:
        NotOwn: the file is not like that.
        FileNotFoundError: there is none.
    """
    return _opened(Path(name), flags, _FILE, folder)


def make_own_folder(path: Path) -> Path:
    """Make a folder of mode 0700 if there is none; return its path without links. Raises as `own_folder`."""
    path.mkdir(mode=_FOLDER, parents=True, exist_ok=True)
    return own_folder(path)


def own_folder(path: Path) -> Path:
    """Return the path without links of a folder of this user that no other user may write to; others may read it.

    A link is followed if it belongs to this user or root: data is often put on another disk that way. Links of others
    are not followed, even to a folder of this user: their owners would choose which folder.

    Raises:
        NotOwn: the folder belongs to another user, or another user may write to it.
        OSError: there is none, or it cannot be made.
    """
    link = path.lstat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (os.geteuid(), _ROOT):
        raise NotOwn(f"{path} is a link of user {link.st_uid}; give the directory itself", is_anothers=True)
    where = path.resolve()
    with closing_fd(os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)) as folder:
        _check_no_other_writes(path, os.fstat(folder), "700", (os.geteuid(),))
    return where


def make_own_file(path: Path) -> None:
    """Make an empty file of mode 0600 if there is none, and a folder of mode 0700 for it.

    Both must belong to this user or root, and no other user may write to them: else another could replace the file,
    or put one beside it that a database takes for its own. The file must not be a link.

    Raises:
        NotOwn: the file or the folder is not like that.
        OSError: they cannot be made or opened.
    """
    path.parent.mkdir(mode=_FOLDER, parents=True, exist_ok=True)
    owners = (os.geteuid(), _ROOT)
    folder = path.parent.resolve()
    _check_no_other_writes(folder, folder.stat(), "go-w", owners)
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, _FILE)
    except OSError as error:
        if error.errno == ELOOP:
            raise NotOwn(f"{path} is a link; give the file itself") from error
        raise
    with closing_fd(file):
        _check_no_other_writes(path, os.fstat(file), "600", owners)


@contextmanager
def closing_fd(descriptor: int) -> Iterator[int]:
    """Close a descriptor when the context ends."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _opened(path: Path, flags: int, mode: int, folder: int | None = None) -> int:
    try:
        # Without O_NONBLOCK, opening a pipe of this name would wait for its other end.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno in (ELOOP, ENOTDIR, ENXIO):
            raise NotOwn(f"{path} is a link or no {'folder' if mode == _FOLDER else 'file'}; remove it") from error
        if error.errno == EACCES:
            raise NotOwn(f"{path} is not readable for user {os.geteuid()}", is_anothers=True) from error
        raise
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise _anothers(path, status)
        if status.st_mode & _ANYONE != mode:
            raise NotOwn(f"{path} has mode {_mode(status)}, not {mode:04o}; remove it, or run: chmod {mode:o} {path}")
        if mode == _FILE and (not stat.S_ISREG(status.st_mode) or status.st_nlink != 1):
            raise NotOwn(f"{path} is no regular file, or has several names (hard links); remove it")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_no_other_writes(path: Path, status: os.stat_result, mode: str, owners: tuple[int, ...]) -> None:
    if status.st_uid not in owners:
        raise _anothers(path, status)
    if status.st_mode & _OTHERS_WRITE:
        raise NotOwn(f"{path} has mode {_mode(status)}, so that other users can write there; run: chmod {mode} {path}")


def _anothers(path: Path, status: os.stat_result) -> NotOwn:
    own = os.geteuid()
    said = f"{path} belongs to user {status.st_uid} (mode {_mode(status)}), and this is user {own}"
    return NotOwn(f"{said}; give another, or run: chown {own} {path}", is_anothers=True)


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):04o}"
