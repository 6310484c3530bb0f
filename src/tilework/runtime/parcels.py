"""The directory where the workers of this node put their parcels down."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from tilework.core.wire import Parcel

_LEAST_FREE_BYTES = 1 << 30
_PREFIX = "tilework-"
_LOCK = "lock"


class ParcelDirectory:
    """A new directory in shared memory; where there is none, or too little of it, among the temporary files.

    Each request that has begun takes the bytes of its conditioning and its latents: 5 MB for FLUX at 1024 px. A
    container's shared memory is 64 MB unless it was given more.

    Its lock is held as long as the process lives. Directories whose lock is free belonged to processes that were
    killed, and are removed here; the process id would not do, since containers may share the memory but not the ids.
    """

    def __init__(self, root: Path | None = None) -> None:
        root = root or _shared_memory()
        _remove_abandoned(root)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._known: set[str] = set()

    def know(self, parcel: Parcel) -> None:
        """A worker has reported this parcel; it stays until it is discarded."""
        self._known.add(parcel.name)

    def sweep(self, gpu: int, pid: int | None) -> None:
        """Remove what a worker that has ended put down and did not live to report."""
        for pattern in (f"{gpu}-{pid}-*", f".{gpu}-{pid}-*"):  # The latter are not complete.
            for path in self.path.glob(pattern):
                if path.name not in self._known:
                    path.unlink(missing_ok=True)

    def discard(self, parcel: Parcel) -> None:
        self._known.discard(parcel.name)
        (self.path / parcel.name).unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _shared_memory() -> Path:
    shared = Path("/dev/shm")
    is_fit = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free >= _LEAST_FREE_BYTES
    return shared if is_fit else Path(tempfile.gettempdir())


def _remove_abandoned(root: Path) -> None:
    for lock in root.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            descriptor = os.open(lock, os.O_RDWR)
        except OSError:  # Another user's, or just removed.
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
