"""The agent's side: it says in the registry that it is there, and works for the set that its route names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tilework.sets.directory import Directory
from tilework.sets.member import Member
from tilework.sets.records import AGENTS, AgentRecord, encoded
from tilework.sets.registry import Registry

_log = logging.getLogger(__name__)


class RoutedAgent:
    """The agent `name`. `serve` makes it a node of the server at an address (HOST:PORT) until cancelled.

    It follows only the newest route: one of an older epoch than the last is not obeyed.
    """

    def __init__(self, registry: Registry, name: str, serve: Callable[[str], Awaitable[None]]) -> None:
        self._directory = Directory(registry)
        self._name, self._serve = name, serve
        self._set: str | None = None
        self._address: str | None = None
        self._seen = (0, 0)  # The epoch and the revision of the newest route.
        self._member = Member(registry, AGENTS + name, self._record, taken=f"agent {name}: another has this name")

    def _record(self, lease: int) -> bytes:
        return encoded(AgentRecord(lease=lease, set=self._set))

    async def run(self) -> None:
        """Go from set to set as the routes say, until cancelled."""
        chores = [asyncio.create_task(self._member.run()), asyncio.create_task(self._directory.follow())]
        serving: asyncio.Task[None] | None = None
        try:
            while True:
                address = await self._directory.until(self._next_address)
                if serving is not None:
                    serving.cancel()
                    await asyncio.wait({serving})
                self._address = address
                serving = asyncio.create_task(self._be_node(address))
        finally:
            for task in [*chores, *([serving] if serving is not None else [])]:
                task.cancel()
            await asyncio.wait([*chores, *([serving] if serving is not None else [])])

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

    async def _be_node(self, address: str) -> None:
        with suppress(asyncio.CancelledError):
            await self._serve(address)
