"""Place of a ring: its memory, and a directory with its socket and what a consumer that takes over must know."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tilework.comm.ring.errors import RingError
from tilework.comm.ring.layout import RingLayout
from tilework.ownership.own import NotOwn, make_own_folder, own_folder

_FORMAT = "tw-ring2"
_MEMORY = "memory"
_SETTINGS = "settings.json"
_SOCKET = "ring"


@dataclass(frozen=True, slots=True)
class RingPlace:
    """A ring's directory and memory. This process is its consumer: no other can take it over while this one lives.

    The memory of a ring that `is_lasting` is a file in its directory, and outlives its consumer. Memory of others has
    no name and ends with the last process that has it.
    """

    directory: Path
    layout: RingLayout
    is_atomic: bool
    is_checked: bool
    is_lasting: bool
    memory: int
    lock: int

    @property
    def address(self) -> str:
        return str(self.directory / _SOCKET)

    @classmethod
    def make(cls, layout: RingLayout, is_atomic: bool, is_checked: bool, directory: Path | None) -> RingPlace:
        """Make a new place; lasting if a directory is given. Raises RingError."""
        if directory is None:
            root = Path(tempfile.mkdtemp(prefix="ring-"))
            memory = _memory_without_name(layout.size)
        else:
            root = directory
            _checked(make_own_folder, root)
            if any(root.iterdir()):
                raise RingError(f"directory: {root} is not empty; resume the ring there, or remove it")
            memory = _memory_file(root / _MEMORY, layout.size)
        settings = {"format": _FORMAT, "slots": layout.slots, "units": layout.units}
        hidden = root / f".{_SETTINGS}"
        hidden.write_text(json.dumps(settings | {"is_atomic": is_atomic, "is_checked": is_checked}), "ascii")
        lock = os.open(hidden, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        hidden.rename(root / _SETTINGS)
        return cls(root, layout, is_atomic, is_checked, directory is not None, memory, lock)

    @classmethod
    def find(cls, directory: Path) -> RingPlace:
        """Return the place of a lasting ring whose consumer has ended. Raises RingError."""
        try:
            _checked(own_folder, directory)
            lock = os.open(directory / _SETTINGS, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RingError(f"directory: there is no ring in {directory} ({error}); create one") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            settings = json.loads((directory / _SETTINGS).read_text("ascii"))
            if settings["format"] != _FORMAT:
                raise RingError(f"directory: the ring in {directory} is of another version; run that one")
            layout = RingLayout(settings["slots"], settings["units"])
            memory = os.open(directory / _MEMORY, os.O_RDWR | os.O_CLOEXEC)
        except BlockingIOError:
            os.close(lock)
            raise RingError(f"directory: the ring in {directory} has a consumer that lives; end it first") from None
        except BaseException:
            os.close(lock)
            raise
        return cls(directory, layout, settings["is_atomic"], settings["is_checked"], True, memory, lock)

    def remove(self) -> None:
        """End the ring, for producers, too: when its address is gone, they know that it will not come back."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Stop being the ring's consumer."""
        os.close(self.memory)
        os.close(self.lock)


def _checked(own: Callable[[Path], Path], directory: Path) -> None:
    """Check a directory by `own`. Raises RingError if other users could put files there, OSError."""
    try:
        own(directory)
    except NotOwn as error:
        raise RingError(f"directory: {error}") from error


def _memory_without_name(size: int) -> int:
    """Return memory whose length no process can change."""
    fd = os.memfd_create("tilework-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


def _memory_file(path: Path, size: int) -> int:
    """Make memory with all its bytes allocated: a process that writes where none can be had would be killed."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        with suppress(OSError):
            path.unlink()
        raise RingError(f"directory: {path.parent} has no room for a ring of {size} bytes ({error})") from error
    return fd
