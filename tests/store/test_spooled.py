"""What a shared store does not take waits on the disk, is found there, and is written when the store is back."""

from __future__ import annotations

import asyncio
import errno
import logging
import stat
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from clock import ManualLoop, run
from store.scripted_store import TTL_NS, ScriptedStore
from tilework.core.time import NS_PER_S, ns_from_s
from tilework.store import files
from tilework.store.durable import DurableDirectory
from tilework.store.private_folder import PrivateFolder
from tilework.store.results import Stored, StoreUnreachable, TooLarge, Unwritten
from tilework.store.spooled import SpooledStore

AWAY = "Redis: Connection refused"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place for temporary files."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


class Rig:
    """A store over a scripted one, whose clock is that of the loop."""

    def __init__(
        self, loop: ManualLoop, shared: ScriptedStore, durable: DurableDirectory | None, spool_bytes: int
    ) -> None:
        self.loop, self.shared = loop, shared
        self.store = SpooledStore(shared, durable, spool_bytes=spool_bytes, ttl_ns=TTL_NS, now_ns=self.now_ns)

    def now_ns(self) -> int:
        return ns_from_s(self.loop.time())

    async def put(self, uid: str, content: bytes | None = None) -> Stored | TooLarge | Unwritten:
        return await self.store.put(uid, uid.encode() if content is None else content, "image/png", self.now_ns())

    async def read(self, uid: str, part: range | None = None) -> bytes | None:
        result = await self.store.get(uid, self.now_ns())
        assert (result is not None) == await self.store.holds(uid, self.now_ns())
        if result is None:
            return None
        with closing(result):
            assert result.media_type == "image/png"
            return await result.read(part)

    async def is_away(self, *uids: str) -> None:
        """From now on the store takes nothing; these results wait, and the task that writes them has tried."""
        self.shared.problem = AWAY
        for uid in uids:
            assert isinstance(await self.put(uid), Stored)
        self.loop.advance(0.6)
        await self.tried(uids[0], 2)

    async def tried(self, uid: str, times: int) -> None:
        await self.loop.until(lambda: self.shared.tried.count(uid) >= times)
        await self.loop.until_idle()

    async def is_back(self) -> None:
        """The store takes results, and has those that waited."""
        self.shared.problem = ""
        self.loop.advance(10)
        await self.loop.until(lambda: not self.is_lost)

    @property
    def is_lost(self) -> bool:
        return self.store._outage is not None

    @property
    def num_waiting(self) -> int:
        return self.store.backlog().num_results


@asynccontextmanager
async def rig(
    loop: ManualLoop,
    *,
    shared: ScriptedStore | None = None,
    durable: DurableDirectory | None = None,
    spool_bytes: int = 1000,
) -> AsyncIterator[Rig]:
    found = Rig(loop, ScriptedStore() if shared is None else shared, durable, spool_bytes)
    await found.store.open()
    try:
        yield found
    finally:
        await found.store.close()


