"""The four verbs over UCX: memory of another process, of this node or another."""

from __future__ import annotations

import ctypes
import select
import socket
import time
from mmap import mmap

from tilework.comm.ring import _native
from tilework.comm.ring.errors import VerbFailed, VerbTimeout
from tilework.comm.ring.ucx.library import Remote
from tilework.comm.ring.verbs import Buffer

_STAGE = 1 << 20
_SPIN_NS = 50_000


class UcxMemory:
    """Verbs on `remote`. Each verb, except a put, is done or has failed when it returns.

    Bytes pass through a stage of this memory's own, so a put that is cut off by its deadline does not read the caller's
    bytes later. After a VerbFailed no verb may follow.

    UCX does not say that the other end has closed its lane: a verb is then never done. If there is a `connection` to
    the other end, its end says so. Then the verb fails at once, and not at its deadline, which may be a minute away.
    """

    is_one_sided = True

    def __init__(self, remote: Remote, connection: socket.socket | None = None) -> None:
        self._remote = remote
        self._worker = remote.worker
        self._stage = mmap(-1, _STAGE)
        self._view = memoryview(self._stage)
        self._at = ctypes.addressof(ctypes.c_char.from_buffer(self._stage))
        self._poll = select.poll()
        self._poll.register(self._worker.fd, select.POLLIN)
        if connection is not None:
            self._poll.register(connection, select.POLLRDHUP)

    def get(self, offset: int, size: int, *, deadline_ns: int) -> bytes:
        assert size <= _STAGE
        self._wait(self._remote.get(offset, self._at, size), "get", deadline_ns)
        return self._stage[:size]

    def put(self, offset: int, buffers: tuple[Buffer, ...], *, deadline_ns: int) -> None:
        filled = 0
        for buffer in buffers:
            rest = memoryview(buffer).cast("B")
            while rest:
                part = rest[: _STAGE - filled]
                self._view[filled : filled + len(part)] = part
                filled, rest = filled + len(part), rest[len(part) :]
                if filled == _STAGE:
                    offset = self._put_stage(offset, filled, deadline_ns)
                    filled = 0
        if filled:
            self._put_stage(offset, filled, deadline_ns)

    def _put_stage(self, offset: int, size: int, deadline_ns: int) -> int:
        """Put the stage's bytes and wait until it can be written again. Return the offset behind them."""
        self._wait(self._remote.put(offset, self._at, size), "put", deadline_ns)
        return offset + size

    def cas64(self, offset: int, expected: int, desired: int, *, deadline_ns: int) -> int:
        self._view[:16] = expected.to_bytes(8, "little") + desired.to_bytes(8, "little")
        self._wait(self._remote.cas64(offset, self._at, self._at + 8), "compare-and-swap", deadline_ns)
        return int.from_bytes(self._stage[8:16], "little")

    def flush(self, *, deadline_ns: int) -> None:
        self._wait(self._remote.flush(), "flush", deadline_ns)

    @staticmethod
    def checksum(buffer: Buffer, value: int) -> int:
        return _native.crc32c(buffer, value)

    def _wait(self, request: int | None, verb: str, deadline_ns: int) -> None:
        """Wait for a request: spin for a short while, then sleep, since an answer over a network comes soon or late."""
        if request is None:
            return
        is_done, progress = self._remote.is_done, self._worker.progress
        spin_until_ns = 0
        while not is_done(request):
            if progress():
                continue
            now_ns = time.monotonic_ns()
            if now_ns >= deadline_ns:
                raise VerbTimeout(f"a {verb} over UCX was not done by its deadline")
            spin_until_ns = spin_until_ns or now_ns + _SPIN_NS
            if now_ns > spin_until_ns and self._worker.arm():
                events = self._poll.poll(min(1e3, (deadline_ns - now_ns) / 1e6))
                if any(fd != self._worker.fd for fd, _ in events) and not is_done(request):
                    raise VerbFailed(f"the other end has gone while a {verb} over UCX was under way")
