"""Thousands of broken requests: each is answered, none by a 5xx, and nothing is left behind.

`HOSTILE_BODIES` sets how many (default 2500); the seed of each is its number.
"""

from __future__ import annotations

import gc
import http.client
import json
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import pytest

from fake_engine import EDITOR, FakeEngine, Plan, Served, serving
from tilework.core.actions import Reject
from tilework.core.request import RefusalCode
from tilework.core.wire.spec import Spec
from tilework.runtime.ticket import Ticket
from tilework.server.calls.call import Call
from tilework.server.schema.chat_request import EXAMPLE as CHAT
from tilework.server.schema.edit_request import EXAMPLE as EDIT_EXAMPLE
from tilework.server.schema.image_request import EXAMPLE as IMAGES
from waiting import eventually

NUM_BODIES = int(os.environ.get("HOSTILE_BODIES", "2500"))
NUM_CLIENTS = 4
HELD = "until the client has gone"
ENDED = "tilework_requests_total{"
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/images/generations": {**IMAGES, "size": "16x16", "n": 2},
    "/v1/images/edits": EDIT_EXAMPLE,
    "/v1/chat/completions": {**CHAT, "extra_body": {"width": 16, "height": 16, "seed": 7, "slo_ms": 2500}},
}
MORE_FIELDS: dict[str, Any] = {
    "stream": True,
    "partial_images": 2,
    "tilework_events": True,
    "preview_every": 1,
    "response_format": "url",
    "output_format": "webp",
    "output_compression": 50,
    "deadline": "2999-01-01T00:00:00Z",
    "priority": "batch",
    "on_miss": "reject",
    "negative_prompt": "blue",
    "num_inference_steps": 3,
    "guidance_scale": 2.0,
    "user": "u",
    "model": "tiny-shapes",
    "width": 16,
    "num_frames": 1,
    "slo_ms": 9.5,
    "image": EDIT_EXAMPLE["image"],
    "mask": EDIT_EXAMPLE["image"],
    "strength": 0.5,
}
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 3, 2**31, 2**63 - 1, 2**63, -(2**64), 10**400, 0.0, -0.0, 1e-320, 1e308, 2.5,
    float("nan"), float("inf"), float("-inf"), "", " ", "\x00", "x", "1", "\ud800", "\udfff\ud800", "\u202e\u2066",
    "é" * 50, "٦٤x٦٤", "16x16", "1e9x1e9", "x" * 5000, "auto", "null", "NaN", "../../etc/passwd", "%00",
    [], [[]], [None], {}, {"": ""}, {"__proto__": {}}, {"a": {"b": {"c": [1, 2, {}]}}}, [{"role": "user"}],
    [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "user", "content": None}],
    "data:image/png;base64,", "data:,", EDIT_EXAMPLE["image"][:-9], [EDIT_EXAMPLE["image"]] * 2,
    {"image_url": {"url": 1}},
]  # fmt: skip
HEADERS: list[tuple[str, str]] = [
    ("Content-Type", "application/json; charset=utf-16"),
    ("Content-Type", "text/plain"),
    ("Content-Type", "multipart/form-data; boundary=x"),
    ("Content-Type", ""),
    ("Content-Encoding", "gzip"),
    ("Accept", "text/html;q=nan"),
    ("Accept-Encoding", "x" * 300),
    ("Authorization", "Bearer EMPTY"),
    ("Authorization", "Basic Og=="),
    ("Prefer", "respond-async"),
    ("Prefer", "wait=9999999999999, respond-async=\x01"),
    ("Prefer", ",;=,=;"),
    ("Idempotency-Key", ""),
    ("Idempotency-Key", "same"),
    ("Idempotency-Key", "k" * 256),
    ("Idempotency-Key", "\xff\xfe"),
    ("Host", "]:["),
    ("X-Forwarded-Host", "evil"),
    ("Expect", "100-continue"),
    ("Range", "bytes=5-1"),
    ("Transfer-Encoding", "gzip"),
    ("Connection", "upgrade"),
    ("Upgrade", "h2c"),
    ("X-Long", "y" * 20_000),
]


@dataclass
class Message:
    """A request under mutation: fields first, then its text, then how it is sent."""

    path: str
    fields: dict[str, Any]
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    raw: bytes | None = None
    length: int | None = None
    is_chunked: bool = False
    leaves: bool = False

    def body(self) -> bytes:
        if self.raw is None:
            self.raw = json.dumps(self.fields).encode()
        return self.raw


