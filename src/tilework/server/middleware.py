"""What happens to a request before it is routed."""

from __future__ import annotations

import hmac
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilework.server.errors import SERVER, ApiError, shown

logger = logging.getLogger("tilework.server")

OPEN_PATHS = frozenset({"/health", "/ready"})


class CatchBugs:
    """Answer an unexpected exception with a 500; its traceback goes to the log, never to the client."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def sending(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            if scope["type"] != "http" or has_started:
                raise
            logger.exception("%s %s failed", scope["method"], shown(scope["path"]))
            await _internal_error().response()(scope, receive, send)


class RequireKey:
    """Let a request pass with `Authorization: Bearer KEY` only; probes of an orchestrator pass without.

    Every key is compared in constant time, and all of them are, so that time tells nothing about them.
    """

    def __init__(self, app: ASGIApp, keys: tuple[bytes, ...]) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._knows(_bearer(scope)):
            await self._app(scope, receive, send)
        else:
            await _unauthorised().response()(scope, receive, send)

    def _knows(self, given: bytes | None) -> bool:
        if given is None:
            return False
        equal = [hmac.compare_digest(given, key) for key in self._keys]
        return any(equal)


class HeadAsGet:
    """Answer HEAD like GET; the HTTP server leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


def _bearer(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, key = bytes(value).partition(b" ")
            return key.strip() if kind.lower() == b"bearer" else None
    return None


def _internal_error() -> ApiError:
    return ApiError(500, "The server failed to answer; its log says why.", kind=SERVER, code="internal_error")


def _unauthorised() -> ApiError:
    message = 'The API key is missing or wrong. Send "Authorization: Bearer KEY" with a key of this server.'
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
