"""Transfer of a directory's files to another node: one connection per file, parts with a checksum, a deadline."""

from __future__ import annotations

import asyncio
import hashlib
import re
from contextlib import closing
from pathlib import Path
from struct import Struct

from tilework.comm.net.frames import BadFrame, frame, read_frame
from tilework.comm.net.handshake import Refused, admit, join
from tilework.core.wire.node_blobs import Origin

_PART_BYTES = 1 << 20
_MOST_NAME_BYTES = 256
_SIZE = Struct("!Q")
_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9._-]*")
_DIGEST = hashlib.sha256(b"files 1").digest()


class FetchFailed(Exception):
    """A file could not be fetched; the message says why."""


class FileServer:
    """Lets other nodes fetch the files of a directory, in one epoch. `port` is known once it has started."""

    def __init__(self, directory: Path, token: bytes, epoch: int) -> None:
        self._directory = directory
        self._token = token
        self._epoch = epoch
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str) -> None:
        self._server = await asyncio.start_server(self._serve, host, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send one file; its first frame is its size. If there is no such file, close the connection."""
        with closing(writer):
            try:
                await admit(reader, writer, self._token, _DIGEST, self._epoch)
                name = await read_frame(reader, self._epoch, _MOST_NAME_BYTES)
                if name is not None:
                    await self._send(writer, checked_name(name.decode("utf-8", "replace")))
            except (OSError, TimeoutError, ValueError):  # The other end has the same error, or has gone.
                return

    async def _send(self, writer: asyncio.StreamWriter, name: str) -> None:
        with (self._directory / name).open("rb", buffering=0) as file:
            size = file.seek(0, 2)
            file.seek(0)
            writer.writelines(frame(_SIZE.pack(size), self._epoch))
            while part := file.read(_PART_BYTES):
                writer.writelines(frame(part, self._epoch))
                await writer.drain()


def checked_name(name: str) -> str:
    """Return the name if it is that of a file inside its directory. Raises ValueError otherwise."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a blob")
    return name


async def fetch_file(origin: Origin, token: bytes, name: str, target: Path, timeout_s: float) -> None:
    """Fetch a file into `target`, which appears only when complete. Raises FetchFailed and leaves nothing then."""
    hidden = target.with_name(f".{target.name}")
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(origin.host, origin.port)
            with closing(writer):
                await _receive(reader, writer, origin, token, checked_name(name), hidden)
        hidden.rename(target)
    except TimeoutError:
        hidden.unlink(missing_ok=True)
        raise FetchFailed(f"{name} did not come from {origin.host} within {timeout_s:g} s") from None
    except (OSError, ValueError) as error:
        hidden.unlink(missing_ok=True)
        raise FetchFailed(f"{name} did not come from {origin.host}: {error}") from error
    except asyncio.CancelledError:
        hidden.unlink(missing_ok=True)
        raise


async def _receive(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, origin: Origin, token: bytes, name: str, hidden: Path
) -> None:
    epoch = await join(reader, writer, token, _DIGEST)
    if epoch != origin.epoch:
        raise Refused(f"the node is in epoch {epoch}, and the file was there in epoch {origin.epoch}")
    writer.writelines(frame(name.encode(), epoch))
    head = await read_frame(reader, epoch, _SIZE.size)
    if head is None or len(head) != _SIZE.size:
        raise BadFrame("the node has no such file")
    (left,) = _SIZE.unpack(head)
    with hidden.open("wb", buffering=0) as file:
        while left:
            part = await read_frame(reader, epoch, min(left, _PART_BYTES))
            if not part:
                raise BadFrame(f"the connection ended {left} bytes before the end of the file")
            file.write(part)
            left -= len(part)
