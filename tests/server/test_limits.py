"""Slow, huge and too many: what bad clients send and do not take costs neither memory nor patience."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from fake_engine import FakeEngine, Plan, Served, eventually, serving
from tilework.core.request import RefusalCode
from tilework.server.config import ServerConfig
from tilework.server.http.protocol import LEAST_BYTES_PER_S, protocol_class

TESTS = Path(__file__).parents[1]
MIB = 1 << 20
LARGE = b'{"prompt": "x", "size": "512x512", "n": 10}'  # With noise an answer of 10.5 MB: no kernel buffers that much.


def connect(url: str, receive_bytes: int | None = None) -> socket.socket:
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(10)
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


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    settings = {"read_timeout_s": 0.4, "send_timeout_s": 0.4, "max_head_bytes": 2048, "max_connections": 20}
    with serving(FakeEngine(), drain_s=0, **settings) as served:
        yield served


def test_queue_full_is_429_with_retry_after(server: Served) -> None:
    server.engine.script = [Plan(code=RefusalCode.QUEUE), Plan(code=RefusalCode.UNKNOWN_COST)]
    full, unknown = (server.post({"prompt": "x"}) for _ in range(2))
    assert (full.status_code, full.json()["error"]["code"]) == (429, "queue_full")
    assert full.headers["retry-after"] == "5", "nobody knows"
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
        assert error_of(everything(connection)) == (408, "body_too_slow")


def test_announced_length_is_enough_to_refuse_a_body(server: Served) -> None:
    with connect(server.url) as connection:
        connection.sendall(head(100 * MIB))
        assert error_of(everything(connection)) == (413, "body_too_large")


def test_body_that_trickles_is_408_too(server: Served) -> None:
    """The limit is for the whole body, so that a byte now and then buys no time."""
    with connect(server.url) as connection:
        connection.sendall(head(10_000))
        received: list[bytes] = []
        reader = threading.Thread(target=lambda: received.append(everything(connection)))
        reader.start()
        end_s = time.monotonic() + 10
        while reader.is_alive() and time.monotonic() < end_s:
            try:
                connection.sendall(b" ")
            except OSError:
                break
            reader.join(0.05)
        reader.join(5)
        assert error_of(received[0]) == (408, "body_too_slow")


def test_slow_head_is_408(server: Served) -> None:
    with connect(server.url) as connection:
        connection.sendall(b"POST /v1/images/gen")
        assert error_of(everything(connection)) == (408, "head_too_slow")


def test_slow_head_of_a_second_request_is_408(server: Served) -> None:
    with connect(server.url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /hea")
        assert error_of(everything(connection)) == (408, "head_too_slow")


def test_silent_connection_is_closed(server: Served) -> None:
    with connect(server.url) as connection:
        assert everything(connection) == b""


def test_waiting_for_a_picture_is_not_slow(server: Served) -> None:
    server.engine.script = [Plan(delay_s=1.2)]
    assert server.post({"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("kind", ["url", "header", "headers"])
def test_long_head_is_431(server: Served, kind: str) -> None:
    path = "/health?" + "x" * 5000 if kind == "url" else "/health"
    fields = {"header": "a: " + "x" * 5000, "headers": "\r\n".join(f"a{i}: b" for i in range(700)), "url": "a: b"}
    with connect(server.url) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{fields[kind]}\r\n\r\n".encode())
        received = everything(connection)
    assert error_of(received) == (431, "head_too_large")
    assert b"2048 bytes" in received


def test_nonsense_is_400_in_the_usual_shape(server: Served) -> None:
    with connect(server.url) as connection:
        connection.sendall(b"\x16\x03\x01 this is TLS\r\n\r\n")
        assert error_of(everything(connection)) == (400, "invalid_http")


def test_connections_are_limited(server: Served) -> None:
    held = [connect(server.url) for _ in range(30)]
    try:
        answers = []
        for connection in held:
            received = everything(connection)
            if received:
                answers.append(error_of(received))
        assert 9 <= len(answers) <= 12, "20 connections, of which the test's own client may have one"
        assert set(answers) == {(503, "too_many_connections")}
    finally:
        for connection in held:
            connection.close()
    eventually(lambda: httpx.get(f"{server.url}/health").status_code == 200)


# Clients that do not take their answers.


def test_reader_that_takes_nothing_is_cut_off(server: Served) -> None:
    server.engine.script = [Plan(is_noise=True)] * 10
    with connect(server.url, receive_bytes=4096) as connection:
        connection.sendall(head(len(LARGE)) + LARGE)
        received = connection.recv(65536)
        time.sleep(1.5)  # Nothing is taken; several times the limit.
        with suppress(ConnectionResetError):
            received += everything(connection)
    assert len(received) < length_of(received)


def test_reader_that_takes_too_little_is_cut_off() -> None:
    """A byte now and then buys no time: an answer waits in memory for as long as it is not taken."""
    engine = FakeEngine(plan=Plan(is_noise=True))
    with serving(engine, drain_s=0, send_timeout_s=1.5) as server, connect(server.url, 4096) as connection:
        connection.sendall(head(len(LARGE)) + LARGE)
        received = connection.recv(65536)
        rest = length_of(received) - len(received)
        end_s = time.monotonic() + 10
        with suppress(ConnectionResetError):
            while chunk := connection.recv(LEAST_BYTES_PER_S // 40):
                rest -= len(chunk)
                assert time.monotonic() < end_s, "the server has not given up"
                time.sleep(0.05)  # Half of the least rate.
    assert rest > 0


def test_reader_that_takes_little_gets_all(server: Served) -> None:
    """It takes longer than the limit altogether, but more than the least rate all the time."""
    server.engine.script = [Plan(is_noise=True)] * 10
    with connect(server.url, receive_bytes=4096) as connection:
        connection.sendall(head(len(LARGE)) + LARGE)
        start_s = time.monotonic()
        received = connection.recv(65536)
        while len(received) < length_of(received):
            chunk = connection.recv(65536)
            assert chunk, "the server has given up"
            received += chunk
            if time.monotonic() - start_s < 1.5:
                time.sleep(len(chunk) / (3 * LEAST_BYTES_PER_S))
            else:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MIB)
    assert time.monotonic() - start_s >= 1.5
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
    """Events that come seldom: what waits when somebody looks has only just been written."""

    async def is_cut_off(end: socket.socket) -> bool:
        limits = ServerConfig(send_timeout_s=0.2)
        protocol: Any = protocol_class(limits)(uvicorn.Config(FastAPI()), ServerState(), {})  # type: ignore[call-arg]
        wire = Wire(end)
        protocol.connection_made(wire)
        protocol.write(b"x" * 100)
        protocol.pause_writing()
        await asyncio.sleep(0.1)
        wire.num_waiting = 0 if has_taken_all else 1
        protocol.write(b"x" * 100)
        protocol.pause_writing()
        await asyncio.sleep(0.15)
        is_aborted = wire.is_aborted
        protocol.connection_lost(None)
        return is_aborted

    one, other = socket.socketpair()
    with one, other:
        assert asyncio.run(is_cut_off(one)) is not has_taken_all


# A real process, whose memory can be read.

SCRIPT = """
import asyncio, gc, sys
sys.path.insert(0, sys.argv[1])
from fake_engine import FakeEngine, Plan
from tilework.server.config import ServerConfig
from tilework.server.main import serve
engine = FakeEngine(plan=Plan(is_noise=True), keeps=False)
config = ServerConfig(port=0, send_timeout_s=float(sys.argv[2]), result_bytes=1 << 20, max_records=50, drain_s=0)
asyncio.run(serve(engine, config, on_ready=lambda url: print(url, flush=True)))
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
def test_memory_does_not_grow_with_what_clients_send_or_leave() -> None:
    with process() as (url, pid), httpx.Client(base_url=url, timeout=20) as client:
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
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilework.server.main._KEEP_ALIVE_S", 0.2)
    with serving(FakeEngine(), drain_s=0) as server:
        with connect(server.url) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(0.5)  # A connection that were still open would be closed now.
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


def test_answer_to_a_body_too_large_reaches_its_client() -> None:
    with serving(FakeEngine(), drain_s=0) as server:
        for content in (b" " * (30 * MIB), (b" " * MIB for _ in range(30))):
            answer = server.http.post(
                "/v1/images/generations", content=content, headers={"Content-Type": "application/json"}
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
            assert answer.headers["connection"] == "close"
