"""Agents that Ray starts, one per node of its cluster, and starts again when they are lost. Needs the extra `cluster`.

Ray places them and reports whether a node is there. Messages between agents and engine go over their own connections: a
call of an actor takes a millisecond, and there are several per run.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any

from tilework.runtime.executor import WorkerStartFailed

NAMESPACE = "tilework"
_PLACE_S = 60.0


class _RayAgent:
    """The actor of a node."""

    def __init__(self) -> None:
        self._servers: Any = None
        self._serving: asyncio.Future[None] | None = None

    async def serve(self, host: str, port: int, token: bytes) -> None:
        """Be a node of the server at this address, until the actor ends or gets another address."""
        from tilework.runtime.nodes.agent import Servers, serve_node

        if self._serving is None:
            self._servers = Servers([(host, port)], token)
            self._serving = asyncio.ensure_future(serve_node(self._servers))
        else:
            self._servers.addresses = [(host, port)]
            self._servers.token = token
        await asyncio.shield(self._serving)


@dataclass(slots=True, kw_only=True, eq=False)
class RayAgents:
    """Agents on nodes of the Ray cluster at `address`; "auto" is the one that Ray finds.

    Each takes `num_cpus` and `num_accelerators` of its node. They end at `close`, and with this process unless they
    have a `name`: agents of that name are found again, with their workers, by the next process that starts them.
    """

    address: str
    num_cpus: int
    num_accelerators: int
    name: str | None = None
    actors: list[Any] = field(default_factory=list)
    _group: Any = None

    def connect(self, host: str | None = None) -> str:
        """Connect to the cluster; returns the address of this machine there, `host` or one that Ray finds.

        Takes seconds. Raises WorkerStartFailed.
        """
        return connect(self.address, host)

    def num_nodes(self) -> int:
        """Return the number of nodes that are there."""
        import ray

        return sum(bool(node["Alive"]) for node in ray.nodes())

    def start(self, num_nodes: int, host: str, port: int, token: bytes) -> None:
        """Start agents on this number of nodes, for a server at this address. Raises WorkerStartFailed."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._group = self._place(num_nodes)
        for index in range(num_nodes):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            lasting: dict[str, Any] = (
                {"name": f"{self.name} agent {index}", "lifetime": "detached", "get_if_exists": True}
                if self.name is not None
                else {}
            )
            agent = ray.remote(_RayAgent).options(
                num_cpus=self.num_cpus,
                num_gpus=self.num_accelerators,
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=place,
                **lasting,
            )
            self.actors.append(agent.remote())
            self.actors[-1].serve.remote(host, port, token)

    def _place(self, num_nodes: int) -> Any:
        """Return the places of the agents: those of this name, if there are any."""
        from ray.util.placement_group import get_placement_group, placement_group

        wanted = {"CPU": self.num_cpus} | ({"GPU": self.num_accelerators} if self.num_accelerators else {})
        lasting = {} if self.name is None else {"name": self.name, "lifetime": "detached"}
        try:
            group = get_placement_group(self.name or "")
        except ValueError:
            group = placement_group([wanted] * num_nodes, strategy="STRICT_SPREAD", **lasting)
        if not group.wait(_PLACE_S):
            raise WorkerStartFailed(
                f"the cluster has no {num_nodes} nodes with {wanted} to spare; give fewer --nodes or --workers"
            )
        return group

    def close(self) -> None:
        """End the agents, and the connection to the cluster."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for actor in self.actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()


def connect(address: str, host: str | None = None) -> str:
    """Connect to a cluster: see `RayAgents.connect`."""
    import ray

    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, _node_ip_address=host)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise WorkerStartFailed(
            f"cluster = {address!r} cannot be reached: {error}; give the address that `ray start --head` shows"
        ) from error
    return host or str(ray.util.get_node_ip_address())


def new_token() -> bytes:
    """Return a token that only this server and the agents that it starts know."""
    return secrets.token_hex(16).encode()
