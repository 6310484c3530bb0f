"""A server with a standby, and agents, each on a host of a network of its own (`suite.network`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from suite.case import CaseFailed
from suite.children import end_with_parent
from suite.network import Network, Way, network
from tilework.cli.local_agents import session
from tilework.cli.options.nodes import TOKEN

_SECRET = "for this bench"
_HTTP, _AGENTS = 8000, 7070


@dataclass(kw_only=True)
class Hosts:
    """Servers on `servers`, which use one durable directory, and an agent on each of `nodes`."""

    network: Network
    folder: Path
    servers: Sequence[str]
    nodes: Sequence[str]
    options: Sequence[str]
    running: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    _starter: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    """Starts all processes: the kernel ends one with the thread that has started it (`end_with_parent`)."""

    def url(self, server: str) -> str:
        return f"http://{self.network.address(server)}:{_HTTP}"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def start_server(self, host: str) -> None:
        """Start a server there, which stands by while there is another one."""
        address = self.network.address(host)
        where = ["--host", address, "--port", str(_HTTP), "--agents", f"{address}:{_AGENTS}", "--standby"]
        nodes = ["--nodes", str(len(self.nodes)), "--least-nodes", "1", "--durable", str(self.state), "--json"]
        self._start(host, ["serve", *where, *nodes, *self.options])

    def start_agent(self, host: str) -> None:
        addresses = ",".join(f"{self.network.address(one)}:{_AGENTS}" for one in self.servers)
        self._start(host, ["agent", addresses])

    def said(self, host: str) -> str:
        """What has been written to stderr there."""
        path = self.folder / f"{host}.log"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def await_ready(self, host: str) -> None:
        """Wait until the server there serves. Raises CaseFailed."""
        output = self.running[host].stdout
        assert output is not None
        if not output.readline():
            raise CaseFailed(f"the server on {host} did not start: {self.said(host)[-2000:]}")

    def signal(self, host: str, number: signal.Signals) -> None:
        """Send a signal to all processes there, as a machine that stands still or loses its power has it."""
        for pid in session(self.running[host].pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGKILL:
            self._close(host)

    def close(self) -> None:
        for host in list(self.running):
            self.signal(host, signal.SIGKILL)
        self._starter.shutdown()

    def _start(self, host: str, command: Sequence[str]) -> None:
        self._starter.submit(self._start_there, host, command).result()

    def _start_there(self, host: str, command: Sequence[str]) -> None:
        environment = os.environ | {TOKEN: _SECRET, "TILEWORK_PROFILES": str(self.folder / "costs.sqlite")}
        with (self.folder / f"{host}.log").open("a") as log:
            self.running[host] = subprocess.Popen(
                [*self.network.on(host), sys.executable, "-m", "tilework", *command],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509
            )

    def _close(self, host: str) -> None:
        process = self.running.pop(host)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@contextmanager
def hosts(
    folder: Path, *, num_servers: int = 2, num_nodes: int = 3, options: Sequence[str] = (), seed: int = 1, way: Way
) -> Iterator[Hosts]:
    """Hosts that are joined by ways of this kind; the first server serves on all nodes, and the others stand by."""
    servers = [f"s{number}" for number in range(num_servers)]
    nodes = [f"n{number}" for number in range(num_nodes)]
    with network(*servers, *nodes, seed=seed) as joined:
        joined.set_all(way)
        all_of_it = Hosts(network=joined, folder=folder, servers=servers, nodes=nodes, options=options)
        try:
            all_of_it.start_server(servers[0])
            for node in nodes:
                all_of_it.start_agent(node)
            all_of_it.await_ready(servers[0])
            for server in servers[1:]:
                all_of_it.start_server(server)
            yield all_of_it
        finally:
            all_of_it.close()


def log_lines(state: Path) -> list[list[str]]:
    """The event logs of all starts, the first one first."""
    logs = sorted(state.glob("events-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))
    return [path.read_text("utf-8").splitlines() for path in logs]
