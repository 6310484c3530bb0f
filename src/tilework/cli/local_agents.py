"""Agents of nodes as processes of this machine, to try what a server does when one of them is lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tilework.cli.options.nodes import TOKEN


@dataclass(kw_only=True, eq=False)
class LocalAgents:
    """Agents for a server that listens for them on `port` of the loopback and knows `token`; it may start later.

    What they say goes to the file `log`, or to stderr.
    """

    port: int
    token: str
    log: Path | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> subprocess.Popen[bytes]:
        """Start one more agent, in a session of its own."""
        command = [sys.executable, "-m", "tilework", "agent", f"127.0.0.1:{self.port}"]
        environment = os.environ | {TOKEN: self.token}
        with nullcontext() if self.log is None else self.log.open("ab") as log:
            agent = subprocess.Popen(command, env=environment, stderr=log, start_new_session=True)
        self.processes.append(agent)
        return agent

    def kill(self, agent: subprocess.Popen[bytes]) -> None:
        """Kill an agent, its workers, and what starts them: as if the node had lost its power."""
        for pid in session(agent.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def replace_last(self) -> None:
        """Kill the agent that was started last, and start another one."""
        self.kill(self.processes[-1])
        self.start()

    def close(self) -> None:
        """Kill those that still run."""
        for agent in self.processes:
            if agent.poll() is None:
                self.kill(agent)


@contextmanager
def local_agents(count: int, *, port: int, token: str, log: Path | None = None) -> Iterator[LocalAgents]:
    """Start this number of agents; end all of them at the end."""
    agents = LocalAgents(port=port, token=token, log=log)
    try:
        for _ in range(count):
            agents.start()
        yield agents
    finally:
        agents.close()


def free_port() -> int:
    """Return a port of the loopback that was free a moment ago."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def session(leader: int) -> list[int]:
    """Return the processes of a session. One that ends meanwhile is left out."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            found.append(int(path.parent.name))
    return found
