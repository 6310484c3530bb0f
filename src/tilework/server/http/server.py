"""The HTTP server: uvicorn on a socket that is bound already, with our protocol and without its signal handlers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from tilework.server.http.pieces import InPieces
from tilework.server.http.protocol import LimitedProtocol, Limits, protocol_class

# Longer than clients keep idle connections (httpx 5 s, aiohttp 15 s), so that a client closes first and no new request
# meets a connection that the server has just closed.
_KEEP_ALIVE_S = 20
_ABORT_S = 1
_BACKLOG = 2048  # As uvicorn has it.


class AddressInUse(Exception):
    """The address cannot be listened on; the message says which, why and what to do."""


class HttpServer(uvicorn.Server):
    """Serves an application on a bound socket until it is closed.

    uvicorn's signal handlers are left out: they raise the signal again before the engine could stop.
    """

    def __init__(self, app: ASGIApp, listener: socket.socket, limits: Limits) -> None:
        self.listening = asyncio.Event()
        self._protocol, self._listener = protocol_class(limits), listener
        super().__init__(
            uvicorn.Config(
                InPieces(app),
                http=self._protocol,
                h11_max_incomplete_event_size=limits.max_head_bytes,
                timeout_keep_alive=_KEEP_ALIVE_S,
                log_level="warning",
                access_log=False,
                ws="none",
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @property
    def num_closed(self) -> int:
        """Connections that were closed so far."""
        return self._protocol.num_closed

    async def listen(self) -> None:
        """Serve until `close`, and then until no answer is under way. Raises AddressInUse."""
        listen(self._listener)
        await self.serve(sockets=[self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def close(self) -> None:
        """Take no more connections, and end when no answer is under way."""
        self.should_exit = True

    def abort(self) -> None:
        """Cut off all connections. What still works for one, and does not see that it has gone, is ended soon after."""
        for connection in list(self.server_state.connections):
            assert isinstance(connection, LimitedProtocol)
            connection.abort()
        asyncio.get_running_loop().call_later(_ABORT_S, self._end_tasks)

    def _end_tasks(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()


def bind(host: str, port: int) -> socket.socket:
    """Take the port before anything else is begun, so that a wrong address is known at once. Raises AddressInUse."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise AddressInUse(f"host = {host!r} cannot be listened on: {error}. Give another host.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _in_use(host, port, error) from error
    return listener


def listen(listener: socket.socket) -> None:
    """Let connections come; they wait until they are taken. Raises AddressInUse."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:  # Another process has listened since the port was bound.
        host, port = listener.getsockname()[:2]
        raise _in_use(host, port, error) from error


def _in_use(host: str, port: int, error: OSError) -> AddressInUse:
    return AddressInUse(f"{host}:{port} cannot be listened on: {error.strerror}. Give another port, or 0 for any.")
