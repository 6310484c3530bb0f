"""`tilework agent`: a node of a server on another machine."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import suppress
from typing import Annotated

import typer

from tilework.cli.console import UserError, console, require_serve_extra
from tilework.cli.nodes import token
from tilework.cli.options.common import examples
from tilework.cli.options.nodes import parse_address
from tilework.cli.options.serve import LogLevel, LogLevelName

EXAMPLE = examples("tilework agent 10.0.0.5:7070", "TILEWORK_CLUSTER_TOKEN=... tilework agent 10.0.0.5:7070")


def command(
    server: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Where the server listens for agents (serve --agents).")
    ],
    log_level: LogLevelName = LogLevel.WARNING,
) -> None:
    """Run workers on this machine for `tilework serve --nodes` on another (docs/cluster.md).

    The server says which models and how many workers. Their paths are those of this machine. When its server has ended,
    the agent waits for the next one. After Ctrl-C or SIGTERM it ends what it runs, and leaves when its states are on
    other nodes; after a second one it ends at once.
    """
    require_serve_extra()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("tilework").setLevel(log_level.upper())
    host, port = parse_address(server)
    if not port:
        raise UserError(f"HOST:PORT is {server!r}; give the port that the server listens on")
    console.print(f"an agent for the server at {host}:{port}; stop with Ctrl-C", highlight=False)
    asyncio.run(_serve(host, port, token()))


async def _serve(host: str, port: int, known: bytes) -> None:
    from setproctitle import setproctitle

    from tilework.runtime.nodes.agent import serve_node

    setproctitle("tilework: agent")
    loop, leaving = asyncio.get_running_loop(), asyncio.Event()
    serving = loop.create_task(serve_node(host, port, known, leaving))

    def end() -> None:
        serving.cancel() if leaving.is_set() else leaving.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    with suppress(asyncio.CancelledError):
        await serving
