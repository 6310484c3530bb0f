"""Large answers in pieces, for the HTTP server."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PIECE_BYTES = 64 << 10


class InPieces:
    """Passes large bodies to the HTTP server in pieces, so that it never buffers more than one that is not taken."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) <= PIECE_BYTES:
                await send(message)
                return
            view = memoryview(body)
            for start in range(0, len(view), PIECE_BYTES):
                is_last = start + PIECE_BYTES >= len(view)
                more = message.get("more_body", False) or not is_last
                await send({**message, "body": bytes(view[start : start + PIECE_BYTES]), "more_body": more})

        await self._app(scope, receive, sending)
