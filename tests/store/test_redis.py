"""Results in Redis: parts, expiry, a server that is down, and another server that serves the same results."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from redis import Redis

from fake_engine import FakeEngine, serving
from store.redis_server import free_port, redis_server, skip_without_redis
from tilework.core.time import NS_PER_S
from tilework.store.redis_results import CHUNK_BYTES, RedisStore
from tilework.store.results import Stored, StoreUnreachable, TooLarge, Unwritten
from tilework.store.spooled import SpooledStore
from waiting import eventually, until

pytestmark = pytest.mark.slow
TTL_NS = 100 * NS_PER_S


@pytest.fixture(scope="module", autouse=True)
def _redis_package() -> None:
    skip_without_redis()


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with redis_server(tmp_path) as (url, _):
        yield url


def store_of(*urls: str, max_bytes: int = 1 << 30, ttl_ns: int = TTL_NS) -> RedisStore:
    return RedisStore(urls, max_bytes=max_bytes, ttl_ns=ttl_ns)


async def content(store: RedisStore, uid: str, part: range | None = None) -> bytes | None:
    result = await store.get(uid, 0)
    return None if result is None else await result.read(part)


async def has_expired(store: RedisStore, uid: str) -> bool:
    return await store.get(uid, 0) is None


def test_all_parts_of_a_long_result_are_what_was_put(url: str) -> None:
    whole = bytes(range(256)) * (2 * CHUNK_BYTES // 256) + b"the end"
    near_chunks = [range(CHUNK_BYTES - 1, CHUNK_BYTES + 1), range(CHUNK_BYTES, 2 * CHUNK_BYTES)]

    async def run() -> None:
        store = store_of(url)
        assert await store.put("t/a-0", whole, "video/mp4", 5) == Stored(expires_ns=TTL_NS + 5)
        assert (len(store), store.num_bytes) == (1, len(whole))
        for part in (range(0), range(10), *near_chunks, range(3, len(whole)), range(len(whole) - 1, len(whole))):
            assert await content(store, "t/a-0", part) == whole[part.start : part.stop], part
        assert await content(store, "t/a-0") == whole
        await store.put("t/a-0", b"shorter", "image/png", 5)
        result = await store.get("t/a-0", 5)
        assert result is not None
        assert (await result.read(), result.media_type, result.num_bytes) == (b"shorter", "image/png", 7)
        await store.put("t/a-1", b"", "image/png", 5)
        assert await content(store, "t/a-1") == b""
        await store.close()

    asyncio.run(run())


def test_what_is_unknown_or_deleted_or_too_large_is_not_there(url: str) -> None:
    async def run() -> None:
        store = store_of(url, max_bytes=10)
        assert await store.get("a", 0) is None
        await store.delete("a")
        assert await store.put("a", b"x" * 11, "image/png", 0) == TooLarge(num_bytes=11, max_bytes=10)
        await store.put("a", b"x" * 10, "image/png", 0)
        reading = await store.get("a", 0)
        assert reading is not None
        await store.delete("a")
        assert not await store.holds("a", 0)
        assert len(store) == 0
        assert await reading.read() == b"x" * 10, "what is being read is read to its end"
        await store.close()

    asyncio.run(run())


def test_redis_lets_a_result_expire_and_its_chunks_a_minute_later(url: str) -> None:
    async def run() -> None:
        store = store_of(url, ttl_ns=NS_PER_S // 20)
        await store.put("a", b"content", "image/png", 0)
        with closing(Redis.from_url(url)) as client:
            (chunk,) = client.keys("*:0")
            assert 50_000 < client.pttl(chunk) <= 60_050
            await until(lambda: has_expired(store, "a"))
            assert client.get(chunk) == b"content"
        await store.close()

    asyncio.run(run())


def test_a_replica_answers_while_the_first_server_is_down(tmp_path: Path) -> None:
    async def run(first: str, replica: str, process: subprocess.Popen[bytes]) -> None:
        store = store_of(first, replica)
        await store.check()
        assert isinstance(await store.put("a", b"content", "image/png", 0), Stored)
        process.kill()
        process.wait()
        assert await content(store, "a") == b"content"
        written = await store.put("b", b"more", "image/png", 0)
        assert isinstance(written, Unwritten)
        assert "read only replica" in written.reason
        with pytest.raises(StoreUnreachable):
            await store.get("unknown", 0)
        with closing(Redis.from_url(replica)) as client:
            client.replicaof("NO", "ONE")  # As a sentinel does.
        assert isinstance(await store.put("b", b"more", "image/png", 0), Stored)
        assert await content(store, "b") == b"more"
        await store.close()

    with redis_server(tmp_path) as (first, process):
        port = first.removesuffix("/0").rpartition(":")[2]
        with redis_server(tmp_path, "--replicaof", "127.0.0.1", port) as (replica, _):
            with Redis.from_url(first) as client:
                client.set("any", "thing")
                eventually(lambda: client.wait(num_replicas=1, timeout=1000))
            asyncio.run(run(first, replica, process))


class Recorded(RedisStore):
    """`asked` are the uids of all writes."""

    asked: list[str]

    async def write(self, uid: str, content: bytes, media_type: str, ttl_ns: int) -> None:
        self.asked.append(uid)
        await super().write(uid, content, media_type, ttl_ns)


def spooled(shared: RedisStore) -> SpooledStore:
    """On a clock that stands still."""
    return SpooledStore(shared, None, spool_bytes=1 << 30, ttl_ns=TTL_NS, now_ns=lambda: 0)


async def waits_and_is_written(store: SpooledStore, content: bytes, mend: Callable[[], object]) -> None:
    """A result waits until Redis is mended, and is then in it."""
    assert isinstance(await store.put("a", content, "image/png", 0), Stored)
    assert store.backlog().num_results == 1
    mend()
    await until(lambda: store.backlog().num_results == 0)
    result = await store.get("a", 0)
    assert result is not None
    assert await result.read() == content


def test_results_wait_for_a_redis_that_was_killed_until_another_has_its_address(tmp_path: Path) -> None:
    async def run(url: str, process: subprocess.Popen[bytes], stack: ExitStack) -> None:
        def restart() -> None:
            stack.enter_context(redis_server(tmp_path, port=int(url.removesuffix("/0").rpartition(":")[2])))

        store = spooled(store_of(url))
        await store.open()
        assert isinstance(await store.put("early", b"content", "image/png", 0), Stored)
        process.kill()
        process.wait()
        await waits_and_is_written(store, b"x" * (CHUNK_BYTES + 1), restart)
        await store.close()

    with redis_server(tmp_path) as (url, process), ExitStack() as stack:
        asyncio.run(run(url, process, stack))


def test_results_wait_while_redis_is_full(tmp_path: Path) -> None:
    async def run(url: str) -> None:
        store = spooled(store_of(url))
        await store.open()
        with closing(Redis.from_url(url)) as client:
            client.config_set("maxmemory", "1")
            await waits_and_is_written(store, b"content", lambda: client.config_set("maxmemory", "0"))
        await store.close()

    with redis_server(tmp_path, "--maxmemory-policy", "noeviction") as (url, _):
        asyncio.run(run(url))


def test_results_wait_while_there_are_replicas_alone(tmp_path: Path) -> None:
    async def run(url: str) -> None:
        store = spooled(store_of(url))
        await store.open()
        with closing(Redis.from_url(url)) as client:
            client.replicaof("127.0.0.1", str(free_port()))
            await waits_and_is_written(store, b"content", lambda: client.replicaof("NO", "ONE"))
        await store.close()

    with redis_server(tmp_path) as (url, _):
        asyncio.run(run(url))


def test_no_call_waits_for_a_redis_that_hangs_once_that_is_known(tmp_path: Path) -> None:
    """Stopped by a signal: it takes connections, and answers nothing."""

    async def run(url: str, process: subprocess.Popen[bytes]) -> None:
        shared = Recorded([url], max_bytes=1 << 30, ttl_ns=TTL_NS)
        shared.asked = []
        store = spooled(shared)
        await store.open()
        process.send_signal(signal.SIGSTOP)
        for uid in ("first", "a", "b", "c"):
            assert isinstance(await store.put(uid, b"content", "image/png", 0), Stored)
        assert set(shared.asked) == {"first"}
        assert store.backlog().num_results == 4
        process.send_signal(signal.SIGCONT)
        await until(lambda: store.backlog().num_results == 0)
        await store.close()
        assert await content(store_of(url), "c") == b"content"

    with redis_server(tmp_path) as (url, process):
        asyncio.run(run(url, process))


def test_a_part_that_redis_has_evicted_is_an_error_and_no_shorter_file(url: str) -> None:
    async def run() -> None:
        store = store_of(url)
        await store.put("a", b"content", "image/png", 0)
        result = await store.get("a", 0)
        assert result is not None
        with closing(Redis.from_url(url)) as client:
            client.flushall()
        with pytest.raises(StoreUnreachable, match="evicted"):
            await result.read()
        await store.close()

    asyncio.run(run())


def test_another_server_gives_what_this_one_has_drawn_and_says_when_redis_is_down(tmp_path: Path) -> None:
    with redis_server(tmp_path) as (url, process):
        with serving(FakeEngine(), results=url) as server:
            path = server.post({"prompt": "x", "response_format": "url"}).json()["data"][0]["url"]
            path = path[path.index("/v1/") :]
            picture = server.http.get(path)
            assert picture.status_code == 200
        with serving(FakeEngine(), results=url) as other:
            assert other.http.get(path).content == picture.content
            process.kill()
            process.wait()
            answer = other.http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "results_unreachable")
            assert answer.headers["Retry-After"] == "1"
