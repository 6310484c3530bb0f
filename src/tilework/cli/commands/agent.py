"""`tilework agent`: a node of a server on another machine."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import Annotated

import typer

from tilework.cli.console import UserError, console, require_serve_extra, user_errors
from tilework.cli.nodes import told_token, user_token
from tilework.cli.options.common import examples
from tilework.cli.options.logs import LogFile, LogLevel, LogLevelName, ServerLog
from tilework.cli.options.nodes import parse_address
from tilework.sets.address import open_registry
from tilework.sets.registry import BadRegistry, Registry
from tilework.sets.routing import RoutedAgent

EXAMPLE = examples(
    "tilework agent 10.0.0.5:7070",
    "TILEWORK_CLUSTER_TOKEN=... tilework agent 10.0.0.5:7070",
    "tilework agent 10.0.0.5:7070,10.0.0.6:7070 --server-wait 300",
    "tilework agent --registry etcd://10.0.0.2,10.0.0.3,10.0.0.4",
)


def command(
    server: Annotated[
        str | None,
        typer.Argument(
            metavar="HOST:PORT[,HOST:PORT]",
            help="Address on which the server listens for agents (serve --agents); with a standby, also the standby's.",
        ),
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(
            metavar="etcd://HOST:PORT[,HOST:PORT]",
            envvar="TILEWORK_REGISTRY",
            help="Instead of HOST:PORT: work for the servers of this registry, always for the one that its node "
            "manager names.",
        ),
    ] = None,
    server_wait: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Seconds that an agent keeps workers and states of requests when the server is gone, until a server "
            "is there again.",
        ),
    ] = 60.0,
    log_level: LogLevelName = LogLevel.WARNING,
    log_file: LogFile = None,
) -> None:
    """Run workers on this machine for `tilework serve --nodes` on another (docs/cluster.md).

    The server says which models and how many workers. Their paths are those of this machine. When its server has ended,
    the agent waits for the next one, and so do its workers for a while if the server was killed. After Ctrl-C or
    SIGTERM it ends what it runs, and leaves when its states are on other nodes; after a second one it ends at once.
    SIGHUP lets it open its log file anew. Without TILEWORK_CLUSTER_TOKEN the server must be of the same user on this
    machine.
    """
    if (server is None) == (registry is None):
        raise UserError("give either the HOST:PORT of a server, or --registry")
    require_serve_extra()
    with user_errors(OSError):
        log = ServerLog(log_level, log_file)
    for address in () if server is None else server.split(","):
        if not parse_address(address)[1]:
            raise UserError(f"HOST:PORT is {address!r}; give the port that the server listens on")
    where = f"the server at {server}" if registry is None else f"the servers of {registry}"
    with user_errors(BadRegistry):
        opened = None if registry is None else open_registry(registry)
    console.print(f"an agent for {where}; stop with Ctrl-C", highlight=False, soft_wrap=True)
    asyncio.run(_serve(server, opened, server_wait, log))


async def _serve(server: str | None, registry: Registry | None, server_wait_s: float, log: ServerLog) -> None:
    """Be a node of the server at an address, or of those of a registry, until a signal comes."""
    from setproctitle import setproctitle

    from tilework.runtime.nodes.agent import Servers, default_name, serve_node
    from tilework.server.reload import Terminal

    loop = asyncio.get_running_loop()
    name = default_name()
    leaving = asyncio.Event()
    known = told_token() or user_token()

    async def serve(addresses: str, leaving: asyncio.Event) -> None:
        servers = Servers([parse_address(one) for one in addresses.split(",")], known)
        await serve_node(servers, leaving, name, server_wait_s)

    if registry is None:
        assert server is not None
        being = serve(server, leaving)
    else:
        being = RoutedAgent(registry, name, serve).run(leaving)
    serving = loop.create_task(being)

    def end() -> None:
        serving.cancel() if leaving.is_set() else leaving.set()

    terminal = Terminal()
    loop.add_signal_handler(signal.SIGHUP, lambda: end() if terminal.has_closed else log.reopen())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    setproctitle("tilework: agent")  # From now on signals mean what they should.
    with suppress(asyncio.CancelledError):
        await serving
