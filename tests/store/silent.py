"""Owners of a directory that hang, and standbys whose time a test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

from tilework.store import standby
from tilework.store.epochs import newest
from tilework.store.lease import Lease, LeaseTimes, try_lock
from tilework.store.owner import Owner, said_by
from tilework.store.standby import Standby

_MOST_S = 1000.0

SILENT = LeaseTimes(beat_s=1e6, lease_s=1e6)
"""An owner that writes once, as one does that is stopped then."""
LAPSED = LeaseTimes(beat_s=1e6, lease_s=0)
"""The same after its lease has lapsed: each check renews it."""


class Lost(SystemExit):
    """In the place of the end of the process. A thread that raises it ends without a word."""


def lost(reason: str) -> NoReturn:
    raise Lost(reason)


class Clock:
    """What a standby knows of time: its pauses take none, but something may happen in them."""

    def __init__(self, in_pause: Callable[[], object] = lambda: None) -> None:
        self.now_s = 0.0
        self.in_pause = in_pause

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        assert self.now_s < _MOST_S, "nothing happens"
        self.in_pause()


@contextmanager
def another_machine(clock: Clock) -> Iterator[None]:
    """Standbys of the block are on another machine than all owners, and go by this clock."""
    with patch.object(standby, "this_machine", lambda: "another"), patch.object(standby, "time", clock):
        yield


def own(directory: Path, times: LeaseTimes = SILENT) -> Lease:
    descriptor = try_lock(directory / "lock")
    assert descriptor is not None
    return stand_by(directory, times).begin(descriptor)


def stand_by(directory: Path, times: LeaseTimes = SILENT) -> Standby:
    return Standby(directory / "lock", partial(newest, directory), times, lost)


def count(lease: Lease) -> int:
    """How often an owner has written."""
    owner = Owner.read(said_by(lease.descriptor))
    assert owner is not None
    return owner.count
