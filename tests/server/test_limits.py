"""Slow, huge and too many: what clients send, and what they do not take, costs the server neither memory nor time.

Limits of time are minutes on the server's clock, which the tests move when the server has come to wait for the client.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

import h11
import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

import clock
from fake_engine import FakeEngine, Plan, Served, serving
from tilework.core.request import RefusalCode
from tilework.server.config import ServerConfig
from tilework.server.http.connections.line_turns import protocol_class
from tilework.server.http.connections.places import ConnectionPlaces
from tilework.server.http.connections.protocol import LEAST_BYTES_PER_S, LimitedProtocol
from waiting import PATIENCE_S, eventually

TESTS = Path(__file__).parents[1]
MIB = 1 << 20
_UVICORN = uvicorn.Config(FastAPI(), log_config=None, log_level=None)
LARGE = b'{"prompt": "x", "size": "512x512", "n": 10}'  # With noise an answer of 10.5 MB: no kernel buffers that much.


def connect(url: str, receive_bytes: int | None = None) -> socket.socket:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(PATIENCE_S)
    connection.connect((parts.hostname, parts.port))
    return connection


def head(length: int, path: str = "/v1/images/generations") -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}", "", "")
    return "\r\n".join(lines).encode()


def everything(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    return received


def length_of(received: bytes) -> int:
    """How long an answer is according to itself, head and body."""
    first, _, _ = received.partition(b"\r\n\r\n")
    return len(first) + 4 + int(first.lower().partition(b"content-length: ")[2].split()[0])


def error_of(received: bytes) -> tuple[int, str]:
    first, _, body = received.partition(b"\r\n\r\n")
    return int(first.split()[1]), json.loads(body)["error"]["code"]


LIMIT_S = 60.0  # For a head, for a body, and to take enough of an answer.
protocols: WeakSet[LimitedProtocol] = WeakSet()  # The server's ends of the connections.


@pytest.fixture(scope="module", autouse=True)
def _watched() -> Iterator[None]:
    """Servers tell of their connections, and close no idle one."""

    def watching(*shared: Any) -> type[LimitedProtocol]:
        class Watched(protocol_class(*shared)):  # type: ignore[misc]
            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                protocols.add(self)

        return Watched

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilework.server.http.server.protocol_class", watching)
        patch.setattr("tilework.server.http.server._KEEP_ALIVE_S", 10**6)
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    settings = {"read_timeout_s": LIMIT_S, "send_timeout_s": LIMIT_S, "max_head_bytes": 2048, "max_connections": 20}
    with serving(FakeEngine(), drain_s=0, **settings) as served:
        yield served


def at_server(server: Served, connection: socket.socket, is_so: Callable[[LimitedProtocol], object]) -> LimitedProtocol:
    """The server's end of a connection, once this holds for it."""

    def found() -> LimitedProtocol | None:
        name = connection.getsockname()
        return next((one for one in protocols if one.client == name and is_so(one)), None)

    eventually(lambda: server.on_loop(found))
    protocol = server.on_loop(found)
    assert isinstance(protocol, LimitedProtocol)
    return protocol


def is_open(_: LimitedProtocol) -> bool:
    return True


def awaits_body(protocol: LimitedProtocol) -> bool:
    return protocol.conn.their_state is h11.SEND_BODY


def is_stalled(protocol: LimitedProtocol) -> bool:
    return protocol.flow.write_paused


def let_pass(server: Served, seconds: float) -> None:
    """Skip time when the server has nothing more to do; and let it do what is due then."""
    for _ in range(5):
        server.on_loop(lambda: None)
    server.skip(seconds)


def test_queue_full_is_429_with_retry_after(server: Served) -> None:
    server.engine.script = [Plan(code=RefusalCode.QUEUE), Plan(code=RefusalCode.UNKNOWN_COST)]
    full, unknown = (server.post({"prompt": "x"}) for _ in range(2))
    assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
    assert full.headers["retry-after"] == "5", "it cannot be predicted"
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (400, "unknown_cost")
    assert unknown.json()["error"]["param"] == "size"


