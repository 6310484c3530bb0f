"""The times at which the server collects garbage and returns memory to the system."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_M_MMAP_THRESHOLD = -3  # As in malloc.h.
_LARGE_BYTES = 1 << 20
_NEW_S = 0.1
_ALL_S = 3600.0
_RARELY = 1_000  # A collection of all per this many of the middle generation. Python 3.14.0 to 3.14.4 ignore it.
_NEVER = 1 << 30


async def sweep() -> None:
    """Collect new objects every `_NEW_S`, and all objects every `_ALL_S`. Runs until it is cancelled.

    Python's own collections start when the number of objects has grown. With a steady load that is seldom, and each
    then walks all new objects: 30 ms every 4 s, at 200 requests/s. Walking all objects takes 2 s with 20,000 requests
    waiting, and frees nothing that is known: answers and closed connections leave nothing that needs it. Rejected: a
    collection after a number of connections that leave some memory. A client without a key can open 1,000 a second.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _NEVER)
    try:
        while True:
            for _ in range(round(_ALL_S / _NEW_S)):
                await asyncio.sleep(_NEW_S)
                gc.collect(1)
            gc.collect()
    finally:
        gc.set_threshold(*before)


def give_back_large_blocks() -> None:
    """Let the C library return blocks of 1 MiB and more to the system as soon as they are freed.

    By default glibc stops doing so for each size that was freed once, up to 32 MB: after two answers of 20 MB to slow
    clients the server could keep 120 MB. Without glibc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Exempt all objects that exist now from collections, and make full collections of later ones rare.

    A full collection walks everything: 0.2 s for what a server has loaded with torch, 0.3 s for 3,000 requests in
    flight. So there is none here, where a loop may be running already: the little that is garbage now stays until the
    end. No collections at all would be simpler, but each call of a client leaves about 40 objects in cycles, 11 KB.
    Collections of new objects stay as frequent as this Python has them: fewer would walk as many objects, and take as
    long together.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*before[:2], _RARELY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
