"""Requests of very many short lines are read in turns, and mean the same; heads of too many lines are refused."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import pytest

from fake_engine import FakeEngine, Served, serving
from tilework.server.http.connections.line_turns import MAX_HEADERS
from waiting import eventually


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(FakeEngine(), drain_s=0) as served:
        yield served


def connect(server: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60)


def answer_of(connection: socket.socket, method: str = "POST") -> tuple[int, Any]:
    answer = HTTPResponse(connection, method=method)
    answer.begin()
    return answer.status, json.loads(answer.read())


def in_chunks(body: bytes) -> bytes:
    """A request whose body comes byte by byte."""
    head = b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def call(prompt: str) -> bytes:
    return json.dumps({"prompt": prompt, "size": "16x16"}).encode()


def test_a_body_of_tiny_chunks_is_read_whole(server: Served) -> None:
    """And so is the next request on its connection."""
    with connect(server) as connection:
        for animal in ("cat, ", "dog, ", "fox, "):
            connection.sendall(in_chunks(call(animal * 400)))
            assert answer_of(connection)[0] == 200
            assert server.engine.specs[-1].prompt == animal * 400


def test_many_connections_take_turns(server: Served) -> None:
    connections = [connect(server) for _ in range(20)]
    for index, connection in enumerate(connections):
        connection.sendall(in_chunks(call(f"{index} " * 1000)))
    for connection in connections:
        with connection:
            assert answer_of(connection)[0] == 200
    assert {spec.prompt for spec in server.engine.specs[-20:]} == {f"{index} " * 1000 for index in range(20)}


def test_pipelined_requests_are_answered_in_order(server: Served) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 400)
        file = connection.makefile("rb")
        for _ in range(400):
            assert file.readline().startswith(b"HTTP/1.1 200")
            headers = dict(line.lower().split(b": ") for line in iter(file.readline, b"\r\n"))
            file.read(int(headers[b"content-length"]))


def test_a_client_that_leaves_in_between_leaves_nothing(server: Served) -> None:
    tasks = server.tasks()
    with connect(server) as connection:
        connection.sendall(in_chunks(b"x" * 30_000)[:100_000])
    assert server.post({"prompt": "x"}).status_code == 200
    eventually(lambda: tasks.issuperset(server.tasks()))


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
@pytest.mark.parametrize(("count", "expected"), [(MAX_HEADERS, 200), (MAX_HEADERS + 1, 431), (2000, 431)])
def test_a_head_of_too_many_lines_is_refused(server: Served, end: bytes, count: int, expected: int) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1" + end + (b"a: b" + end) * (count - 1) + b"Host: x" + 2 * end)
        status, body = answer_of(connection, "GET")
    assert status == expected
    if status == 431:
        assert body["error"]["code"] == "too_many_headers"