@pytest.mark.parametrize("code", [RefusalCode.QUEUE, RefusalCode.TENANT])
def test_a_full_queue_says_when_there_will_be_room(server: Served, code: RefusalCode) -> None:
    server.engine.script = [Plan(code=code, retry_ns=41_000_000_001)]
    full = server.post({"prompt": "x"})
    assert (full.status_code, full.json()["error"]["code"]) == (429, code.value)
    assert full.headers["retry-after"] == "42"
    assert "Retry in 42 seconds." in full.json()["error"]["message"]


# Clients that send.


def test_slow_body_is_408(server: Served) -> None:
    with connect(server.url) as connection:
        connection.sendall(head(100) + b'{"prompt"')
        at_server(server, connection, awaits_body)
        let_pass(server, LIMIT_S)
        assert error_of(everything(connection)) == (408, "body_too_slow")


def test_announced_length_is_enough_to_refuse_a_body(server: Served) -> None:
    with connect(server.url) as connection:
        connection.sendall(head(100 * MIB))
        assert error_of(everything(connection)) == (413, "body_too_large")


def test_body_that_trickles_is_408_too(server: Served) -> None:
    """The limit is for the whole body, so that a byte now and then buys no time."""
    with connect(server.url) as connection:
        connection.sendall(head(10_000))
        at_server(server, connection, awaits_body)
        for _ in range(3):
            connection.sendall(b" ")
            let_pass(server, LIMIT_S / 3)
        assert error_of(everything(connection)) == (408, "body_too_slow")


def test_slow_head_is_408(server: Served) -> None:
    with connect(server.url) as connection:
        connection.sendall(b"POST /v1/images/gen")
        at_server(server, connection, lambda protocol: protocol.conn.trailing_data[0])
        let_pass(server, LIMIT_S)
        assert error_of(everything(connection)) == (408, "head_too_slow")


def test_slow_head_of_a_second_request_is_408(server: Served) -> None:
    with connect(server.url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        let_pass(server, 2 * LIMIT_S)  # Between two requests there is no hurry.
        connection.sendall(b"GET /hea")
        at_server(server, connection, lambda protocol: protocol.conn.trailing_data[0])
        let_pass(server, LIMIT_S)
        assert error_of(everything(connection)) == (408, "head_too_slow")


def test_silent_connection_is_closed(server: Served) -> None:
    with connect(server.url) as connection:
        at_server(server, connection, is_open)
        let_pass(server, LIMIT_S)
        assert everything(connection) == b""


def test_what_uvicorn_says_is_in_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """There lines that repeat are counted. By itself it writes one to stderr for each connection."""
    its = logging.getLogger("uvicorn")
    monkeypatch.setattr(its, "handlers", [])  # As in a process that has run no server yet.
    monkeypatch.setattr(its, "propagate", True)
    with serving(FakeEngine()) as server, connect(server.url) as connection:
        connection.sendall(b"no HTTP\r\n\r\n")
        assert everything(connection).startswith(b"HTTP/1.1 400 ")
    assert [one.name for one in caplog.records if "Invalid HTTP" in one.message] == ["uvicorn.error"]
    assert not its.handlers


def test_waiting_for_a_picture_is_not_slow(server: Served) -> None:
    server.engine.script = [Plan(is_held=True)]
    server.engine.requests.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, {"prompt": "x"})
        eventually(lambda: server.engine.requests)
        let_pass(server, 3 * LIMIT_S)
        server.on_loop(server.engine.finish, server.engine.requests[0].uid)
        assert answer.result().status_code == 200


@pytest.mark.parametrize("kind", ["url", "header", "headers"])
def test_long_head_is_431(server: Served, kind: str) -> None:
    path = "/health?" + "x" * 5000 if kind == "url" else "/health"
    fields = {
        "header": "a: " + "x" * 5000,
        "headers": "\r\n".join(f"a{i}: {'b' * 20}" for i in range(100)),
        "url": "a: b",
    }
    with connect(server.url) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{fields[kind]}\r\n\r\n".encode())
        received = everything(connection)
    assert error_of(received) == (431, "head_too_large")
    assert b"2048 bytes" in received


def test_nonsense_is_400_in_the_usual_shape(server: Served) -> None:
    with connect(server.url) as connection:
        connection.sendall(b"\x16\x03\x01 this is TLS\r\n\r\n")
        assert error_of(everything(connection)) == (400, "invalid_http")


