"""A worker process as the event loop sees it: its pipe and its exit."""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tilework.comm.messages import MessageReader, encode_message
from tilework.control.driver.report_check import BadReport, ReportCheck
from tilework.core.model import Source
from tilework.core.wire.commands import Command, Quit, Site
from tilework.core.wire.reports import Report
from tilework.runtime.outbox import Outbox, Outgoing
from tilework.worker.start.entry import run

PRELOAD = "tilework.worker.start.preload"
_OF_THE_TRACKER = "resource_tracker"
"""Start of the warnings of multiprocessing's tracker, which cleans up what processes leave behind."""
_EXIT_S = 5.0
"""Longest time that a process may take to end after it has closed its pipe."""


def forkserver_context() -> ForkServerContext:
    """Return the context in which workers are forked from one process that has imported torch and diffusers once."""
    _quiet_tracker()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    return context


def _quiet_tracker() -> None:
    """Suppress the tracker's warnings, about which a user can do nothing.
    They are of a killed tracker, which is started again, and of semaphores of killed processes, which it unlinks. The
    tracker is a process that is started with the options of this one.
    """
    option = f"ignore:{_OF_THE_TRACKER}:UserWarning"
    if option not in sys.warnoptions:
        sys.warnoptions.append(option)
        warnings.filterwarnings("ignore", _OF_THE_TRACKER, UserWarning)


def _forkserver_pid() -> int | None:
    pid: int | None = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


@atexit.register
def _end_forkserver() -> None:
    """End the forkserver. While it imports it would not see that this process has ended, and outlive it by seconds."""
    pid = _forkserver_pid()
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def _keep_forkserver() -> None:
    """Start another forkserver whenever it has ended, for as long as there is a worker.

    `multiprocessing` does so only when a worker is to be started: until then the old one is a zombie, and that worker
    waits for the imports of the new one.
    """
    loop = asyncio.get_running_loop()
    while (pid := _forkserver_pid()) is not None:
        with suppress(ProcessLookupError):  # Another worker has seen it first.
            await _ended(pid)
        try:
            await loop.run_in_executor(None, forkserver.ensure_running)
        except OSError:  # No memory for a process; the start of a worker tries again, and reports it.
            return


async def _ended(pid: int) -> None:
    """Wait for the end of a child process, and leave it to be reaped. Raises ProcessLookupError if there is none."""
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(pid)
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


class WorkerProcess(asyncio.BufferedProtocol):
    """Starts a process at once. Use it on the event loop's thread; callbacks are called there.

    `on_exit` is the last callback and comes once, also if the process could not be started. A process that sends an
    impossible report is killed: it `is_believed` no more, and none of its reports counts then. The loop never blocks:
    not for a process that is suspended in the middle of a message or does not read, nor for the forkserver, which takes
    seconds to restart after it was killed. The loop reads reports itself: a thread would cost two context switches per
    message, just when the worker is to begin its next work.
    """

    def __init__(
        self,
        site: Site,
        sources: Sequence[Source],
        on_report: Callable[[Report], None],
        on_exit: Callable[[str], None],
    ) -> None:
        self._on_report = on_report
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(self._write)
        self._reader = MessageReader()
        self._transport: asyncio.Transport | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._reason: str | None = None
        self._killed = False
        self._check = ReportCheck(site.device_id)
        self.is_believed = True
        self.pid: int | None = None  # None until the process has started.
        ours, theirs = socket.socketpair()
        self._process = forkserver_context().Process(
            target=run, args=(theirs, sources, site), name=f"tilework-worker-{site.device_id}", daemon=True
        )
        self._task = self._loop.create_task(self._run(ours, theirs))

    def send(self, outgoing: Outgoing) -> None:
        """Send a command after the earlier ones, as `Outbox` does."""
        self._outbox.send(outgoing)

    def set_exit_reason(self, reason: str) -> None:
        """Set the reason that `on_exit` gets instead of the exit status. The first one counts."""
        self._reason = self._reason or reason

    def kill(self, reason: str) -> None:
        """Kill the process, also if it is suspended; `on_exit` gets this reason."""
        self.set_exit_reason(reason)
        self._killed = True
        # Process.kill does not do: it takes all workers for dead when the forkserver is dead.
        if self.pid is not None and not self._closed.done():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    async def close(self, grace_s: float) -> None:
        """Ask the process to quit, and kill it if it has not within `grace_s`.

        If the forkserver has not started the process by then, since it still imports, the forkserver is ended: the next
        start makes a new one.
        """
        self._write(Quit())
        await asyncio.wait({self._task}, timeout=grace_s)
        if not self._task.done():
            self.kill("it did not quit")
            if self.pid is None:
                _end_forkserver()
            await self._task

    async def _run(self, ours: socket.socket, theirs: socket.socket) -> None:
        """Start the process, wait for its end, and call `on_exit`."""
        self._transport, _ = await self._loop.create_unix_connection(lambda: self, sock=ours)
        self._outbox.open()
        try:
            await self._loop.run_in_executor(None, self._process.start)
        except Exception as error:  # Perhaps the forkserver was killed; the next start makes a new one.
            self.set_exit_reason(f"it could not be started: {type(error).__name__}: {error}")
        finally:
            theirs.close()
        self.pid = self._process.pid
        if self._killed:  # The process was still starting.
            self.kill("")
        keeping = self._loop.create_task(_keep_forkserver())
        await self._closed
        keeping.cancel()
        exit_status = await self._loop.run_in_executor(None, self._reap)
        on_exit = self._on_exit
        self._on_report = self._on_exit = _ignore  # See `connection_lost`.
        on_exit(self._reason or exit_status)

    def _reap(self) -> str:
        """Wait for the process to exit, and close its resources; returns how it exited."""
        if self.pid is None:
            return "it was not started"
        self._process.join(_EXIT_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(_EXIT_S)
        code = self._process.exitcode
        if code is None:
            return "it has closed its pipe but does not exit"
        self._process.close()
        return f"it was killed by signal {-code}" if code < 0 else f"exit code {code}"

    def _write(self, command: Command) -> None:
        """Write a command. Nothing is written to a process that has gone: `on_exit` follows."""
        if self._transport is not None and not self._transport.is_closing():
            self._check.sent(command, time.monotonic_ns())
            for piece in encode_message(command):
                self._transport.write(piece)

    # For the transport.

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.room()

    def buffer_updated(self, nbytes: int) -> None:
        for report in self._reader.received(nbytes):
            if self._believes(report):
                # Called later, so that a bug in handling a report does not close the transport.
                self._loop.call_soon(self._on_report, report)

    def _believes(self, report: Report) -> bool:
        try:
            if self.is_believed:
                self._check.check(report, time.monotonic_ns())
        except BadReport as error:
            self.is_believed = False
            self.kill(f"it has sent an impossible report: {error}")
        return self.is_believed

    def connection_lost(self, exc: Exception | None) -> None:
        # This object is in cycles, which a server collects rarely. So it releases what it no longer needs: the buffer
        # of 64 KiB here, and what callbacks hold when the process has ended.
        del self._reader
        self._closed.set_result(None)


def resident_bytes(pid: int) -> int | None:
    """Return the memory that a process uses; None if there is no such process, or no way to know."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
    except (OSError, IndexError):  # A process that has just ended has an empty file.
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def resident_bytes_of(pids: Mapping[str, int]) -> dict[str, int]:
    """Return the memory of those of these processes that exist, by the same names."""
    return {name: size for name, pid in pids.items() if (size := resident_bytes(pid)) is not None}


def _ignore(_what: object) -> None:
    """Do nothing, in place of a callback that will not be called any more."""
