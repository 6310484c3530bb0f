"""Limits the memory of a work, and frees memory after a work that exceeded it."""

from __future__ import annotations

import ctypes
import errno
import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_M_MMAP_THRESHOLD = -3
_MAPPED_BYTES = 1 << 20
_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed", "bad_alloc")
"""Parts of the messages of torch, its allocators, cuDNN and cuBLAS, in lower case; most raise a RuntimeError."""

_ONEDNN_SIGN = "could not create a primitive"
"""Message of oneDNN if it cannot allocate, but also if it does not support an operation."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether `error` reports a lack of memory, of the host or of an accelerator."""
    match error:
        case MemoryError() | torch.OutOfMemoryError():
            return True
        case OSError():
            return error.errno == errno.ENOMEM
        case RuntimeError():
            return any(sign in str(error).lower() for sign in _SIGNS)
        case _:
            return False


class Budget:
    """The memory that a work may take beyond what the worker has when the work begins; None: all of the device.

    On a CPU the kernel enforces it (RLIMIT_DATA), on an accelerator torch's allocator does. Memory that an allocator
    keeps from earlier works does not count. With a budget, glibc is set to return large tensors at once; otherwise it
    keeps them, in pieces that are too small for the next ones.

    Raises:
        OSError: there is no /proc, so the budget of a CPU worker cannot be enforced.
    """

    def __init__(self, device: torch.device, memory_bytes: int | None) -> None:
        self._device = device
        self._memory_bytes = memory_bytes
        if memory_bytes is not None and device.type == "cpu":
            _data_bytes()
            _glibc("mallopt", _M_MMAP_THRESHOLD, _MAPPED_BYTES)

    @property
    def is_limited(self) -> bool:
        return self._memory_bytes is not None

    def is_exceeded_by(self, error: Exception) -> bool:
        """Return whether `error` reports a lack of memory; with a budget on a CPU oneDNN's ambiguous message counts."""
        limits_cpu = self._memory_bytes is not None and self._device.type == "cpu"
        return is_out_of_memory(error) or (
            limits_cpu and isinstance(error, RuntimeError) and _ONEDNN_SIGN in str(error)
        )

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Make allocations beyond the budget raise an error for which `is_exceeded_by` is true, while entered."""
        if self._memory_bytes is None:
            yield
        elif self._device.type == "cuda":
            self._set_fraction(torch.cuda.memory_allocated(self._device) + self._memory_bytes)
            try:
                yield
            finally:
                torch.cuda.set_per_process_memory_fraction(1.0, self._device)
        else:
            soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (_least(_data_bytes() + self._memory_bytes, soft), hard))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def release(self) -> None:
        """Free the memory that remains allocated after a work ran out of memory."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            _glibc("malloc_trim", 0)

    def _set_fraction(self, most_bytes: int) -> None:
        total = torch.cuda.get_device_properties(self._device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, most_bytes / total), self._device)


def _glibc(name: str, *arguments: int) -> None:
    """Call a malloc function of glibc; do nothing with other C libraries."""
    if function := getattr(ctypes.CDLL(None), name, None):
        function(*arguments)


def _least(limit: int, soft: int) -> int:
    return limit if soft == resource.RLIM_INFINITY else min(limit, soft)


def _data_bytes() -> int:
    """Return the bytes that the kernel counts against RLIMIT_DATA."""
    try:
        lines = _STATUS.read_text("ascii", errors="replace").splitlines()
    except OSError as error:
        raise OSError(f"a memory budget on a CPU needs Linux: {_STATUS} cannot be read; leave it out") from error
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
