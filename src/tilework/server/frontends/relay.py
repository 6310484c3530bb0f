"""The application of a front end: passes each request on to the controller, and its answer to the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.types import Message, Receive, Scope, Send

from tilework.comm.net.channel import Channel
from tilework.comm.net.frames import BadFrame
from tilework.server.frontends.messages import (
    THE_FRONT_END,
    Answered,
    AnswerPiece,
    Ask,
    Close,
    CutOff,
    Gone,
    More,
    Pull,
    Resume,
    StandingAnswer,
    Taken,
    ToFrontEnd,
)
from tilework.server.http.errors import CLOSE, SERVER, ApiError, internal_error
from tilework.server.http.middleware import PIECE_BYTES

_MOST_NUMBERS = 1 << 31
_TELL_S = 0.1
_LOST = ApiError(
    503,
    "The server ended before it answered; send the request again, with the same Idempotency-Key if it has one.",
    error_type=SERVER,
    code="server_lost",
    headers=CLOSE | {"Retry-After": "1"},
)
_BODY_S = 0.1  # Time for a body that is sent after its head, while there is a standing answer.


@dataclass(slots=True, eq=False)
class _Exchange:
    """One request and its answer. `pulls` counts the pieces of the body that may be sent."""

    number: int
    answers: asyncio.Queue[AnswerPiece | None] = field(default_factory=asyncio.Queue)
    pulls: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))


class Relay:
    """An ASGI application that keeps nothing. `follow` has to run beside it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._exchanges: dict[int, _Exchange] = {}
        self._last_number = 0
        self._standing: StandingAnswer | None = None
        self._num_answered = 0
        self._is_lost = False

    @property
    def has_standing_answer(self) -> bool:
        return self._standing is not None

    async def follow(self, messages: AsyncIterator[tuple[int, ToFrontEnd]], on_close: Callable[[], None]) -> None:
        """Take messages of the controller, until it has gone. Clients without an answer by then get an error."""
        with suppress(BadFrame):  # The controller was killed in the middle of a message.
            async for number, message in messages:
                self._take(number, message, on_close)
        self._is_lost = True
        for exchange in self._exchanges.values():
            exchange.answers.put_nowait(_refusal(_LOST))

    def _take(self, number: int, message: ToFrontEnd, on_close: Callable[[], None]) -> None:
        exchange = self._exchanges.get(number)
        match message:
            case Close():
                on_close()
            case StandingAnswer():
                self._standing = message
            case Resume():
                self._standing = None
            case AnswerPiece() if exchange is not None:
                exchange.answers.put_nowait(message)
            case CutOff() if exchange is not None:
                exchange.answers.put_nowait(_refusal(internal_error()))
            case Pull() if exchange is not None:
                exchange.pulls.release()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        exchange = self._open()
        if self._is_lost:
            exchange.answers.put_nowait(_refusal(_LOST))
        asking = asyncio.create_task(self._ask(exchange, scope, receive))
        is_complete = has_begun = False
        try:
            while not is_complete and (answer := await exchange.answers.get()) is not None:
                if has_begun and answer.status:  # The answer breaks off.
                    return
                is_complete = not answer.more_body
                has_begun = True
                await _pass_on(answer, send)
                if answer.more_body:
                    self._channel.send(Taken(), exchange.number)
        finally:
            asking.cancel()
            del self._exchanges[exchange.number]

    def _open(self) -> _Exchange:
        number = (self._last_number + 1) % _MOST_NUMBERS
        while number in self._exchanges:
            number = (number + 1) % _MOST_NUMBERS
        self._last_number = number
        exchange = self._exchanges[number] = _Exchange(number)
        return exchange

    async def _ask(self, exchange: _Exchange, scope: Scope, receive: Receive) -> None:
        """Send the request and its body, piece by piece, then watch whether the client goes.

        A body that has come with its head is sent with it. Otherwise the head does not wait for its body: the
        application decides how long a body may take.
        """
        receiving = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({receiving}, timeout=0 if self._standing is None else _BODY_S)
            message = receiving.result() if receiving.done() else _piece(b"", more_body=True)
            if _has_gone(message):
                exchange.answers.put_nowait(None)
                return
            ask = _asked(scope, message)
            if self._standing is not None and self._standing.is_for(ask):
                exchange.answers.put_nowait(self._standing.answer)
                self._count_answered()
                return
            self._channel.send(ask, exchange.number)
            if not receiving.done():
                await self._send_body(exchange, await receiving, receive)
            elif message["more_body"]:
                await self._send_body(exchange, await _next_piece(receive), receive)
            while not _has_gone(await receive()):
                pass
        finally:
            receiving.cancel()
        exchange.answers.put_nowait(None)  # The controller, which would cut it off, may have gone, too.
        self._channel.send(Gone(), exchange.number)

    def _count_answered(self) -> None:
        """Count a request that was answered here; the controller is told now and then, so that it costs nothing."""
        if not self._num_answered:
            asyncio.get_running_loop().call_later(_TELL_S, self._tell_answered)
        self._num_answered += 1

    def _tell_answered(self) -> None:
        self._channel.send(Answered(self._num_answered), THE_FRONT_END)
        self._num_answered = 0

    async def _send_body(self, exchange: _Exchange, piece: Message, receive: Receive) -> None:
        """Send the rest of the body; its first `piece` is there."""
        while not _has_gone(piece):
            await exchange.pulls.acquire()
            self._channel.send(More(body=bytes(piece["body"]), more_body=piece["more_body"]), exchange.number)
            if not piece["more_body"]:
                return
            piece = await _next_piece(receive)


async def _next_piece(receive: Receive) -> Message:
    """Gather a piece, so that a client that sends byte by byte is no work for the controller."""
    body = bytearray()
    while len(body) < PIECE_BYTES:
        message = await receive()
        if _has_gone(message):
            return message
        body += message["body"]
        if not message["more_body"]:
            return _piece(bytes(body), more_body=False)
    return _piece(bytes(body), more_body=True)


def _refusal(error: ApiError) -> AnswerPiece:
    """Make the answer to a request that has none yet; an answer that has begun ends where it is."""
    told = error.response()
    return AnswerPiece(status=told.status_code, headers=tuple(told.raw_headers), body=bytes(told.body), more_body=False)


async def _pass_on(answer: AnswerPiece, send: Send) -> None:
    if answer.status:
        await send({"type": "http.response.start", "status": answer.status, "headers": list(answer.headers)})
    if answer.body or not answer.more_body:
        await send({"type": "http.response.body", "body": answer.body, "more_body": answer.more_body})


def _asked(scope: Scope, first: Message) -> Ask:
    return Ask(
        http_version=scope["http_version"],
        method=scope["method"],
        scheme=scope["scheme"],
        path=scope["path"],
        raw_path=scope["raw_path"],
        query_string=scope["query_string"],
        headers=tuple(scope["headers"]),
        client=scope["client"],
        server=scope["server"],
        body=bytes(first["body"]),
        more_body=first["more_body"],
    )


def _piece(body: bytes, more_body: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more_body}


def _has_gone(message: Message) -> bool:
    return bool(message["type"] == "http.disconnect")
