"""A copy of the registry that is kept up to date, so that no request waits for the registry.

Rejected: a watch per refusal, which would take milliseconds of each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import TypeVar

from tilework.sets.records import (
    AGENTS,
    LEADER,
    ROUTES,
    SETS,
    AgentRecord,
    LeaderRecord,
    Record,
    Route,
    SetRecord,
    decoded,
)
from tilework.sets.registry import Entries, Registry, RegistryLost

_log = logging.getLogger(__name__)
_RETRY_S = 0.5
T = TypeVar("T")


class Directory:
    """Sets, agents and routes by name, as of the last change that the registry has reported.

    `is_current` is false while the registry does not answer: then the copy is of no use for new decisions. `entries`
    are what it was made from. `leader_epoch` is the revision at which the leader became the leader.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._waiting: set[asyncio.Future[None]] = set()
        self.sets: Mapping[str, SetRecord] = {}
        self.agents: Mapping[str, AgentRecord] = {}
        self.routes: Mapping[str, Route] = {}
        self.entries: Entries = {}
        self.leader: LeaderRecord | None = None
        self.leader_epoch = 0
        self.is_current = False
        self._since_s = 0.0  # On the loop's clock: the copy is current since then, in this era.
        self._era = registry.era

    @property
    def current_for_s(self) -> float:
        """Seconds for which the copy has been current without a gap."""
        return asyncio.get_running_loop().time() - self._since_s if self.is_current else 0.0

    async def follow(self) -> None:
        """Keep the copy up to date, until cancelled."""
        lost = ""
        while True:
            try:
                async with aclosing(self._registry.watch()) as watched:
                    async for entries in watched:
                        self._take(entries)
                        lost = ""
            except RegistryLost as error:
                if str(error) != lost:
                    _log.warning("the registry of sets is lost; no client is sent to another set: %s", error)
                lost = str(error)
            finally:
                self.is_current = False
            await asyncio.sleep(_RETRY_S)

    def _take(self, entries: Entries) -> None:
        self.sets = _named(SetRecord, SETS, entries)
        self.agents = _named(AgentRecord, AGENTS, entries)
        self.routes = _named(Route, ROUTES, entries)
        self.entries = dict(entries)
        leader = entries.get(LEADER)
        self.leader = None if leader is None else decoded(LeaderRecord, leader.value)
        self.leader_epoch = 0 if leader is None else leader.created
        if not self.is_current or self._era != self._registry.era:
            self._since_s = asyncio.get_running_loop().time()
            self._era = self._registry.era
        self.is_current = True
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    async def until(self, found: Callable[[], T | None]) -> T:
        """Return the value that `found` finds in the copy, as soon as it is not None."""
        while (value := found()) is None:
            changed = asyncio.get_running_loop().create_future()
            self._waiting.add(changed)
            await changed
        return value

    def alternate(self, model: str, own: str, start_in_s: float) -> SetRecord | None:
        """Return the set that would start a request for a model first; None unless that is earlier than here.

        Ties go to the first name.
        """
        if not self.is_current:
            return None
        others = [
            (one.start_in_s, name)
            for name, one in self.sets.items()
            if name != own and one.is_open and one.devices_up and model in one.models and one.start_in_s < start_in_s
        ]
        return self.sets[min(others)[1]] if others else None


def _named(kind: type[Record], prefix: str, entries: Entries) -> dict[str, Record]:
    """Return the records of a kind by name, in order of name; entries that cannot be decoded are left out."""
    found = {}
    for key in sorted(entries):
        if key.startswith(prefix) and (record := decoded(kind, entries[key].value)) is not None:
            found[key.removeprefix(prefix)] = record
    return found
