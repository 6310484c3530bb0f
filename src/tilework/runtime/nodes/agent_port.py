"""Where agents connect to a server."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from itertools import count

from tilework.comm.net.channel import Channel
from tilework.comm.net.handshake import admit
from tilework.runtime.nodes.config import NodesConfig
from tilework.runtime.nodes.messages import node_codec

_log = logging.getLogger(__name__)


class AgentPort:
    """Listens for agents, and has each that knows the token served, under an epoch of its own."""

    def __init__(self, config: NodesConfig, serve: Callable[[Channel], Awaitable[None]]) -> None:
        """`serve` has the connection of an agent until it returns."""
        self._config, self._serve, self._codec = config, serve, node_codec()
        self._epochs = count(secrets.randbelow(1 << 30) + 1)
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._is_admitting = asyncio.Event()

    @property
    def number(self) -> int:
        """The port, once it listens."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def address(self) -> str | None:
        """HOST:PORT, once it listens."""
        if self._server is None:
            return None
        host = self._config.host
        return f"[{host}]:{self.number}" if ":" in host else f"{host}:{self.number}"

    async def listen(self) -> None:
        """Let agents connect from now on; they wait until they are admitted. Raises OSError."""
        if self._server is None:
            self._server = await asyncio.start_server(self._connect, self._config.host, self._config.port)

    def admit(self) -> None:
        """Serve those that have connected, and those that will."""
        self._is_admitting.set()

    def close(self) -> None:
        """Let no more agents connect. Those that have go on."""
        if self._server is not None:
            self._server.close()

    async def ended(self, within_s: float) -> None:
        """Wait until no agent is connected; those that still are then are cut off."""
        if self._connections:
            await asyncio.wait(self._connections, timeout=within_s)
        for task in self._connections:
            task.cancel()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of an agent, from its greeting to its end."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        epoch = next(self._epochs)
        await self._is_admitting.wait()
        try:
            await admit(reader, writer, self._config.token, self._codec.digest, epoch)
            await self._serve(Channel(reader, writer, self._codec, epoch))
        except (OSError, TimeoutError) as error:
            _log.warning("an agent was not admitted: %s", error)
        except asyncio.CancelledError:  # By `ended`; asyncio would report it as an error of its server.
            pass
        finally:
            writer.close()
            self._connections.discard(task)
