"""When the server collects garbage, and gives memory back."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_M_MMAP_THRESHOLD = -3  # As in malloc.h.
_LARGE_BYTES = 1 << 20
_NEW_S = 0.1
_MANY_CLOSED = 50_000
_NEVER = 1 << 30


async def sweep(num_closed: Callable[[], int]) -> None:
    """Collect what is new again and again; for ever, on the running loop. `num_closed`: connections so far.

    Python begins a collection when there are so many objects more than after the last one. Where requests come and go
    evenly that is seldom, and everything that is new by then has to be walked: 30 ms every 4 s, at 200 requests/s. To
    walk everything there is takes 2 s with 20,000 requests waiting, and is hardly ever of use: what answers leave is
    freed without it, and a closed connection leaves 1 KB, or 10 if it was closed before its answer.
    """
    gc.set_threshold(*gc.get_threshold()[:2], _NEVER)
    num_swept = num_closed()
    while True:
        await asyncio.sleep(_NEW_S)
        if num_closed() - num_swept < _MANY_CLOSED:
            gc.collect(1)
        else:
            num_swept = num_closed()
            gc.collect()


def give_back_large_blocks() -> None:
    """Let the C library return blocks of a megabyte and more to the system as soon as they are freed.

    glibc ceases to do so for every size that it has seen freed, up to 32 MB, so that after two answers of 20 MB to slow
    clients the server could keep 120 MB. Where there is no glibc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Leave what is there now to itself, and let the garbage of what comes and goes wait.

    A full collection walks everything: 45 ms for what a server has loaded, 0.3 s for 3,000 requests in flight. None at
    all would be simpler, but a client's call leaves some 40 objects in cycles, 11 KB.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_000, 10, 1_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