def odd_value(rng: Random, message: Message) -> None:
    place = message.fields
    inner = place.get("extra_body")
    if isinstance(inner, dict) and rng.random() < 0.5:
        place = inner
    place[rng.choice([*place, *MORE_FIELDS])] = rng.choice(ODD)


def right_value(rng: Random, message: Message) -> None:
    name = rng.choice(list(MORE_FIELDS))
    message.fields[name] = MORE_FIELDS[name]


def lost_field(rng: Random, message: Message) -> None:
    if message.fields:
        del message.fields[rng.choice(list(message.fields))]


def deep_nest(rng: Random, message: Message) -> None:
    """Where the stack ends is not the same for all that reads a body, so most depths are near its end."""
    near = sys.getrecursionlimit() - 45
    depth = rng.choice([5, 60, 500, 100_000, rng.randint(800, 1100), *[near + rng.randint(-9, 9) for _ in range(5)]])
    left, right = rng.choice([("[", "]"), ('{"a":', "}")])
    if rng.random() < 0.5:
        message.headers["Idempotency-Key"] = f"deep {depth}"
    name = rng.choice(list(message.fields) or ["prompt"])
    message.raw = f'{{"prompt": "x", "{name}": {left * depth}1{right * depth}}}'.encode()


def cut(rng: Random, message: Message) -> None:
    message.raw = message.body()[: rng.randrange(len(message.body()) + 1)]


def flipped(rng: Random, message: Message) -> None:
    content = bytearray(message.body())
    for _ in range(rng.choice([1, 3, 20])):
        if content:
            content[rng.randrange(len(content))] = rng.randrange(256)
    message.raw = bytes(content)


def other_encoding(rng: Random, message: Message) -> None:
    text = message.body().decode("utf-8", "replace")
    message.raw = text.encode(rng.choice(["utf-16", "utf-32", "utf-8-sig", "utf-7", "cp037"]))


def twice(_rng: Random, message: Message) -> None:
    text = message.body().decode("utf-8", "replace")
    message.raw = (text.rstrip()[:-1] + ", " + text.lstrip()[1:]).encode()


def noise(rng: Random, message: Message) -> None:
    message.raw = rng.choice([b"", b"null", b"[]", b'"x"', b"1e999", b"{}{}", b"\x00" * 9, rng.randbytes(200)])


def large(rng: Random, message: Message) -> None:
    message.raw = b'{"prompt": "' + b"x" * rng.choice([70_000, 2 << 20]) + b'"}'


def odd_header(rng: Random, message: Message) -> None:
    name, value = rng.choice(HEADERS)
    message.headers[name] = value


def chunked(_rng: Random, message: Message) -> None:
    message.is_chunked = True


def wrong_length(rng: Random, message: Message) -> None:
    """With one too large the rest never comes, so that the client leaves, or it is refused for its size."""
    more = rng.choice([-7, -1, 1, 9, 10**9])
    message.length = max(0, len(message.body()) + more)
    message.leaves = more in (1, 9)


def later(_rng: Random, message: Message) -> None:
    message.headers["Prefer"] = "respond-async"


def leaving(_rng: Random, message: Message) -> None:
    """If it is a call that would never end by itself, its leaving must end it."""
    message.leaves = True
    if message.raw is None and isinstance(message.fields.get("prompt"), str):
        message.fields["prompt"] = HELD
    elif message.raw is None:
        message.fields["messages"] = [{"role": "user", "content": HELD}]


FIELDS: list[Callable[[Random, Message], None]] = [odd_value, odd_value, right_value, right_value, lost_field]
TEXTS = [deep_nest, cut, flipped, other_encoding, twice, noise, large]
SENDING = [odd_header, odd_header, chunked, wrong_length, leaving, later]


def mutated(seed: int) -> Message:
    rng = Random(seed)
    path = rng.choice(list(ROUTES))
    message = Message(path, json.loads(json.dumps(ROUTES[path])))
    for mutations, most in ((FIELDS, 3), (TEXTS, 1), (SENDING, 1)):
        for _ in range(rng.randint(0, most)):
            rng.choice(mutations)(rng, message)
    return message


