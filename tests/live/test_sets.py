"""Two servers of simulated devices that share an etcd of three members, and agents that go where they are needed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from suite.etcd import Etcd, etcd

from debian import has
from live.nodes import TOKEN
from tilework.cli.local_agents import session
from tilework.client.drive import drive
from tilework.client.record import CallEnd
from tilework.formats.workload import WorkloadRequest
from waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has("etcd", "etcd-server"), reason="needs the Debian package etcd-server"),
]
WINDOW_S = 5
ASYNC = {"Prefer": "respond-async"}
MODEL = "flux.1-dev"


@dataclass
class Cluster:
    """An etcd, servers by the name of their set, and agents; all of them processes on this machine."""

    registry: Etcd
    servers: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    agents: list[subprocess.Popen[str]] = field(default_factory=list)
    urls: dict[str, str] = field(default_factory=dict)

    def _start(self, *words: str) -> subprocess.Popen[str]:
        settings = {
            "TILEWORK_CLUSTER_TOKEN": TOKEN,
            "TILEWORK_REGISTRY": self.registry.address,
            "TILEWORK_SET_WINDOW_S": str(WINDOW_S),
        }
        command = [sys.executable, "-m", "tilework", *words]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TILEWORK_")} | settings
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)

    def serve(self, name: str) -> None:
        """A server with places for two nodes, which starts with one."""
        words = ["serve", "--port", "0", "--json", "--set", name, "--backend", "modelled", "--workers", "1"]
        words += [
            "--cost",
            "flux1dev_h100_eager",
            "--nodes",
            "2",
            "--least-nodes",
            "1",
            "--agents",
            "127.0.0.1:0",
            "--max-backlog",
            "100",
        ]
        self.servers[name] = self._start(*words)

    def await_servers(self) -> None:
        for name, server in self.servers.items():
            assert server.stdout is not None
            self.urls[name] = json.loads(server.stdout.readline())["url"]

    def add_agent(self) -> None:
        self.agents.append(self._start("agent"))

    def sets(self, by: str) -> Any:
        return httpx.get(f"{self.urls[by]}/v1/sets").json()

    def nodes(self, by: str, name: str) -> list[Any]:
        """The nodes of a set that are up, as a server knows it."""
        card = next((one for one in self.sets(by)["data"] if one["name"] == name), {"nodes": []})
        return [one for one in card["nodes"] if one["utilisation"] is not None]

    def close(self) -> None:
        for process in (*self.servers.values(), *self.agents):
            kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """Kill it and all that it has started, as if its machine had lost its power."""
    for pid in session(process.pid):
        os.kill(pid, 9)
    process.wait()


@contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    with etcd(directory) as registry:
        running = Cluster(registry)
        try:
            yield running
        finally:
            running.close()


def fill(url: str) -> None:
    """Send requests until one is refused."""
    body = {"prompt": "x", "size": "1024x1024"}
    with httpx.Client(base_url=url, timeout=30) as http:
        while (answer := http.post("/v1/images/generations", json=body, headers=ASYNC)).is_success:
            pass
    assert answer.status_code == 429


def ask(url: str, max_hops: int) -> Any:
    wanted = WorkloadRequest(arrival_s=0, pipeline=MODEL, height=1024, width=1024, steps=28, prompt="x")
    return asyncio.run(drive(url, [wanted], max_hops=max_hops))[0]


def test_sets_help_each_other_and_outlive_their_parts(tmp_path: Path) -> None:
    """A full set sends a client to the other and gets a node of it; then an etcd member and the leader are killed."""
    with cluster(tmp_path) as running:
        for name in "ab":
            running.serve(name)
        for _ in range(3):
            running.add_agent()
        running.await_servers()
        eventually(lambda: len(running.nodes("a", "a")) + len(running.nodes("a", "b")) == 3)
        full = "a" if len(running.nodes("a", "a")) == 1 else "b"
        idle = "b" if full == "a" else "a"
        eventually(lambda: running.sets(full)["is_current"] and len(running.nodes(full, idle)) == 2)

        fill(running.urls[full])
        assert ask(running.urls[full], max_hops=0).status is CallEnd.REJECTED
        followed = ask(running.urls[full], max_hops=1)
        assert (followed.status, followed.num_hops) == (CallEnd.DONE, 1), followed

        eventually(lambda: len(running.nodes(full, full)) == 2)
        came = next(one for one in running.nodes(full, full) if f"it gets 1 of {idle}" in one["why"])
        assert came["epoch"]
        eventually(lambda: len(running.nodes(full, idle)) == 1)  # Its record is up to a second old.

        running.registry.kill(running.registry.leader())
        eventually(lambda: running.sets(full)["is_current"] and running.sets(idle)["is_current"])
        fill(running.urls[full])
        assert ask(running.urls[full], max_hops=1).num_hops == 1

        leader = running.sets(full)["node_manager"]
        other = "a" if leader == "b" else "b"
        kill(running.servers[leader])
        eventually(lambda: running.sets(other)["node_manager"] == other)
        eventually(lambda: [one["name"] for one in running.sets(other)["data"]] == [other])
