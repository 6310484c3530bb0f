"""Collections are rare inside, and as before outside."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections import Counter
from collections.abc import Iterator

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

import clock
from fake_engine import FakeEngine, Plan, serving
from tilework.server import garbage
from tilework.server.garbage import rare_collections, sweep
from waiting import eventually


@pytest.fixture(autouse=True)
def _thresholds() -> Iterator[None]:
    """The same ones for every Python, whatever tests before have left."""
    before = gc.get_threshold()
    gc.set_threshold(1_500, 10, 10)
    yield
    gc.set_threshold(*before)


def test_what_is_there_is_left_alone_until_the_end() -> None:
    before, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    there = [[] for _ in range(2000)]  # What this process had before, it may have frozen.
    with rare_collections():
        assert gc.get_freeze_count() > num_frozen + len(there)
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


def test_sweep_finds_new_garbage_at_once_and_old_garbage_once_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_ALL_S", 2 * garbage._NEW_S)

    async def swept(loop: clock.ManualLoop) -> list[bool]:
        before, old = gc.get_threshold()[2], _Cycle()
        gc.collect()
        sweeping = asyncio.create_task(sweep())
        ghosts = weakref.ref(_Cycle()), weakref.ref(old)
        del old

        async def one_interval() -> None:
            await asyncio.sleep(0)
            loop.advance(garbage._NEW_S)
            await loop.until_idle()

        await one_interval()
        seen = [ghosts[0]() is None, ghosts[1]() is not None]
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


_POST = b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
_SENT = {
    "nothing": b"",
    "half a head": b"GET /health HTTP/1.1\r\n",
    "a probe": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "a call": _POST + b'Content-Length: 15\r\n\r\n{"prompt": "x"}',
    "half a body": _POST + b'Content-Length: 99\r\n\r\n{"prompt": "x"}',
}


@pytest.mark.parametrize("sent", _SENT.values(), ids=_SENT)
def test_a_closed_connection_leaves_nothing_for_a_collection(sent: bytes) -> None:
    """1 KB of each would be 50 MB in a minute, from a client without a key; walking all objects would hold the loop."""
    with serving(FakeEngine(plan=Plan(is_held=True)), drain_s=0) as server:
        server.http.get("/health")  # Its connection stays.
        host, _, port = server.url.removeprefix("http://").partition(":")
        gc.collect()
        gc.disable()
        gc.freeze()  # What was there before is not looked at: a look takes a second where many modules are loaded.
        try:
            before = _num_connections()
            for _ in range(5):
                with socket.create_connection((host, int(port))) as one:
                    one.sendall(sent)
                    eventually(lambda: _num_connections() > before)
                    server.until_idle()
                    gc.collect(1)  # Now it is as old as one that has been open for a while.
            eventually(lambda: _num_connections() == before)
        finally:
            gc.unfreeze()
            gc.enable()


def _num_connections() -> int:
    return sum(isinstance(one, H11Protocol | RequestResponseCycle | asyncio.Transport) for one in gc.get_objects())
