"""What stands between servers and their registry: passes all on, late if it should, or answers in its place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from random import Random

_PAGE = b"<html><title>Welcome</title></html>"
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
_PIECE_BYTES = 1 << 16


@dataclass(slots=True)
class RegistryProxy:
    """Listens on `port` for a registry on the port `to`, both of the loopback.

    While it `is_foreign` it answers everything by a page. `late_s` are the bounds of how long each answer takes.
    """

    to: int
    random: Random
    port: int = 0
    is_foreign: bool = False
    late_s: tuple[float, float] | None = None
    _ends: set[asyncio.StreamWriter] = field(default_factory=set)

    def cut(self) -> None:
        """End all connections; new ones may come."""
        for end in tuple(self._ends):
            end.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection, to its end."""
        self._ends.add(writer)
        try:
            with suppress(OSError):
                await (self._answer(reader, writer) if self.is_foreign else self._pass(reader, writer))
        finally:
            self._ends.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(_PIECE_BYTES)
        writer.write(_ANSWER % (len(_PAGE), _PAGE))
        await writer.drain()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until either end closes."""
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", self.to)
        try:
            ways = [self._copy(reader, their_writer, is_answer=False), self._copy(their_reader, writer, is_answer=True)]
            tasks = [asyncio.ensure_future(way) for way in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            their_writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        while piece := await reader.read(_PIECE_BYTES):
            if is_answer and self.late_s is not None:
                await asyncio.sleep(self.random.uniform(*self.late_s))
            writer.write(piece)
            await writer.drain()


@asynccontextmanager
async def registry_proxy(to: int, random: Random) -> AsyncIterator[RegistryProxy]:
    """A proxy that listens."""
    proxy = RegistryProxy(to, random)
    listening = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = listening.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        listening.close()
        proxy.cut()
