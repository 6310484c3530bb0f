"""The directory of the blobs of all workers of this node."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from tilework.core.wire import StateBlob

_LEAST_FREE_BYTES = 1 << 30
_SHARED = Path("/dev/shm")
_PREFIX = "tilework-"
_LOCK = "lock"
_OWNER = "owner"
_MODEL = "model"


class StateBlobDirectory:
    """A new directory in shared memory; where there is none, or too little of it, among the temporary files.

    Each request that has begun takes the bytes of its conditioning and its latents: 5 MB for FLUX at 1024 px. A
    container's shared memory is 64 MB unless it was given more.

    Its lock is held as long as the process lives. Directories whose lock is free belonged to processes that were
    killed, and are removed here; the process id would not do, since containers may share the memory but not the ids.

    With an `owner`, the directory of a durable server, what lies here may outlive the process: the server's next start
    finds it by the owner's path, and so does not make a new one. As long as the owner exists, no other server removes
    it.
    """

    def __init__(self, root: Path | None = None, owner: Path | None = None) -> None:
        self._known: set[str] = set()
        roots = [root] if root else [_SHARED, Path(tempfile.gettempdir())]
        found = _take_abandoned(roots, owner)
        self._is_inherited = found is not None
        self._is_durable = owner is not None
        self.path, self._lock = found or _make(root or _fit_root(), owner)

    def inherit(self, blobs: Collection[StateBlob], model: str) -> set[StateBlob]:
        """Take over those of these blobs that are here, if they are of this model; remove everything else."""
        mark = self.path / _MODEL
        same_model = mark.is_file() and mark.read_text("utf-8") == model
        inherited = {blob for blob in blobs if same_model and (self.path / blob.name).is_file()}
        self._known = {blob.name for blob in inherited}
        self._is_inherited = False
        self._clear()
        mark.write_text(model, "utf-8")
        return inherited

    def _clear(self) -> None:
        """Remove all unknown blobs."""
        for path in self.path.iterdir():
            if path.is_file() and path.name not in self._known | {_LOCK, _OWNER, _MODEL}:
                path.unlink(missing_ok=True)

    def know(self, blob: StateBlob) -> None:
        """A worker has reported this blob; it stays until it is discarded."""
        self._known.add(blob.name)

    def sweep(self, device_id: int, pid: int | None) -> None:
        """Remove the blobs that an ended worker has written and not reported."""
        for pattern in (f"{device_id}-{pid}-*", f".{device_id}-{pid}-*"):  # The latter are not complete.
            for path in self.path.glob(pattern):
                if path.name not in self._known:
                    path.unlink(missing_ok=True)

    def discard(self, blob: StateBlob) -> None:
        self._known.discard(blob.name)
        (self.path / blob.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the directory, unless the owner's next start needs what is in it."""
        if self._is_durable and (self._known or self._is_inherited):
            if not self._is_inherited:
                self._clear()
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _fit_root() -> Path:
    is_fit = os.access(_SHARED, os.W_OK) and shutil.disk_usage(_SHARED).free >= _LEAST_FREE_BYTES
    return _SHARED if is_fit else Path(tempfile.gettempdir())


def _make(root: Path, owner: Path | None) -> tuple[Path, int]:
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    if owner is not None:
        (path / _OWNER).write_text(str(owner), "utf-8")
    lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return path, lock


def _take_abandoned(roots: list[Path], owner: Path | None) -> tuple[Path, int] | None:
    """Remove the directories of killed processes; returns the one that belongs to `owner`, with its lock."""
    found: tuple[Path, int] | None = None
    for path, lock in _abandoned(roots):
        theirs = _owner(path)
        if found is None and owner is not None and theirs == owner:
            for groups in path.glob("*/"):  # Where their workers met.
                shutil.rmtree(groups, ignore_errors=True)
            found = path, lock
            continue
        if theirs is None or theirs == owner or not theirs.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)
    return found


def _owner(path: Path) -> Path | None:
    try:
        return Path((path / _OWNER).read_text("utf-8"))
    except OSError:
        return None


def _abandoned(roots: list[Path]) -> Iterator[tuple[Path, int]]:
    """Directories of ours whose lock was free, each with it."""
    for lock in (lock for root in roots for lock in root.glob(f"{_PREFIX}*/{_LOCK}")):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # Another user's, or just removed.
            continue
        is_ours = os.fstat(descriptor).st_uid == os.geteuid()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_ours = False
        if is_ours:
            yield lock.parent, descriptor
        else:
            os.close(descriptor)
