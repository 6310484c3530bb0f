"""Agreement of a producer and a consumer over TCP before messages go over UCX. The connection ends with either of them.

1. The producer sends the secret from the ring's address.
2. The consumer opens a lane for it and sends its address.
3. The producer reaches the memory by the lane and says so.
4. Only then the consumer gives the producer an owner id.

So nothing is written by a lane that the consumer has not seen connected: the port of a closed lane may be another's.
All messages are lines of JSON.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Generator
from typing import Any
from urllib.parse import urlsplit

from tilework.comm.ring.errors import RingError
from tilework.comm.ring.network import SCHEME

FORMAT = "tw-ring-ucx1"
_LONGEST = 1 << 16
_IDLE_S, _PROBES, _PROBE_S = 5, 3, 2
"""Settings by which a node that vanishes silently is noticed after about 11 s."""


def new_secret() -> str:
    return secrets.token_urlsafe(16)


def parse(address: str) -> tuple[str, int, str]:
    """Return host, port and secret of `ucx://HOST:PORT/SECRET`. Raises RingError."""
    parts = urlsplit(address)
    try:
        if address.startswith(SCHEME) and parts.hostname and parts.port and len(parts.path) > 1:
            return parts.hostname, parts.port, parts.path[1:]
    except ValueError:  # The port is no number.
        pass
    raise RingError(f"address: {address!r} is not as ring.address() gives it, {SCHEME}HOST:PORT/SECRET")


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message. Raises OSError if the other end is gone."""
    connection.sendall(json.dumps(message).encode("ascii") + b"\n")


def receive(connection: socket.socket) -> Generator[None, None, dict[str, Any]]:
    """Return the next message; yield where the connection must be readable to go on.

    Raises:
        OSError: the other end is gone, or has not answered in the time of the connection.
        RingError: it refused, or speaks something else.
    """
    data = b""
    while not data.endswith(b"\n"):
        try:
            more = connection.recv(_LONGEST)
        except BlockingIOError:
            yield
            continue
        data += more
        if not more:
            raise ConnectionResetError("it has ended")
        if len(data) > _LONGEST:
            raise RingError("address: this is no ring; give the address as ring.address() has it")
    try:
        message = json.loads(data)
        if "refused" in message:
            raise RingError(message["refused"])
        return dict(message)
    except (ValueError, TypeError, RecursionError) as error:
        raise RingError(f"address: this is no ring of this version ({error}); run one version on both ends") from error


def watch(connection: socket.socket) -> None:
    """Notice the end of the other node, and send without delay."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _IDLE_S),
        (socket.TCP_KEEPCNT, _PROBES),
        (socket.TCP_KEEPINTVL, _PROBE_S),
        (socket.TCP_USER_TIMEOUT, 1000 * (_IDLE_S + _PROBES * _PROBE_S)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
