"""One worker process seen from the runtime: its pipe, the thread that reads it and the thread that writes it."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from queue import SimpleQueue

from tilework.core.wire import Command, ModelSource, Quit, Report, StopWork

PRELOAD = "tilework.worker.preload"
Outgoing = Command | Callable[[], Command]
"""A command, or a function that waits for what the command needs and then builds it."""


def forkserver_context() -> ForkServerContext:
    """Workers are forked from one server process that has imported torch and diffusers once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    return context


class WorkerProcess:
    """Starts the process at once. Callbacks come from the reader thread, `on_exit` last and once."""

    def __init__(
        self,
        gpu: int,
        source: ModelSource,
        on_report: Callable[[Report], None],
        on_exit: Callable[[str], None],
    ) -> None:
        from tilework.worker.process import serve

        self.gpu = gpu
        self._on_report, self._on_exit = on_report, on_exit
        self._connection, theirs = multiprocessing.Pipe()
        self._send_lock = threading.Lock()
        self._outbox: SimpleQueue[Outgoing | None] = SimpleQueue()
        context = forkserver_context()
        self._process = context.Process(
            target=serve, args=(theirs, source, gpu), name=f"tilework-worker-{gpu}", daemon=True
        )
        self._process.start()
        theirs.close()
        for name, target in (("read", self._read), ("write", self._write)):
            threading.Thread(target=target, name=f"tilework-{name}-{gpu}", daemon=True).start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def send(self, outgoing: Outgoing) -> None:
        """Queue a command behind the former ones; a StopWork overtakes them. Never blocks."""
        if isinstance(outgoing, StopWork):
            self._send_now(outgoing)
        else:
            self._outbox.put(outgoing)

    def close(self, grace_s: float) -> None:
        """Ask the process to quit, and kill it if it has not within `grace_s`. Blocks."""
        self._send_now(Quit())
        self._process.join(grace_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _write(self) -> None:
        while (outgoing := self._outbox.get()) is not None:
            self._send_now(outgoing() if callable(outgoing) else outgoing)

    def _send_now(self, command: Command) -> None:
        data = pickle.dumps(command, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            with self._send_lock:
                self._connection.send_bytes(data)
        except OSError:
            return  # The process is gone; the reader finds out and says so.

    def _read(self) -> None:
        connection: Connection = self._connection
        try:
            while True:
                self._on_report(pickle.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            self._outbox.put(None)
        self._process.join(5)
        code = self._process.exitcode
        self._on_exit("it was killed by signal " + str(-code) if code is not None and code < 0 else f"exit code {code}")
