"""Floods of connections: others are served, what was accepted ends as it would have, and the log stays small."""

from __future__ import annotations

import errno
import json
import logging
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from fake_engine import FakeEngine, Plan, Served, serving
from tilework.server.http.connections import acceptor, descriptors
from tilework.server.http.connections.places import ConnectionPlaces, holder_of
from waiting import PATIENCE_S, eventually

KEYS = """
[tenants.one]
keys = ["key-one"]
[tenants.other]
keys = ["key-other"]
"""
HELD = {"prompt": "x"}


class Peer:
    def __init__(self, holder: str, closed: list[Peer]) -> None:
        self.holder, self._closed = holder, closed

    def give_way(self) -> None:
        self._closed.append(self)


class House:
    """Places on a clock that stands still, and who had to give way."""

    def __init__(self, most: int) -> None:
        self.now_s, self.closed = 0.0, list[Peer]()
        self.places = ConnectionPlaces(most, lambda: self.now_s)

    def come(self, holder: str = "a") -> Peer | None:
        peer = Peer(holder, self.closed)
        return peer if self.places.enter(peer) else None

    def known(self, holder: str = "a") -> Peer:
        peer = self.come(holder)
        assert peer is not None
        self.places.use(peer)
        self.places.rest(peer, is_known=True)
        return peer


def test_one_address_has_a_quarter_for_connections_that_send_nothing() -> None:
    house = House(40)
    of_a = [house.come("a") for _ in range(15)]
    assert house.closed == of_a[:5]
    others = [house.come(f"b{number}") for number in range(10)]
    assert house.closed == of_a[:5]
    assert None not in others


def test_strangers_have_half_and_the_oldest_gives_way() -> None:
    house = House(40)
    strangers = [house.come(f"a{number}") for number in range(25)]
    assert house.closed == strangers[:5]


def test_connections_in_a_request_stay_and_no_other_gets_their_place() -> None:
    house = House(8)
    for number in range(8):
        peer = house.come(f"a{number}")
        assert peer is not None
        house.places.use(peer)
    assert house.come("b") is None
    assert not house.closed


def test_who_gives_way_first() -> None:
    """One that has its answer, then a stranger, then one that has rested for long."""
    house = House(4)
    rested, used, stranger = house.known("a"), house.known("b"), house.come("c")
    leaving = house.come("d")
    assert leaving is not None
    house.places.linger(leaving)
    house.now_s = 5.0
    house.places.use(used)
    house.places.rest(used, is_known=True)
    came = [house.come(f"e{number}") for number in range(2)]
    assert house.closed == [leaving, stranger]
    for peer in came:
        assert peer is not None
        house.places.use(peer)
    last = house.come("f")
    assert house.closed == [leaving, stranger, rested]
    assert last is not None
    house.places.use(last)
    assert house.come("g") is None, "the one that is left was used a moment ago"


def test_one_that_has_not_shown_a_key_is_a_stranger_again_after_its_answer() -> None:
    house = House(8)
    peer = house.come("a")
    assert peer is not None
    house.places.use(peer)
    house.places.rest(peer, is_known=False)
    for _ in range(2):
        house.come("a")
    assert house.closed == [peer]


def test_places_are_given_back_and_never_exceeded() -> None:
    """Whatever happens, in any order: there are never more than there may be, and in the end all are free."""
    rng = Random(7)
    for _ in range(200):
        house = House(rng.randint(1, 12))
        there: list[Peer] = []
        for _ in range(100):
            house.now_s += rng.random()
            there = [peer for peer in there if peer not in house.closed]
            if not there or rng.random() < 0.5:
                if (peer := house.come(rng.choice("abc"))) is not None:
                    there.append(peer)
                continue
            peer = rng.choice(there)
            match rng.randrange(4):
                case 0:
                    house.places.use(peer)
                case 1:
                    house.places.rest(peer, is_known=rng.random() < 0.5)
                case 2:
                    house.places.linger(peer)
                case 3:
                    house.places.leave(peer)
                    there.remove(peer)
            assert len(house.places) <= house.places.most
        for peer in there:
            house.places.leave(peer)
        assert len(house.places) == 0
        assert not any((house.places._leaving, house.places._strangers, house.places._by_holder, house.places._resting))