def test_what_the_store_does_not_take_is_found_meanwhile_and_written_in_order(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(loop: ManualLoop) -> None:
        async with rig(loop) as it:
            await it.put("early")
            assert list(it.shared.held) == ["early"]
            await it.is_away("b", "a", "c")
            expires_ns = it.now_ns() + TTL_NS
            assert await it.put("b") == Stored(expires_ns=expires_ns), "it expires as it would in the store"
            assert [await it.read(uid) for uid in "abc"] == [b"a", b"b", b"c"]
            assert await it.read("a", range(0)) == b""
            with pytest.raises(StoreUnreachable):
                await it.read("early")
            assert (len(it.store), it.store.num_bytes) == (4, 8)
            it.loop.advance(3)
            assert it.store.backlog().unwritten_ns == ns_from_s(3.6)
            await it.is_back()
            assert list(it.shared.held) == ["early", "a", "c", "b"], "b was replaced"
            held = it.shared.held["b"]
            assert (held.content, held.media_type, held.ttl_ns) == (b"b", "image/png", expires_ns - it.now_ns())
            assert (it.num_waiting, it.store.backlog().unwritten_ns) == (0, 0)
            await it.put("late")
            assert "late" in it.shared.held

    with caplog.at_level(logging.WARNING, "tilework.store"):
        run(scenario)
    assert [record.getMessage() for record in caplog.records] == [
        f"results wait on the disk until their store takes them: {AWAY}",
        "the store of results takes them again: 3 had waited and are written",
    ]


def test_no_result_waits_for_a_store_that_is_known_to_hang() -> None:
    async def scenario(loop: ManualLoop) -> None:
        async with rig(loop) as it:
            await it.is_away("a")
            it.shared.problem = ""
            it.shared.going.clear()
            loop.advance(10)
            await it.tried("a", 3)
            putting = asyncio.create_task(it.put("b"))
            await loop.until(putting.done)
            assert isinstance(putting.result(), Stored)
            assert it.num_waiting == 2
            it.shared.going.set()
            await loop.until(lambda: not it.is_lost)
            assert list(it.shared.held) == ["a", "b"]

    run(scenario)


def test_the_store_is_tried_after_growing_pauses() -> None:
    async def scenario(loop: ManualLoop) -> None:
        async with rig(loop) as it:
            await it.is_away("a")
            for number, pause_s in enumerate((0.5, 1, 2, 4, 8, 10, 10), 3):
                loop.advance(pause_s - 0.1)
                await loop.until_idle()
                assert it.shared.tried.count("a") == number - 1
                loop.advance(0.2)
                await it.tried("a", number)
            await it.is_back()
            await it.is_away("b")
            loop.advance(0.6)
            await it.tried("b", 3)

    run(scenario)


@pytest.mark.parametrize("swallows", [False, True])
def test_what_is_deleted_while_it_waits_is_not_in_the_store_afterwards(swallows: bool) -> None:
    """Nor if the store had taken it, and its answer was lost."""

    async def scenario(loop: ManualLoop) -> None:
        async with rig(loop) as it:
            it.shared.swallows = swallows
            await it.is_away("a", "b")
            assert ("a" in it.shared.held) == swallows
            await it.store.delete("a")
            assert await it.read("a") is None
            await it.store.delete("a")
            it.shared.swallows = False
            await it.is_back()
            assert list(it.shared.held) == ["b"]
            assert await it.read("a") is None
            await it.store.delete("b")
            assert it.shared.held == {}

    run(scenario)


def test_what_is_deleted_while_it_is_written_is_not_in_the_store_afterwards() -> None:
    async def scenario(loop: ManualLoop) -> None:
        async with rig(loop) as it:
            await it.is_away("a")
            it.shared.going.clear()
            it.shared.problem = ""
            loop.advance(10)
            await it.tried("a", 3)
            await it.store.delete("a")
            it.shared.going.set()
            await loop.until(lambda: not it.is_lost)
            assert it.shared.held == {}
            assert len(it.store) == 0

    run(scenario)


def test_what_is_replaced_while_it_is_written_is_written_again() -> None:
    async def scenario(loop: ManualLoop) -> None:
        async with rig(loop) as it:
            await it.is_away("a")
            it.shared.going.clear()
            it.shared.problem = ""
            loop.advance(10)
            await it.tried("a", 3)
            await it.put("a", b"new")
            it.shared.going.set()
            await loop.until(lambda: not it.is_lost)
            assert it.shared.held["a"].content == b"new"

    run(scenario)


def test_what_has_expired_makes_room_at_once() -> None:
    async def scenario(loop: ManualLoop) -> None:
        async with rig(loop, spool_bytes=1) as it:
            await it.is_away("a")
            loop.advance(TTL_NS / NS_PER_S)
            assert isinstance(await it.put("b"), Stored)

    run(scenario)


def test_what_expires_while_it_waits_is_dropped() -> None:
    async def scenario(loop: ManualLoop) -> None:
        async with rig(loop) as it:
            await it.is_away("a")
            loop.advance(TTL_NS / NS_PER_S + 1)
            with pytest.raises(StoreUnreachable):
                await it.read("a")
            await loop.until(lambda: it.num_waiting == 0)
            assert it.is_lost, "nothing says that it takes results"
            await it.is_back()
            assert it.shared.held == {}

    run(scenario)


def test_the_bound_holds_and_nothing_that_waits_is_evicted() -> None:
    async def scenario(loop: ManualLoop) -> None:
        async with rig(loop, spool_bytes=10) as it:
            assert it.store.refusal(1_000_000) is None
            await it.is_away("aaa", "bbb")
            loop.advance(6.4)
            assert it.store.refusal(1) is None
            assert it.store.refusal(2) == (
                f"their store has taken none for 7 seconds ({AWAY}), and 6 of 10 bytes for waiting results on this "
                "server's disk are in use"
            ), "each is expected to be as large as those that wait"
            refused = await it.put("ccccc")
            assert isinstance(refused, Unwritten)
            assert refused.places == "to their store, nor to its disk meanwhile"
            assert AWAY in refused.reason
            assert [await it.read("aaa"), await it.read("bbb")] == [b"aaa", b"bbb"]
            assert isinstance(await it.put("dddd"), Stored)
            await it.is_back()
            assert list(it.shared.held) == ["aaa", "bbb", "dddd"]
            assert it.store.refusal(1_000_000) is None

    run(scenario)


def test_results_that_come_together_do_not_exceed_the_bound() -> None:
    async def scenario(loop: ManualLoop) -> None:
        async with rig(loop, spool_bytes=10) as it:
            await it.is_away("aaa")
            answers = await asyncio.gather(*(it.put(uid) for uid in ("bbb", "ccc", "ddd", "eee")))
            assert [type(one) for one in answers] == [Stored, Stored, Unwritten, Unwritten]
            assert it.store.backlog().num_bytes == 9

    run(scenario)


def test_a_result_that_is_too_large_for_the_store_does_not_wait_for_it() -> None:
    async def scenario(loop: ManualLoop) -> None:
        async with rig(loop, shared=ScriptedStore(max_bytes=3)) as it:
            await it.is_away("a")
            assert await it.put("b", b"four") == TooLarge(num_bytes=4, max_bytes=3)
            assert it.num_waiting == 1

    run(scenario)


def test_a_disk_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def scenario(loop: ManualLoop) -> None:
        async with rig(loop, spool_bytes=1 << 30) as it:
            with monkeypatch.context() as full:
                full.setattr(files, "_write", write)
                it.shared.problem = AWAY
                assert isinstance(await it.put("a"), Unwritten)
                assert "disk cannot be written (No space left on device)" in (it.store.refusal(1) or "")
            loop.advance(6)
            await loop.until(lambda: it.store.refusal(1) is None)
            await it.is_back()

    run(scenario)


def test_a_result_that_is_being_put_when_the_last_one_is_written_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_go, is_held, really = threading.Event(), threading.Event(), files._write

    def write(*args: Any) -> None:
        is_held.set()
        assert may_go.wait(60)
        really(*args)

    async def scenario(loop: ManualLoop) -> None:
        async with rig(loop) as it:
            await it.is_away("a")
            monkeypatch.setattr(files, "_write", write)
            putting = asyncio.create_task(it.put("b"))
            await loop.until(is_held.is_set)
            it.shared.problem = ""
            loop.advance(1)
            await loop.until(lambda: "a" in it.shared.held and it.num_waiting == 0)
            await loop.until_idle()
            may_go.set()
            await putting
            loop.advance(1)
            await loop.until(lambda: "b" in it.shared.held)

    run(scenario)


def test_a_bug_does_not_end_the_task_that_writes(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(loop: ManualLoop) -> None:
        async with rig(loop) as it:
            await it.is_away("a")
            it.shared.bugs.append(RuntimeError("a bug"))
            loop.advance(1)
            await it.tried("a", 3)
            await it.is_back()
            assert list(it.shared.held) == ["a"]

    run(scenario)
    assert "a bug" in caplog.text


def test_the_next_start_writes_what_a_durable_server_has_left(tmp_path: Path) -> None:
    async def scenario(loop: ManualLoop) -> None:
        shared = ScriptedStore()
        with closing(DurableDirectory(tmp_path / "state")) as durable:
            async with rig(loop, shared=shared, durable=durable) as it:
                expires_ns = it.now_ns() + TTL_NS
                await it.is_away("a", "b")
                assert it.store.backlog().outlives_server
                await it.store.written()
        loop.advance(20)
        with closing(DurableDirectory(tmp_path / "state")) as durable:
            async with rig(loop, shared=shared, durable=durable) as it:
                assert await it.read("a") == b"a", "it starts, though the store is away"
                await it.put("c")
                await it.tried("a", 3)
                await it.is_back()
                assert list(shared.held) == ["a", "b", "c"]
                assert shared.held["a"].ttl_ns == expires_ns - it.now_ns()
            assert list((tmp_path / "state" / "results").iterdir()) == []

    run(scenario)


def test_a_result_is_given_out_while_it_is_on_its_way_to_a_store_that_hangs() -> None:
    async def scenario(loop: ManualLoop) -> None:
        async with rig(loop) as it:
            it.shared.going.clear()
            putting = asyncio.create_task(it.put("a", b"content"))
            await loop.until(lambda: it.shared.tried == ["a"])
            assert await it.read("a") == b"content"
            assert await it.read("a", range(3)) == b"con"
            it.shared.going.set()
            assert isinstance(await putting, Stored)
            assert await it.read("a") == b"content"

    run(scenario)


def test_the_first_start_needs_the_store_and_a_later_one_does_not(tmp_path: Path) -> None:
    """A wrong address is found at once, and a standby takes over while the store is away."""

    async def scenario(loop: ManualLoop) -> None:
        shared = ScriptedStore()
        shared.problem = AWAY
        with (
            closing(DurableDirectory(tmp_path / "state")) as durable,
            pytest.raises(StoreUnreachable, match="Connection refused Start it or make it"),
        ):
            await Rig(loop, shared, durable, 1000).store.open()
        with closing(DurableDirectory(tmp_path / "state")) as durable:
            durable.now_ns()  # As a server does that starts.
        with closing(DurableDirectory(tmp_path / "state")) as durable:
            async with rig(loop, shared=shared, durable=durable) as it:
                assert isinstance(await it.put("a"), Stored)
                await it.is_back()
                assert await it.read("a") == b"a"
            assert shared.held["a"].content == b"a"

    run(scenario)


def test_without_a_durable_directory_results_wait_in_a_folder_that_goes_with_the_server(
    temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(loop: ManualLoop) -> None:
        async with rig(loop) as it:
            (folder,) = temporary.iterdir()
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            await it.is_away("a", "b")
            written = asyncio.create_task(it.store.written())
            await loop.until_idle()
            assert not written.done()
            await it.is_back()
            await written
            await it.is_away("c")
        assert list(temporary.iterdir()) == []

    run(scenario)
    assert "1 results are lost" in caplog.text


def test_the_folder_of_a_killed_process_goes_with_the_next_and_that_of_a_running_one_stays(temporary: Path) -> None:
    """A lock that nobody holds belongs to nobody."""
    left = temporary / "tilework-spool-left"
    left.mkdir(mode=0o700)
    (left / "result").touch()
    others = temporary / "tilework-spool-others"
    others.mkdir(mode=0o755)
    first, second = PrivateFolder(), PrivateFolder()
    assert set(temporary.iterdir()) == {others, first.path, second.path}
    first.close()
    del second
    assert set(temporary.iterdir()) == {others}
