"""Accepts the connections of a listening socket, a few at a time, and none while there is no descriptor for one.

asyncio's own acceptor (3.11 to 3.14) accepts as many as the backlog has in one turn of the loop. Without descriptors it
logs a traceback and tries again for each of them, 2048 times a turn.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

_log = logging.getLogger("tilework.server")
_PAUSE_S = 0.1


class Acceptor:
    """Makes a protocol for each connection, from its creation until `close`. uvicorn knows it as an `asyncio.Server`.

    It accepts `at_once` connections in a turn of the loop. Their data are read two turns later.
    """

    def __init__(self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol], at_once: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._protocol = protocol
        self._at_once = at_once
        self._tasks: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._is_closed = False
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept no more; a second call does nothing. The caller closes the socket, afterwards."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        else:
            self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Wait for connections that are being accepted."""
        await asyncio.gather(*self._tasks)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(self._at_once):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # The client has gone.
                continue
            except OSError as error:  # No descriptor, or no memory for a socket; a network that is down.
                _log.warning("no connection is accepted for %g s: %s", _PAUSE_S, error.strerror)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(_PAUSE_S, self._resume)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:  # The client has gone.
            connection.close()
