"""Pictures that open calls were given, as files: the journal holds only their names."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from uuid import uuid4

from tilework.ownership.own import make_own_folder
from tilework.store.disk import sync
from tilework.store.journal import NotWritten

_log = logging.getLogger(__name__)
_NAME = re.compile(r"[0-9a-f]{32}")


class GivenPictures:
    """A folder with a file for each picture that an open call was given; files are written and removed on threads.

    Methods run on the event loop. A file is written before its call is in the journal, and stays until the journal
    holds the call's end: whenever the process is killed, no open call lacks a file, and the next start removes the
    files of no call.

    Rejected: contents in the journal's database. Its one writer is the event loop, which they would hold for 7 ms per
    MB (`tests/server/test_loop_pauses.py`).
    """

    def __init__(self, folder: Path, on_failed: Callable[[OSError], None] = lambda _error: None) -> None:
        """Open the folder. `on_failed` is called, on any thread, with each error of a write. Raises NotOwn, OSError."""
        self._folder = make_own_folder(folder)
        self._on_failed = on_failed
        self._held: dict[str, tuple[str, ...]] = {}

    async def write(self, contents: Sequence[bytes]) -> tuple[str, ...]:
        """Write new files, all or none, and return their names; one object gets one file. Raises NotWritten."""
        files = {id(content): (uuid4().hex, content) for content in contents}
        await asyncio.to_thread(self._write, dict(files.values()))
        return tuple(files[id(content)][0] for content in contents)

    def _write(self, contents: Mapping[str, bytes]) -> None:
        try:
            for name, content in contents.items():
                with open(self._folder / name, "xb", opener=_opener) as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())  # Otherwise the journal may survive a loss of power, and the picture not.
            sync(self._folder)
        except OSError as error:
            self._remove(contents)
            self._on_failed(error)
            raise NotWritten(f"{self._folder}: {error.strerror}") from error

    def read(self, name: str) -> bytes:
        """Return the content of a file. Blocks. Raises OSError, also if it is a link or no regular file."""
        # Without O_NONBLOCK, opening a pipe of this name would wait for its writer.
        descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is no file", name)
            return file.read()

    def hold(self, uid: str, names: Sequence[str]) -> None:
        """Keep these files until the call of this uid has ended."""
        if names:
            self._held[uid] = tuple(names)

    def release(self, uids: Iterable[str]) -> None:
        """Remove the files of these calls, which have ended."""
        self._drop(name for uid in uids for name in self._held.pop(uid, ()))

    def drop_unheld(self, names: Sequence[str]) -> None:
        """Remove those of these files that no call holds: the call that they were written for has not begun."""
        if names:
            self._drop(self._unheld(names))

    def keep_held(self) -> None:
        """Remove all pictures that no call holds, and no other files. Blocks. Raises OSError."""
        self._remove(self._unheld([one.name for one in self._folder.iterdir() if _NAME.fullmatch(one.name)]))

    def _unheld(self, names: Sequence[str]) -> list[str]:
        held = {name for each in self._held.values() for name in each}
        return [name for name in names if name not in held]

    def _drop(self, names: Iterable[str]) -> None:
        if going := tuple(names):
            asyncio.get_running_loop().run_in_executor(None, self._remove, going)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                (self._folder / name).unlink(missing_ok=True)
            except OSError as error:
                _log.warning("%s stays until the next start: %s", self._folder / name, error)


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
