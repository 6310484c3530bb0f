"""The controller's end of a front end: runs the application for the requests that the front end takes."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from tilework.comm.net.channel import Channel
from tilework.server.frontends.messages import (
    Answered,
    AnswerPiece,
    Ask,
    CannotListen,
    CutOff,
    FromFrontEnd,
    Gone,
    Listening,
    More,
    Pull,
    Taken,
)
from tilework.server.http.server import AddressInUse

_log = logging.getLogger("tilework.server")
_GONE: Message = {"type": "http.disconnect"}


class RelayedRequests:
    """Requests that come through one front end. When it is lost, their clients have gone."""

    def __init__(
        self,
        app: ASGIApp,
        channel: Channel,
        on_listening: Callable[[], None],
        on_answered: Callable[[int], None],
    ) -> None:
        """Serve a channel; `on_answered` gets the number of requests that the front end has answered by itself."""
        self._app = app
        self._channel = channel
        self._on_listening = on_listening
        self._on_answered = on_answered
        self._exchanges: dict[int, _AsgiExchange] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Serve until the front end closes its connection. Raises BadFrame, and AddressInUse if it cannot listen."""
        try:
            async for number, message in self._channel.messages():
                self._take(number, message)
        finally:
            for exchange in self._exchanges.values():
                exchange.leave()

    def _take(self, number: int, message: FromFrontEnd) -> None:
        match message:
            case Ask():
                exchange = self._exchanges[number] = _AsgiExchange(self._channel, number, message)
                task = asyncio.create_task(self._run(exchange))
                self._tasks.add(task)  # The loop alone would not keep the task.
                task.add_done_callback(self._tasks.discard)
            case Listening():
                self._on_listening()
            case CannotListen(message=reason):
                raise AddressInUse(reason)
            case Answered(number=num_answered):
                self._on_answered(num_answered)
            case _ if (found := self._exchanges.get(number)) is not None:
                found.take(message)

    async def _run(self, exchange: _AsgiExchange) -> None:
        try:
            await self._app(exchange.scope, exchange.receive, exchange.send)
        except Exception:
            _log.exception("an answer was cut off")
        finally:
            del self._exchanges[exchange.number]
            if not exchange.is_complete:
                self._channel.send(CutOff(), exchange.number)


@dataclass(slots=True, eq=False)
class _AsgiExchange:
    """One request and its answer, as ASGI has them."""

    channel: Channel
    number: int
    ask: Ask
    is_complete: bool = False
    _pieces: deque[Message] = field(default_factory=deque)
    _wants_more: bool = False
    _has_gone: bool = False
    _head: Message | None = None
    _num_untaken: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _room: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        if self.ask.body or not self.ask.more_body:
            self._pieces.append(_piece(self.ask.body, self.ask.more_body))

    @property
    def scope(self) -> Scope:
        ask = self.ask
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": ask.http_version,
            "method": ask.method,
            "scheme": ask.scheme,
            "root_path": "",
            "path": ask.path,
            "raw_path": ask.raw_path,
            "query_string": ask.query_string,
            "headers": list(ask.headers),
            "client": ask.client,
            "server": ask.server,
            "state": {},
        }

    # From the front end.

    def take(self, message: FromFrontEnd) -> None:
        match message:
            case More(body=body, more_body=more_body):
                self._pieces.append(_piece(body, more_body))
                self._news.set()
            case Taken():
                self._num_untaken -= 1
                self._room.set()
            case Gone():
                self.leave()

    def leave(self) -> None:
        """Note that the client has gone."""
        self._has_gone = True
        self._news.set()
        self._room.set()

    # For the application.

    async def receive(self) -> Message:
        """Return the next piece of the body; after the last one, once the client has gone, a message that says so."""
        while not self._pieces and not self._has_gone and not self.is_complete:
            if self._wants_more:
                self._wants_more = False
                self.channel.send(Pull(), self.number)
            self._news.clear()
            await self._news.wait()
        if self._has_gone or not self._pieces:
            return _GONE
        piece = self._pieces.popleft()
        self._wants_more = piece["more_body"]
        return piece

    async def send(self, message: Message) -> None:
        """Send a part of the answer; while more is to come, wait until the client has taken this one."""
        if self._has_gone or self.is_complete:
            return
        if message["type"] == "http.response.start":
            self._head = message
            asyncio.get_running_loop().call_soon(self._send_head)
            return
        more_body = message.get("more_body", False)
        self._answer(message.get("body", b""), more_body)
        while more_body and self._num_untaken and not self._has_gone:
            self._room.clear()
            await self._room.wait()

    def _send_head(self) -> None:
        """Send the head of an answer whose body is not there yet."""
        if self._head is not None and not self._has_gone:
            self._answer(b"", more_body=True)

    def _answer(self, body: bytes, more_body: bool) -> None:
        head, self._head = self._head, None
        status, headers = (0, ()) if head is None else (head["status"], tuple(head.get("headers", ())))
        self.channel.send(
            AnswerPiece(status=status, headers=headers, body=bytes(body), more_body=more_body), self.number
        )
        if more_body:
            self._num_untaken += 1
        else:
            self.is_complete = True
            self._news.set()


def _piece(body: bytes, more_body: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more_body}
