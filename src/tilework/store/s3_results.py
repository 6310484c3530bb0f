"""Results in a bucket of S3 or of a store with its interface: every server that has the same address finds them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qs, quote, urlsplit

from tilework.store.results import Result, StoreUnreachable
from tilework.store.shared import SharedStore

SCHEME = "s3"
_PREFIX = "tilework/"
_EXPIRES = "expires"  # In the metadata of an object, as a Unix time.
_ANSWER_S = 10
_MISSING = {"404", "NoSuchKey"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _S3Result:
    """A `Result` that is one object. If the object is deleted meanwhile, it cannot be read further."""

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
        content = await self.store.told(answer["Body"].read)
        assert isinstance(content, bytes)
        return content

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class S3Store(SharedStore):
    """Results in a bucket: `url` is `s3://BUCKET`, or `s3://BUCKET?endpoint=http://HOST:PORT` for a store other than
    Amazon's. Keys and region are those that boto3 finds, in the environment or its files.

    A result is an object that holds its expiry. After that it is not given out, though it exists until a rule of the
    bucket's life cycle removes it. A server cannot set such a rule for objects of minutes.
    """

    def __init__(self, url: str, *, max_bytes: int, ttl_ns: int) -> None:
        """Prepare the client. Raises ValueError for an invalid address."""
        import boto3
        from botocore.config import Config

        super().__init__(max_bytes=max_bytes, ttl_ns=ttl_ns)
        parts = urlsplit(url)
        asked = parse_qs(parts.query, strict_parsing=True) if parts.query else {}
        if parts.scheme != SCHEME or not parts.hostname or parts.path.strip("/") or asked.keys() - {"endpoint"}:
            raise ValueError("it is no s3://BUCKET?endpoint=URL")
        self._bucket = parts.netloc
        timeouts = {"connect_timeout": _ANSWER_S, "read_timeout": _ANSWER_S, "retries": {"total_max_attempts": 2}}
        self._client: Any = boto3.client("s3", endpoint_url=asked.get("endpoint", [None])[0], config=Config(**timeouts))

    async def reach(self) -> None:
        if await self.told(lambda: self._client.head_bucket(Bucket=self._bucket)) is None:
            raise StoreUnreachable(f"S3 has no bucket {self._bucket}.")

    async def write(self, uid: str, content: bytes, media_type: str, ttl_ns: int) -> None:
        expires = datetime.now(UTC) + timedelta(microseconds=ttl_ns // 1000)
        about = {"ContentType": media_type, "Metadata": {_EXPIRES: str(expires.timestamp())}}
        await self.ask("put_object", uid, Body=content, **about)

    async def find(self, uid: str) -> Result | None:
        head = await self.ask("head_object", uid)
        if head is None or float(head["Metadata"].get(_EXPIRES, 0)) <= datetime.now(UTC).timestamp():
            return None
        return _S3Result(self, uid, head["ETag"], head["ContentLength"], head["ContentType"])

    async def remove(self, uid: str) -> None:
        await self.ask("delete_object", uid)

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)

    async def ask(self, operation: str, uid: str, **more: object) -> Any:
        """Return the answer to an operation on an object; None if there is none. Raises StoreUnreachable."""
        key = _PREFIX + quote(uid)
        return await self.told(lambda: getattr(self._client, operation)(Bucket=self._bucket, Key=key, **more))

    async def told(self, ask: Callable[[], T]) -> T | None:
        """Wait for an answer of the network on a thread; None if nothing was found. Raises StoreUnreachable."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return await asyncio.to_thread(ask)
        except ClientError as error:
            if error.response["Error"]["Code"] in _MISSING:
                return None
            raise StoreUnreachable(f"S3: {error}") from error
        except (BotoCoreError, OSError) as error:
            raise StoreUnreachable(f"S3: {error}") from error
