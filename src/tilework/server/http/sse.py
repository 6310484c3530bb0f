"""Server-sent events: how they look on the wire, and a response that sends them as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from tilework.server.http.connection import watched
from tilework.server.http.middleware import is_head

MEDIA_TYPE = "text/event-stream"
KEEP_ALIVE = b": keep-alive\n\n"


def event(name: str, data: Mapping[str, object]) -> bytes:
    """One event; its type is in the data as well. JSON in ASCII holds no line break."""
    text = json.dumps({"type": name, **data})
    return f"event: {name}\ndata: {text}\n\n".encode("ascii")


class EventStream(Response):
    """Sends each chunk of `events` only when the client has taken the one before, and a comment in longer silences.

    The generator is closed, then `on_close` called, when it has ended or the client has gone, whichever is first. HEAD
    does not begin it.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        keep_alive_s: float,
        headers: Mapping[str, str] | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self.headers["content-type"] = MEDIA_TYPE
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send, has_body=not is_head(scope)))
        try:
            async with watched(receive) as gone:
                await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            await asyncio.wait({sending})
            await self._events.aclose()
            if self._on_close is not None:
                self._on_close()

    async def _send(self, send: Send, *, has_body: bool) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if has_body:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _chunks(self) -> AsyncGenerator[bytes, None]:
        while True:
            following = asyncio.ensure_future(anext(self._events, None))
            try:
                while not (await asyncio.wait({following}, timeout=self._keep_alive_s))[0]:
                    yield KEEP_ALIVE
            finally:
                if not following.done():
                    following.cancel()
                    await asyncio.wait({following})
            chunk = following.result()
            if chunk is None:
                return
            yield chunk
