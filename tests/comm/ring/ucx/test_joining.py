"""How producers come to a ring over a network: who is refused, and why. Nothing of it crashes the consumer."""

from __future__ import annotations

import json
import socket
from threading import Thread

import pytest

pytest.importorskip("tilework.comm.ring._native", reason="the C extension was not built: no compiler")
pytest.importorskip("libucx", reason="the extra ucx is not installed")

from comm.ring.team import connected
from tilework.comm.ring.consumer import Ring
from tilework.comm.ring.errors import RingClosed, RingError
from tilework.comm.ring.network import Network
from tilework.comm.ring.producer import Producer
from tilework.comm.ring.ucx import joining
from tilework.comm.ring.ucx.library import Context, version
from waiting import PATIENCE_S

HERE = Network(host="127.0.0.1")


def refusal(ring: Ring, address: str) -> str:
    """What a producer is told that connects to this address."""
    errors: list[RingError] = []

    def connect() -> None:
        try:
            Producer.connect(address, timeout_s=PATIENCE_S)
        except RingError as error:
            errors.append(error)

    thread = Thread(target=connect)
    thread.start()
    while thread.is_alive():
        assert ring.recv(timeout_s=0.01) is None
    return str(errors[0])


def test_who_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with Ring.create(1 << 14, 16, network=HERE) as ring:
        address = ring.address()
        assert "its secret is not the ring's" in refusal(ring, address[:-1] + ("a" if address[-1] != "a" else "b"))
        versions = iter(["1.0", version(), version()])  # Of the producer, of the ring to compare and to name.
        monkeypatch.setattr("tilework.comm.ring.ucx.site.version", versions.__next__)
        assert f"the ring has UCX {version()}, not 1.0" in refusal(ring, address)
        assert not ring._site._lanes._workers  # type: ignore[attr-defined]
        monkeypatch.undo()
        monkeypatch.setattr("tilework.comm.ring.ucx.lanes.Worker", lambda context: Context("warp"))
        assert "warp" in refusal(ring, address), "a lane cannot be opened"
        assert ring.stats.producers == len(ring._admissions) == 0


@pytest.mark.parametrize("address", ["ucx://host/secret", "ucx://host:1/", "ucx://host:x/secret", "ucx://:1/secret"])
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(RingError, match="HOST:PORT/SECRET"):
        Producer.connect(address)


def test_no_answer_is_said_without_the_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nothing:
        port = nothing.getsockname()[1]
        with pytest.raises(RingClosed, match=f"no consumer answers at ucx://127.0.0.1:{port} within") as error:
            Producer.connect(f"ucx://127.0.0.1:{port}/hidden", timeout_s=0.05)
    assert "hidden" not in str(error.value)


@pytest.mark.parametrize("transports", ["all", "tcp,cma", "^cma", "^tcp", "shm,self"])
def test_transports_that_no_lane_fences_are_refused(transports: str) -> None:
    with pytest.raises(ValueError, match="transports"):
        Network(host="127.0.0.1", transports=transports)


def test_a_host_that_is_not_this_node_is_named() -> None:
    with pytest.raises(RingError, match=r"192\.0\.2\.77"):
        Ring.create(1 << 14, network=Network(host="192.0.2.77"))


NONSENSE = (
    b"\xff\xfe\n",
    b"[" * 60_000 + b"\n",
    b'"refused"\n',
    b"7\n",
    b"x" * 70_000,
    b'{"format": "tw-ring-ucx1", "secret": "\\ud800"}\n',
    json.dumps({"format": "\ud800" * 5000}).encode() + b"\n",
    json.dumps({"format": joining.FORMAT, "secret": None, "ucx": []}).encode() + b"\n",
    b"",
)


def test_nonsense_and_silence_do_not_disturb_the_consumer() -> None:
    with Ring.create(1 << 14, 16, network=HERE) as ring:
        host, port, secret = joining.parse(ring.address())
        silent = socket.create_connection((host, port))
        for line in NONSENSE:
            with socket.create_connection((host, port)) as connection:
                connection.sendall(line)
                assert ring.recv(timeout_s=0.02) is None
        hello = {"format": joining.FORMAT, "secret": secret, "ucx": version()}
        with socket.create_connection((host, port)) as leaver:  # It gets a lane, and does not use it.
            joining.send(leaver, hello)
            while not ring._site._lanes._workers:  # type: ignore[attr-defined]
                assert ring.recv(timeout_s=0.01) is None
            assert ring.stats.producers == 0, "it has not shown that it is connected by its lane"
        while ring._site._lanes._workers:  # type: ignore[attr-defined]
            assert ring.recv(timeout_s=0.01) is None
        with connected(ring) as producer:
            producer.send(b"still here")
            assert ring.take() == [(b"still here", b"")]
        assert len(ring._admissions) == 1
        silent.close()
