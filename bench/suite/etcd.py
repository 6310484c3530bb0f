"""An etcd of several members on this machine's loopback. Its program comes with the Debian package etcd-server."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

_START_S = 30.0


@dataclass
class Etcd:
    """The members, and the ports where clients reach them."""

    ports: Sequence[int]
    members: Sequence[subprocess.Popen[bytes]]

    @property
    def address(self) -> str:
        """What `--registry` takes."""
        return "etcd://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def leader(self) -> int:
        """Which member the others follow."""
        for index, port in enumerate(self.ports):
            try:
                status = httpx.post(f"http://127.0.0.1:{port}/v3/maintenance/status", json={}, timeout=1).json()
            except httpx.TransportError:
                continue
            if status.get("leader") == status["header"]["member_id"]:
                return index
        raise AssertionError("no member leads")

    def kill(self, index: int) -> None:
        self.members[index].kill()
        self.members[index].wait()


@contextmanager
def etcd(directory: Path, num_members: int = 3) -> Iterator[Etcd]:
    """An etcd that answers."""
    ports = _free_ports(2 * num_members)
    clients, peers = ports[:num_members], ports[num_members:]
    names = [f"m{index}" for index in range(num_members)]
    cluster = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in zip(names, peers, strict=True))
    with ExitStack() as stack:
        running = Etcd(clients, [])
        for name, client, peer in zip(names, clients, peers, strict=True):
            log = stack.enter_context((directory / f"{name}.log").open("wb"))
            command = ["etcd", "--name", name, "--data-dir", str(directory / name), "--initial-cluster", cluster]
            command += ["--initial-cluster-state", "new", "--initial-cluster-token", directory.name]
            for option, port in (("client", client), ("peer", peer)):
                command += [f"--listen-{option}-urls", f"http://127.0.0.1:{port}"]
            command += ["--advertise-client-urls", f"http://127.0.0.1:{client}"]
            command += ["--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"]
            running.members = [*running.members, subprocess.Popen(command, stdout=log, stderr=log)]
            stack.callback(_end, running.members[-1])
        _await_health(clients)
        yield running


def _end(member: subprocess.Popen[bytes]) -> None:
    member.send_signal(signal.SIGKILL)
    member.wait()


def _await_health(ports: Sequence[int]) -> None:
    end_s = time.monotonic() + _START_S
    for port in ports:
        while True:
            assert time.monotonic() < end_s, "etcd did not start"
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=1).json().get("health") == "true":
                    break
            except (httpx.TransportError, ValueError):
                pass
            time.sleep(0.05)


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in listeners:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in listeners]
