"""Waits for the lock file of a directory, and takes the directory over from an owner that hangs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from tilework.store.disk import sync
from tilework.store.lease import Lease, LeaseTimes, is_at, is_free, open_standbys, try_lock, wait_visibly
from tilework.store.owner import Owner, kill, said_by, this_machine

_log = logging.getLogger(__name__)
_NEXT = "lock.next"


class Standby:
    """Waits until the owner of `path` has ended, or has written no new count for `times.silence_s`.

    An owner that hangs on this machine is killed, with its workers, which frees its lock, port and devices. An owner on
    another machine is fenced: a new lock file takes the place of its own. Only one of several standbys can do so: the
    one that has the lock of the new file. A server of a version that writes no count is only waited for.
    """

    def __init__(
        self,
        path: Path,
        newest_epoch: Callable[[], int],
        times: LeaseTimes,
        on_lost: Callable[[str], NoReturn],
    ) -> None:
        self._path = path
        self._newest_epoch = newest_epoch
        self._times = times
        self._on_lost = on_lost
        self._said, self._since_s = b"", 0.0

    def wait(self) -> Lease:
        """Wait for the directory, and return its lease. Raises OSError."""
        with ExitStack() as stack:
            standbys = open_standbys(self._path)
            stack.callback(os.close, standbys)
            wait_visibly(standbys)
            return self._wait()

    def _wait(self) -> Lease:
        while (descriptor := try_lock(self._path)) is None:
            with suppress(FileNotFoundError), ExitStack() as stack:
                other = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                stack.callback(os.close, other)
                if self._hangs(other) and (lease := self._fence(other)) is not None:
                    return lease
            time.sleep(self._times.poll_s)
        return self.begin(descriptor)

    def begin(self, descriptor: int) -> Lease:
        """Return the lease of a lock file that is locked. Its last owner may not have entered its epoch."""
        last = Owner.read(said_by(descriptor))
        epoch, last_ns = (1, 0) if last is None else (last.epoch, last.now_ns)
        return Lease(self._path, descriptor, max(self._newest_epoch(), epoch), self._times, self._on_lost, last_ns)

    def _hangs(self, other: int) -> bool:
        """Return whether an owner has been silent for long, by a clock that stops while this machine is suspended."""
        now_s = time.monotonic()
        if (said := said_by(other)) != self._said:
            self._said, self._since_s = said, now_s
        owner = Owner.read(said)
        return owner is not None and owner.machine != "" and now_s - self._since_s >= self._times.silence_s

    def _fence(self, other: int) -> Lease | None:
        """Return the lease of a new lock file; None if the owner was killed, or if another standby makes the file."""
        owner = Owner.read(self._said)
        assert owner is not None
        silence = f"the server of {self._path.parent} has said nothing for {self._times.silence_s:g} s"
        if owner.machine == this_machine():
            _log.warning("%s: process %d of this machine is killed, with its workers", silence, owner.pid)
            kill(owner)
            return None
        with ExitStack() as stack:
            descriptor = try_lock(self._path.with_name(_NEXT))
            if descriptor is None:
                return None
            stack.callback(os.close, descriptor)
            if not is_at(self._path, other):
                return None
            epoch = 1 + max(self._newest_epoch(), owner.epoch)
            replace(Owner.this(epoch), now_ns=owner.now_ns).write(descriptor)
            self._path.with_name(_NEXT).rename(self._path)
            sync(self._path.parent)
            stack.pop_all()
        _log.warning("%s: this one goes on in its place, with its data in epoch-%d", silence, epoch)
        lease = Lease(self._path, descriptor, epoch, self._times, self._on_lost, owner.now_ns)
        # The owner may have written before it could see the new file: then it will see the file, and end, or hang
        # again.
        while not is_free(other) and not self._hangs(other):
            time.sleep(self._times.poll_s)
        return lease
