"""Free memory of the host, according to the machine and to the control group of a container."""

from __future__ import annotations

from math import inf
from pathlib import Path

_MACHINE = Path("/proc/meminfo")
_GROUP_LIMIT, _GROUP_USE = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


def free_host_bytes() -> float:
    """Return the bytes that a process may take before the kernel has to end one; infinite if that is not known."""
    return min(_free_of_machine(), _free_of_group())


def _free_of_machine() -> float:
    try:
        lines = [line.split() for line in _MACHINE.read_text("ascii").splitlines()]
    except OSError:
        return inf
    return next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), inf)


def _free_of_group() -> float:
    try:
        limit, used = (path.read_text().strip() for path in (_GROUP_LIMIT, _GROUP_USE))
    except OSError:
        return inf
    return inf if limit == "max" else int(limit) - int(used)
