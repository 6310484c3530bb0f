"""One worker process seen from the runtime's event loop: its pipe and its end."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

from tilework.core.model import Source
from tilework.core.wire import BreakGroup, Command, Decode, Denoise, Encode, Quit, Report, Site, StopWork
from tilework.runtime.frames import Frames, framed

PRELOAD = "tilework.worker.preload"
_EXIT_S = 5.0
"""How long a process may take to end after it has closed its pipe."""

Outgoing = Command | asyncio.Future[Command | None]
"""A command, or one that may still come (None: it does not), for which those sent after it wait."""


def forkserver_context() -> ForkServerContext:
    """Workers are forked from one server process that has imported torch and diffusers once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    return context


class WorkerProcess(asyncio.Protocol):
    """Starts the process at once; to be used on the event loop's thread, where the callbacks come, too.

    `on_exit` comes last and once, also if the process could not be started. The loop never waits: neither for a process
    that has been stopped in the middle of a message, or does not read what it is sent, nor for the forkserver, which
    takes seconds to come back if it was killed. Reports are read by the loop itself: a thread between them would cost
    two switches per message, at the moment when the worker is to begin its next work.
    """

    def __init__(
        self,
        site: Site,
        source: Source,
        on_report: Callable[[Report], None],
        on_exit: Callable[[str], None],
    ) -> None:
        from tilework.worker.process import serve

        self._on_report, self._on_exit = on_report, on_exit
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[Outgoing] = deque()
        self._blocked = False
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._reason: str | None = None
        self._killed = False
        ours, theirs = socket.socketpair()
        connection: Connection[Any, Any] = Connection(theirs.detach())
        self._process = forkserver_context().Process(
            target=serve, args=(connection, source, site), name=f"tilework-worker-{site.device_id}", daemon=True
        )
        self._life = self._loop.create_task(self._live(ours, connection))

    @property
    def pid(self) -> int | None:
        """None until it has been started."""
        return self._process.pid

    def send(self, outgoing: Outgoing) -> None:
        """Send a command behind the former ones; StopWork and BreakGroup do not wait for those that are to come.

        A work that itself waits for one is sent revoked.
        """
        if isinstance(outgoing, StopWork) and self._revoke(outgoing.work_id):
            return
        if isinstance(outgoing, StopWork | BreakGroup):
            self._write(outgoing)
        else:
            self._outbox.append(outgoing)
            self._pump()

    def _revoke(self, work_id: int) -> bool:
        """Stop a work that has not been sent; whether there is one. The worker would not know yet what to stop."""
        for index, waiting in enumerate(self._outbox):
            if isinstance(waiting, Encode | Denoise | Decode) and waiting.work_id == work_id:
                self._outbox[index] = replace(waiting, revoked=True)
                return True
        return False

    def explain(self, reason: str) -> None:
        """What to say at its end, rather than how the process ended."""
        self._reason = self._reason or reason

    def kill(self, reason: str) -> None:
        """End it, whatever it does, and also if it was stopped; `on_exit` gets this reason."""
        self.explain(reason)
        self._killed = True
        # Not Process.kill, which takes all workers for dead when the forkserver is.
        if self.pid is not None and not self._closed.done():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def close(self, grace_s: float) -> None:
        """Ask the process to quit, and kill it if it has not within `grace_s`."""
        self._write(Quit())
        await asyncio.wait({self._life}, timeout=grace_s)
        if not self._life.done():
            self.kill("it did not quit")
            await self._life

    async def _live(self, ours: socket.socket, theirs: Connection[Any, Any]) -> None:
        """From before the start of the process to after its end."""
        self._transport, _ = await self._loop.create_unix_connection(lambda: self, sock=ours)
        self._pump()
        try:
            await self._loop.run_in_executor(None, self._process.start)
        except Exception as error:  # The forkserver was killed, perhaps; the next start makes a new one.
            self.explain(f"it could not be started: {type(error).__name__}: {error}")
        finally:
            theirs.close()
        if self._killed:  # Meanwhile.
            self.kill("")
        await self._closed
        ending = await self._loop.run_in_executor(None, self._bury)
        self._on_exit(self._reason or ending)

    def _bury(self) -> str:
        if self.pid is None:
            return "it was not started"
        self._process.join(_EXIT_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(_EXIT_S)
        code = self._process.exitcode
        if code is None:
            return "it has closed its pipe, and does not end"
        return f"it was killed by signal {-code}" if code < 0 else f"exit code {code}"

    def _pump(self, _ready: object = None) -> None:
        """Write what can be written; a command to come calls back."""
        while self._outbox and not self._blocked and self._transport is not None:
            outgoing = self._outbox[0]
            if isinstance(outgoing, asyncio.Future) and not outgoing.done():
                self._blocked = True
                outgoing.add_done_callback(self._unblock)
                return
            self._outbox.popleft()
            command = outgoing.result() if isinstance(outgoing, asyncio.Future) else outgoing
            if command is not None:
                self._write(command)

    def _unblock(self, _future: object) -> None:
        self._blocked = False
        self._pump()

    def _write(self, command: Command) -> None:
        """To one that is gone nothing is written: that it is gone is about to be said."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(pickle.dumps(command, protocol=pickle.HIGHEST_PROTOCOL)))

    # For the transport.

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            # A report whose handling fails is a bug, but no reason for the transport to be closed.
            self._loop.call_soon(self._on_report, pickle.loads(message))

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set_result(None)
