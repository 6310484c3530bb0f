"""Server-sent events: how they look on the wire, and a response that sends them as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from tilework.server.http.connection import watched
from tilework.server.http.middleware import is_head

MEDIA_TYPE = "text/event-stream"
KEEP_ALIVE = b": keep-alive\n\n"


def event(kind: str, data: Mapping[str, object]) -> bytes:
    """One event; its type is in the data as well. JSON in ASCII holds no line break."""
    text = json.dumps({"type": kind, **data})
    return f"event: {kind}\ndata: {text}\n\n".encode("ascii")


class EventStream(Response):
    """Sends what `events` yields, each only when the client has taken the one before.

    The generator is closed, then `on_close` called, when it has ended or the client has gone, whichever is first. HEAD
    does not even begin it.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self.headers["content-type"] = MEDIA_TYPE
        self._events = events
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
            async for chunk in self._events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
