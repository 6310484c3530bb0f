"""Connections that stay cheap by the thousand: one idle stack, one connection per request in flight."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator

import httpx

KEEP_S = 1.5  # Servers close idle connections after 2 s (gunicorn) or 5 s (uvicorn, node); we must be the first.
_ONE = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEP_S)


class Connections(httpx.AsyncBaseTransport):
    """Opens one connection per request in flight; the connection that became free last serves the next request.

    Taking and returning a connection costs the same with one open as with thousands. httpx's own pool walks over all
    its connections at each request: 5 s answers at 200 requests per second, so 1000 open ones, cost it 25 ms of CPU per
    request, and measured latencies rose to 53 s.
    """

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._tls = tls
        self._idle: list[httpx.AsyncHTTPTransport] = []
        self._open: set[httpx.AsyncHTTPTransport] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send on a connection of its own, which is free again when the answer's body has been read or given up."""
        connection = self._idle.pop() if self._idle else self._new()
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            self._open.discard(connection)
            await connection.aclose()
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Returning(response.stream, connection, self._idle)
        return response

    async def aclose(self) -> None:
        for connection in self._open:
            await connection.aclose()
        self._open.clear()
        self._idle.clear()

    def _new(self) -> httpx.AsyncHTTPTransport:
        connection = httpx.AsyncHTTPTransport(verify=self._tls, limits=_ONE, trust_env=False)
        self._open.add(connection)
        return connection


class _Returning(httpx.AsyncByteStream):
    """A body that returns its connection to the stack of idle ones once it is closed."""

    def __init__(
        self, body: httpx.AsyncByteStream, connection: httpx.AsyncHTTPTransport, idle: list[httpx.AsyncHTTPTransport]
    ) -> None:
        self._body = body
        self._connection = connection
        self._idle = idle

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            yield part

    async def aclose(self) -> None:
        await self._body.aclose()
        self._idle.append(self._connection)
