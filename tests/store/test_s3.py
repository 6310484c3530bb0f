"""Results in a bucket of a real server with the interface of S3 (moto's): parts, expiry, and one that is down."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta, tzinfo
from unittest.mock import Mock, patch

import pytest

from fake_engine import FakeEngine, serving
from tilework.core.time import NS_PER_S
from tilework.server.api.app import new_store
from tilework.server.config import ConfigError, ServerConfig
from tilework.store import s3_results
from tilework.store.results import Stored, StoreUnreachable, TooLarge, Unwritten
from tilework.store.s3_results import S3Store

pytestmark = pytest.mark.slow
TTL_NS = 100 * NS_PER_S
BUCKET = "pictures"


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    moto = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def url(endpoint: str) -> str:
    import boto3

    with closing(boto3.client("s3", endpoint_url=endpoint)) as client:
        client.create_bucket(Bucket=BUCKET)
    return f"s3://{BUCKET}?endpoint={endpoint}"


def store_of(url: str, max_bytes: int = 1 << 30, ttl_ns: int = TTL_NS) -> S3Store:
    return S3Store(url, max_bytes=max_bytes, ttl_ns=ttl_ns)


async def content(store: S3Store, uid: str, part: range | None = None) -> bytes | None:
    result = await store.get(uid, 0)
    return None if result is None else await result.read(part)


def test_all_parts_are_what_was_put(url: str) -> None:
    async def scenario() -> None:
        store, whole = store_of(url), bytes(range(256)) * 4096
        await store.check()
        assert await store.put("t/a-0", whole, "image/png", 5) == Stored(expires_ns=5 + TTL_NS)
        assert await content(store, "t/a-0") == whole
        for part in (range(1), range(255, 300), range(len(whole) - 3, len(whole)), range(7, 7)):
            assert await content(store, "t/a-0", part) == whole[part.start : part.stop]
        found = await store.get("t/a-0", 0)
        assert found is not None
        assert (found.num_bytes, found.media_type) == (len(whole), "image/png")
        assert (store.num_bytes, len(store)) == (len(whole), 1)
        assert await content(store_of(url), "t/a-0") == whole, "another server finds it"
        assert await content(store, "t/a-1") is None
        assert not await store.holds("u/a-0", 0)
        await store.put("t/a-0", b"new", "image/webp", 6)
        assert await content(store, "t/a-0") == b"new"
        with pytest.raises(StoreUnreachable):
            await found.read(range(3))
        await store.delete("t/a-0")
        await store.delete("t/a-0")
        assert await content(store, "t/a-0") is None
        assert len(store) == 0
        assert await store.put("b", b"1234", "image/png", 0) != await store_of(url, 3).put("b", b"1234", "", 0)
        assert await store_of(url, 3).put("b", b"1234", "", 0) == TooLarge(num_bytes=4, max_bytes=3)
        await store.close()

    asyncio.run(scenario())


class Later(datetime):
    """A clock that is as far ahead as a result is kept."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + timedelta(microseconds=TTL_NS // 1000)


def test_what_has_expired_is_not_given_out(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store = store_of(url)
        await store.put("a", b"x", "image/png", 0)
        assert await store.holds("a", 0)
        monkeypatch.setattr(s3_results, "datetime", Later)
        assert not await store.holds("a", 0)

    asyncio.run(scenario())


def test_a_store_that_is_down_or_has_no_such_bucket_is_named(endpoint: str) -> None:
    async def scenario() -> None:
        other = store_of(f"s3://nowhere?endpoint={endpoint}")
        with pytest.raises(StoreUnreachable, match="has no bucket nowhere"):
            await other.check()
        assert isinstance(await other.put("a", b"x", "image/png", 0), Unwritten)
        down = store_of("s3://pictures?endpoint=http://127.0.0.1:9")
        with pytest.raises(StoreUnreachable, match="give another address for results"):
            await down.check()
        assert isinstance(await down.put("a", b"x", "image/png", 0), Unwritten)
        with pytest.raises(StoreUnreachable):
            await down.get("a", 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("url", ["s3://", "s3://b/path", "s3://b?region=x", "s3:b", "s3://b?endpoint"])
def test_what_is_no_address_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"give redis://HOST:PORT, several by commas, or s3://BUCKET"):
        new_store(ServerConfig(results=url), FakeEngine().now_ns)


def test_a_server_gives_out_what_another_has_drawn(url: str) -> None:
    with serving(FakeEngine(), results=url) as server:
        answer = server.post({"prompt": "x", "response_format": "url", "seed": 3}).json()
        path = answer["data"][0]["url"].removeprefix(server.url)
        file = server.http.get(path)
        assert file.content.startswith(b"\x89PNG")
    with serving(FakeEngine(), results=url) as server:
        assert server.http.get(path).content == file.content
        part = server.http.get(path, headers={"Range": "bytes=1-3"})
        assert (part.status_code, part.content) == (206, b"PNG")
        uid = answer["data"][0]["tilework"]["uid"].rpartition("-")[0]
        assert server.http.get(f"/v1/requests/{uid}").status_code == 404, "records stay with their server"


def test_a_read_that_breaks_off_says_that_the_store_does_not_answer() -> None:
    """As any other error of the way to it, so that a client is told to ask again."""
    body = pytest.importorskip("botocore.response").StreamingBody
    head = {"Metadata": {"expires": "1e18"}, "ETag": "1", "ContentLength": 100, "ContentType": "image/png"}
    store = store_of("s3://pictures?endpoint=http://127.0.0.1:1")
    client = Mock(head_object=Mock(return_value=head))
    client.get_object.return_value = {"Body": body(io.BytesIO(b"half of it"), 100)}
    with patch.object(store, "_client", client), pytest.raises(StoreUnreachable, match="10 read"):
        asyncio.run(content(store, "t/a-0"))
