"""Collections are rare inside, and as before outside."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Iterator

import pytest

import clock
from tilework.server import garbage
from tilework.server.garbage import rare_collections, sweep


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    """The same ones for every Python, whatever tests before have left."""
    before = gc.get_threshold()
    gc.set_threshold(1_500, 10, 10)
    yield
    gc.set_threshold(*before)


def test_what_is_there_is_left_alone_until_the_end() -> None:
    before, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    with rare_collections():
        assert gc.get_freeze_count() > num_frozen + 1000
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_full_collections_are_rare_and_others_as_frequent_as_before() -> None:
    young, middle, full = gc.get_threshold()
    num_young = 2 * (middle + 1) * (full + 1)  # Outside, one or two of them are full.
    collected = Counter[int]()

    def note(phase: str, of: dict[str, int]) -> None:
        collected[of["generation"]] += phase == "start"

    with rare_collections():
        gc.collect()
        gc.callbacks.append(note)
        kept = [[] for _ in range(num_young * young)]
        gc.callbacks.remove(note)
    assert len(kept) == num_young * young
    assert collected[2] == 0
    assert num_young // 2 <= collected.total() <= num_young + 2


class _Cycle:
    """Garbage that only a collection finds, once nothing else holds it."""

    def __init__(self) -> None:
        self.itself = self


def test_sweep_finds_new_garbage_at_once_and_old_garbage_when_many_connections_were_closed() -> None:
    num_closed = 0

    async def swept(loop: clock.ManualLoop) -> list[bool]:
        nonlocal num_closed
        before, old = gc.get_threshold()[2], _Cycle()
        gc.collect()
        sweeping = asyncio.create_task(sweep(lambda: num_closed))
        ghosts = weakref.ref(_Cycle()), weakref.ref(old)
        del old

        async def one_interval() -> None:
            await asyncio.sleep(0)
            loop.advance(garbage._NEW_S)
            await loop.until_idle()

        await one_interval()
        seen = [ghosts[0]() is None, ghosts[1]() is not None]
        num_closed = garbage._MANY_CLOSED
        await one_interval()
        sweeping.cancel()
        await asyncio.wait([sweeping])
        return [*seen, ghosts[1]() is None, gc.get_threshold()[2] == before]

    gc.disable()
    try:
        with rare_collections():
            assert clock.run(swept) == [True, True, True, True]
    finally:
        gc.enable()
