"""The process of one front end: `python -m tilework.server.frontends CHANNEL LISTENER`, both numbers of open sockets.

It imports neither the API nor anything that knows a model, so that it starts again quickly.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys

from setproctitle import setproctitle

from tilework.comm.net.channel import Channel
from tilework.comm.net.frames import BadFrame
from tilework.server.frontends.messages import EPOCH, BeginFrontEnd, CannotListen, Listening, frontend_codec
from tilework.server.frontends.relay import Relay
from tilework.server.http.server import AddressInUse, HttpServer

_LAST_WORD_S = 1.0  # Time for clients to read that the controller has gone.


async def run(channel_end: socket.socket, listener: socket.socket) -> None:
    """Take HTTP until the controller ends that, or has gone."""
    reader, writer = await asyncio.open_unix_connection(sock=channel_end)
    channel = Channel(reader, writer, frontend_codec(), EPOCH)
    messages = channel.messages()
    _, begin = await anext(messages)
    assert isinstance(begin, BeginFrontEnd)
    relay = Relay(channel)
    server = HttpServer(relay, listener, begin, begin.max_connections, begin.open_paths)
    serving = asyncio.create_task(server.listen())
    following = asyncio.create_task(relay.follow(messages, on_close=server.close))
    try:
        await server.until_listening(serving)
    except AddressInUse as error:
        channel.send(CannotListen(str(error)))
        await channel.drain()
        return
    channel.send(Listening())
    await asyncio.wait({serving, following}, return_when=asyncio.FIRST_COMPLETED)
    server.close()
    await asyncio.wait({serving}, timeout=_LAST_WORD_S)
    server.abort()  # Nothing is left to abort if `Close` has ended it.
    await serving


def main() -> None:
    """Run a front end. It ignores signals to all processes of the server: the controller ends the front ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    setproctitle("tilework: front end")
    channel_end, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    try:
        asyncio.run(run(channel_end, listener))
    except (BadFrame, StopAsyncIteration):  # The controller has gone.
        sys.exit(1)


if __name__ == "__main__":
    main()
