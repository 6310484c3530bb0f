"""A server that Ray keeps, followed from the command line: it goes on when this command is killed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tilework.cli.console import UserError, console, out, user_errors
from tilework.cli.nodes import kept_name

KEPT = "TILEWORK_KEPT"
"""The variable of the environment that says to a server that Ray keeps it."""


def is_kept() -> bool:
    return KEPT in os.environ


def follow(cluster: str, host: str | None, durable: Path, *, json: bool) -> None:
    """Let an actor of the cluster run this very command, or find the one that does, until a signal ends the server.

    Raises UserError.
    """
    import ray

    from tilework.runtime.executor import WorkerStartFailed
    from tilework.runtime.nodes.ray_agents import connect
    from tilework.runtime.nodes.ray_server import keeper

    with user_errors(WorkerStartFailed), console.status("asking Ray for a server"):
        connect(cluster, host)
        command = [sys.executable, "-m", "tilework", *sys.argv[1:], "--standby", "--json"]
        actor = keeper(kept_name(durable.resolve()), command, os.environ | {KEPT: "1"})
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # The server goes on.
    why = ""
    try:
        if line := ray.get(actor.ready.remote()):
            out.print(line if json else f"Ray keeps the server: {line}; stop with Ctrl-C", soft_wrap=True, markup=False)
        why = ray.get(actor.ended.remote())
    except KeyboardInterrupt:
        ray.get(actor.end.remote())
    ray.kill(actor)
    if why:
        raise UserError(f"the server could not be kept: {why}")
