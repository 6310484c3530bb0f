"""The place of this server among others: its record for them, and the address for clients that it has no room for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from tilework.core.time import ns_from_s, s_from_ns
from tilework.core.work import Group
from tilework.policy.placement.utilisation import UtilisationRule
from tilework.runtime.engine import Engine
from tilework.server.config import ConfigError, ServerConfig
from tilework.sets.address import open_registry
from tilework.sets.chores import Chore, kept_alive
from tilework.sets.directory import Directory
from tilework.sets.leader import NodeManager
from tilework.sets.local import LocalRegistry
from tilework.sets.member import KeyOwner
from tilework.sets.records import SETS, SetRecord, encoded
from tilework.sets.registry import BadRegistry, Registry
from tilework.sets.window import UseWindow

_TTL_S = 5  # Clients may be sent to a dead server for this long.
_ANY_HOST = ("0.0.0.0", "::", "")


class NodePlaces(Protocol):
    """The nodes of a server that has some."""

    @property
    def host(self) -> str:
        """Host on which the server listens for agents."""

    @property
    def address(self) -> str | None:
        """HOST:PORT at which the server listens for agents; None before it does."""

    @property
    def node_names(self) -> Mapping[str, Group]:
        """Accelerators of each node that is up, by the name of its agent."""

    @property
    def most_nodes(self) -> int:
        """Number of places for nodes."""

    @property
    def least_nodes(self) -> int:
        """Number of nodes that the server starts with."""


@dataclass(slots=True, kw_only=True)
class OwnSet:
    """The record of this server for others.

    `engine` returns None until there is one; `url` is known once the server listens; `use` counts all works.
    """

    engine: Callable[[], Engine | None]
    config: ServerConfig
    use: UseWindow
    nodes: NodePlaces | None = None
    url: str = ""

    def record(self) -> SetRecord:
        """Return the record as of now. A server that has not started has one, so that agents come to it."""
        nodes = self.nodes
        places = SetRecord(
            url=self.config.public_url or self.url,
            agents=None if nodes is None else nodes.address,
            most_nodes=0 if nodes is None else nodes.most_nodes,
            least_nodes=0 if nodes is None else nodes.least_nodes,
        )
        return places if (engine := self.engine()) is None else self._with_load(places, engine)

    def _with_load(self, places: SetRecord, engine: Engine) -> SetRecord:
        health = engine.status.health()
        nodes = self.nodes
        use = self.use.use(engine.now_ns(), range(health.num_devices))
        backlog_s = s_from_ns(engine.status.backlog_ns())
        is_idle = health.num_jobs < health.num_devices_up
        return replace(
            places,
            models=tuple(engine.models),
            is_open=not engine.draining,
            nodes={} if nodes is None else {name: _share(use.by_device, of) for name, of in nodes.node_names.items()},
            devices_up=health.num_devices_up,
            backlog_s=round(backlog_s, 1),
            start_in_s=0.0 if is_idle else round(backlog_s / max(1, health.num_devices_up), 1),
            measured_s=math.floor(s_from_ns(use.measured_ns)),
            share=round(use.share, 2),
            stages={stage: round(share, 2) for stage, share in use.by_stage.items()},
        )


def _share(by_device: Mapping[int, float], devices: Group) -> float:
    """Return the mean share of the devices that are there."""
    there = [by_device[one] for one in devices if one in by_device]
    return round(sum(there) / len(there), 2) if there else 0.0


@dataclass(slots=True, kw_only=True)
class Sets:
    """The set `name` among those of a registry."""

    name: str
    own: OwnSet
    registry: Registry
    rule: UtilisationRule
    directory: Directory = field(init=False)

    def __post_init__(self) -> None:
        self.directory = Directory(self.registry)

    def alternate(self, model: str, before_s: float) -> str | None:
        """Return the URL of another set that could begin a request for a model in less time; None if there is none.

        Waits for nothing: it uses a copy of the registry.
        """
        found = self.directory.alternate(model, self.name, before_s)
        return None if found is None else found.url

    async def run(self, url: str) -> None:
        """Keep this server's record, follow the registry, and manage nodes while this server leads, until cancelled."""
        self.own.url = url
        taken = f"set = {self.name!r} is in the registry already; stop that server, or give this one another --set"
        key = SETS + self.name
        ttl_s = _TTL_S
        member = KeyOwner(self.registry, key, lambda _lease: encoded(self.own.record()), ttl_s=ttl_s, taken=taken)
        manager = NodeManager(self.registry, self.directory, self.name, self.rule)
        chores: Mapping[str, Chore] = {
            "the record of this set": member.run,
            "the copy of the registry": self.directory.follow,
            "the node manager": manager.run,
        }
        try:
            async with asyncio.TaskGroup() as tasks:
                for what, chore in chores.items():
                    tasks.create_task(kept_alive(what, chore))
        finally:
            await self.registry.close()


def new_sets(
    engine: Callable[[], Engine | None],
    config: ServerConfig,
    use: UseWindow,
    nodes: NodePlaces | None = None,
) -> Sets:
    """Make the sets of this server's registry; without one, of a registry in this process alone.

    Raises:
        ConfigError: the registry cannot be used, or others could not reach this server at the addresses in its record.
    """
    registry: Registry = LocalRegistry()
    if config.registry is not None:
        _check_reachable(config, nodes)
        try:
            registry = open_registry(config.registry)
        except BadRegistry as error:
            raise ConfigError(str(error)) from error
    rule = UtilisationRule(window_ns=ns_from_s(config.set_window_s), threshold=config.set_threshold)
    return Sets(
        name=config.set_name,
        own=OwnSet(engine=engine, config=config, use=use, nodes=nodes),
        registry=registry,
        rule=rule,
    )


def _check_reachable(config: ServerConfig, nodes: NodePlaces | None) -> None:
    """Check that others can reach this server. Raises ConfigError."""
    if config.public_url is None and config.host in _ANY_HOST:
        raise ConfigError(
            f"host = {config.host!r} is no address that clients of other sets can reach; set TILEWORK_PUBLIC_URL"
        )
    if nodes is not None and nodes.host in _ANY_HOST:
        raise ConfigError(
            f"agents = {nodes.host!r} is no address that agents can reach; give that of this machine in --agents"
        )