@pytest.mark.parametrize(
    ("address", "holder"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_who_holds_the_connections_of_an_address(address: str, holder: str) -> None:
    assert holder_of(address) == holder


# Whole servers.


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE_S)
    connection.settimeout(PATIENCE_S)
    return connection


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Served]:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(KEYS)
    with serving(FakeEngine(), drain_s=0, max_connections=40, tenants=str(tenants)) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def slow_heads(url: str, stack: ExitStack, number: int) -> list[socket.socket]:
    held = []
    for _ in range(number):
        connection = stack.enter_context(connect(url))
        with suppress(OSError):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        held.append(connection)
    return held


def test_slow_heads_lock_no_one_out(guarded: Served) -> None:
    """More of them than there are places, again and again, from the address of all others."""
    with ExitStack() as stack:
        known = stack.enter_context(httpx.Client(base_url=guarded.url, headers=bearer("key-one")))
        assert known.get("/v1/models").status_code == 200
        for _ in range(5):
            slow_heads(guarded.url, stack, 20)
            assert httpx.get(f"{guarded.url}/health").status_code == 200
            assert httpx.get(f"{guarded.url}/v1/models", headers=bearer("key-other")).status_code == 200
        assert known.get("/v1/models").status_code == 200


def test_one_that_gives_way_is_told_why(guarded: Served) -> None:
    with ExitStack() as stack:
        first, *_ = slow_heads(guarded.url, stack, 11)
        received = first.recv(65536)
        assert received.startswith(b"HTTP/1.1 503 ")
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"


def test_a_tenant_leaves_connections_to_the_others(guarded: Served) -> None:
    """Half of the connections may wait for its pictures."""
    guarded.engine.plan = Plan(is_held=True)
    body = json.dumps(HELD).encode()
    head = (
        "POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-one\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with ExitStack() as stack:
        for number in range(1, 21):
            stack.enter_context(connect(guarded.url)).sendall(head.encode() + body)
            eventually(lambda number=number: guarded.on_loop(lambda: guarded.engine.status.health().num_jobs) == number)
        refused = httpx.post(f"{guarded.url}/v1/images/generations", json=HELD, headers=bearer("key-one"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_at_once")
        assert refused.headers["retry-after"] == "1"
        assert httpx.get(f"{guarded.url}/v1/models", headers=bearer("key-other")).status_code == 200
    eventually(lambda: guarded.on_loop(lambda: guarded.engine.status.health().num_jobs) == 0)
    assert httpx.get(f"{guarded.url}/v1/models", headers=bearer("key-one")).status_code == 200


def test_accepting_pauses_without_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, guarded: Served
) -> None:
    """One line of log for each pause, and no work meanwhile; then all that have waited are served."""
    tried, is_full = count(), [True]

    class Full(socket.socket):
        def accept(self) -> Any:
            if is_full:
                next(tried)
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        full = Full(fileno=listener.detach())
        with full:
            made: list[Any] = []

            def protocol() -> Any:
                made.append(Protocol())
                return made[-1]

            one = guarded.on_loop(lambda: acceptor.Acceptor(full, protocol, at_once=5))
            with caplog.at_level(logging.WARNING, "tilework"), ExitStack() as stack:
                for _ in range(50):
                    stack.enter_context(socket.create_connection(full.getsockname(), timeout=PATIENCE_S))
                for _ in range(3):
                    guarded.skip(0.2)
                assert next(tried) <= 12
                assert 1 <= sum("Too many open files" in line for line in caplog.messages) <= 12
                is_full.clear()
                eventually(lambda: guarded.skip(0.2) or len(made) == 50)
                guarded.on_loop(one.close)
    guarded.on_loop(one.close)  # As uvicorn does when it has closed the socket.


class Protocol:
    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        pass

    def eof_received(self) -> None:
        pass


def test_connections_follow_from_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"value": (1024, 4096)}
    monkeypatch.setattr("resource.getrlimit", lambda _which: limits["value"])
    monkeypatch.setattr("resource.setrlimit", lambda _which, value: limits.update(value=value))
    assert descriptors.raise_limit() == 4096
    assert limits["value"] == (4096, 4096)
    assert descriptors.connections_within(4096) == 1920
    limits["value"] = (1024, resource.RLIM_INFINITY)
    assert descriptors.raise_limit() == 1 << 20
