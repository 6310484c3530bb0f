"""The response that sends server-sent events, with a connection whose every step the test takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.types import Message

from clock import ManualLoop, run
from tilework.server.http.middleware import PIECE_BYTES, HeadAsGet, InPieces
from tilework.server.http.sse import EventStream, event

KEEP_ALIVE_S = 10.0
COMMENT = b": keep-alive\n\n"
LARGE = event("large", {"text": "x" * (3 * PIECE_BYTES)})


@dataclass
class Connection:
    """`sent` is what the server has written. Each write waits until the client has taken it, by `taken.release()`."""

    method: str = "GET"
    log: list[str] = field(default_factory=list)
    sent: list[Message] = field(default_factory=list)
    taken: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        await self.taken.acquire()

    async def events(self, *chunks: bytes, is_endless: bool = False) -> AsyncGenerator[bytes, None]:
        try:
            for number, chunk in enumerate(chunks):
                self.log.append(f"chunk {number}")
                yield chunk
            if is_endless:
                await asyncio.Event().wait()
        finally:
            self.log.append("generator closed")

    @asynccontextmanager
    async def answered(self, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[asyncio.Task[None], None]:
        """Answer with these events until the block is left; then the answer must have ended."""
        stream = EventStream(events, keep_alive_s=KEEP_ALIVE_S, on_close=lambda: self.log.append("on_close"))
        app = InPieces(HeadAsGet(stream))
        answer = asyncio.create_task(
            app({"type": "http", "method": self.method, "path": "/", "headers": []}, self.receive, self.send)
        )
        yield answer
        await answer

    def take(self, number: int) -> None:
        for _ in range(number):
            self.taken.release()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def test_a_chunk_is_made_only_when_the_client_has_taken_the_one_before() -> None:
    async def scenario(loop: ManualLoop) -> None:
        client = Connection()
        async with client.answered(client.events(b"a", b"b")):
            for number, log in enumerate([[], ["chunk 0"], ["chunk 0", "chunk 1"]]):
                await loop.until(lambda number=number: len(client.sent) == number + 1)  # type: ignore[misc]
                await loop.until_idle()
                assert client.log == log
                client.take(1)
            client.take(1)
        assert client.body == b"ab"
        assert client.log[2:] == ["generator closed", "on_close"]

    run(scenario)


def test_a_comment_does_not_come_between_the_pieces_of_an_event() -> None:
    async def scenario(loop: ManualLoop) -> None:
        client = Connection()
        client.take(1)
        async with client.answered(client.events(LARGE)):
            await loop.until(lambda: client.body)
            assert len(client.body) == PIECE_BYTES
            loop.advance(KEEP_ALIVE_S)
            await loop.until_idle()
            client.take(99)
        assert client.body == LARGE + COMMENT

    run(scenario)


def test_comments_fill_silence_until_the_client_leaves() -> None:
    async def scenario(loop: ManualLoop) -> None:
        client = Connection()
        client.take(99)
        async with client.answered(client.events(b"a", is_endless=True)):
            for number in range(3):
                await loop.until(lambda number=number: client.body == b"a" + number * COMMENT)  # type: ignore[misc]
                await asyncio.sleep(0)
                loop.advance(KEEP_ALIVE_S)
            client.gone.set()
        assert client.log == ["chunk 0", "generator closed", "on_close"]

    run(scenario)


def test_a_client_that_leaves_during_a_write_closes_the_generator() -> None:
    async def scenario(loop: ManualLoop) -> None:
        client = Connection()
        client.take(1)
        async with client.answered(client.events(LARGE, b"never")):
            await loop.until(lambda: client.body)
            client.gone.set()
        assert client.log == ["chunk 0", "generator closed", "on_close"]

    run(scenario)


def test_head_begins_no_events() -> None:
    async def scenario(_loop: ManualLoop) -> None:
        client = Connection(method="HEAD")
        client.take(2)
        async with client.answered(client.events(b"never", is_endless=True)):
            pass
        start, end = client.sent
        assert (b"content-type", b"text/event-stream") in start["headers"]
        assert (b"x-accel-buffering", b"no") in start["headers"]
        assert (b"cache-control", b"no-store") in start["headers"]
        assert (end["body"], end["more_body"]) == (b"", False)
        assert client.log == ["on_close"], "a generator that has not begun has nothing to close"

    run(scenario)
