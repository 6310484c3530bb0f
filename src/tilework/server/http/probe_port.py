"""A port of the loopback for probes and metrics, which needs no key: its clients are on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from tilework.server.http.connections.protocol import ConnectionLimits
from tilework.server.http.errors import ApiError
from tilework.server.http.middleware import METRICS, PROBES, TENANT
from tilework.server.http.server import HttpServer, bind
from tilework.server.tenants import Tenant

LOOPBACK = "127.0.0.1"
_MONITOR = Tenant(is_monitor=True)
_CLOSE_S = 5
_MAX_CONNECTIONS = 32


class ProbesOnly:
    """An application without its other routes, for requests that need no key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"  # The application gets start and end from its own server.
        if scope["path"] in PROBES | {METRICS}:
            await self._app({**scope, TENANT: _MONITOR}, receive, send)
        else:
            await _unknown().response()(scope, receive, send)


@asynccontextmanager
async def probe_port(app: ASGIApp, port: int | None, limits: ConnectionLimits) -> AsyncIterator[str | None]:
    """Answer on the port while the block runs, and yield its URL; without a port do nothing. Raises AddressInUse."""
    if port is None:
        yield None
        return
    with bind(LOOPBACK, port) as listener:
        server = HttpServer(ProbesOnly(app), listener, limits, _MAX_CONNECTIONS, PROBES | {METRICS})
        serving = asyncio.create_task(server.listen())
        try:
            await server.until_listening(serving)
            yield f"http://{LOOPBACK}:{listener.getsockname()[1]}"
        finally:
            server.close()
            await asyncio.wait({serving}, timeout=_CLOSE_S)
            server.abort()
            await serving


def _unknown() -> ApiError:
    paths = ", ".join(sorted(PROBES | {METRICS}))
    return ApiError(404, f"This port has {paths} and nothing else; ask the server's own port.", code="not_found")
