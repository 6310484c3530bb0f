"""Both ends of a front end, joined by its real connection on one loop; no process is started."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import clock
from fake_engine import FakeEngine, app_of, serving
from tilework.comm.net.channel import Channel
from tilework.core.actions import Reject
from tilework.core.request import RefusalCode
from tilework.core.time import NS_PER_S
from tilework.server.config import ServerConfig
from tilework.server.frontends.messages import EPOCH, Resume, frontend_codec
from tilework.server.frontends.relay import Relay
from tilework.server.frontends.relayed import RelayedRequests
from tilework.server.http.middleware import PIECE_BYTES
from tilework.server.standing_answer import standing_answer
from waiting import eventually

T = TypeVar("T")
START: Message = {"type": "http.response.start", "status": 200, "headers": [(b"x-one", b"1")]}


@dataclass
class Client:
    """A connection as a front end's HTTP server has it. The body ends with an empty piece."""

    relay: Relay
    body: list[bytes] = field(default_factory=list)
    answer: list[Message] = field(default_factory=list)
    takes: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    num_read: int = 0
    has_gone: bool = False

    def ask(self, **scope: Any) -> asyncio.Task[None]:
        return asyncio.create_task(self.relay(SCOPE | scope, self._receive, self._send))

    def go(self) -> None:
        self.has_gone = True
        self.changed.set()

    def add(self, piece: bytes) -> None:
        self.body.append(piece)
        self.changed.set()

    async def _receive(self) -> Message:
        while not self.has_gone and self.num_read == len(self.body):
            self.changed.clear()
            await self.changed.wait()
        if self.has_gone:
            return {"type": "http.disconnect"}
        piece = self.body[self.num_read]
        is_last = self.body[self.num_read :] in ([b""], [piece, b""])  # An end that is there comes with its piece.
        self.num_read += 1
        return {"type": "http.request", "body": piece, "more_body": not is_last}

    async def _send(self, message: Message) -> None:
        self.answer.append(message)
        await self.takes.wait()

    @property
    def status(self) -> int | None:
        return next((one["status"] for one in self.answer if "status" in one), None)

    @property
    def content(self) -> bytes:
        return b"".join(one.get("body", b"") for one in self.answer)


SCOPE: Scope = {
    "type": "http",
    "http_version": "1.1",
    "method": "POST",
    "scheme": "http",
    "path": "/v1/ä b",
    "raw_path": b"/v1/%C3%A4%20b",
    "query_string": b"a=1",
    "headers": [(b"x-two", b"2"), (b"x-two", b"3")],
    "client": ("127.0.0.1", 1),
    "server": ("::1", None),
}


@dataclass
class Joined:
    """`to_it` and `channel` are the controller's and the front end's end of their connection."""

    loop: clock.ManualLoop
    relay: Relay
    relayed: RelayedRequests
    to_it: Channel
    channel: Channel

    def client(self, *body: bytes) -> Client:
        client = Client(self.relay, list(body))
        client.takes.set()
        return client


def run(
    app: ASGIApp, scenario: Callable[[Joined], Awaitable[T]], on_answered: Callable[[int], None] = lambda _number: None
) -> T:
    """A scenario with a front end before an application."""

    async def joined(loop: clock.ManualLoop) -> T:
        ends = [await asyncio.open_unix_connection(sock=one) for one in socket.socketpair()]
        ours, theirs = (Channel(*one, frontend_codec(), EPOCH) for one in ends)
        relayed, relay = RelayedRequests(app, ours, lambda: None, on_answered), Relay(theirs)
        serving = asyncio.create_task(relayed.serve())
        following = asyncio.create_task(relay.follow(theirs.messages(), lambda: None))
        try:
            return await scenario(Joined(loop, relay, relayed, ours, theirs))
        finally:
            theirs.close()
            await asyncio.gather(serving, following, return_exceptions=True)  # A lost connection is one.

    return clock.run(joined)


