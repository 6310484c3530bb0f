"""Servers over several nodes: the nodes asked for, the token that agents must know, and servers that Ray keeps."""

from __future__ import annotations

import os
import secrets
import signal
import stat
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilework.cli.console import UserError, console, out, user_errors
from tilework.cli.options.nodes import KEPT, TOKEN, NodeGroup, parse_address
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
        """Make the executor with these workers on each node.

        Raises BadNodes; WorkerStartFailed if there is no cluster.
        """
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
    """Return the nodes asked for; None if the server has no nodes but its machine. Raises UserError."""
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
    """Raise UserError if a server of one machine is given options of nodes."""
    copies = None if asked.state_copies == 1 else asked.state_copies
    given = {"--agents": asked.agents, "--least-nodes": asked.least_nodes, "--state-copies": copies}
    for flag, value in given.items():
        if value is not None:
            raise UserError(f"{flag} is {value}, and the server has no nodes; give --nodes, or leave it out")


def kept_name(durable: Path) -> str:
    """Return the name by which Ray knows the server of a durable directory."""
    return f"tilework {durable}"


def token(host: str) -> bytes:
    """Return the token that a server listening for agents on `host` and its agents must share. Raises UserError.

    On the loopback that of the user, if it was told none; elsewhere none.
    """
    return told_token() or (user_token() if host in LOOPBACK else b"")


def told_token() -> bytes:
    """Return the token of the environment; it is no option, since lists of processes show options."""
    return os.environ.get(TOKEN, "").encode()


_NAME = "cluster-token"


def user_token() -> bytes:
    """Return the one in tilework/cluster-token in $XDG_STATE_HOME, which is ~/.local/state if not set.

    The first process makes it, readable by this user alone. It stays, so that agents outlive their server. Raises
    UserError.
    """
    try:
        return _read(_directory())
    except (OSError, RuntimeError) as error:  # The latter if nothing says where the home of this user is.
        raise UserError(
            f"no token is set, and that of this user cannot be had: {error}; "
            f"set {TOKEN}, the same for server and agents"
        ) from error


def _directory() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    directory = (Path(state) if state else Path.home() / ".local" / "state") / "tilework"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def _read(directory: Path) -> bytes:
    """Read the token. Raises OSError; UserError if others may know it."""
    path = directory / _NAME
    if not path.exists():
        _make(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise UserError(f"{path} is of another user, or others may read it; remove it, and a new one is made")
        token = file.read().strip()
    if not token:
        raise UserError(f"{path} is empty; remove it, and a new one is made")
    return token


def _make(path: Path) -> None:
    """Write it whole or not at all; another process may do the same now, and the first one counts."""
    hidden = path.with_name(f".{_NAME}-{os.getpid()}")
    descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secrets.token_hex(16).encode())
    finally:
        os.close(descriptor)
    with suppress(FileExistsError):
        os.link(hidden, path)
    hidden.unlink()


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
    """Return the answer of the actor, or of the one that Ray starts in its place when its process is lost.

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
