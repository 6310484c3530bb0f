"""Describes a worker's device, so that different hardware has different names."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from tilework.pipelines.errors import describe

_CPUINFO = Path("/proc/cpuinfo")


def describe_hardware(device: torch.device) -> str:
    """Return the name of the GPU, or name and number of cores of the CPUs that this process may run on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores"


class DeviceFailed(Exception):
    """A worker cannot continue, since its device accepts nothing from this process any more."""


def has_failed(device: torch.device) -> bool:
    """Return whether an accelerator answers every call with an error for the rest of this process.

    CUDA does so after a kernel has accessed invalid memory, and after many faults of the card.
    """
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def check_device(device: torch.device, error: Exception) -> None:
    """Raise DeviceFailed if the device can do nothing after this error, whichever request met it."""
    if has_failed(device):
        raise DeviceFailed(f"its device has failed: {describe(error)}") from error


def memory_in_use(device: torch.device) -> int | None:
    """Return the bytes in use on an accelerator, by all processes; None for a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def cpu_name(cpuinfo: Path = _CPUINFO) -> str:
    """Return the first "model name" in /proc/cpuinfo; if there is none (ARM, for example), the architecture."""
    try:
        lines = cpuinfo.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == "model name")
    return next((name for name in names if name), platform.machine())
