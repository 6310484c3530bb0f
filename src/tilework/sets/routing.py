"""The agent's side: it registers itself in the registry, and works for the set that its route names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping

from tilework.sets.chores import Chore, kept_alive
from tilework.sets.directory import Directory
from tilework.sets.member import KeyOwner
from tilework.sets.records import AGENTS, ROUTES, AgentRecord, encoded
from tilework.sets.registry import Registry

_log = logging.getLogger(__name__)


Serve = Callable[[str, asyncio.Event], Coroutine[object, object, None]]
"""Makes this machine a node of the server at HOST:PORT, until the event is set and the server has let it go."""


class RoutedAgent:
    """The agent `name`, which `serve`s the sets that its routes name.

    It follows only the newest route that was written under its present lease. It obeys no route of an older epoch than
    the last one, nor one that the registry still has from an earlier era.
    """

    def __init__(self, registry: Registry, name: str, serve: Serve) -> None:
        self._directory = Directory(registry)
        self._name = name
        self._serve = serve
        self._set: str | None = None
        self._address: str | None = None
        self._lease: int | None = None  # The lease under which the newest route was written.
        self._seen = (0, 0)  # The epoch and the revision of the newest route.
        self._serving: asyncio.Future[None] | None = None
        self._leaves = asyncio.Event()  # Set to leave the set that it serves.
        self._is_asked = False  # True once this agent itself has asked to leave that set.
        self._member = KeyOwner(registry, AGENTS + name, self._record, taken=f"agent {name}: another has this name")

    def _record(self, lease: int) -> bytes:
        return encoded(AgentRecord(lease=lease, set=self._set))

    async def run(self, leaving: asyncio.Event) -> None:
        """Go from set to set as the routes say, until `leaving` is set and the last set has let the agent go.

        A server that tells the agent to end sets `leaving`, too.
        """
        chores: Mapping[str, Chore] = {
            "the record of this agent": self._member.run,
            "the copy of the registry": self._directory.follow,
            "the change to another set": lambda: self._follow_routes(leaving),
        }
        tasks: list[asyncio.Future[None]] = [asyncio.ensure_future(kept_alive(*chore)) for chore in chores.items()]
        try:
            await leaving.wait()
            tasks[-1].cancel()
            await self._leave()
        finally:
            tasks += [] if self._serving is None else [self._serving]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _follow_routes(self, leaving: asyncio.Event) -> None:
        while True:
            address = await self._directory.until(self._next_address)
            await self._leave()
            self._address = address
            self._leaves = asyncio.Event()
            self._is_asked = False
            self._serving = asyncio.ensure_future(self._work(address, leaving))

    async def _work(self, address: str, leaving: asyncio.Event) -> None:
        leaves = self._leaves
        await kept_alive(f"the node of the server at {address}", lambda: self._serve(address, leaves))
        if not self._is_asked:
            leaving.set()

    async def _leave(self) -> None:
        """Leave the set that the agent serves, if there is one."""
        if self._serving is not None:
            self._is_asked = True
            self._leaves.set()
            await asyncio.wait({self._serving})

    def _next_address(self) -> str | None:
        """Return the address of the set that the agent is for, if it works at another one; else None.

        While the set is missing, or the agent has no route, it stays where it is.
        """
        directory = self._directory
        route = directory.routes.get(self._name)
        entry = directory.entries.get(ROUTES + self._name)
        if route is None or entry is None or entry.lease != self._member.lease or route.set not in directory.sets:
            return None
        newest = self._seen if entry.lease == self._lease else (0, 0)
        stamp = (route.epoch, entry.changed)
        if stamp < newest:
            return None
        self._lease = entry.lease
        self._seen = stamp
        address = directory.sets[route.set].agents
        if address is None or address == self._address:
            return None
        _log.warning("this node goes to set %s: %s", route.set, route.why)
        self._set = route.set
        self._member.write_now()
        return address