def wire(message: Message) -> bytes:
    """The message as it goes over the wire, right or wrong."""
    body = message.body()
    lines = [f"POST {message.path} HTTP/1.1", *(f"{name}: {value}" for name, value in message.headers.items())]
    if "Host" not in message.headers:
        lines.append("Host: test")
    if message.is_chunked:
        lines.append("Transfer-Encoding: chunked")
        half = len(body) // 2
        parts = [part for part in (body[:half], body[half:]) if part]
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    else:
        lines.append(f"Content-Length: {len(body) if message.length is None else message.length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class Line:
    """A connection, kept for as long as the server keeps it."""

    def __init__(self, served: Served) -> None:
        host, _, port = served.url.removeprefix("http://").partition(":")
        self._address = host, int(port)
        self._socket: socket.socket | None = None

    def ask(self, message: Message) -> int | None:
        """The status of the answer; None for a client that has left before it came."""
        if self._socket is None:
            self._socket = socket.create_connection(self._address, timeout=30)
        with suppress(BrokenPipeError, ConnectionResetError):  # It may answer before it has everything.
            self._socket.sendall(wire(message))
        if message.leaves:
            self.close()
            return None
        answer = http.client.HTTPResponse(self._socket, method="POST")
        answer.begin()
        answer.read()
        if answer.will_close or message.length is not None:
            self.close()
        return answer.status

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


@dataclass
class Counting(FakeEngine):
    """Some requests take a moment, some are refused; none fails, since that would be a 500 by right."""

    rng: Random = field(default_factory=lambda: Random(0))
    num_accepted: int = 0
    num_ended: int = 0

    def submit(self, specs: Mapping[str, Spec], **options: Any) -> tuple[Ticket, ...] | Reject:
        is_held = any(spec.prompt == HELD for spec in specs.values())
        self.script = [Plan(is_held=True) if is_held else self.rng.choice(PLANS) for _ in specs]
        answer = super().submit(specs, **options)
        for ticket in () if isinstance(answer, Reject) else answer:
            self.num_accepted += 1
            ticket.outcome.add_done_callback(self._count)
        return answer

    def _count(self, _outcome: object) -> None:
        self.num_ended += 1


PLANS = [*[Plan()] * 12, Plan(delay_s=0.02), Plan(refuse_s=9.0), Plan(code=RefusalCode.QUEUE)]
PLANS += [Plan(code=RefusalCode.UNKNOWN_COST)]


@pytest.fixture
def server() -> Iterator[Served]:
    engine = Counting(info=replace(EDITOR, name="tiny-shapes"), keeps=False)
    limits = {"max_records": 50, "result_bytes": 1 << 20, "max_input_bytes": 1 << 20}
    with serving(engine, reconnect_s=0.05, drain_s=0, **limits) as served:
        yield served


def ask_all(served: Served, seeds: range) -> Counter[int | None]:
    line, statuses = Line(served), Counter[int | None]()
    try:
        for seed in seeds:
            message = mutated(seed)
            status = line.ask(message)
            assert status is None or status < 500, (seed, status, wire(message)[:2000])
            statuses[status] += 1
    finally:
        line.close()
    return statuses


def num_alive() -> int:
    """Calls, tickets and prompts in memory, those of other tests in this process included."""
    gc.collect()
    return sum(
        isinstance(one, Call | Ticket) or (isinstance(one, Spec) and one.prompt != "") for one in gc.get_objects()
    )


@pytest.mark.slow
def test_every_request_is_answered_and_nothing_is_left(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    tasks, num_alive_before = server.tasks(), num_alive()
    caplog.clear()  # What asyncio says of the garbage of earlier tests, which num_alive has collected.
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        parts = [range(first, NUM_BODIES, NUM_CLIENTS) for first in range(NUM_CLIENTS)]
        statuses = sum(pool.map(partial(ask_all, server), parts), Counter[int | None]())
    assert statuses.total() == NUM_BODIES
    assert {200, 202, 400, 404, 413, 415, 422, 429, 431, None} <= statuses.keys(), "the mutations reach too little"
    assert min(statuses[200], statuses[400]) > NUM_BODIES // 10, statuses
    engine = server.engine
    assert isinstance(engine, Counting)
    eventually(lambda: engine.num_ended == engine.num_accepted)
    eventually(lambda: server.tasks() <= tasks)  # Each open call has one.
    assert engine.num_accepted > statuses[200]
    assert engine.tickets == {}
    ready = server.http.get("/ready").json()
    assert (ready["open_requests"], ready["devices_up"]) == (0, 2)
    latest = server.http.get("/v1/requests?limit=50").json()
    assert {one["status"] for one in latest["data"]} <= {"done", "cancelled"}
    assert not latest["has_more"]
    ended = [line for line in server.http.get("/metrics").text.splitlines() if line.startswith(ENDED)]
    assert sum(float(line.split()[-1]) for line in ended if "rejected" not in line) == engine.num_ended
    assert num_alive() <= num_alive_before, "calls that have ended, or what they asked for, are still held"
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert server.post({"prompt": "x", "size": "16x16"}).status_code in (200, 400, 429)
