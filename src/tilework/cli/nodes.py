"""Kinds of server by their machines, the token that agents must know, and servers that Ray keeps."""

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
from typing import TYPE_CHECKING, Any, ClassVar

from tilework.cli.console import UserError, console, out, user_errors
from tilework.cli.options.nodes import KEPT, TOKEN, NodeGroup, parse_address
from tilework.distribution import install_command

if TYPE_CHECKING:
    from tilework.runtime.executor import Executor
    from tilework.runtime.local_config import LocalConfig
    from tilework.runtime.nodes.config import NodesConfig
    from tilework.server.sets import NodePlaces


_AGENTS = "127.0.0.1:7070"
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class ThisMachine:
    """A server of this machine alone."""

    num_nodes: ClassVar[int] = 1

    def __str__(self) -> str:
        return ""

    def executor(self, each: LocalConfig) -> tuple[Executor, None]:
        """Make the executor with these workers. Raises WorkerStartFailed."""
        from tilework.runtime.local_executor import LocalExecutor

        return LocalExecutor(each), None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nodes:
    """Nodes whose agents connect to a `port`, 0: a free one."""

    port: int = 0
    state_copies: int = 1
    least_nodes: int = 0

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentNodes(_Nodes):
    """A server over a number of nodes, whose agents are started elsewhere."""

    num_nodes: int
    host: str

    def __str__(self) -> str:
        return f" on {_counted(self.num_nodes)} (agents at {self.host}:{self.port})"

    def executor(self, each: LocalConfig) -> tuple[Executor, NodePlaces]:
        """Make the executor with these workers on each node, which a node manager may move. Raises BadNodes."""
        from tilework.runtime.nodes.executor import NodesExecutor

        executor = NodesExecutor(self._config(each, self.num_nodes, self.host, token(self.host)))
        return executor, executor


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNodes(_Nodes):
    """A server over nodes of a Ray `cluster`, all if there is no number. Ray starts their agents.

    Without a `host` this machine has the address that Ray knows.
    """

    cluster: str
    num_nodes: int | None = None
    host: str | None = None

    def __str__(self) -> str:
        return f" on {'all nodes' if self.num_nodes is None else _counted(self.num_nodes)} (started by Ray)"

    def executor(self, each: LocalConfig) -> tuple[Executor, None]:
        """Make the executor with these workers on each node.

        Raises BadNodes; WorkerStartFailed if there is no cluster.
        """
        from tilework.runtime.nodes.executor import NodesExecutor
        from tilework.runtime.nodes.ray_agents import RayAgents, new_token

        is_cuda = each.sources[0].device == "cuda"
        starter = RayAgents(
            address=self.cluster,
            num_cpus=each.num_workers,
            num_accelerators=each.num_workers if is_cuda else 0,
            name=None if each.owner is None else kept_name(each.owner),
        )
        host = starter.connect(self.host)
        num_nodes = self.num_nodes or starter.num_nodes()
        return NodesExecutor(self._config(each, num_nodes, host, told_token() or new_token()), starter), None


Machines = ThisMachine | AgentNodes | RayNodes
"""Kinds of server, by the machines that have its workers."""


def machines_of(asked: NodeGroup) -> Machines:
    """Return the machines asked for. Raises UserError."""
    if asked.cluster is None and asked.nodes is None:
        return ThisMachine()
    host, port = (None, 0) if asked.agents is None else parse_address(asked.agents)
    more = {"state_copies": asked.state_copies, "least_nodes": asked.least_nodes or 0}
    if asked.cluster is None:
        assert asked.nodes is not None
        host, port = (host, port) if host is not None else parse_address(_AGENTS)
        return AgentNodes(num_nodes=asked.nodes, host=host, port=port, **more)
    if find_spec("ray") is None:
        raise UserError(f"--cluster needs Ray; run: {install_command('cluster')}")
    return RayNodes(cluster=asked.cluster, num_nodes=asked.nodes, host=host, port=port, **more)


def _counted(num_nodes: int) -> str:
    return f"{num_nodes} node{'' if num_nodes == 1 else 's'}"


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


def follow(nodes: RayNodes, durable: Path, *, json: bool) -> None:
    """Let an actor of the cluster run this very command, or find the one that does, until a signal ends the server.

    Raises UserError.
    """
    import ray

    from tilework.runtime.executor import WorkerStartFailed
    from tilework.runtime.nodes.ray_agents import connect
    from tilework.runtime.nodes.ray_server import keeper

    with user_errors(WorkerStartFailed), console.status("asking Ray for a server"):
        connect(nodes.cluster, nodes.host)
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
