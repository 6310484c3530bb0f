"""Who may use a durable directory: leases, and standbys that take it from an owner that hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from typing import NoReturn
from unittest.mock import patch

import pytest

from store.silent import LAPSED, SILENT, Clock, Lost, another_machine, count, lost, own, stand_by
from tilework.store import standby
from tilework.store.lease import FENCED, Lease, LeaseTimes, any_waits, is_free, open_standbys, try_lock, wait_visibly
from tilework.store.owner import Owner
from waiting import PATIENCE_S, eventually

TIMES = LeaseTimes()
LOST = r"another server has taken over .*, or lock there was removed"


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def waiting(lock: Path) -> Iterator[Callable[[], None]]:
    """Lets a standby wait from then on, as owners see it."""
    standbys = open_standbys(lock)
    yield lambda: wait_visibly(standbys)
    os.close(standbys)


# An owner.


def test_a_lease_that_holds_costs_no_writing_and_one_that_has_lapsed_is_renewed(
    tmp_path: Path, waiting: Callable[[], None]
) -> None:
    waiting()
    holding = own(tmp_path)
    holding.check()
    assert count(holding) == 1
    holding.close()
    lapsed = own(tmp_path, LAPSED)
    for _ in range(3):
        lapsed.check()
    assert count(lapsed) == 1 + 3
    lapsed.close()


def test_an_owner_writes_again_and_again(tmp_path: Path) -> None:
    owner = own(tmp_path, LeaseTimes(beat_s=0.001))
    eventually(lambda: count(owner) > 3)
    owner.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_lock_file_that_is_gone_is_noticed_without_an_event(lock: Path, is_replaced: bool) -> None:
    reasons = Queue[str]()

    def note(reason: str) -> NoReturn:
        reasons.put(reason)
        raise Lost

    descriptor = try_lock(lock)
    assert descriptor is not None
    lease = Lease(lock, descriptor, 1, LeaseTimes(beat_s=0.001), note)
    lock.unlink()
    if is_replaced:
        lock.touch()
    assert "was removed" in reasons.get(timeout=PATIENCE_S)
    lease.close()


def test_who_has_lapsed_and_was_replaced_does_nothing_more(tmp_path: Path, lock: Path) -> None:
    owner = own(tmp_path, LAPSED)
    lock.unlink()
    with pytest.raises(Lost, match=LOST):
        owner.check()
    with pytest.raises(Lost, match=LOST):
        owner.confirm()


def test_an_owner_that_cannot_write_goes_on_until_its_lease_lapses_while_a_standby_waits(
    tmp_path: Path, waiting: Callable[[], None]
) -> None:
    """Without one it goes on, and finds that out without the disk."""
    holding = own(tmp_path)
    with patch("os.fdatasync", side_effect=OSError(5, "Input/output error")):
        holding.check()
        holding._until_ns = 0
        holding.check()
        waiting()
        holding.check()
        holding._until_ns = 0
        with pytest.raises(Lost, match=r"cannot be written.*Input/output"):
            holding.check()


def test_a_standby_is_seen_as_long_as_it_waits(tmp_path: Path) -> None:
    owner, clock, seen = own(tmp_path), Clock(), list[bool]()
    standbys = open_standbys(owner.path)
    clock.in_pause = lambda: seen.append(any_waits(standbys)) or (owner.close() if len(seen) == 3 else None)
    with another_machine(clock):
        stand_by(tmp_path).wait().close()
    assert seen == [True] * 3
    assert not any_waits(standbys)
    os.close(standbys)


def test_a_process_that_owns_it_no_more_ends_with_a_status_of_its_own(lock: Path) -> None:
    script = (
        "import sys, signal; from pathlib import Path; from functools import partial\n"
        "from tilework.store.lease import *\n"
        "lock = Path(sys.argv[1])\n"
        "lease = Lease(lock, try_lock(lock), 1, LeaseTimes(beat_s=0.001), end_process)\n"
        "lock.unlink(); signal.pause()"
    )
    command = [sys.executable, "-c", script, str(lock)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == FENCED
    assert f"another server has taken over {lock.parent}, or lock there was removed: this process ends" in ended.stderr


# A standby.


def test_a_standby_fences_an_owner_of_another_machine_after_ten_seconds_of_silence(tmp_path: Path) -> None:
    owner, clock = own(tmp_path, LAPSED), Clock()
    clock.in_pause = lambda: owner.check() if clock.now_s < 20 else None
    with another_machine(clock):
        taken = stand_by(tmp_path).wait()
    assert 20 + TIMES.silence_s - 1 < clock.now_s <= 20 + TIMES.silence_s + 1
    assert taken.epoch == 2
    taken.check()
    with pytest.raises(Lost, match=LOST):
        owner.check()
    taken.close()


def test_an_owner_that_writes_while_it_is_fenced_is_waited_for(tmp_path: Path) -> None:
    """It may have looked for its lock file before that was replaced: then its lease holds."""
    owner, clock, fenced_s = own(tmp_path), Clock(), list[float]()

    def write_again(_folder: Path) -> None:
        Owner.this(1).write(owner.descriptor)
        fenced_s.append(clock.now_s)

    with another_machine(clock), patch.object(standby, "sync", write_again):
        taken = stand_by(tmp_path).wait()
    assert clock.now_s >= fenced_s[0] + TIMES.silence_s, "it hangs again"
    taken.close()


def test_a_fenced_owner_that_ends_is_waited_for_no_longer(tmp_path: Path) -> None:
    owner, clock, fenced_s = own(tmp_path), Clock(), list[float]()

    def write_and_end(_folder: Path) -> None:
        Owner.this(1).write(owner.descriptor)
        fenced_s.append(clock.now_s)
        clock.in_pause = owner.close

    with another_machine(clock), patch.object(standby, "sync", write_and_end):
        taken = stand_by(tmp_path).wait()
    assert clock.now_s == fenced_s[0] + TIMES.poll_s
    taken.close()


def test_of_two_standbys_one_fences(tmp_path: Path, lock: Path) -> None:
    owner, clock = own(tmp_path), Clock()
    other = try_lock(tmp_path / "lock.next")
    assert other is not None, "another standby is about to fence"

    def take_over() -> None:
        if clock.now_s == 60:
            (tmp_path / "lock.next").rename(lock)
            first.append(Lease(lock, other, 2, SILENT, lost))
        if clock.now_s == 65:
            first[0].close()

    first = list[Lease]()
    clock.in_pause = take_over
    with another_machine(clock):
        second = stand_by(tmp_path).wait()
    assert (clock.now_s, second.epoch) == (65, 2)
    with pytest.raises(Lost, match=LOST):
        owner.confirm()
    second.close()


def test_a_server_that_says_nothing_is_only_waited_for(tmp_path: Path, lock: Path) -> None:
    """Of a version before leases."""
    descriptor, clock = try_lock(lock), Clock()
    assert descriptor is not None

    def end() -> None:
        if clock.now_s >= 100:
            os.close(descriptor)
            clock.in_pause = lambda: None

    clock.in_pause = end
    with another_machine(clock):
        taken = stand_by(tmp_path).wait()
    assert (clock.now_s, taken.epoch) == (100, 1)
    taken.close()


OWNER = """
import subprocess, sys
from pathlib import Path
from tilework.store.durable import DurableDirectory
directory = DurableDirectory(Path(sys.argv[1]))
worker = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
print(worker.pid, flush=True)
sys.stdin.read()
"""


def test_an_owner_that_hangs_on_this_machine_is_killed_with_its_workers(tmp_path: Path, lock: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.send_signal(signal.SIGSTOP)
        clock = Clock()
        with patch.object(standby, "time", clock):
            taken = stand_by(tmp_path).wait()
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert clock.now_s >= TIMES.silence_s
    assert taken.epoch == 1, "its journal is used as it is"
    eventually(lambda: not Path(f"/proc/{worker}").exists())
    taken.close()
    unlocked = lock.open()
    assert is_free(unlocked.fileno())
    unlocked.close()
