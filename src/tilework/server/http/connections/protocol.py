"""uvicorn's HTTP protocol with limits on slow connections and on their number.

uvicorn (0.54) has no limit for these: it waits without end for the head of a request, for a client that takes nothing
of its answer, and for the rest of a body that no route reads. Its `limit_concurrency` refuses requests, but accepts any
number of connections (see `places`). The protocol is always h11's, so that the limits are the same on every machine.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import socket
import struct
import sys
import termios
from collections.abc import Collection
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Protocol, cast

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from tilework.server.http.connections.places import ConnectionPlaces, holder_of
from tilework.server.http.errors import SERVER, ApiError, long_head

LEAST_BYTES_PER_S = 16 << 10  # The least rate at which a client must take its answer.
LINGER_S = 1.0  # Time for a client to read an answer that came before it had sent all of its request.
_HEAD = b"HTTP/1.1 "  # The beginning of an answer; its status follows.
_MOST_REFUSED = 64  # Connections without a place that may get an answer at a time: others are cut off.
LINGER_BYTES = 4 << 20  # More of that request is received up to this size, and thrown away.


class ConnectionLimits(Protocol):
    """The limits for each connection: see `ServerConfig`."""

    @property
    def max_head_bytes(self) -> int: ...
    @property
    def read_timeout_s(self) -> float: ...
    @property
    def send_timeout_s(self) -> float: ...


class LimitedProtocol(H11Protocol):
    """One connection. `open_paths` are answered without a key.

    uvicorn makes protocols from a class, so what all connections share is set on a subclass: see
    `line_turns.protocol_class`. That subclass also counts the connections that were refused and are still open.
    """

    limits: ConnectionLimits
    places: ConnectionPlaces
    open_paths: Collection[str]
    num_refused = 0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._num_written = 0
        self._num_taken_before = 0
        self._num_discarded = 0
        self._head = b""
        self._status = 0
        self._is_known = self._is_refused = False

    @property
    def holder(self) -> str:
        """Holder of the connection: see `places`."""
        return holder_of(self.client[0] if self.client else "")

    @property
    def is_lingering(self) -> bool:
        return self._linger_timer is not None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, _PoliteTransport(transport, self)))
        self._raw = transport
        if self.places.enter(self):
            self._await_head()
        else:
            self._turn_away()

    def _turn_away(self) -> None:
        """Refuse a connection for which there is no place."""
        if type(self).num_refused >= _MOST_REFUSED:
            self._raw.abort()
            return
        type(self).num_refused += 1
        self._is_refused = True
        self._refuse(_too_many_connections(self.places.most))

    def give_way(self) -> None:
        """Close for a connection that gets its place. A client that has begun to send is told why."""
        if not self.is_lingering and self.conn.trailing_data[0]:
            self._answer(_too_many_connections(self.places.most))
        if self._raw.get_write_buffer_size():  # Otherwise it would stay open until its client takes that.
            self._raw.abort()
        else:
            self._raw.close()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._stall_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self.places.leave(self)
        type(self).num_refused -= self._is_refused
        self._unset_keepalive_if_required()  # uvicorn leaves it running if the connection was reset.
        # These refer back to their owners: only a collection would free them.
        self.cycle = self.transport = self.flow = None  # type: ignore[assignment]
        vars(self._raw).pop("_read_ready_cb", None)

    def data_received(self, data: bytes) -> None:
        if self.is_lingering:
            self._discard(len(data))
            return
        if self._head_timer is None and self._is_between_requests():
            self._await_head()
        super().data_received(data)
        if self._head_timer is not None and not self._is_between_requests():
            self._head_timer.cancel()
            self._head_timer = None
            self.places.use(self)

    def _is_between_requests(self) -> bool:
        return self.conn.their_state is h11.IDLE

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.read_timeout_s, self._on_slow_head)

    def _on_slow_head(self) -> None:
        """Refuse a late head. A connection that has sent nothing is closed without an answer, as an idle one is."""
        self._head_timer = None
        if self.conn.trailing_data[0]:
            self._refuse(_slow_head(self.limits.read_timeout_s))
        else:
            self._raw.close()

    def send_400_response(self, msg: str) -> None:
        """Refuse data that h11 could not read. One reason is a head that is incomplete, and already too long."""
        is_long = len(self.conn.trailing_data[0]) > self.limits.max_head_bytes
        self._refuse(long_head(self.limits.max_head_bytes) if is_long else _not_http(msg))

    def _refuse(self, error: ApiError) -> None:
        """Answer outside of any request, and close."""
        self._answer(error)
        self._linger()

    def _answer(self, error: ApiError) -> None:
        body = json.dumps(error.body()).encode("ascii")
        lines = [
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in error.headers.items()),
        ]
        self.write("\r\n".join([*lines, "", ""]).encode("ascii") + body)
        self.send_head()

    # Clients that take too little.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def on_response_complete(self) -> None:
        is_open = self.scope["path"] in self.open_paths or self.scope["method"] == "OPTIONS"
        self._is_known |= self._status < HTTPStatus.BAD_REQUEST and not is_open
        super().on_response_complete()
        self._watch_stall()
        if self._is_between_requests() and not self.is_lingering:
            self.places.rest(self, is_known=self._is_known)

    def _watch_stall(self) -> None:
        """Check every `send_timeout_s` until everything is sent; cut off a client that took too little in between."""
        if self._stall_timer is None and self._raw.get_write_buffer_size():
            self._num_taken_before = self.num_taken()
            self._stall_timer = self.loop.call_later(self.limits.send_timeout_s, self._on_stall)

    def _on_stall(self) -> None:
        self._stall_timer = None
        is_slow = self.num_taken() - self._num_taken_before < LEAST_BYTES_PER_S * self.limits.send_timeout_s
        if is_slow and self._raw.get_write_buffer_size():
            _reset_when_closed(self._raw)
            self._raw.abort()
        else:
            self._watch_stall()

    def _forgive(self) -> None:
        """Stop the check once the client has taken all: between two events of a stream there is nothing to take."""
        if self._stall_timer is not None and self.num_taken() == self._num_written:
            self._stall_timer.cancel()
            self._stall_timer = None

    def num_taken(self) -> int:
        """Return the bytes that the client has confirmed; what the kernel here still buffers does not count."""
        return self._num_written - self._raw.get_write_buffer_size() - _num_unconfirmed(self._raw)

    def write(self, data: bytes) -> None:
        """Send what uvicorn has written: a head together with the body that follows it at once, if one does.

        Each send is a call of the kernel, which wakes the client: a third of the time of a short answer.
        """
        if data.startswith(_HEAD) and not self._head:
            self._status = int(data[len(_HEAD) : len(_HEAD) + 3])
            self._head = data
            self.loop.call_soon(self.send_head)
        else:
            self._head, head = b"", self._head
            self._send(head + data if head else data)

    def send_head(self) -> None:
        """Send a head that has waited for its body."""
        if self._head:
            self._head, head = b"", self._head
            self._send(head)

    def _send(self, data: bytes) -> None:
        if not self._raw.is_closing():  # asyncio would log each write after the client has gone.
            self._forgive()
            self._num_written += len(data)
            self._raw.write(data)

    # Clients that are still sending.

    def hang_up(self) -> None:
        """Close; a client that is still sending gets time to read its answer first.

        If the socket is closed while bytes arrive, the kernel resets the connection, which discards the answer.
        """
        self.send_head()
        if self.conn.their_state is h11.SEND_BODY:
            self._linger()
        else:
            self._raw.close()

    def _linger(self) -> None:
        if self.is_lingering or self._raw.is_closing():
            return
        self.send_head()
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self.places.linger(self)
        self._linger_timer = self.loop.call_later(LINGER_S, self._raw.abort)
        self._raw.resume_reading()
        if self._raw.can_write_eof():
            with suppress(OSError):  # The client has gone; `connection_lost` follows.
                self._raw.write_eof()

    def _discard(self, num_bytes: int) -> None:
        self._num_discarded += num_bytes
        if self._num_discarded > LINGER_BYTES:
            self._raw.pause_reading()

    def abort(self) -> None:
        self._raw.abort()

    def shutdown(self) -> None:
        if self.is_lingering:
            self._raw.abort()
        else:
            super().shutdown()


class _PoliteTransport:
    """The transport as uvicorn sees it: its `write` is counted, and its `close` is the protocol's `hang_up`."""

    def __init__(self, transport: asyncio.Transport, protocol: LimitedProtocol) -> None:
        self._transport = transport
        self._protocol = protocol

    def write(self, data: bytes) -> None:
        self._protocol.write(data)

    def close(self) -> None:
        self._protocol.hang_up()

    def is_closing(self) -> bool:
        return self._protocol.is_lingering or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _num_unconfirmed(transport: asyncio.Transport) -> int:
    """Return the bytes in the kernel's send queue; 0 on systems that do not say: then all it accepted is taken."""
    size = bytearray(4)
    with suppress(OSError):
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, size)
    return int.from_bytes(size, sys.byteorder)


def _reset_when_closed(transport: asyncio.Transport) -> None:
    """Let the kernel drop what it has not sent yet, instead of sending it to a client that is cut off."""
    on_at_once = struct.pack("ii", 1, 0)
    with suppress(OSError):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, on_at_once)


def _too_many_connections(most: int) -> ApiError:
    message = f"The server has {most} connections, as many as it may have. Retry in 1 second, with fewer."
    return ApiError(503, message, error_type=SERVER, code="too_many_connections", headers={"Retry-After": "1"})


def _slow_head(timeout_s: float) -> ApiError:
    message = f"The head of the request was not complete after {timeout_s:g} seconds; send it faster."
    return ApiError(408, message, code="head_too_slow")


def _not_http(reason: str) -> ApiError:
    return ApiError(400, f"This is not HTTP/1.1: {reason} Send a request as in RFC 9112.", code="invalid_http")
