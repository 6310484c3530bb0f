"""Agents in processes of their own on this machine, for an engine in the process of the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

TOKEN = "known to both"


@dataclass
class Agents:
    """Agents that connect to a port. What a killed one leaves behind is gone, too: its session ends as a whole."""

    port: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tilework", "agent", f"127.0.0.1:{self.port}"]
        environment = os.environ | {"TILEWORK_CLUSTER_TOKEN": TOKEN}
        agent = subprocess.Popen(command, env=environment, start_new_session=True)
        self.processes.append(agent)
        return agent

    def kill(self, agent: subprocess.Popen[bytes]) -> None:
        """Kill an agent, its workers, and what starts them: as if the node had lost its power."""
        for pid in session(agent.pid):
            os.kill(pid, signal.SIGKILL)
        agent.wait()

    def close(self) -> None:
        for agent in self.processes:
            if agent.poll() is None:
                self.kill(agent)


def session(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            found.append(int(path.parent.name))
    return found


@asynccontextmanager
async def agents(port: int, count: int) -> AsyncIterator[Agents]:
    """So many agents for an executor that listens on this port."""
    running = Agents(port)
    try:
        for _ in range(count):
            running.start()
        yield running
    finally:
        running.close()
