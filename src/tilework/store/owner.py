"""The text of a lock file, which names its owner, and the end of that process if it hangs on this machine."""

from __future__ import annotations

import json
import os
import select
import signal
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

_NUM_BYTES = 256  # Equal for all lock files, so that one write replaces all that another process has written.


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process that owns a lock file, and the count of its messages that it goes on.

    `machine` names one boot of a machine, with the namespace of `pid`; it is empty once the process has ended and left
    its epoch to the next one. `started` is the start of the process in ticks after the boot. `epoch` is that of the
    data in use (`store.epochs`). `now_ns` is the time on the server's clock, which goes on from one owner to the next.
    """

    machine: str
    pid: int
    started: int
    epoch: int
    count: int = 0
    now_ns: int = 0

    @classmethod
    def this(cls, epoch: int) -> Owner:
        pid = os.getpid()
        return cls(machine=this_machine(), pid=pid, started=_started(pid), epoch=epoch)

    @classmethod
    def read(cls, said: bytes) -> Owner | None:
        """Return the owner that a lock file names; None if it names none."""
        try:
            return cls(**json.loads(said))
        except (ValueError, TypeError):
            return None

    def ended(self) -> Owner:
        return replace(self, machine="")

    def write(self, descriptor: int) -> None:
        """Replace the text of the file, and wait for the disk. Raises OSError."""
        os.pwrite(descriptor, json.dumps(asdict(self)).encode().ljust(_NUM_BYTES - 1) + b"\n", 0)
        os.fdatasync(descriptor)


def said_by(descriptor: int) -> bytes:
    """Return the text of an open lock file, opened once more: then a network file system asks its server."""
    with open(f"/proc/self/fd/{descriptor}", "rb") as file:
        return file.read(_NUM_BYTES)


def this_machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def kill(owner: Owner) -> None:
    """Kill a process of this machine with all that it has started, and wait for their ends.

    Does nothing if the process has ended, or is this one. Raises PermissionError.
    """
    if owner.pid == os.getpid():
        return
    with ExitStack() as stack:
        processes = []
        for pid in (owner.pid, *_descendants(owner.pid)):
            with suppress(ProcessLookupError):
                processes.append(os.pidfd_open(pid))
                stack.callback(os.close, processes[-1])
        with suppress(OSError):
            if _started(owner.pid) == owner.started:  # Its pid still was its own when it was opened.
                _kill(processes)


def _kill(processes: list[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
    for process in processes:
        ended = select.poll()
        ended.register(process, select.POLLIN)
        ended.poll()


def _descendants(pid: int) -> list[int]:
    parents = dict[int, list[int]]()
    for one in Path("/proc").iterdir():
        if one.name.isdecimal():
            with suppress(OSError):
                parents.setdefault(int(_stat(int(one.name))[1]), []).append(int(one.name))
    found = list(parents.get(pid, ()))
    for child in found:  # The list grows meanwhile.
        found += parents.get(child, ())
    return found


def _started(pid: int) -> int:
    """Return the start of a process in ticks after the boot. Raises OSError if there is no such process."""
    return int(_stat(pid)[19])


def _stat(pid: int) -> list[str]:
    """Return the fields of proc(5) after the name, which may hold blanks: state, parent, ... Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
