"""What a front end and the controller tell each other. The address of a message is the number of its exchange.

An exchange is one HTTP request and its answer. `http` of ASGI (version 3.0) has the meaning of the fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tilework.comm.net.codec import Codec

THE_FRONT_END = -1
"""The address of messages that belong to no exchange."""
EPOCH = 0
"""Of a connection: each has one end alone, so there is no earlier session."""

# From the controller.


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """What holds for connections: see `ServerConfig`. The first message."""

    max_connections: int
    max_head_bytes: int
    read_timeout_s: float
    send_timeout_s: float


@dataclass(frozen=True, slots=True)
class Pull:
    """The application wants a further piece of the body. Answered by `More`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A piece of the answer; the first one has its head, of which `status` is 0 in all others.

    If there is more to come, it is answered by `Taken`.
    """

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes = field(repr=False)
    more_body: bool


@dataclass(frozen=True, slots=True)
class CutOff:
    """The answer will not be completed."""


@dataclass(frozen=True, slots=True)
class Close:
    """Take no more connections, and end when no answer is under way."""


# From the front end.


@dataclass(frozen=True, slots=True)
class Listening:
    """Connections are taken."""


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
    """A further piece of the body. The first one comes without being pulled."""

    body: bytes = field(repr=False)
    more_body: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """The client has taken the piece, or what buffers there are."""


@dataclass(frozen=True, slots=True)
class Gone:
    """The client has closed its connection, or needs no more of the answer."""


FromFrontEnd = Listening | Ask | More | Taken | Gone
ToFrontEnd = Begin | Pull | Answer | CutOff | Close


def frontend_codec() -> Codec:
    return Codec((Begin, Pull, Answer, CutOff, Close, Listening, Ask, More, Taken, Gone))
