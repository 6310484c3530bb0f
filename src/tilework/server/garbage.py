"""When the server collects garbage, and gives memory back."""

from __future__ import annotations

import asyncio
import ctypes
import gc

_M_MMAP_THRESHOLD = -3  # As in malloc.h.
_LARGE_BYTES = 1 << 20
_NEW_S, _EVERYTHING_S = 0.1, 600.0


async def sweep() -> None:
    """Collect what is new again and again, and everything now and then; for ever, on the running loop.

    Python begins a collection when there are so many objects more than after the last one. Where requests come and go
    evenly that is seldom, and everything that is new by then has to be walked: 30 ms every 4 s, at 200 requests/s. What
    a collection finds here is little: 1 KB for each connection that was closed, 10 KB if that was before its answer.
    """
    while True:
        for _ in range(round(_EVERYTHING_S / _NEW_S)):
            await asyncio.sleep(_NEW_S)
            gc.collect(1)
        gc.collect()


def give_back_large_blocks() -> None:
    """Let the C library return blocks of a megabyte and more to the system as soon as they are freed.

    glibc ceases to do so for every size that it has seen freed, up to 32 MB, so that after two answers of 20 MB to slow
    clients the server could keep 120 MB. Where there is no glibc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
