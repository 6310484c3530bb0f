"""The port at which agents connect to a server."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count

from tilework.comm.net.channel import Channel
from tilework.comm.net.handshake import TIMEOUT_S, admit
from tilework.runtime.nodes.config import NodesConfig
from tilework.runtime.nodes.messages import node_codec

_log = logging.getLogger(__name__)
_LEAST_SHARE = 32
_NUM_SHARES = 4


class AgentPort:
    """Listens for agents, and lets `serve` handle each that knows the token, under an epoch of its own.

    A connection must show within `handshake.TIMEOUT_S` that it knows the token. Of connections that have not yet, one
    address may have twice as many as there are nodes, at least 32, and all addresses four times that. Further ones are
    cut off at once; an agent tries again.
    """

    def __init__(self, config: NodesConfig, serve: Callable[[Channel], Awaitable[None]]) -> None:
        """Prepare to listen. `serve` has the connection of an agent until it returns."""
        self._config = config
        self._serve = serve
        self._codec = node_codec()
        self._epochs = count(secrets.randbelow(1 << 30) + 1)
        self._connections: set[asyncio.Task[None]] = set()
        self._greeting = Counter[str]()  # Connections that are not admitted yet, by their address.
        self._share = max(_LEAST_SHARE, 2 * config.num_nodes)
        self._server: asyncio.Server | None = None
        self._is_admitting = asyncio.Event()

    @property
    def number(self) -> int:
        """Number of the port, once it listens."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def address(self) -> str | None:
        """HOST:PORT while it listens; otherwise None."""
        if self._server is None or not self._server.sockets:
            return None
        host = self._config.host
        return f"[{host}]:{self.number}" if ":" in host else f"{host}:{self.number}"

    async def listen(self) -> None:
        """Let agents connect from now on; they wait until they are admitted. Raises OSError."""
        if self._server is None:
            self._server = await asyncio.start_server(self._connect, self._config.host, self._config.port)

    def admit(self) -> None:
        """Serve agents that have connected, and those that will."""
        self._is_admitting.set()

    def close(self) -> None:
        """Let no more agents connect. Existing connections go on."""
        if self._server is not None:
            self._server.close()

    async def ended(self, within_s: float) -> None:
        """Wait until no agent is connected; those still connected after this time are cut off."""
        if self._connections:
            await asyncio.wait(self._connections, timeout=within_s)
        for task in self._connections:
            task.cancel()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection of an agent, from its greeting to its end."""
        host = str((writer.get_extra_info("peername") or ("",))[0])
        if self._greeting[host] >= self._share or self._greeting.total() >= _NUM_SHARES * self._share:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        epoch = next(self._epochs)
        try:
            if await self._admits(reader, writer, host, epoch):
                await self._serve(Channel(reader, writer, self._codec, epoch))
        except (OSError, TimeoutError) as error:
            why = str(error) or f"it said nothing for {TIMEOUT_S:g} s"
            _log.warning("an agent at %s was not admitted: %s", host, why)
        except asyncio.CancelledError:  # It comes from `ended`; asyncio would report it as an error of its server.
            pass
        finally:
            writer.close()
            self._connections.discard(task)

    async def _admits(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, epoch: int) -> bool:
        """Wait until agents are admitted, at most for the time of a greeting, and then for a right greeting.

        Raises Refused, BadFrame, TimeoutError.
        """
        self._greeting[host] += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(TIMEOUT_S):
                    await self._is_admitting.wait()
            if self._is_admitting.is_set():
                await admit(reader, writer, self._config.token, self._codec.digest, epoch)
            return self._is_admitting.is_set()
        finally:
            self._greeting[host] -= 1
            if not self._greeting[host]:
                del self._greeting[host]