def asks_and_waits(url: str) -> socket.socket:
    """A connection with a call whose picture does not come."""
    connection, body = connect(url), b'{"prompt": "x"}'
    connection.sendall(head(len(body)) + body)
    return connection


def open_images(server: Served) -> int:
    return server.on_loop(lambda: server.engine.status.health().num_jobs)


def test_connections_in_a_request_keep_their_places(server: Served) -> None:
    """Who comes then is told so; and gets a place as soon as there is one."""
    server.engine.script = [Plan(is_held=True)] * 20
    with ExitStack() as stack:
        held = [stack.enter_context(asks_and_waits(server.url)) for _ in range(19)]  # The test's client may have one.
        eventually(lambda: open_images(server) == 19)
        late = [stack.enter_context(asks_and_waits(server.url)) for _ in range(2)]
        assert error_of(everything(late[1])) == (503, "too_many_connections")
        held[0].close()
        eventually(lambda: httpx.get(f"{server.url}/health").status_code == 200)
    eventually(lambda: not open_images(server))
    server.engine.script = []


# Clients that do not take their answers.


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_reader_that_takes_too_little_is_cut_off(server: Served, share: float) -> None:
    """A byte now and then buys no time: an answer waits in memory for as long as it is not taken."""
    server.engine.script = [Plan(is_noise=True)] * 10
    with connect(server.url, receive_bytes=4096) as connection:
        connection.sendall(head(len(LARGE)) + LARGE)
        received = connection.recv(65536)
        at_server(server, connection, is_stalled)
        num_wanted = len(received) + share * LEAST_BYTES_PER_S * LIMIT_S
        while len(received) < num_wanted:
            received += connection.recv(65536)
        let_pass(server, LIMIT_S)
        with suppress(ConnectionResetError):
            received += everything(connection)
    assert len(received) < length_of(received)


def test_reader_that_takes_little_gets_all(server: Served) -> None:
    """It takes several times the limit altogether, but never less than the least rate."""
    server.engine.script = [Plan(is_noise=True)] * 10
    with connect(server.url, receive_bytes=65536) as connection:
        connection.sendall(head(len(LARGE)) + LARGE)
        received = connection.recv(65536)
        protocol = at_server(server, connection, is_stalled)
        for _ in range(4):
            num_wanted = server.on_loop(protocol.num_taken) + 1.1 * LEAST_BYTES_PER_S * LIMIT_S
            while server.on_loop(protocol.num_taken) < num_wanted:
                received += connection.recv(65536)
            assert is_stalled(protocol)
            let_pass(server, LIMIT_S)
        while len(received) < length_of(received):
            chunk = connection.recv(65536)
            assert chunk, "the server has given up"
            received += chunk
    assert len(json.loads(received.partition(b"\r\n\r\n")[2])["data"]) == 10


