"""Results as files, which outlive the process."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import BinaryIO

from tilework.store.disk import sync
from tilework.store.index import Index
from tilework.store.results import LocalStore, Result, Stored, TooLarge, Unwritten

_log = logging.getLogger(__name__)
_HIDDEN = ".new-"
_MOST_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The first line of a file; the content follows it."""

    uid: str
    media_type: str
    num_bytes: int
    expires_ns: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A result of a `FileStore`, and its file, whose path no other result ever has."""

    uid: str
    path: Path
    expires_ns: int


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A `Result` in an open file: the content begins at byte `begin`."""

    file: BinaryIO
    begin: int
    num_bytes: int
    media_type: str

    async def read(self, part: range | None = None) -> bytes:
        wanted = range(self.num_bytes) if part is None else part
        return await asyncio.to_thread(os.pread, self.file.fileno(), len(wanted), self.begin + wanted.start)

    def close(self) -> None:
        self.file.close()


class FileStore(LocalStore):
    """A `ResultStore` in its own directory, on the server's clock, which continues at the next start.

    Rejected: contents in the journal's database. They would be written twice, and its one writer would block the event
    loop. A file appears under its name, a number that grows, only when it is complete. Files are read and written on
    threads; everything else happens on the event loop.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        ttl_ns: int,
        on_failed: Callable[[OSError], None] = lambda _error: None,
    ) -> None:
        """Load earlier results. `on_failed` is called with each error of a write. Raises OSError."""
        self._directory = directory
        self._on_failed = on_failed
        self._index: Index[Path] = Index(max_bytes=max_bytes, ttl_ns=ttl_ns)
        directory.mkdir(mode=0o700, exist_ok=True)
        self._numbers = count(self._load() + 1)

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes

    def __len__(self) -> int:
        return len(self._index)

    async def put(self, uid: str, content: bytes, media_type: str, now_ns: int) -> Stored | TooLarge | Unwritten:
        self.sweep(now_ns)
        if len(content) > self._index.max_bytes:
            return TooLarge(num_bytes=len(content), max_bytes=self._index.max_bytes)
        expires_ns = self._index.expires_ns(now_ns)
        head = _Head(uid=uid, media_type=media_type, num_bytes=len(content), expires_ns=expires_ns)
        path = self._directory / f"{next(self._numbers):012}"
        try:
            await asyncio.to_thread(_write, path, head, content)
        except OSError as error:
            self._on_failed(error)
            return Unwritten(reason=f"{path}: {error.strerror}")
        _remove(self._index.add(uid, path, len(content), expires_ns))
        return Stored(expires_ns=expires_ns)

    async def get(self, uid: str, now_ns: int) -> Result | None:
        self.sweep(now_ns)
        path = self._index.get(uid, now_ns)
        if path is None:
            return None
        try:
            return await asyncio.to_thread(_opened, path)
        except FileNotFoundError:  # It has been deleted or evicted.
            return None

    async def holds(self, uid: str, now_ns: int) -> bool:
        self.sweep(now_ns)
        return self._index.get(uid, now_ns) is not None

    def sweep(self, now_ns: int) -> None:
        """Remove expired results."""
        _remove(self._index.sweep(now_ns))

    async def delete(self, uid: str) -> None:
        _remove(self._index.remove(uid))

    def oldest(self, now_ns: int) -> Kept | None:
        """Return the result that expires next; None if there is none."""
        self.sweep(now_ns)
        found = self._index.oldest()
        return None if found is None else Kept(*found)

    def drop(self, kept: Kept) -> None:
        """Delete this result, but not a newer one with its uid."""
        if self._index.holds(kept.uid, kept.path):
            _remove(self._index.remove(kept.uid))

    def _load(self) -> int:
        """Load the results of earlier processes; return the last number that one of them used."""
        last = 0
        for path in sorted(self._directory.iterdir()):
            head = None if path.name.startswith(_HIDDEN) else _head_of(path)
            if head is None or head.num_bytes > self._index.max_bytes:
                _remove([path])
                continue
            last = int(path.name)
            _remove(self._index.add(head.uid, path, head.num_bytes, head.expires_ns))
        return last


def _write(path: Path, head: _Head, content: bytes) -> None:
    hidden = path.with_name(_HIDDEN + path.name)
    fields = {name: getattr(head, name) for name in _Head.__slots__}
    try:
        hidden.write_bytes(json.dumps(fields).encode() + b"\n" + content)
        sync(hidden)
        hidden.rename(path)
        sync(path.parent)
    except OSError:
        _remove([hidden])
        raise


def _opened(path: Path) -> Result | None:
    with ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        head = _read_head(file)
        if head is None:
            return None
        stack.pop_all()
        return OpenFile(file, file.tell(), head.num_bytes, head.media_type)


def _head_of(path: Path) -> _Head | None:
    """Return the head of a file; None if the file is no complete result: the machine may have lost power."""
    with path.open("rb") as file:
        head = _read_head(file)
        is_whole = head is not None and path.stat().st_size - file.tell() == head.num_bytes
        return head if is_whole and path.name.isdecimal() else None


def _read_head(file: BinaryIO) -> _Head | None:
    try:
        return _Head(**json.loads(file.readline(_MOST_HEAD_BYTES)))
    except (ValueError, TypeError):
        return None


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(FileNotFoundError):
            path.unlink()
