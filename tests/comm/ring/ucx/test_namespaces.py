"""A consumer and a producer on two nodes: network namespaces that are joined by a veth."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

import tilework
from waiting import eventually

pytest.importorskip("tilework.comm.ring._native", reason="the C extension was not built: no compiler")
pytest.importorskip("libucx", reason="the extra ucx is not installed")

CONSUMER = """
import sys
from tilework.comm.ring.consumer import Ring
from tilework.comm.ring.network import Network
with Ring.create(1 << 20, 64, network=Network(host="10.77.0.1"), abandon_after_s=0.05, fence_after_s=0.1) as ring:
    print(ring.address(), flush=True)
    for number in range(200):
        with ring.recv(timeout_s=60) as message:
            assert message.header == b"%d" % number
            assert bytes(message.payload) == bytes([number]) * 5000 * (number % 9)
    while ring.stats.producers:
        assert ring.recv(timeout_s=0.01) is None
"""
PRODUCER = """
import sys
from tilework.comm.ring.producer import Producer
with Producer.connect(sys.argv[1]) as producer:
    for number in range(200):
        producer.send(b"%d" % number, bytes([number]) * 5000 * (number % 9), timeout_s=60)
"""


class Nodes:
    """Two namespaces, whose addresses are 10.77.0.1 and 10.77.0.2, and what was started there."""

    def __init__(self) -> None:
        self.names = [f"ring-{os.getpid()}-{number}" for number in (1, 2)]
        self._started: list[subprocess.Popen[str]] = []

    def make(self) -> None:
        first, second = self.names
        made = ip("netns", "add", first)
        if made.returncode:
            pytest.skip(f"namespaces cannot be made here: {made.stderr.strip()}")
        for arguments in (
            ("netns", "add", second),
            ("-n", first, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", second),
            ("-n", first, "addr", "add", "10.77.0.1/24", "dev", "wire"),
            ("-n", second, "addr", "add", "10.77.0.2/24", "dev", "wire"),
            *(("-n", name, "link", "set", device, "up") for name in self.names for device in ("lo", "wire")),
        ):
            result = ip(*arguments)
            assert result.returncode == 0, result.stderr
        # The kernel may take a second to see that both ends are up. UCX passes over a link that is not.
        eventually(lambda: all("state UP" in ip("-n", name, "link", "show", "wire").stdout for name in self.names))

    def start(self, node: int, program: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", self.names[node], sys.executable, "-c", program, *arguments]
        path = os.pathsep.join([os.path.dirname(tilework.__path__[0]), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path} | variables
        pipe = subprocess.PIPE
        self._started.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment))
        return self._started[-1]

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()
        for name in self.names:
            ip("netns", "del", name)


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command (Debian package iproute2)")
    made = Nodes()
    try:
        made.make()
        yield made
    finally:
        made.close()


def address_of(consumer: subprocess.Popen[str]) -> str:
    assert consumer.stdout is not None
    address = consumer.stdout.readline().strip()
    assert address.startswith("ucx://10.77.0.1:"), consumer.communicate()[1]
    return address


@pytest.mark.slow
def test_messages_pass_between_nodes(nodes: Nodes) -> None:
    consumer = nodes.start(0, CONSUMER)
    producer = nodes.start(1, PRODUCER, address_of(consumer))
    errors = [process.communicate(timeout=90)[1] for process in (producer, consumer)]
    assert (producer.returncode, consumer.returncode) == (0, 0), "\n".join(errors)


@pytest.mark.slow
def test_a_producer_without_a_way_to_the_other_node_is_told_so(nodes: Nodes) -> None:
    consumer = nodes.start(0, CONSUMER)
    address = address_of(consumer)
    lost = nodes.start(1, PRODUCER, address, UCX_NET_DEVICES="lo")
    assert "RingError: UCX: no network that both nodes had up when they began" in lost.communicate(timeout=90)[1]
    producer = nodes.start(1, PRODUCER, address)
    errors = [process.communicate(timeout=90)[1] for process in (producer, consumer)]
    assert (producer.returncode, consumer.returncode) == (0, 0), "\n".join(errors)


@pytest.mark.slow
def test_a_node_that_is_cut_off_is_noticed(nodes: Nodes) -> None:
    """Nothing says that the wire is gone: the consumer's probes are not answered."""
    consumer = nodes.start(0, CONSUMER)
    stays = "    import signal\n    print('sent', flush=True)\n    signal.pause()\n"
    producer = nodes.start(1, PRODUCER + stays, address_of(consumer))
    assert producer.stdout is not None
    assert producer.stdout.readline() == "sent\n"
    ip("-n", nodes.names[1], "link", "set", "wire", "down")
    assert consumer.wait(timeout=60) == 0
