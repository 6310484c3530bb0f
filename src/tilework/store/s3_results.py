"""Results in a bucket of S3 or of a store with its interface, where every server that has the same one finds them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qs, quote, urlsplit

from tilework.store.index import Index
from tilework.store.results import Result, Stored, StoreUnreachable, TooLarge, Unwritten

SCHEME = "s3"
_PREFIX = "tilework/"
_EXPIRES = "expires"  # In the metadata of an object, as a Unix time.
_ANSWER_S = 10
_MISSING = {"404", "NoSuchKey"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Found:
    """A `Result` that is one object. One that is deleted meanwhile cannot be read further."""

    store: S3Store
    key: str
    version: str
    num_bytes: int
    media_type: str

    async def read(self, part: range | None = None) -> bytes:
        if part is not None and not part:
            return b""
        only = {} if part is None else {"Range": f"bytes={part.start}-{part.stop - 1}"}
        answer = await self.store.ask("get_object", self.key, IfMatch=self.version, **only)
        if answer is None:
            raise StoreUnreachable(f"S3: {self.key} was deleted while it was read")
        return await asyncio.to_thread(answer["Body"].read)

    def close(self) -> None:
        """There is nothing to close."""


class S3Store:
    """A `ResultStore` in a bucket: `url` is `s3://BUCKET`, or `s3://BUCKET?endpoint=http://HOST:PORT` for another store
    than Amazon's. Keys and region are those that boto3 finds, in the environment or its files.

    A result is an object that knows when it expires. After that it is not given out, though it is there until a rule of
    the bucket's life cycle removes it, which a server cannot set for objects of minutes. `max_bytes` bounds one result.
    `num_bytes` and the number of results are those that this server has put there.
    """

    def __init__(self, url: str, *, max_bytes: int, ttl_ns: int) -> None:
        """Raises ValueError for an address that is none."""
        import boto3
        from botocore.config import Config

        parts = urlsplit(url)
        asked = parse_qs(parts.query, strict_parsing=True) if parts.query else {}
        if parts.scheme != SCHEME or not parts.hostname or parts.path.strip("/") or asked.keys() - {"endpoint"}:
            raise ValueError("it is no s3://BUCKET?endpoint=URL")
        self._bucket = parts.netloc
        timeouts = {"connect_timeout": _ANSWER_S, "read_timeout": _ANSWER_S, "retries": {"total_max_attempts": 2}}
        self._client: Any = boto3.client("s3", endpoint_url=asked.get("endpoint", [None])[0], config=Config(**timeouts))
        self._max_bytes, self._ttl_ns = max_bytes, ttl_ns
        self._own: Index[str] = Index(max_bytes=1 << 62, ttl_ns=ttl_ns)

    @property
    def num_bytes(self) -> int:
        return self._own.num_bytes

    def __len__(self) -> int:
        return len(self._own)

    async def check(self) -> None:
        try:
            found = await self._told(lambda: self._client.head_bucket(Bucket=self._bucket))
        except StoreUnreachable as error:
            raise StoreUnreachable(f"{error} Start it, or give another address for results.") from error
        if found is None:
            raise StoreUnreachable(f"S3 has no bucket {self._bucket}: make it, or give another one for results.")

    async def put(self, uid: str, content: bytes, media_type: str, now_ns: int) -> Stored | TooLarge | Unwritten:
        self._own.sweep(now_ns)
        if len(content) > self._max_bytes:
            return TooLarge(num_bytes=len(content), max_bytes=self._max_bytes)
        expires = datetime.now(UTC) + timedelta(microseconds=self._ttl_ns // 1000)
        about = {"ContentType": media_type, "Metadata": {_EXPIRES: str(expires.timestamp())}}
        try:
            await self.ask("put_object", uid, Body=content, **about)
        except StoreUnreachable as error:
            return Unwritten(reason=str(error))
        expires_ns = self._own.expires_ns(now_ns)
        self._own.add(uid, uid, len(content), expires_ns)
        return Stored(expires_ns=expires_ns)

    async def get(self, uid: str, now_ns: int) -> Result | None:
        self._own.sweep(now_ns)
        head = await self.ask("head_object", uid)
        if head is None or float(head["Metadata"].get(_EXPIRES, 0)) <= datetime.now(UTC).timestamp():
            return None
        return _Found(self, uid, head["ETag"], head["ContentLength"], head["ContentType"])

    async def holds(self, uid: str, now_ns: int) -> bool:
        return await self.get(uid, now_ns) is not None

    async def delete(self, uid: str) -> None:
        self._own.remove(uid)
        await self.ask("delete_object", uid)

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)

    async def ask(self, operation: str, uid: str, **more: object) -> Any:
        """What the store answers about an object; None if there is none. Raises StoreUnreachable."""
        key = _PREFIX + quote(uid)
        return await self._told(lambda: getattr(self._client, operation)(Bucket=self._bucket, Key=key, **more))

    async def _told(self, ask: Callable[[], T]) -> T | None:
        """On a thread, since it waits for the network."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return await asyncio.to_thread(ask)
        except ClientError as error:
            if error.response["Error"]["Code"] in _MISSING:
                return None
            raise StoreUnreachable(f"S3: {error}") from error
        except (BotoCoreError, OSError) as error:
            raise StoreUnreachable(f"S3: {error}") from error
