"""A process that is ended at a limit, with all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

GRACE_S = 10.0
"""So long may a part that is ended stop its servers. Then it is killed."""


def run(command: Sequence[str], limit_s: float, log: Path, environment: Mapping[str, str], cwd: Path) -> int | None:
    """The exit code; None if it was ended at its limit. What it prints goes to `log`.

    Its processes are a group. They are ended together also if the first of them has ended by itself.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            list(command), stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=cwd, start_new_session=True
        )
    try:
        code: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
        _signal(process.pid, signal.SIGTERM)
        _await_end(process)
    finally:
        _signal(process.pid, signal.SIGKILL)
        process.wait()
    return code


def _await_end(process: subprocess.Popen[bytes]) -> None:
    """Until the whole group has ended, or the grace is over."""
    deadline_s = time.monotonic() + GRACE_S
    while time.monotonic() < deadline_s and _signal(process.pid, 0):
        process.poll()  # A process that was not waited for is still one of the group.
        time.sleep(0.05)


def _signal(group: int, number: int) -> bool:
    """Whether the group has a process."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
