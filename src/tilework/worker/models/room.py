"""How much of weights a node's memory can have; without torch, as the process that starts workers asks."""

from __future__ import annotations

import shutil
from pathlib import Path

RESERVE_BYTES = 1 << 30  # Left free for the states of jobs, which lie on the same device.


def capacity_bytes(directory: Path) -> int:
    """How much of weights the directory can have: what is there, and what is free but for the reserve."""
    there = sum(path.stat().st_size for path in directory.iterdir() if not path.suffix) if directory.is_dir() else 0
    free = shutil.disk_usage(directory if directory.is_dir() else directory.parent).free
    return max(0, there + free - RESERVE_BYTES)
