"""A server over several nodes, as it was asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilework.cli.options.nodes import TOKEN, parse_address

if TYPE_CHECKING:
    from tilework.runtime.local_executor import LocalConfig
    from tilework.runtime.nodes.executor import NodesExecutor


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesWanted:
    """A number of nodes, whose agents connect to this address."""

    num_nodes: int
    host: str
    port: int
    state_copies: int

    @property
    def nodes_text(self) -> str:
        return f"{self.num_nodes} node{'' if self.num_nodes == 1 else 's'} (agents at {self.host}:{self.port})"

    def executor(self, each: LocalConfig) -> NodesExecutor:
        """Its executor, with these workers on each node. Raises BadNodes."""
        from tilework.runtime.nodes.config import NodesConfig
        from tilework.runtime.nodes.executor import NodesExecutor

        return NodesExecutor(
            NodesConfig(
                num_nodes=self.num_nodes,
                each=each,
                host=self.host,
                port=self.port,
                token=token(),
                state_copies=self.state_copies,
            )
        )


def nodes_wanted(num_nodes: int | None, agents: str, state_copies: int) -> NodesWanted | None:
    """None: the server has no nodes but its machine. Raises UserError."""
    if num_nodes is None:
        return None
    host, port = parse_address(agents)
    return NodesWanted(num_nodes=num_nodes, host=host, port=port, state_copies=state_copies)


def token() -> bytes:
    """What server and agents must both know; no option, since lists of processes show those."""
    return os.environ.get(TOKEN, "").encode()
