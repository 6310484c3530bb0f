"""The agent's side: it says in the registry that it is there, and works for the set that its route names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tilework.sets.directory import Directory
from tilework.sets.member import Member
from tilework.sets.records import AGENTS, AgentRecord, encoded
from tilework.sets.registry import Registry

_log = logging.getLogger(__name__)


Serve = Callable[[str, asyncio.Event], Awaitable[None]]
"""Makes this machine a node of the server at an address (HOST:PORT), until the event is set and that has let it go."""


class RoutedAgent:
    """The agent `name`, which `serve`s where its routes say.

    It follows only the newest route: one of an older epoch than the last is not obeyed.
    """

    def __init__(self, registry: Registry, name: str, serve: Serve) -> None:
        self._directory = Directory(registry)
        self._name, self._serve = name, serve
        self._set: str | None = None
        self._address: str | None = None
        self._seen = (0, 0)  # The epoch and the revision of the newest route.
        self._serving: asyncio.Future[None] | None = None
        self._leaves = asyncio.Event()  # The set that it serves.
        self._member = Member(registry, AGENTS + name, self._record, taken=f"agent {name}: another has this name")

    def _record(self, lease: int) -> bytes:
        return encoded(AgentRecord(lease=lease, set=self._set))

    async def run(self, leaving: asyncio.Event) -> None:
        """Go from set to set as the routes say, until `leaving` is set and the last one has let it go."""
        chores = self._member.run(), self._directory.follow(), self._follow_routes()
        tasks: list[asyncio.Future[None]] = [asyncio.ensure_future(chore) for chore in chores]
        try:
            await leaving.wait()
            tasks[-1].cancel()
            await self._leave()
        finally:
            tasks += [] if self._serving is None else [self._serving]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _follow_routes(self) -> None:
        while True:
            address = await self._directory.until(self._next_address)
            await self._leave()
            self._address, self._leaves = address, asyncio.Event()
            self._serving = asyncio.ensure_future(self._serve(address, self._leaves))

    async def _leave(self) -> None:
        """Leave the set that it serves, if there is one."""
        if self._serving is not None:
            self._leaves.set()
            await asyncio.wait({self._serving})

    def _next_address(self) -> str | None:
        """The address of the set that the agent is for, if it works at another one; else None.

        While the set is not there, or the agent has no route, it stays where it is.
        """
        route, there = self._directory.routes.get(self._name), self._directory.sets
        if route is None or route.set not in there:
            return None
        stamp = (route.epoch, self._directory.revisions[self._name])
        if stamp < self._seen:
            return None
        if stamp > self._seen:
            _log.warning("this node goes to set %s: %s", route.set, route.why)
        self._seen = stamp
        address = there[route.set].agents
        if address is None or address == self._address:
            return None
        self._set = route.set
        self._member.write_now()
        return address
