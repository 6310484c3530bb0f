"""The messages between a front end and the controller. The address of a message is the number of its exchange.

An exchange is one HTTP request and its answer. `http` of ASGI (version 3.0) defines the fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from tilework.comm.net.codec import Codec

THE_FRONT_END = -1
"""Address of messages that belong to no exchange."""
EPOCH = 0
"""Epoch of a connection, which has one session only."""

# From the controller.


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginFrontEnd:
    """The limits for connections: see `ServerConfig`. The first message. `open_paths` need no key."""

    max_connections: int
    open_paths: tuple[str, ...]
    max_head_bytes: int
    read_timeout_s: float
    send_timeout_s: float


@dataclass(frozen=True, slots=True)
class Pull:
    """The application wants a further piece of the body. Answered by `More`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPiece:
    """A piece of the answer; the first one has its head, in all others `status` is 0.

    A piece after which more follows is answered by `Taken`.
    """

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes = field(repr=False)
    more_body: bool


@dataclass(frozen=True, slots=True)
class CutOff:
    """The answer will not be completed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingAnswer:
    """An answer that a front end itself gives from now on until `Resume`, to all requests that it is for.

    They have this method, one of the paths, a body of this type that came with its head and contains none of
    `unless_body`, and none of the headers `unless_headers`.
    """

    method: str
    paths: tuple[str, ...]
    media_type: bytes
    unless_headers: tuple[bytes, ...]
    unless_body: tuple[bytes, ...]
    answer: AnswerPiece

    def is_for(self, ask: Ask) -> bool:
        if ask.more_body or ask.method != self.method or ask.path not in self.paths:
            return False
        headers = dict(ask.headers)
        given = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        has_header = any(name in headers for name in self.unless_headers)
        is_plain = not has_header and not any(part in ask.body for part in self.unless_body)
        return given == self.media_type and is_plain


@dataclass(frozen=True, slots=True)
class Resume:
    """The front end passes all requests on to the application again."""


@dataclass(frozen=True, slots=True)
class Close:
    """The front end takes no more connections, and ends when no answer is under way."""


# From the front end.


@dataclass(frozen=True, slots=True)
class Listening:
    """The front end takes connections."""


@dataclass(frozen=True, slots=True)
class CannotListen:
    """The address is in use; the front end ends. `message` is that of the error."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request, with the part of its body that has come."""

    http_version: str
    method: str
    scheme: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    client: tuple[str, int | None] | None
    server: tuple[str, int | None] | None
    body: bytes = field(repr=False)
    more_body: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class More:
    """A further piece of the body. The first one comes without a `Pull`."""

    body: bytes = field(repr=False)
    more_body: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """The client, or a buffer, has taken the piece."""


@dataclass(frozen=True, slots=True)
class Gone:
    """The client has closed its connection, or needs no more of the answer."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The number of requests that the front end has answered by itself since the last such message."""

    number: int


FromFrontEnd = Listening | CannotListen | Ask | More | Taken | Gone | Answered
ToFrontEnd = BeginFrontEnd | Pull | AnswerPiece | CutOff | StandingAnswer | Resume | Close


def frontend_codec() -> Codec:
    return Codec((*get_args(ToFrontEnd), *get_args(FromFrontEnd)))
