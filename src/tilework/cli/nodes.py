"""A server over several nodes, as it was asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tilework.cli.agents.user_token import user_token
from tilework.cli.console import UserError
from tilework.cli.options.nodes import TOKEN, NodeGroup, parse_address
from tilework.distribution import install_command

if TYPE_CHECKING:
    from tilework.runtime.local_config import LocalConfig
    from tilework.runtime.nodes.config import NodesConfig
    from tilework.runtime.nodes.executor import NodesExecutor

_AGENTS = "127.0.0.1:7070"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesWanted:
    """A number of nodes, whose agents connect to this address; or those of a Ray `cluster`, all if there is no number.

    In a cluster without a `host` this machine has the address that Ray knows.
    """

    num_nodes: int | None
    host: str | None
    port: int
    state_copies: int
    least_nodes: int = 0
    cluster: str | None = None

    @property
    def nodes_text(self) -> str:
        number = "all nodes" if self.num_nodes is None else f"{self.num_nodes} node{'' if self.num_nodes == 1 else 's'}"
        return f"{number} ({f'agents at {self.host}:{self.port}' if self.cluster is None else 'started by Ray'})"

    def executor(self, each: LocalConfig) -> NodesExecutor:
        """Its executor, with these workers on each node. Raises BadNodes; WorkerStartFailed if there is no cluster."""
        from tilework.runtime.nodes.executor import NodesExecutor
        from tilework.runtime.nodes.ray_agents import RayAgents, new_token

        if self.cluster is None:
            return NodesExecutor(self._config(each, self.num_nodes or 1, self.host or "", token(self.host or "")))
        is_cuda = each.sources[0].device == "cuda"
        starter = RayAgents(
            address=self.cluster,
            num_cpus=each.num_workers,
            num_accelerators=each.num_workers if is_cuda else 0,
            name=None if each.owner is None else kept_name(each.owner),
        )
        host = starter.connect(self.host)
        num_nodes = self.num_nodes or starter.num_nodes()
        return NodesExecutor(self._config(each, num_nodes, host, told_token() or new_token()), starter)

    def _config(self, each: LocalConfig, num_nodes: int, host: str, known: bytes) -> NodesConfig:
        from tilework.runtime.nodes.config import NodesConfig

        return NodesConfig(
            num_nodes=num_nodes,
            each=each,
            host=host,
            port=self.port,
            token=known,
            state_copies=self.state_copies,
            least_nodes=self.least_nodes,
        )


def nodes_wanted(asked: NodeGroup) -> NodesWanted | None:
    """None: the server has no nodes but its machine. Raises UserError."""
    if asked.nodes is None and asked.cluster is None:
        _check_alone(asked)
        return None
    if asked.cluster is not None and find_spec("ray") is None:
        raise UserError(f"--cluster needs Ray; run: {install_command('cluster')}")
    is_any = asked.agents is None and asked.cluster is not None
    host, port = (None, 0) if is_any else parse_address(asked.agents or _AGENTS)
    return NodesWanted(
        num_nodes=asked.nodes,
        host=host,
        port=port,
        state_copies=asked.state_copies,
        least_nodes=asked.least_nodes or 0,
        cluster=asked.cluster,
    )


def _check_alone(asked: NodeGroup) -> None:
    """Raises UserError if a server of one machine is given what only nodes have."""
    copies = None if asked.state_copies == 1 else asked.state_copies
    given = {"--agents": asked.agents, "--least-nodes": asked.least_nodes, "--state-copies": copies}
    for flag, value in given.items():
        if value is not None:
            raise UserError(f"{flag} is {value}, and nothing says that there are nodes; give --nodes, or leave it out")


def kept_name(durable: Path) -> str:
    """What Ray calls the server of a durable directory."""
    return f"tilework {durable}"


def token(host: str) -> bytes:
    """What a server that listens for agents on `host` and its agents must both know. Raises UserError.

    On the loopback that of the user, if it was told none; elsewhere none.
    """
    return told_token() or (user_token() if host in LOOPBACK else b"")


def told_token() -> bytes:
    """What it was told of that; no option, since lists of processes show those."""
    return os.environ.get(TOKEN, "").encode()
