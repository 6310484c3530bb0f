"""Collections are rare inside, and as before outside."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from tilework.core.garbage import rare_collections
from tilework.server import garbage
from tilework.server.garbage import sweep


def test_what_is_there_is_left_alone_until_the_end() -> None:
    before, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    with rare_collections():
        assert gc.get_freeze_count() > num_frozen + 1000
        assert gc.get_threshold()[0] > before[0]
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


class _Cycle:
    """Garbage, once nobody else holds it, that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


def test_sweep_finds_new_garbage_at_once_and_old_garbage_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_NEW_S", 0.01)
    monkeypatch.setattr(garbage, "_EVERYTHING_S", 0.5)

    async def swept() -> tuple[bool, bool, bool]:
        old = _Cycle()
        gc.collect()
        sweeping = asyncio.create_task(sweep())
        ghosts = weakref.ref(_Cycle()), weakref.ref(old)
        del old
        await asyncio.sleep(0.2)
        new_is_gone, old_is_left = ghosts[0]() is None, ghosts[1]() is not None
        await asyncio.sleep(0.6)
        sweeping.cancel()
        return new_is_gone, old_is_left, ghosts[1]() is None

    gc.disable()
    try:
        assert asyncio.run(swept()) == (True, True, True)
    finally:
        gc.enable()
