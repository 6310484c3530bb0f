"""A consumer and a producer on two nodes: network namespaces that are joined by a veth."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

import tilework

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


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Names of two namespaces, whose addresses are 10.77.0.1 and 10.77.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command (Debian package iproute2)")
    first, second = (f"ring-{os.getpid()}-{number}" for number in (1, 2))
    try:
        made = _ip("netns", "add", first)
        if made.returncode:
            pytest.skip(f"namespaces cannot be made here: {made.stderr.strip()}")
        setup = (
            ("netns", "add", second),
            ("-n", first, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", second),
            ("-n", first, "addr", "add", "10.77.0.1/24", "dev", "wire"),
            ("-n", second, "addr", "add", "10.77.0.2/24", "dev", "wire"),
            *(("-n", name, "link", "set", device, "up") for name in (first, second) for device in ("lo", "wire")),
        )
        for arguments in setup:
            result = _ip(*arguments)
            assert result.returncode == 0, result.stderr
        yield first, second
    finally:
        _ip("netns", "del", first)
        _ip("netns", "del", second)


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)


def _start(node: str, program: str, *arguments: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", node, sys.executable, "-c", program, *arguments]
    path = os.pathsep.join([os.path.dirname(tilework.__path__[0]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_messages_pass_between_nodes(nodes: tuple[str, str]) -> None:
    consumer = _start(nodes[0], CONSUMER)
    assert consumer.stdout is not None
    address = consumer.stdout.readline().strip()
    assert address.startswith("ucx://10.77.0.1:"), consumer.communicate()[1]
    producer = _start(nodes[1], PRODUCER, address)
    errors = [process.communicate(timeout=90)[1] for process in (producer, consumer)]
    assert (producer.returncode, consumer.returncode) == (0, 0), errors


@pytest.mark.slow
def test_a_node_that_is_cut_off_is_noticed(nodes: tuple[str, str]) -> None:
    """Nothing says that the wire is gone: the consumer's probes are not answered."""
    consumer = _start(nodes[0], CONSUMER)
    assert consumer.stdout is not None
    address = consumer.stdout.readline().strip()
    stays = "    import signal\n    print('sent', flush=True)\n    signal.pause()\n"
    producer = _start(nodes[1], PRODUCER + stays, address)
    assert producer.stdout is not None
    assert producer.stdout.readline() == "sent\n"
    _ip("-n", nodes[1], "link", "set", "wire", "down")
    assert consumer.wait(timeout=40) == 0
    producer.kill()
    producer.communicate()
