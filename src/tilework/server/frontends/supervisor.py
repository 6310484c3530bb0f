"""Starts front ends, and another one for each that ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import suppress

from fastapi import FastAPI

from tilework.comm.net.channel import Channel
from tilework.comm.net.frames import BadFrame
from tilework.server.frontends.messages import EPOCH, BeginFrontEnd, Close, Resume, StandingAnswer, frontend_codec
from tilework.server.frontends.relayed import RelayedRequests
from tilework.server.http.connections.protocol import ConnectionLimits

_log = logging.getLogger("tilework.server")
_EXIT_S = 5.0  # Time for a front end to end after its connection.
_PUBLISH_S = 0.05
_PAUSE_S = 1.0  # Before the next start, if a front end has ended before it took connections.


class FrontEnds:
    """Keeps `number` processes that take a bound socket's connections, and pass their requests to an application.

    The application runs in this process. A front end that ends costs its connections; the others go on, and a new one
    takes its place. `max_connections` are for all of them together.
    """

    def __init__(
        self,
        app: FastAPI,
        listener: socket.socket,
        limits: ConnectionLimits,
        max_connections: int,
        number: int,
        standing: Callable[[], StandingAnswer | None],
        on_answered: Callable[[int], None],
    ) -> None:
        """Prepare front ends that may give the `standing` answer themselves; `on_answered` gets the number of times."""
        self.listening = asyncio.Event()
        self.num_started = 0
        self._app = app
        self._listener = listener
        self._number = number
        self._begin = BeginFrontEnd(
            max_connections=-(-max_connections // number),
            open_paths=tuple(sorted(app.state.open_paths)),
            max_head_bytes=limits.max_head_bytes,
            read_timeout_s=limits.read_timeout_s,
            send_timeout_s=limits.send_timeout_s,
        )
        self._running: dict[Process, Channel] = {}
        self._standing = standing
        self._on_answered = on_answered
        self._stands: StandingAnswer | None = None
        self._is_closing = False

    async def listen(self) -> None:
        """Take requests until `close`, and then until no answer is under way. Raises AddressInUse.

        Connections are taken once the first front end is up.
        """
        async with self._app.router.lifespan_context(self._app):
            publishing = asyncio.create_task(self._publish())
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._number):
                        group.create_task(self._keep())
            except ExceptionGroup as failed:  # At the start each front end fails for the same reason.
                raise failed.exceptions[0] from None
            finally:
                publishing.cancel()

    async def _publish(self) -> None:
        """Tell the front ends whenever the standing answer changes or ends."""
        while True:
            if (stands := self._standing()) != self._stands:
                self._stands = stands
                for channel in self._running.values():
                    channel.send(stands or Resume())
            await asyncio.sleep(_PUBLISH_S)

    def close(self) -> None:
        """Take no more connections, and end when no answer is under way."""
        self._is_closing = True
        self._listener.close()
        for channel in self._running.values():
            channel.send(Close())

    def abort(self) -> None:
        """Cut off all connections."""
        for process in self._running:
            with suppress(ProcessLookupError):
                process.kill()

    async def _keep(self) -> None:
        while not self._is_closing:
            has_listened = False
            reason = "a front end has ended"
            try:
                has_listened = await self._run_one()
            except OSError as error:
                if not self.listening.is_set():  # The server has not started.
                    raise
                reason = f"a front end could not be started: {error}"
            if not self._is_closing:
                _log.warning("%s; another one takes its place", reason)
                await asyncio.sleep(0 if has_listened else _PAUSE_S)

    async def _run_one(self) -> bool:
        """Run one front end to its end. Return whether it has taken connections."""
        ours, theirs = socket.socketpair()
        process = await self._start(theirs)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        channel = self._running[process] = Channel(reader, writer, frontend_codec(), EPOCH)
        listened: list[bool] = []

        def on_listening() -> None:
            listened.append(True)
            self.listening.set()

        requests = RelayedRequests(self._app, channel, on_listening, self._on_answered)
        channel.send(self._begin)
        if self._stands is not None:
            channel.send(self._stands)
        if self._is_closing:  # `close` was called since it was started.
            channel.send(Close())
        try:
            await requests.serve()
        except BadFrame as error:
            _log.warning("a front end is ended: %s", error)
        finally:
            channel.close()
            del self._running[process]
            await _ended(process)
        return bool(listened)

    async def _start(self, theirs: socket.socket) -> Process:
        numbers = (theirs.fileno(), self._listener.fileno())
        command = ("-m", "tilework.server.frontends", *map(str, numbers))
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *command, pass_fds=numbers, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
            )
        self.num_started += 1
        return process


async def _ended(process: Process) -> None:
    """Wait until a process has ended; kill it if it does not end."""
    try:
        await asyncio.wait_for(process.wait(), _EXIT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
