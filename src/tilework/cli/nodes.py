"""A server over several nodes, as it was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from tilework.cli.options.nodes import parse_address
from tilework.runtime.local_executor import LocalConfig
from tilework.runtime.nodes.config import NodesConfig
from tilework.runtime.nodes.executor import NodesExecutor


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesWanted:
    """So many nodes, whose agents connect to this address."""

    num_nodes: int
    host: str
    port: int
    state_copies: int
    token: str

    @property
    def nodes_text(self) -> str:
        return f"{self.num_nodes} node{'' if self.num_nodes == 1 else 's'} (agents at {self.host}:{self.port})"

    def executor(self, each: LocalConfig) -> NodesExecutor:
        """Its executor, with these workers on each node. Raises BadNodes."""
        return NodesExecutor(
            NodesConfig(
                num_nodes=self.num_nodes,
                each=each,
                host=self.host,
                port=self.port,
                token=self.token.encode(),
                state_copies=self.state_copies,
            )
        )


def nodes_wanted(num_nodes: int, agents: str, state_copies: int, token: str) -> NodesWanted:
    """Raises UserError."""
    host, port = parse_address(agents)
    return NodesWanted(num_nodes=num_nodes, host=host, port=port, state_copies=state_copies, token=token)
