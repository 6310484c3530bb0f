"""Processes that a bench starts: none outlives it, however it ends. The standard library is enough for this file."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NoReturn

GRACE_S = 10.0
"""So long may a part that is ended stop its servers. Then it is killed."""
_PR_SET_PDEATHSIG = 1


class Signalled(SystemExit):
    """A signal asks this process to end: what it has started is ended on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def leave_on(*numbers: signal.Signals) -> None:
    """Let these signals raise `Signalled`, in place of what they do by default."""

    def leave(number: int, _: object) -> NoReturn:
        raise Signalled(number)

    for number in numbers:
        signal.signal(number, leave)


def end_with_parent() -> None:
    """Let the kernel end this process when its parent is killed. It takes no lock, as `preexec_fn` requires."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def run(command: Sequence[str], limit_s: float, log: Path, environment: Mapping[str, str], cwd: Path) -> int | None:
    """The exit code; None if it was ended at its limit. What it prints goes to `log`."""
    with (
        log.open("wb") as file,
        child(command, environment, cwd, file) as process,
    ):
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None


@contextmanager
def child(
    command: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    log: BinaryIO | None = None,
    grace_s: float | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process, which leads a group. What is left of the group at the end of the block is ended, for any reason.

    What it prints goes to `log`, or to where our own goes. `grace_s` is GRACE_S, unless it is given.
    """
    process = subprocess.Popen(
        list(command),
        stdout=log,
        stderr=log and subprocess.STDOUT,
        env=environment,
        cwd=cwd,
        start_new_session=True,
        preexec_fn=end_with_parent,  # noqa: PLW1509
    )
    try:
        yield process
    finally:
        _end(process, GRACE_S if grace_s is None else grace_s)


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    try:
        _signal(process.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + grace_s
        while time.monotonic() < deadline_s and _signal(process.pid, 0):
            process.poll()  # A process that was not waited for is still one of the group.
            time.sleep(0.05)
    finally:
        _signal(process.pid, signal.SIGKILL)
        process.wait()


def _signal(group: int, number: int) -> bool:
    """Whether the group has a process."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def worker_pids(server_pid: int) -> list[int]:
    """The children of the server's children: workers come from a forkserver."""
    return [pid for child in _children(server_pid) for pid in _children(child)]


def _children(pid: int) -> list[int]:
    """Of all its threads; none if it has just ended."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, children.read_text("ascii").split())
    return found
