"""Results in Redis: every server that has the same address finds them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tilework.store.results import Result, StoreUnreachable
from tilework.store.shared import SharedStore

if TYPE_CHECKING:
    from redis.asyncio import Redis

CHUNK_BYTES = 4 << 20
_READING_MS = 60_000  # A result that was found just before it expires can still be read to its end.
_ANSWER_S = 5.0
_COPIED_MS = 1000
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class _RedisResult:
    """A `Result` in chunks on one server."""

    server: Redis
    name: str
    num_bytes: int
    chunk_bytes: int
    media_type: str

    async def read(self, part: range | None = None) -> bytes:
        wanted = range(self.num_bytes) if part is None else part
        if not wanted:
            return b""
        first, last = wanted.start // self.chunk_bytes, (wanted.stop - 1) // self.chunk_bytes
        pieces: list[bytes] = []
        for index in range(first, last + 1):
            begin = index * self.chunk_bytes
            start, stop = max(wanted.start - begin, 0), min(wanted.stop - begin, self.chunk_bytes)
            piece: Any = await _told(self.server.getrange(_chunk(self.name, index), start, stop - 1))
            pieces.append(piece)
        content = b"".join(pieces)
        if len(content) != len(wanted):
            raise StoreUnreachable(f"Redis has evicted a part of {self.name} while it was read; give it more memory")
        return content

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class RedisStore(SharedStore):
    """Results on Redis servers: the first one that takes writes, and its replicas.

    `urls` are their addresses, `redis://HOST:PORT/DB`. A result is written to the first server that answers and takes
    writes. It then has a second to reach a replica, if there are any. Reads ask one server after another, so a result
    is found while one server is down or has not received it yet.

    A result is a head, which expires after `ttl_ns`, and chunks, which outlive it by a minute. Redis removes both. Its
    own settings (`maxmemory`) say how much it keeps.

    Source: OnePiece (Chen et al.), section 3.4, databases. There a result is purged once it was fetched; here a client
    may fetch it again until it expires, or delete it.
    """

    def __init__(self, urls: Sequence[str], *, max_bytes: int, ttl_ns: int) -> None:
        """Prepare the connections. Raises ValueError for an invalid address."""
        from redis.asyncio import Redis

        super().__init__(max_bytes=max_bytes, ttl_ns=ttl_ns)
        self._servers: list[Redis] = [
            Redis.from_url(url, socket_timeout=_ANSWER_S, socket_connect_timeout=_ANSWER_S) for url in urls
        ]

    async def reach(self) -> None:
        await self._any(lambda server: server.ping())

    async def write(self, uid: str, content: bytes, media_type: str, ttl_ns: int) -> None:
        await self._any(lambda server: self._write(server, _name(uid), content, media_type, ttl_ns))

    async def find(self, uid: str) -> Result | None:
        return await self._any(lambda server: _found(server, _name(uid)))

    async def remove(self, uid: str) -> None:
        """Remove a result's head. Its chunks stay for a minute: a client may be reading them."""
        await self._any(lambda server: _remove(server, _name(uid)))

    async def _write(self, server: Redis, name: str, content: bytes, media_type: str, ttl_ns: int) -> bool:
        """Write the chunks before the head: a server that finds the head finds all chunks."""
        ttl_ms = max(1, ttl_ns // 1_000_000)
        head = {"media_type": media_type, "num_bytes": len(content), "chunk_bytes": CHUNK_BYTES}
        view = memoryview(content)
        for index, begin in enumerate(range(0, len(content), CHUNK_BYTES)):
            chunk = bytes(view[begin : begin + CHUNK_BYTES])
            await server.set(_chunk(name, index), chunk, px=ttl_ms + _READING_MS)
        await server.set(name, json.dumps(head), px=ttl_ms)
        if len(self._servers) > 1:
            await server.wait(1, _COPIED_MS)
        return True

    async def _any(self, ask: Callable[[Redis], Awaitable[_Answer | None]]) -> _Answer | None:
        """Ask one server after another, and return the first answer other than None; None if all servers answer None.

        Raises:
            StoreUnreachable: no server has an answer, and some could not be asked.
        """
        failed = []
        for server in self._servers:
            try:
                answer = await _told(ask(server))
            except StoreUnreachable as error:
                failed.append(str(error))
                continue
            if answer is not None:
                return answer
        if failed:
            raise StoreUnreachable("; ".join(failed))
        return None

    async def close(self) -> None:
        for server in self._servers:
            await server.aclose()


def _name(uid: str) -> str:
    return f"tilework:{{{uid}}}"  # A cluster places a key by the part in braces: all of a result in one place.


def _chunk(name: str, index: int) -> str:
    return f"{name}:{index}"


async def _told(answer: Awaitable[_Answer]) -> _Answer:
    """Return an answer. Raises StoreUnreachable for any error of the server or of the connection."""
    from redis.exceptions import RedisError

    try:
        return await answer
    except (RedisError, OSError) as error:
        raise StoreUnreachable(f"Redis: {error}") from error


async def _found(server: Redis, name: str) -> _RedisResult | None:
    head = await server.get(name)
    if head is None:
        return None
    fields = json.loads(head)
    return _RedisResult(server, name, fields["num_bytes"], fields["chunk_bytes"], fields["media_type"])


async def _remove(server: Redis, name: str) -> bool | None:
    found = await _found(server, name)
    if found is None:
        return None
    await server.delete(name)
    for index in range(-(-found.num_bytes // found.chunk_bytes)):
        await server.pexpire(_chunk(name, index), _READING_MS)
    return True
