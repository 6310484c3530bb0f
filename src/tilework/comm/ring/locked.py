"""The verbs on shared memory under a lock, for installations without the C extension."""

from __future__ import annotations

import fcntl
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import mmap

from tilework.comm.ring.errors import VerbTimeout
from tilework.comm.ring.verbs import Buffer

_PAUSE_S = 50e-6


class LockedMemory:
    """Verbs in Python. Slow, and *not* one-sided: a process that is stopped while it holds the lock stops all others
    until it continues or ends. The others notice by their deadlines.

    `fd` is the file behind `memory`. It is opened again here: a lock belongs to an open file, not to a process.
    """

    is_one_sided = False

    def __init__(self, memory: mmap, fd: int) -> None:
        self._memory = memory
        self._lock = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)

    def __del__(self) -> None:
        os.close(self._lock)

    def get(self, offset: int, size: int, *, deadline_ns: int) -> bytes:
        with self._locked(deadline_ns):
            return self._memory[offset : offset + size]

    def put(self, offset: int, buffers: tuple[Buffer, ...], *, deadline_ns: int) -> None:
        with self._locked(deadline_ns):
            for buffer in buffers:
                self._memory[offset : offset + len(buffer)] = bytes(buffer)
                offset += len(buffer)

    def cas64(self, offset: int, expected: int, desired: int, *, deadline_ns: int) -> int:
        with self._locked(deadline_ns):
            seen = int.from_bytes(self._memory[offset : offset + 8], "little")
            if seen == expected:
                self._memory[offset : offset + 8] = desired.to_bytes(8, "little")
            return seen

    def flush(self, *, deadline_ns: int) -> None:
        pass

    @staticmethod
    def checksum(buffer: Buffer, value: int) -> int:
        return zlib.crc32(buffer, value)

    @contextmanager
    def _locked(self, deadline_ns: int) -> Iterator[None]:
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic_ns() > deadline_ns:
                    raise VerbTimeout("another process has held the ring's lock until the deadline") from None
                time.sleep(_PAUSE_S)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
