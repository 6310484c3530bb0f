"""The verbs over UCX, by TCP and by shared memory, and what closing a lane does to them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from mmap import mmap

import pytest

pytest.importorskip("tilework.comm.ring._native", reason="the C extension was not built: no compiler")
pytest.importorskip("libucx", reason="the extra ucx is not installed")

from tilework.comm.ring.errors import RingError, VerbFailed, VerbTimeout
from tilework.comm.ring.ucx.lanes import Lane, Lanes
from tilework.comm.ring.ucx.library import Context, Remote, Worker
from tilework.comm.ring.ucx.memory import UcxMemory

SIZE = 4 << 20
Ends = tuple[mmap, Lane, UcxMemory]


@pytest.fixture(params=["tcp,self", pytest.param("posix,self", marks=pytest.mark.slow)])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Memory, a lane to it, and the verbs by that lane."""
    context, memory = Context(request.param), mmap(-1, SIZE)
    lanes = Lanes(context, memory)
    lane, worker = lanes.open(), Worker(context)
    remote = Remote(worker, lane.address, lane.base, lane.key)
    yield memory, lane, UcxMemory(remote)
    remote.close()
    worker.close()
    lanes.close()
    context.close()


def soon(seconds: float = 10.0) -> int:
    return time.monotonic_ns() + round(seconds * 1e9)


def test_the_verbs(ends: Ends) -> None:
    memory, _lane, verbs = ends
    long = os.urandom(3 << 20)  # Longer than the stage.
    verbs.put(64, (b"head", long[:5], long[5:]), deadline_ns=soon())
    verbs.flush(deadline_ns=soon())
    assert memory[64 : 68 + len(long)] == b"head" + long
    assert verbs.get(66, 100, deadline_ns=soon()) == (b"ad" + long)[:100]
    assert verbs.cas64(8, 0, 5, deadline_ns=soon()) == 0
    assert verbs.cas64(8, 0, 6, deadline_ns=soon()) == 5
    assert memory[8:16] == (5).to_bytes(8, "little")


def test_nothing_arrives_by_a_lane_that_is_closed(ends: Ends) -> None:
    memory, lane, verbs = ends
    verbs.put(64, (b"in time",), deadline_ns=soon())
    verbs.flush(deadline_ns=soon())
    lane.close()
    with pytest.raises(VerbFailed):
        put_and_flush(verbs, b"late" * 1000)
    assert memory[64:5000] == b"in time" + bytes(5000 - 71)


def put_and_flush(verbs: UcxMemory, data: bytes) -> None:
    """Again and again: the end of a connection is noticed by one of the next."""
    for _ in range(100):
        verbs.put(64, (data,), deadline_ns=soon(0.2))
        verbs.flush(deadline_ns=soon(0.2))


def test_a_verb_that_is_not_answered_ends_at_its_deadline(ends: Ends) -> None:
    _, lane, verbs = ends
    verbs.flush(deadline_ns=soon())
    assert verbs.get(0, 8, deadline_ns=soon()) == bytes(8)
    with lane._lanes._lock, pytest.raises(VerbTimeout):  # The consumer's thread stands still.
        verbs.get(0, 8, deadline_ns=soon(0.05))


def test_a_verb_under_way_fails_as_soon_as_the_other_end_has_gone(ends: Ends) -> None:
    _, lane, verbs = ends
    ours, theirs = socket.socketpair()
    beside = UcxMemory(verbs._remote, ours)
    assert beside.get(0, 8, deadline_ns=soon()) == bytes(8)
    theirs.close()
    with ours, lane._lanes._lock, pytest.raises(VerbFailed, match="gone"):
        beside.get(0, 8, deadline_ns=1 << 62)


def test_a_process_forked_from_a_user_of_ucx_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Context("tcp,self").close()
    pid = os.getpid()
    monkeypatch.setattr("os.getpid", lambda: pid + 1)
    with pytest.raises(RingError, match="forkserver"):
        Context("tcp,self")


def test_transports_that_there_are_not_are_named() -> None:
    with pytest.raises(RingError, match="warp"):
        Context("warp")
