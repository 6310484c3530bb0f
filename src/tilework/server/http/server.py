"""The HTTP server: uvicorn on a socket that is bound already, with our protocol and without its signal handlers."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from tilework.server.http.connections.acceptor import Acceptor
from tilework.server.http.connections.descriptors import connections_within, possible_limit
from tilework.server.http.connections.line_turns import protocol_class
from tilework.server.http.connections.places import ConnectionPlaces
from tilework.server.http.connections.protocol import ConnectionLimits, LimitedProtocol
from tilework.server.http.middleware import InPieces

# Longer than clients keep idle connections (httpx 5 s, aiohttp 15 s), so that a client closes first and no new request
# meets a connection that the server has just closed.
_KEEP_ALIVE_S = 20
_ABORT_S = 1
_BACKLOG = 2048  # As in uvicorn.
_TURNS = 8  # Turns of the loop in which an address may open all of its share of connections.

_log = logging.getLogger("tilework.server")


class AddressInUse(Exception):
    """The address cannot be listened on; the message says which, why and what to do."""


class HttpServer(uvicorn.Server):
    """Serves an application on a bound socket until it is closed.

    uvicorn's signal handlers are left out: they raise the signal again before the engine could stop.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        limits: ConnectionLimits,
        max_connections: int,
        open_paths: Collection[str] = (),
    ) -> None:
        """Prepare the server; `open_paths` need no key.

        It takes fewer than `max_connections` if this process may open too few files for them.
        """
        self.listening = asyncio.Event()
        self._places = ConnectionPlaces(_possible(max_connections), time.monotonic)
        self._protocol = protocol_class(limits, self._places, open_paths)
        self._listener = listener
        super().__init__(
            uvicorn.Config(
                InPieces(app),
                http=self._protocol,
                h11_max_incomplete_event_size=limits.max_head_bytes,
                timeout_keep_alive=_KEEP_ALIVE_S,
                log_config=None,  # Its lines go to our log, so that repeated ones are counted.
                log_level="warning",
                access_log=False,
                ws="none",
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def listen(self) -> None:
        """Serve until `close`, and then until no answer is under way. Raises AddressInUse."""
        await self.serve(sockets=[self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin. The port takes connections once all is there to answer them, so a probe does not wait."""
        await super().startup([])
        try:
            _listen(self._listener)
        except AddressInUse:
            await self.lifespan.shutdown()
            raise
        state = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        # Far fewer than the share of an address: otherwise the first would lose its place before its data could be
        # read.
        at_once = max(1, self._places.most_of_one // _TURNS)
        acceptor = Acceptor(self._listener, partial(self._protocol, **state), at_once)
        self.servers.append(acceptor)  # type: ignore[arg-type]
        self.listening.set()

    async def until_listening(self, serving: asyncio.Task[None]) -> None:
        """Wait until connections are taken by the task of `listen`. Raises AddressInUse."""
        listening = asyncio.create_task(self.listening.wait())
        try:
            await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            listening.cancel()
        if serving.done():
            await serving

    def close(self) -> None:
        """Take no more connections, and end when no answer is under way."""
        self.should_exit = True
        for acceptor in self.servers:
            acceptor.close()

    def abort(self) -> None:
        """Cut off all connections. Tasks that do not see that theirs has gone are ended soon after."""
        for connection in list(self.server_state.connections):
            assert isinstance(connection, LimitedProtocol)
            connection.abort()
        asyncio.get_running_loop().call_later(_ABORT_S, self._end_tasks)

    def _end_tasks(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()


def _possible(max_connections: int) -> int:
    """Return `max_connections`, or fewer if this process may open too few files for them."""
    limit = possible_limit()
    most = min(max_connections, connections_within(limit))
    if most < max_connections:
        text = "at most %d connections, not max_connections = %d: this process may have %d files open; raise ulimit -n"
        _log.warning(text, most, max_connections, limit)
    return most


def bind(host: str, port: int) -> socket.socket:
    """Bind the port before anything else is begun, so that a wrong address is known at once. Raises AddressInUse."""
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


def _listen(listener: socket.socket) -> None:
    """Take connections. Raises AddressInUse."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:  # Another process has listened since the port was bound.
        host, port = listener.getsockname()[:2]
        raise _in_use(host, port, error) from error


def _in_use(host: str, port: int, error: OSError) -> AddressInUse:
    return AddressInUse(f"{host}:{port} cannot be listened on: {error.strerror}. Give another port, or 0 for any.")
