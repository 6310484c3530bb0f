"""A server that Ray keeps, followed from the command line: it goes on when this command is killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tilework.cli.console import UserError, console, out, user_errors
from tilework.cli.nodes import kept_name

KEPT = "TILEWORK_KEPT"
"""The variable of the environment that says to a server that Ray keeps it."""
_PAUSE_S = 1.0  # Until Ray is asked again.


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
        if line := _told(actor.ready):
            out.print(line if json else f"Ray keeps the server: {line}; stop with Ctrl-C", soft_wrap=True, markup=False)
        why = _told(actor.ended)
    except KeyboardInterrupt:
        _told(actor.end)
    ray.kill(actor)
    if why:
        raise UserError(f"the server could not be kept: {why}")


def _told(method: Any) -> Any:
    """What the actor answers, or the one that Ray starts in its place when its process is lost.

    Raises UserError if it has ended for good.
    """
    import ray
    from ray.exceptions import ActorUnavailableError, RayActorError

    while True:
        try:
            return ray.get(method.remote())
        except ActorUnavailableError:
            console.print("the process that keeps the server was lost; Ray starts another one", style="yellow")
            time.sleep(_PAUSE_S)
        except RayActorError as error:
            why = str(error).strip().splitlines()[-1]
            raise UserError(f"nothing keeps the server any more: {why}; the same command starts it again") from error
