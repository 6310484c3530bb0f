"""A server that Ray keeps: an actor of its cluster runs it, and another as its standby. Needs the extra `cluster`."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_PAUSE_S = 0.5
_MOST_FAILED = 3  # Starts in a row that end before the server serves.
_NUM_SERVERS = 2  # The server that serves, and the one that waits for its end.
_SAID_LINES = 20
_DEATH_SIGNAL = 1  # Of `prctl`, PR_SET_PDEATHSIG.


class ServerKeeper:
    """The actor, which keeps servers running.
    Each server is a process with the same `command`, which waits while another one serves, prints a line when it serves
    itself, and ends with exit status 0 only when it is told to.

    If the actor is lost, Ray starts it again, on another node if need be; its servers are lost with it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], directory: str) -> None:
        self._command = command
        self._environment = environment
        self._directory = directory
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._serving: int | None = None  # Number of the server that serves.
        self._said: deque[str] = deque(maxlen=_SAID_LINES)
        self._num_failed = 0
        self._is_ending = False
        self._ready: asyncio.Future[str] = asyncio.get_event_loop().create_future()
        self._ended = asyncio.gather(*(self._keep(number) for number in range(_NUM_SERVERS)))

    async def ready(self) -> str:
        """Return the line of the first server that serves. Empty if none can be started."""
        either: set[asyncio.Future[Any]] = {self._ready, self._ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return self._ready.result() if self._ready.done() else ""

    async def ended(self) -> str:
        """Wait for the end; returns the output of the servers if they could not start."""
        await asyncio.shield(self._ended)
        return "\n".join(self._said) if self._num_failed >= _MOST_FAILED else ""

    async def serving_pid(self) -> int | None:
        """Return the process that serves, if there is one."""
        return None if self._serving is None else self._running[self._serving].pid

    async def end(self) -> None:
        """Let the server end as after a signal, and its standby at once."""
        self._begin_to_end()
        await asyncio.shield(self._ended)

    def _begin_to_end(self) -> None:
        self._is_ending = True
        for number, process in self._running.items():
            with suppress(ProcessLookupError):  # The process has ended, and its task has not been told yet.
                process.send_signal(signal.SIGTERM if number == self._serving else signal.SIGKILL)

    async def _keep(self, number: int) -> None:
        """Run one server after the other."""
        while not self._is_ending:
            await self._run(number)
            await asyncio.sleep(_PAUSE_S)

    async def _run(self, number: int) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            env=dict(self._environment),
            cwd=self._directory if Path(self._directory).is_dir() else None,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=_end_with_parent,
        )
        self._running[number] = process
        if self._is_ending:
            process.kill()
        saying = asyncio.ensure_future(self._pass_on(process.stderr))
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode().strip()
        if line:
            self._serving = number
            self._num_failed = 0
            if not self._ready.done():
                self._ready.set_result(line)
        await process.wait()
        await saying
        del self._running[number]
        self._serving = None if self._serving == number else self._serving
        self._num_failed += not line and not self._is_ending
        if self._num_failed >= _MOST_FAILED:
            self._begin_to_end()

    async def _pass_on(self, stream: asyncio.StreamReader | None) -> None:
        """Write a server's output to the log of the actor, and keep its last lines."""
        assert stream is not None
        async for line in stream:
            self._said.append(line.decode(errors="replace").rstrip())
            print(self._said[-1], file=sys.stderr, flush=True)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


def keeper(name: str, command: Sequence[str], environment: Mapping[str, str]) -> Any:
    """Return the actor of this name: the existing one, or a new one, which outlives this process.

    To be called when Ray is connected.
    """
    import ray

    options = ray.remote(ServerKeeper).options(
        name=name, lifetime="detached", get_if_exists=True, num_cpus=0, max_restarts=-1, max_concurrency=16
    )
    return options.remote(list(command), dict(environment), os.getcwd())
