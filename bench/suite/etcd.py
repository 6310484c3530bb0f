"""An etcd of several members on this machine's loopback. Its program comes with the Debian package etcd-server."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

_START_S = 30.0


@dataclass
class Etcd:
    """The members, and the ports where clients reach them."""

    ports: Sequence[int]
    directory: Path
    commands: Sequence[Sequence[str]]
    members: list[subprocess.Popen[bytes]] = field(default_factory=list)

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
        """Also one that is suspended."""
        self.members[index].kill()
        self.members[index].wait()

    def suspend(self, index: int) -> None:
        """Let it answer nothing, though its connections stay, until it is told to go on."""
        self.members[index].send_signal(signal.SIGSTOP)

    def resume(self, index: int) -> None:
        self.members[index].send_signal(signal.SIGCONT)

    def wipe(self, index: int) -> None:
        """Remove what one that was killed has written."""
        shutil.rmtree(self.directory / f"m{index}")

    def start(self, index: int) -> None:
        """Start a member, by the same command each time. It does not answer yet."""
        with (self.directory / f"m{index}.log").open("ab") as log:
            member = subprocess.Popen(self.commands[index], stdout=log, stderr=log)
        self.members[index : index + 1] = [member]

    def await_health(self) -> None:
        """Raises AssertionError if a member does not answer in time."""
        _await_health(self.ports)


@contextmanager
def etcd(directory: Path, num_members: int = 3) -> Iterator[Etcd]:
    """An etcd that answers."""
    ports = _free_ports(2 * num_members)
    clients, peers = ports[:num_members], ports[num_members:]
    names = [f"m{index}" for index in range(num_members)]
    cluster = ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in zip(names, peers, strict=True))
    commands = list[list[str]]()
    for name, client, peer in zip(names, clients, peers, strict=True):
        command = ["etcd", "--name", name, "--data-dir", str(directory / name), "--initial-cluster", cluster]
        command += ["--initial-cluster-state", "new", "--initial-cluster-token", directory.name]
        for option, port in (("client", client), ("peer", peer)):
            command += [f"--listen-{option}-urls", f"http://127.0.0.1:{port}"]
        command += ["--advertise-client-urls", f"http://127.0.0.1:{client}"]
        command += ["--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"]
        commands.append(command)
    running = Etcd(clients, directory, commands)
    try:
        for index in range(num_members):
            running.start(index)
        running.await_health()
        yield running
    finally:
        for index in range(len(running.members)):
            running.kill(index)


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
