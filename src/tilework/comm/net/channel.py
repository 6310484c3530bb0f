"""A connection over which messages of one codec travel both ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from tilework.comm.net.codec import Codec
from tilework.comm.net.frames import frame, read_frame

_PART_BYTES = 1 << 16


class Channel:
    """Messages over a connection whose handshake is done (`handshake`), in one epoch."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, codec: Codec, epoch: int) -> None:
        self._reader = reader
        self._writer = writer
        self._codec = codec
        self.epoch = epoch

    @property
    def host(self) -> str:
        """Address of the other end."""
        return str(self._writer.get_extra_info("peername")[0])

    @property
    def own_host(self) -> str:
        """Address by which the other end knows this one, unless something between them translates it."""
        return str(self._writer.get_extra_info("sockname")[0])

    def send(self, message: object, address: int = -1) -> None:
        """Send a message after the earlier ones. Over a closed connection nothing is sent."""
        if not self._writer.is_closing():
            self._writer.writelines(frame(self._codec.encode(message, address), self.epoch))

    async def messages(self) -> AsyncIterator[tuple[int, Any]]:
        """Yield the messages that arrive, each with its address, until the other end closes. Raises BadFrame."""
        while (payload := await read_frame(self._reader, self.epoch)) is not None:
            yield self._codec.decode(payload)

    async def drain(self) -> None:
        """Wait until all that was sent has left, or the connection is lost."""
        with suppress(OSError):
            await self._writer.drain()

    async def discard(self, most_s: float) -> None:
        """Drop bytes until the other end closes, for at most `most_s`.

        Closing with unread bytes would reset the connection and cut off what the other end still reads.
        """
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(most_s):
                while await self._reader.read(_PART_BYTES):
                    pass

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Close at once, without sending what is still waiting. `messages` ends."""
        self._writer.transport.abort()
