"""The right to a durable directory: a lock file, in which its owner writes that it goes on.

An owner holds the lock of the file. Each second it writes a count into the file, waits for the disk, and then checks
that the file still has its name. A standby that sees no new count for ten seconds replaces the lock file with its own,
and reads the count once more (`store.standby`). So at least one of them sees the other, whatever the order.

An owner that was stopped, or whose disk hung, may go on at any time. Three things keep it from doing harm:

- It does what only the owner may do while its lease holds: for five seconds from before the write of the last
  count that was on the disk before such a check. `check` compares two numbers, and renews a lease that has lapsed.
  While no standby waits (each shows by its own lock that it does), a renewal takes no disk: a standby that comes
  later first waits ten seconds.
- Before it promises something, it has written it, and then checks that its lock file is there (`confirm`). If it
  is, a standby that replaces the file later reads what was written.
- Paths of the data belong to an epoch (`store.epochs`), and go with it.
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
"""The exit status of a process that no longer owns its directory: EX_TEMPFAIL, since another one serves."""
_SAY_S = 1.0
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_FLOCK = Struct("hhqqi4x")
"""struct flock of fcntl(2): type, whence, start, length, process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTimes:
    """Times of a lease, in seconds. `silence_s` exceeds `lease_s` by more than a clock may go wrong meanwhile.

    An owner writes every `beat_s`, and its lease then holds for `lease_s`. A standby looks every `poll_s`, and acts
    after `silence_s` without a new count.
    """

    beat_s: float = 1.0
    lease_s: float = 5.0
    silence_s: float = 10.0
    poll_s: float = 0.25


def end_process(reason: str) -> NoReturn:
    """Log the reason, and end this process at once: nothing is finished, as if the process was killed."""
    # On a thread, since another one may hold the lock of the log, and hang.
    saying = threading.Thread(target=_log.critical, args=("%s: this process ends", reason), daemon=True)
    saying.start()
    saying.join(_SAY_S)
    os._exit(FENCED)


class Lease:
    """The lease of this process, renewed by its own thread until it is closed. Thread-safe."""

    def __init__(
        self,
        path: Path,
        descriptor: int,
        epoch: int,
        times: LeaseTimes,
        on_lost: Callable[[str], NoReturn],
        last_ns: int = 0,
    ) -> None:
        """Take over the descriptor of the lock file at `path`, which this process has locked.

        `last_ns` is the time that the last owner's clock showed last; `now_ns` is the clock of this one. Raises
        OSError.
        """
        self.path = path
        self.descriptor = descriptor
        self.last_ns = last_ns
        self.now_ns: Callable[[], int] = lambda: last_ns
        self._times = times
        self._on_lost = on_lost
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
        """Make sure that this process owns the directory, before anything that only the owner may do.

        Calls `on_lost` if not. Waits for the disk if the lease has lapsed and a standby waits.
        """
        from_ns = _now_ns()
        if from_ns < self._until_ns:
            return
        if not any_waits(self._standbys):
            self.confirm()  # After `any_waits`: a standby that has taken over before that look waits no more.
            self._until_ns = from_ns + ns_from_s(self._times.lease_s)
            return
        try:
            self._renew()
        except OSError as error:
            self._on_lost(f"{self.path} cannot be written: {error}")

    def confirm(self) -> None:
        """Make sure that the lock file is still this process's: after a write, before it is reported.

        Calls `on_lost` if not. Waits for the disk. Raises OSError.
        """
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
    """Lock the file at `path`, made if there is none. Return its descriptor; None while another process has the lock.

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
    """Lock this file, and return whether that succeeded: no other process had locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_standbys(path: Path) -> int:
    """Open the file beside the lock file at `path` that standbys lock while they wait. Raises OSError."""
    return os.open(path.with_name(f"{path.name}.standbys"), os.O_CREAT | os.O_RDWR | _FLAGS, 0o600)


def wait_visibly(standbys: int) -> None:
    """Show owners that a standby waits, until this descriptor is closed. Raises OSError."""
    fcntl.fcntl(standbys, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))


def any_waits(standbys: int) -> bool:
    """Return whether a standby waits. Takes no lock: a process might be stopped while it has it. Raises OSError."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    return int(_FLOCK.unpack(fcntl.fcntl(standbys, fcntl.F_OFD_GETLK, asked))[0]) != fcntl.F_UNLCK


def is_at(path: Path, descriptor: int) -> bool:
    """Return whether the path leads to this open file. Raises OSError."""
    try:
        there = os.open(path, os.O_RDONLY | _FLAGS)  # A network file system asks its server; `stat` may not.
    except FileNotFoundError:
        return False
    try:
        return os.path.samestat(os.fstat(there), os.fstat(descriptor))
    finally:
        os.close(there)


def _now_ns() -> int:
    """Return the time since the boot of the machine, which goes on while the machine is suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
