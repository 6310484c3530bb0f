"""The options of a server over several nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from tilework.cli.console import UserError

TOKEN = "TILEWORK_CLUSTER_TOKEN"
"""The variable of the environment that says what server and agents must both know."""
KEPT = "TILEWORK_KEPT"
"""The variable of the environment that says to a server that Ray keeps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes instead of this machine."""

    heading: ClassVar[str] = "Several machines"
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="Serve with this many nodes instead of this machine, with --workers on each (docs/cluster.md).",
        ),
    ] = None
    least_nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Start when this many of the --nodes have come; others may join later. Default: all."),
    ] = None
    agents: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="With --nodes: address to listen on for agents (`tilework agent HOST:PORT`, one per node); default "
            "127.0.0.1:7070, or with --cluster any port.",
        ),
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="auto|ADDRESS",
            help="Let Ray start the agents, on --nodes of the cluster at this address, or on all. With --durable, Ray "
            "keeps the server, too, also when this command is killed. Needs the extra cluster.",
        ),
    ] = None
    state_copies: Annotated[
        int,
        typer.Option(
            "--state-copies",
            min=1,
            help="With --nodes: number of nodes that keep the state of a request. With 2, a lost node costs its "
            "requests little, and each state crosses the network once more.",
        ),
    ] = 1
    standby: Annotated[
        bool,
        typer.Option(
            "--standby",
            help="With --durable: wait until another server that uses the directory ends or hangs; then take over.",
        ),
    ] = False


def parse_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT. Raises UserError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise UserError(f"HOST:PORT is {text!r}; give an address and a port, such as 0.0.0.0:7070")
    return host.strip("[]"), int(port)