async def read(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        body += message["body"]
        if not message["more_body"]:
            return body


def test_the_application_gets_the_request_and_the_client_its_answer() -> None:
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        body = await read(receive)
        await send(START)
        await send({"type": "http.response.body", "body": b"got " + body})

    async def scenario(joined: Joined) -> Client:
        client = joined.client(b"one ", b"two", b"")
        await client.ask()
        return client

    client = run(app, scenario)
    assert {name: scopes[0][name] for name in SCOPE} == SCOPE
    assert client.answer[0] == START
    assert client.content == b"got one two"
    assert not client.answer[-1]["more_body"]


def test_a_body_is_read_only_as_far_as_the_application_wants_it() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(START)
        await send({"type": "http.response.body", "body": b"enough"})

    async def scenario(joined: Joined) -> Client:
        client = joined.client(*[b"x" * PIECE_BYTES] * 20, b"")
        await client.ask()
        return client

    client = run(app, scenario)
    assert client.content == b"enough"
    assert client.num_read <= 4


def test_a_head_does_not_wait_for_its_body() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send({"type": "http.response.body", "body": b"too large"})

    async def scenario(joined: Joined) -> Client:
        client = joined.client()  # The body never comes.
        await client.ask()
        return client

    assert run(app, scenario).content == b"too large"


def test_an_answer_goes_on_only_when_the_client_has_taken_what_was_sent() -> None:
    sent: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        for number in range(10):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            sent.append(number)
        await send({"type": "http.response.body"})

    async def scenario(joined: Joined) -> tuple[int, int]:
        client = joined.client(b"")
        client.takes.clear()
        asking = client.ask()
        await joined.loop.until(lambda: client.answer)
        await joined.loop.until_idle()
        held_up = len(sent)
        client.takes.set()
        await asking
        return held_up, len(client.content)

    assert run(app, scenario) == (0, 10)


def test_a_head_comes_before_the_first_piece_is_there() -> None:
    async def app(goes_on: asyncio.Event, scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await goes_on.wait()
        await send({"type": "http.response.body", "body": b"later"})

    async def scenario(goes_on: asyncio.Event, joined: Joined) -> bytes:
        client = joined.client(b"")
        asking = client.ask()
        await joined.loop.until(lambda: client.status == 200)
        goes_on.set()
        await asking
        return client.content

    goes_on = asyncio.Event()
    assert run(partial(app, goes_on), partial(scenario, goes_on)) == b"later"


@pytest.mark.parametrize("is_lost", [False, True], ids=["the client goes", "the front end is lost"])
@pytest.mark.parametrize("body", [(b"",), (b"half", b"x" * PIECE_BYTES)], ids=["whole body", "half a body"])
def test_the_application_hears_that_its_client_has_gone(is_lost: bool, body: tuple[bytes, ...]) -> None:
    heard: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        heard.append("request")
        message = await receive()
        while message["type"] != "http.disconnect":
            message = await receive()
        heard.append("gone")

    async def scenario(joined: Joined) -> None:
        client = joined.client(*body)
        asking = client.ask()
        await joined.loop.until(lambda: heard == ["request"])
        if is_lost:
            joined.channel.abort()
        else:
            client.go()
        await joined.loop.until(lambda: heard == ["request", "gone"])
        await joined.loop.until(lambda: not joined.relayed._exchanges)
        client.go()
        await joined.loop.until(asking.done)

    run(app, scenario)


def test_an_answer_that_breaks_off_is_not_completed(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ValueError("a bug")

    async def scenario(joined: Joined) -> Client:
        client = joined.client(b"")
        await client.ask()
        return client

    client = run(app, scenario)
    assert client.content == b"half"
    assert client.answer[-1]["more_body"]
    assert "a bug" in caplog.text


def test_a_request_without_an_answer_is_told_that_the_controller_has_ended() -> None:
    """Also one that comes then. What has an answer ends where it is."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/begun":
            await send(START)
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
        await asyncio.get_running_loop().create_future()

    async def scenario(joined: Joined) -> list[Client]:
        begun, waiting, late = (joined.client(b"") for _ in range(3))
        asked = [begun.ask(path="/begun"), waiting.ask(path="/waiting")]
        await joined.loop.until(lambda: begun.content == b"half")
        joined.to_it.abort()
        await asyncio.gather(*asked)
        await late.ask(path="/late")
        return [begun, waiting, late]

    begun, *others = run(app, scenario)
    assert begun.content == b"half"
    for client in others:
        assert client.status == 503
        assert json.loads(client.content)["error"]["code"] == "server_lost"
        assert dict(client.answer[0]["headers"])[b"retry-after"] == b"1"


def test_exchanges_do_not_wait_for_each_other() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            await read(receive)
        await send(START)
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    async def scenario(joined: Joined) -> tuple[bytes, bytes]:
        slow, fast = joined.client(b"begin"), joined.client(b"")
        first = slow.ask(path="/slow")
        await fast.ask(path="/fast")
        slow.add(b"")
        await first
        return slow.content, fast.content

    assert run(app, scenario) == (b"/slow", b"/fast")


# Answers that a front end gives by itself.

JSON = [(b"content-type", b"application/json; charset=utf-8")]
PLAIN = b'{"prompt": "x"}'
GENERATIONS = "/v1/images/generations"


@pytest.mark.parametrize(
    ("is_answered", "scope", "body"),
    [
        (True, {"headers": JSON}, PLAIN),
        (False, {"headers": [*JSON, (b"idempotency-key", b"k")]}, PLAIN),
        (False, {"headers": [*JSON, (b"content-encoding", b"gzip")]}, gzip.compress(PLAIN)),
        (False, {"headers": JSON}, b'{"prompt": "x", "slo_s": 9, "on_miss": "reject"}'),
        (False, {"headers": JSON}, rb'{"prompt": "x", "slo_s": 9, "on\u005fmiss": "reject"}'),
        (False, {"headers": [(b"content-type", b"multipart/form-data")]}, PLAIN),
        (False, {"headers": JSON, "method": "GET"}, b""),
        (False, {"headers": JSON, "path": "/v1/admin/models"}, PLAIN),
    ],
    ids=["plain", "key", "compressed", "promise", "escaped", "form", "get", "other path"],
)
def test_a_full_queue_is_answered_without_the_application(
    is_answered: bool, scope: dict[str, Any], body: bytes
) -> None:
    """Until there is room again; the controller is told how often."""
    engine = FakeEngine(standing=Reject("", "9 are waiting", None, RefusalCode.QUEUE, 7 * NS_PER_S))
    numbers: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read(receive)
        await send({**START, "status": 202})
        await send({"type": "http.response.body", "body": b"accepted"})

    async def asked(joined: Joined) -> Client:
        client = joined.client(*filter(None, [body]), b"")
        await client.ask(**{"path": GENERATIONS, **scope})
        return client

    async def scenario(joined: Joined) -> tuple[Client, Client]:
        stands = standing_answer(engine)
        assert stands is not None
        joined.to_it.send(stands)
        await joined.loop.until(lambda: joined.relay.has_standing_answer)
        first = await asked(joined)
        joined.to_it.send(Resume())
        await joined.loop.until(lambda: not joined.relay.has_standing_answer)
        joined.loop.advance(1.0)
        if is_answered:
            await joined.loop.until(lambda: numbers)
        return first, await asked(joined)

    first, second = run(app, scenario, numbers.append)
    assert (first.status, second.status) == (429 if is_answered else 202, 202)
    assert numbers == ([1] if is_answered else [])
    if is_answered:
        error = json.loads(first.content)["error"]
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        assert "9 are waiting" in error["message"]
        assert (b"retry-after", b"7") in first.answer[0]["headers"]


def test_nothing_is_answered_for_an_engine_that_has_room() -> None:
    assert standing_answer(FakeEngine()) is None


def test_every_route_that_begins_a_call_is_refused_while_the_queue_is_full() -> None:
    """So that a new one is not forgotten."""
    stands = standing_answer(FakeEngine(standing=Reject("", "full", None, RefusalCode.QUEUE)))
    assert stands is not None
    routes: list[Any] = app_of(FakeEngine(), ServerConfig()).routes
    shown = [route for route in routes if getattr(route, "include_in_schema", False)]
    assert set(stands.paths) == {route.path for route in shown if "POST" in route.methods}


@pytest.mark.slow
def test_clients_of_a_front_end_are_refused_while_the_queue_is_full() -> None:
    """With a real process. httpx sends the body behind the head."""
    engine = FakeEngine()
    with serving(engine, frontends=1) as server:
        assert server.post({"prompt": "x"}).status_code == 200
        engine.standing = Reject("", "9 are waiting", None, RefusalCode.QUEUE, 7 * NS_PER_S)
        eventually(lambda: server.post({"prompt": "x"}).status_code == 429)
        num_asked = len(engine.requests)
        answers = [server.post({"prompt": "x"}) for _ in range(20)]
        assert {answer.status_code for answer in answers} == {429}
        assert len(engine.requests) == num_asked
        assert server.post({"prompt": "x"}, headers={"Idempotency-Key": "k"}).status_code == 200
        eventually(lambda: server.metric("tilework_frontend_refusals_total") == 21)
        engine.standing = None
        eventually(lambda: server.post({"prompt": "x"}).status_code == 200)


@pytest.mark.slow
def test_a_front_end_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As for want of memory: the others go on meanwhile."""
    start, pids, has_room = asyncio.create_subprocess_exec, list[int](), True

    async def started(*command: str, **options: Any) -> asyncio.subprocess.Process:
        if not has_room:
            raise OSError(12, "Cannot allocate memory")
        process = await start(*command, **options)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    with serving(FakeEngine(), frontends=2) as server:
        eventually(lambda: len(pids) == 2)
        has_room = False
        os.kill(pids[0], signal.SIGKILL)
        eventually(lambda: "Cannot allocate memory" in caplog.text)
        has_room = True
        eventually(lambda: len(pids) == 3)
        with httpx.Client(base_url=server.url) as client:
            assert client.get("/health").status_code == 200
