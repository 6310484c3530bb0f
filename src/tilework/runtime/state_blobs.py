"""The directory that holds the blobs of all workers of this node."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Set
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from tilework.core.wire.blobs import StateBlob
from tilework.core.wire.commands import WEIGHTS
from tilework.ownership.own import NotOwn, closing_fd, open_private_file, open_private_folder

_log = logging.getLogger(__name__)
_MIN_FREE_BYTES = 1 << 30
_SHARED = Path("/dev/shm")
_PREFIX = "tilework-"
_LOCK, _UNLOCKED = "lock", "lock-soon"
_OWNER = "owner"


class StateBlobDirectory:
    """A new directory in shared memory, or among the temporary files if there is too little shared memory.

    Each request that has begun takes the size of its conditioning and latents: 5 MB for FLUX at 1024 px. A container
    has 64 MB of shared memory unless configured otherwise.

    The process holds a lock on its directory while it lives. Directories whose lock is free belonged to killed
    processes and are removed here. A process id would not do instead of a lock: containers may share memory but not
    process ids. Only directories that no other user can have made or changed are read.

    With an `owner`, the data directory of a durable server, the blobs may outlive the process: the server's next start
    finds this directory by the owner's path and reuses it. No other server removes it while the owner exists.
    """

    def __init__(self, root: Path | None = None, owner: Path | None = None) -> None:
        self._known: set[str] = set()
        self._prefix, self._numbers = f"copy-{time.monotonic_ns():x}", count()  # No name is ever used again.
        roots = [root] if root else [_SHARED, Path(tempfile.gettempdir())]
        found = _take_abandoned(roots, owner)
        self._is_inherited = found is not None
        self._is_durable = owner is not None
        self.path, self._lock = found or _make(root or _choose_root(), owner)

    def inherit(self, blobs: Collection[StateBlob]) -> set[StateBlob]:
        """Keep those of these blobs that exist, and return them; remove all others."""
        inherited = {blob for blob in blobs if (self.path / blob.name).is_file()}
        self._is_inherited = False
        self.keep_only(inherited)
        return inherited

    @property
    def names(self) -> Set[str]:
        """Names of the blobs that were reported and not discarded."""
        return self._known

    def keep_only(self, blobs: Collection[StateBlob]) -> None:
        """Remove all other blobs; no worker may be writing one."""
        self._known = {blob.name for blob in blobs}
        self._clear()

    def _clear(self) -> None:
        """Remove all unknown blobs."""
        for path in self.path.iterdir():
            if path.is_file() and path.name not in self._known | {_LOCK, _OWNER}:
                path.unlink(missing_ok=True)

    def add(self, blob: StateBlob) -> None:
        """Keep a reported blob until it is discarded."""
        self._known.add(blob.name)

    def sweep(self, device_id: int, pid: int | None) -> None:
        """Remove the blobs that an ended worker has written but not reported."""
        for pattern in (f"{device_id}-{pid}-*", f".{device_id}-{pid}-*"):  # The latter are incomplete.
            for path in self.path.glob(pattern):
                if path.name not in self._known:
                    path.unlink(missing_ok=True)

    def copy(self, blob: StateBlob, name: str = "") -> StateBlob | None:
        """Give the same file another name, to be discarded on its own: a new one if it is not given.

        None if there is no such file, or no room for a name.
        """
        name = name or f"{self._prefix}-{next(self._numbers)}"
        try:
            (self.path / name).hardlink_to(self.path / blob.name)
        except OSError:
            return None
        self._known.add(name)
        return StateBlob(name, blob.num_bytes)

    def discard(self, blob: StateBlob) -> None:
        self._known.discard(blob.name)
        (self.path / blob.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the directory, unless the owner's next start needs its blobs; and the weights of its workers."""
        if self._is_durable and (self._known or self._is_inherited):
            shutil.rmtree(self.path / WEIGHTS, ignore_errors=True)
            if not self._is_inherited:
                self._clear()
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _choose_root() -> Path:
    is_fit = os.access(_SHARED, os.W_OK) and shutil.disk_usage(_SHARED).free >= _MIN_FREE_BYTES
    return _SHARED if is_fit else Path(tempfile.gettempdir())


def _make(root: Path, owner: Path | None) -> tuple[Path, int]:
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    with closing_fd(open_private_folder(path)) as folder:
        if owner is not None:
            with open(_new(_OWNER, folder), "w", encoding="utf-8") as file:
                file.write(str(owner))
        lock = _new(_UNLOCKED, folder)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(_UNLOCKED, _LOCK, src_dir_fd=folder, dst_dir_fd=folder)  # It is locked before it gets its name.
    return path, lock


def _new(name: str, folder: int) -> int:
    return os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=folder)


def _take_abandoned(roots: list[Path], owner: Path | None) -> tuple[Path, int] | None:
    """Remove the directories of killed processes; returns that of `owner`, if any, with its lock."""
    found: tuple[Path, int] | None = None
    for path, lock, its_owner in _abandoned(roots):
        if found is None and owner is not None and its_owner == owner:
            for groups in path.glob("*/"):  # The rendezvous of its workers.
                shutil.rmtree(groups, ignore_errors=True)
            found = path, lock
            continue
        if its_owner is None or its_owner == owner or not its_owner.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
    return found


def _abandoned(roots: list[Path]) -> Iterator[tuple[Path, int, Path | None]]:
    """Yield Tilework's directories of this user alone whose lock was free, each with the lock, now held, and its owner.

    Every user can make a directory of such a name, also one that looks like Tilework's: its files could come from
    another user, and files written there could be read by that user. So a directory that others could have made or
    changed is not touched.
    """
    for path in (path for root in roots for path in root.glob(f"{_PREFIX}*")):
        try:
            with closing_fd(open_private_folder(path)) as folder, ExitStack() as stack:
                lock = open_private_file(_LOCK, folder, os.O_RDWR)
                stack.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                its_owner = _owner(folder)
                stack.pop_all()
        except NotOwn as error:
            if not error.is_anothers:  # Servers of other users need no warning.
                _log.warning("%s is not used because other users could change its content: %s", path, error)
            continue
        except OSError:  # It is in use, just removed, or no directory of a server.
            continue
        yield path, lock, its_owner


def _owner(folder: int) -> Path | None:
    """Return the owner in a directory, if any. Raises NotOwn, OSError."""
    try:
        with open(open_private_file(_OWNER, folder, os.O_RDONLY), encoding="utf-8") as file:
            return Path(file.read())
    except FileNotFoundError:
        return None