class Wire:
    """A transport of which a test says how much of what was written is still waiting."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.num_waiting = 0
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.num_waiting += len(data)

    def get_write_buffer_size(self) -> int:
        return self.num_waiting

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._end if name == "socket" else default

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        self.abort()


@pytest.mark.parametrize("has_taken_all", [True, False])
def test_reader_that_took_everything_in_between_is_not_slow(has_taken_all: bool) -> None:
    """Events that come seldom: what waits when the time is up has only just been written."""

    async def is_cut_off(loop: clock.ManualLoop, end: socket.socket) -> bool:
        limits = ServerConfig(send_timeout_s=LIMIT_S, read_timeout_s=9 * LIMIT_S)
        places = ConnectionPlaces(most=9, now_s=loop.time)
        protocol: Any = protocol_class(limits, places)(_UVICORN, ServerState(), {})  # type: ignore[call-arg]
        wire = Wire(end)
        protocol.connection_made(wire)
        protocol.write(b"x" * 100)
        protocol.pause_writing()
        loop.advance(LIMIT_S / 2)
        wire.num_waiting = 0 if has_taken_all else 1
        protocol.write(b"x" * 100)
        protocol.pause_writing()
        loop.advance(LIMIT_S / 2)
        await loop.until_idle()
        is_aborted = wire.is_aborted
        protocol.connection_lost(None)
        return is_aborted

    one, other = socket.socketpair()
    with one, other:
        assert clock.run(lambda loop: is_cut_off(loop, one)) is not has_taken_all


# A real process, whose memory can be read.

SCRIPT = """
import asyncio, gc, sys
sys.path.insert(0, sys.argv[1])
from fake_engine import FakeEngine, Plan
from tilework.server.config import ServerConfig
from tilework.server.main import serve
engine = FakeEngine(plan=Plan(is_noise=True), keeps=False)
config = ServerConfig(port=0, send_timeout_s=float(sys.argv[2]), result_bytes=1 << 20, max_records=50, drain_s=0)
asyncio.run(serve(engine, config, on_ready=lambda url, _engine: print(url, flush=True)))
"""


@contextmanager
def process(send_timeout_s: float = 30) -> Iterator[tuple[str, int]]:
    command = [sys.executable, "-c", SCRIPT, str(TESTS), str(send_timeout_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            yield started.stdout.readline().strip(), started.pid
        finally:
            started.terminate()


def rss(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.slow
def test_memory_does_not_grow_with_what_clients_send_or_leave() -> None:
    with process() as (url, pid), httpx.Client(base_url=url) as client:
        body = {"prompt": "x", "size": "512x512", "response_format": "url"}

        def serve_some(number: int) -> None:
            for _ in range(number):
                assert client.post("/v1/images/generations", json=body).status_code == 200

        serve_some(10)
        before = rss(pid)
        _send_100_mb(url)
        _send_100_mb(url, is_chunked=True)
        assert rss(pid) - before < 8 * MIB
        serve_some(25)  # 20 MB of pixels, 20 MB of files.
        assert rss(pid) - before < 16 * MIB
        for _ in range(3):
            stalled = [_stalled(url) for _ in range(2)]
            eventually(lambda: rss(pid) - before > 12 * MIB)  # The answers wait.
            for connection in stalled:
                connection.close()
            eventually(lambda: rss(pid) - before < 8 * MIB)


@pytest.mark.slow
def test_a_connection_leaves_next_to_nothing_for_a_collection(server: Served) -> None:
    ask = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

    def visit(number: int) -> None:
        for _ in range(number):
            with connect(server.url) as connection:
                connection.sendall(ask)
                assert everything(connection)

    visit(5)
    gc.collect()
    gc.disable()
    try:
        visit(50)
        assert gc.collect() < 50 * 12
    finally:
        gc.enable()


def test_connection_that_is_reset_between_two_requests_is_quiet(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(server.url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(1)
        protocol = at_server(server, connection, is_open)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    eventually(lambda: protocol not in protocol.connections)
    let_pass(server, 2 * 10**6)  # A connection that were still open would be closed now.
    assert "Traceback" not in caplog.text


def _send_100_mb(url: str, *, is_chunked: bool = False) -> None:
    """The server says no long before the end, and closes."""
    piece = b" " * MIB
    with connect(url) as connection:
        if is_chunked:
            first = head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
            piece = f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
        else:
            first = head(100 * MIB)
        connection.sendall(first)
        num_sent = 0
        with suppress(OSError):  # Reset or broken pipe, as it happens.
            while num_sent < 100:
                connection.sendall(piece)
                num_sent += 1
        assert num_sent < 50, "the server took it"


def _stalled(url: str) -> socket.socket:
    connection = connect(url, receive_bytes=4096)
    connection.sendall(head(len(LARGE)) + LARGE)
    assert connection.recv(1)
    return connection


def test_refused_body_does_not_reset_the_connection(server: Served) -> None:
    """A server that just closed while bytes arrive would, and the answer could be lost."""
    with connect(server.url) as connection:
        connection.sendall(head(100 * MIB) + b" " * MIB)
        assert error_of(everything(connection)) == (413, "body_too_large")


@pytest.mark.slow
def test_answer_to_a_body_too_large_reaches_its_client() -> None:
    with serving(FakeEngine(), drain_s=0) as server:
        for content in (b" " * (30 * MIB), (b" " * MIB for _ in range(30))):
            answer = server.http.post(
                "/v1/images/generations", content=content, headers={"Content-Type": "application/json"}
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
            assert answer.headers["connection"] == "close"
