"""One worker process seen from the runtime's event loop: its pipe and its end."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
from collections import deque
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from threading import Lock

from tilework.core.wire import BreakGroup, Command, Quit, Report, Site, Source, StopWork

PRELOAD = "tilework.worker.preload"
SMALL_BYTES = 32 * 1024
"""Up to here a message fits the pipe's buffer, and is written at once rather than on a thread."""

Outgoing = Command | asyncio.Future[Command]
"""A command, or one that is still to come, which those sent after it wait for."""


def forkserver_context() -> ForkServerContext:
    """Workers are forked from one server process that has imported torch and diffusers once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    return context


class WorkerProcess:
    """Starts the process at once; to be used on the event loop's thread, where the callbacks come, too.

    `on_exit` comes last and once. Reports are read by the loop itself, and small commands written by it: a thread
    between them would cost two switches per message, at the moment when the worker begins its next work.
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
        self._connection, theirs = multiprocessing.Pipe()
        self._send_lock = Lock()
        self._outbox: deque[Outgoing] = deque()
        self._blocked = False
        self._process = forkserver_context().Process(
            target=serve, args=(theirs, source, site), name=f"tilework-worker-{site.gpu}", daemon=True
        )
        self._process.start()
        theirs.close()
        self._loop.add_reader(self._connection.fileno(), self._read)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def send(self, outgoing: Outgoing) -> None:
        """Send a command behind the former ones; StopWork and BreakGroup overtake them."""
        if isinstance(outgoing, StopWork | BreakGroup):
            self._write(pickle.dumps(outgoing))
        else:
            self._outbox.append(outgoing)
            self._pump()

    def close(self, grace_s: float) -> None:
        """Ask the process to quit, and kill it if it has not within `grace_s`. Blocks; may be called on a thread."""
        self._write(pickle.dumps(Quit()))
        self._process.join(grace_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _pump(self, _ready: object = None) -> None:
        """Write what can be written; a command to come, or a large one under way, calls back."""
        while self._outbox and not self._blocked:
            outgoing = self._outbox[0]
            if isinstance(outgoing, asyncio.Future):
                if not outgoing.done():
                    self._block_until(outgoing)
                    return
                outgoing = outgoing.result()
            self._outbox.popleft()
            data = pickle.dumps(outgoing, protocol=pickle.HIGHEST_PROTOCOL)
            if len(data) <= SMALL_BYTES:
                self._write(data)
            else:
                self._block_until(self._loop.run_in_executor(None, self._write, data))

    def _block_until(self, future: asyncio.Future[Command] | asyncio.Future[None]) -> None:
        self._blocked = True
        future.add_done_callback(self._unblock)

    def _unblock(self, _future: object) -> None:
        self._blocked = False
        self._pump()

    def _write(self, data: bytes) -> None:
        try:
            with self._send_lock:
                self._connection.send_bytes(data)
        except OSError:
            return  # The process is gone; the reader finds out and says so.

    def _read(self) -> None:
        """Take one report; the loop calls again while there are more."""
        try:
            report: Report = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self._loop.remove_reader(self._connection.fileno())
            self._burial = self._loop.create_task(self._bury())
            return
        self._on_report(report)

    async def _bury(self) -> None:
        await self._loop.run_in_executor(None, self._process.join, 5)
        code = self._process.exitcode
        self._on_exit(f"it was killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}")
