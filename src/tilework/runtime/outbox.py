"""Commands for a device in their order, while some of them wait for a future."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from tilework.core.wire.commands import BreakGroup, Command, EnterNode, Execute, StopWork

Outgoing = Command | asyncio.Future[Command | None]
"""A command, or the future of one. Commands sent after a future wait for it.

It may resolve to None, or be cancelled: then there is no command.
"""


class Outbox:
    """Calls `write` with one command after the other, from `open` on.

    `StopWork`, `BreakGroup` and `EnterNode` do not wait for unresolved futures. `StopWork` of a work that waits for a
    future marks the work as revoked.
    """

    def __init__(self, write: Callable[[Command], None]) -> None:
        self._write = write
        self._waiting: deque[Outgoing] = deque()
        self._is_open = self._is_blocked = False

    def open(self) -> None:
        self._is_open = True
        self._pump()

    def send(self, outgoing: Outgoing) -> None:
        """Send a command after the earlier ones."""
        if isinstance(outgoing, StopWork) and self._revoke(outgoing.work_id):
            return
        if isinstance(outgoing, StopWork | BreakGroup | EnterNode):
            self._write(outgoing)
        else:
            self._waiting.append(outgoing)
            self._pump()

    def clear(self) -> None:
        """Forget waiting commands, since the device was lost: later ones do not wait for them."""
        self._waiting.clear()
        self._is_blocked = False

    def _revoke(self, work_id: int) -> bool:
        """Mark a work that has not been sent as revoked; returns whether there is one."""
        for index, waiting in enumerate(self._waiting):
            if isinstance(waiting, Execute) and waiting.work_id == work_id:
                self._waiting[index] = replace(waiting, revoked=True)
                return True
        return False

    def _pump(self) -> None:
        """Write the commands that are ready. An unresolved future continues this when it resolves."""
        while self._waiting and self._is_open and not self._is_blocked:
            outgoing = self._waiting[0]
            if isinstance(outgoing, asyncio.Future) and not outgoing.done():
                self._is_blocked = True
                outgoing.add_done_callback(self._unblock)
                return
            self._waiting.popleft()
            if isinstance(outgoing, asyncio.Future):
                command = None if outgoing.cancelled() else outgoing.result()
            else:
                command = outgoing
            if command is not None:
                self._write(command)

    def _unblock(self, _future: object) -> None:
        self._is_blocked = False
        self._pump()
