"""Capacity of a node's memory for weights; without torch, as the process that starts workers asks."""

from __future__ import annotations

import shutil
from pathlib import Path

RESERVE_BYTES = 1 << 30  # Left free for the states of jobs, which lie on the same device.


def capacity_bytes(directory: Path) -> int:
    """Return the bytes of weights that the directory can hold: what is there, and what is free minus the reserve."""
    there = sum(path.stat().st_size for path in directory.iterdir() if not path.suffix) if directory.is_dir() else 0
    free = shutil.disk_usage(directory if directory.is_dir() else directory.parent).free
    return max(0, there + free - RESERVE_BYTES)
