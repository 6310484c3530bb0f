"""The right to a durable directory: a lock file, in which its owner writes that it goes on.

An owner holds the lock of the file, writes a count into it each second and waits for the disk, and then looks whether
the file still has its name. A standby that sees no new count for ten seconds puts a file of its own in the place of
the lock, and reads the count once more (`store.standby`). So at least one of them sees the other, whatever the order.

An owner that was stopped, or whose disk hung, may go on at any time. Three things keep it from doing harm:

- What it may do only as the owner it does while its lease holds: for five seconds from before the last count that was
  on the disk before it looked. `check` compares two numbers, and renews a lease that has lapsed. While no standby
  waits, which each says by a lock of its own, that takes no disk: one that comes later first waits ten seconds.
- What it promises it has written, and looks for its lock file after that (`confirm`): if it is there, a standby that
  replaces it later reads what was written.
- Paths of the data are of an epoch (`store.epochs`), and go with it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from struct import Struct
from typing import NoReturn

from tilework.core.time import ns_from_s
from tilework.store.owner import Owner

_log = logging.getLogger(__name__)
FENCED = 75
"""The exit status of a process that owns its directory no more: EX_TEMPFAIL, since another one serves."""
_SAY_S = 1.0
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_FLOCK = Struct("hhqqi4x")
"""struct flock of fcntl(2): type, whence, start, length, process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """How often an owner writes, how long its lease then holds, after what silence a standby acts, and how often it
    looks. A lease must be shorter than the silence by more than a clock may go wrong meanwhile.
    """

    beat_s: float = 1.0
    lease_s: float = 5.0
    silence_s: float = 10.0
    poll_s: float = 0.25


def end_process(reason: str) -> NoReturn:
    """Say why, and end this process at once: nothing is finished, as if it was killed."""
    # On a thread, since another one may hold the lock of the log, and hang.
    saying = threading.Thread(target=_log.critical, args=("%s: this process ends", reason), daemon=True)
    saying.start()
    saying.join(_SAY_S)
    os._exit(FENCED)


class Lease:
    """The lease of this process, renewed by a thread of its own until it is closed. Thread-safe."""

    def __init__(
        self,
        path: Path,
        descriptor: int,
        epoch: int,
        times: LeaseTimes,
        on_lost: Callable[[str], NoReturn],
        last_ns: int = 0,
    ) -> None:
        """Takes over the descriptor of the lock file at `path`, which this process has locked.

        `last_ns` is what the last owner's clock showed at last, and `now_ns` the clock of this one. Raises OSError.
        """
        self.path, self.descriptor, self.last_ns = path, descriptor, last_ns
        self.now_ns: Callable[[], int] = lambda: last_ns
        self._times, self._on_lost = times, on_lost
        self._owner = Owner.this(epoch)
        self._standbys = open_standbys(path)
        self._until_ns = 0
        self._renewing = threading.Lock()
        self._is_closing = threading.Event()
        self._renew()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        return self._owner.epoch

    def check(self) -> None:
        """To be called before what only the owner may do. Waits for the disk if the lease has lapsed, and one waits."""
        from_ns = _now_ns()
        if from_ns < self._until_ns:
            return
        if not any_waits(self._standbys):
            self.confirm()  # After that look: who has taken over before it waits no more.
            self._until_ns = from_ns + ns_from_s(self._times.lease_s)
            return
        try:
            self._renew()
        except OSError as error:
            self._on_lost(f"{self.path} cannot be written: {error}")

    def confirm(self) -> None:
        """To be called after what was written, before anything is said of it. Waits for the disk. Raises OSError."""
        if not is_at(self.path, self.descriptor):
            self._on_lost(f"another server has taken over {self.path.parent}, or {self.path.name} there was removed")

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()
        with suppress(OSError):
            replace(self._owner.ended(), now_ns=self.now_ns()).write(self.descriptor)
        os.close(self.descriptor)
        os.close(self._standbys)

    def _beat(self) -> None:
        while not self._is_closing.wait(self._times.beat_s):
            try:
                self._renew()
            except OSError as error:
                _log.error("%s cannot be written: %s", self.path, error)

    def _renew(self) -> None:
        with self._renewing:
            from_ns = _now_ns()
            self._owner = replace(self._owner, count=self._owner.count + 1, now_ns=self.now_ns())
            self._owner.write(self.descriptor)
            self.confirm()
            self._until_ns = from_ns + ns_from_s(self._times.lease_s)


def try_lock(path: Path) -> int | None:
    """A descriptor of the file at `path`, made if there is none, and locked; None while another one has the lock.

    Raises OSError, also if it is a link.
    """
    while True:
        with ExitStack() as stack:
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR | _FLAGS, 0o600)
            stack.callback(os.close, descriptor)
            if not is_free(descriptor):
                return None
            if is_at(path, descriptor):  # Else it was replaced meanwhile.
                stack.pop_all()
                return descriptor


def is_free(descriptor: int) -> bool:
    """Whether no other process had locked this file; now it is locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_standbys(path: Path) -> int:
    """A descriptor of the file beside the lock file at `path` that standbys lock while they wait. Raises OSError."""
    return os.open(path.with_name(f"{path.name}.standbys"), os.O_CREAT | os.O_RDWR | _FLAGS, 0o600)


def wait_visibly(standbys: int) -> None:
    """Let owners see that a standby waits, until this descriptor is closed. Raises OSError."""
    fcntl.fcntl(standbys, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))


def any_waits(standbys: int) -> bool:
    """Whether a standby waits. Asks, and locks nothing: who asks may be stopped in the middle of it. Raises OSError."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    return int(_FLOCK.unpack(fcntl.fcntl(standbys, fcntl.F_OFD_GETLK, asked))[0]) != fcntl.F_UNLCK


def is_at(path: Path, descriptor: int) -> bool:
    """Whether the path is of this open file. Raises OSError."""
    try:
        there = os.open(path, os.O_RDONLY | _FLAGS)  # A network file system asks its server; `stat` may not.
    except FileNotFoundError:
        return False
    try:
        return os.path.samestat(os.fstat(there), os.fstat(descriptor))
    finally:
        os.close(there)


def _now_ns() -> int:
    """Goes on while the machine is suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
