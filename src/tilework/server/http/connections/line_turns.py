"""Reads data with very many short lines in turns: h11 takes microseconds for each header and each chunk of a body."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Collection
from typing import Any

from uvicorn import Config
from uvicorn.server import ServerState

from tilework.server.http.connections.places import ConnectionPlaces
from tilework.server.http.connections.protocol import ConnectionLimits, LimitedProtocol
from tilework.server.http.errors import many_headers

MAX_HEADERS = 128
_MOST_LINES = 256
_PIECE_BYTES = 2 << 10
"""Size of a piece: 340 chunks of one byte, 2 ms. Ordinary chunks have kilobytes: they are read at once."""
_END_OF_HEAD = re.compile(rb"\n\r?\n")


class LineTurns(LimitedProtocol):
    """Passes on data with too many lines in small pieces, one piece of one connection in each round of the event loop.

    `turns` are the connections that have something left. A head with more than `MAX_HEADERS` headers is refused before
    it is parsed.
    """

    turns: deque[LineTurns]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._left = bytearray()

    def data_received(self, data: bytes) -> None:
        if self.is_lingering:
            super().data_received(data)
        elif self._left:
            self._left += data
            self._raw.pause_reading()
        elif len(data) > _PIECE_BYTES and data.count(b"\r\n") > _MOST_LINES:
            self._left += data
            self._raw.pause_reading()
            self.turns.append(self)
            if len(self.turns) == 1:
                self._take_turn()
        else:
            super().data_received(data)

    def _take_turn(self) -> None:
        """Read a piece of the connection that is next."""
        one = self.turns.popleft()
        if one._has_more():
            self.turns.append(one)
        if self.turns:
            self.loop.call_soon(self._take_turn)

    def _has_more(self) -> bool:
        """Read a piece. Return whether more is left."""
        if self.is_lingering or self._raw.is_closing():
            self._left.clear()
            return False
        piece = bytes(self._left[:_PIECE_BYTES])
        del self._left[:_PIECE_BYTES]
        super().data_received(piece)
        if not self._left and not self.flow.read_paused:
            self._raw.resume_reading()
        self._hold_back()
        return bool(self._left)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._hold_back()

    def _hold_back(self) -> None:
        """Receive no more while something is left, though uvicorn has asked for it."""
        if self._left and not self.is_lingering:
            self._raw.pause_reading()

    def handle_events(self) -> None:
        if self._is_between_requests() and self._num_lines() > MAX_HEADERS:
            self._refuse(many_headers(MAX_HEADERS))
        else:
            super().handle_events()

    def _num_lines(self) -> int:
        """Return the number of lines of the head that has come."""
        head = self.conn.trailing_data[0][: self.limits.max_head_bytes]
        end = _END_OF_HEAD.search(head)
        return head.count(b"\n", 0, len(head) if end is None else end.start())


def protocol_class(
    limits: ConnectionLimits, places: ConnectionPlaces, open_paths: Collection[str] = ()
) -> type[LineTurns]:
    """Make the protocol class of a server with these limits and places; `open_paths` need no key."""
    shared = {"limits": limits, "places": places, "open_paths": open_paths, "turns": deque()}
    return type("BoundProtocol", (LineTurns,), shared)
