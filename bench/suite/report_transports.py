"""Ways for a worker to send a picture to the engine's event loop: a pipe, a ring, a file in shared memory."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import socket
import struct
import tempfile
from collections.abc import Awaitable, Callable
from mmap import PROT_READ, mmap
from typing import Any, Protocol

from tilework.comm.messages import MessageReader, send_message
from tilework.comm.ring.consumer import Ring
from tilework.comm.ring.producer import Producer
from tilework.core.wire.spec import Image

_LENGTH = struct.Struct("!i")


class Way(Protocol):
    """Made in the engine's process, on its event loop, before the worker is forked."""

    def open_sender(self) -> Callable[[Image], None]:
        """What the worker sends by; called in its process."""

    async def open_receiver(self) -> Callable[[], Awaitable[Image]]:
        """What the engine receives by."""

    def close(self) -> None: ...


class PipeWay:
    """As the runtime does it: the pixels beside the pickle, received where they stay."""

    def __init__(self, size: int) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._transport: asyncio.BaseTransport | None = None

    def open_sender(self) -> Callable[[Image], None]:
        return lambda image: send_message(self._theirs, image)

    async def open_receiver(self) -> Callable[[], Awaitable[Image]]:
        inbox: asyncio.Queue[Image] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(lambda: self._protocol(inbox), sock=self._ours)
        return inbox.get

    def _protocol(self, inbox: asyncio.Queue[Image]) -> asyncio.BaseProtocol:
        return _InPlace(inbox)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._theirs.close()


class _InPlace(asyncio.BufferedProtocol):
    def __init__(self, inbox: asyncio.Queue[Image]) -> None:
        self._reader, self._inbox = MessageReader(), inbox

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.room()

    def buffer_updated(self, nbytes: int) -> None:
        for image in self._reader.received(nbytes):
            self._inbox.put_nowait(image)


class OnePieceWay(PipeWay):
    """The pixels in the pickle, put together from the pieces that asyncio receives: as Tilework did before."""

    def open_sender(self) -> Callable[[Image], None]:
        def send(image: Image) -> None:
            message = pickle.dumps(image, protocol=5)
            self._theirs.sendall(_LENGTH.pack(len(message)))
            self._theirs.sendall(message)

        return send

    def _protocol(self, inbox: asyncio.Queue[Image]) -> asyncio.BaseProtocol:
        return _Gathered(inbox)


class _Gathered(asyncio.Protocol):
    def __init__(self, inbox: asyncio.Queue[Image]) -> None:
        self._bytes, self._inbox = bytearray(), inbox

    def data_received(self, data: bytes) -> None:
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                return
            message = bytes(memoryview(self._bytes)[_LENGTH.size : end])
            del self._bytes[:end]
            self._inbox.put_nowait(pickle.loads(message))


class RingWay:
    """The pixels in the ring. The engine copies them out, since an encoder may keep them for long."""

    def __init__(self, size: int, is_checked: bool) -> None:
        self._ring = Ring.create(max(1 << 20, 4 * size), 64, is_checked=is_checked)

    def open_sender(self) -> Callable[[Image], None]:
        producer = Producer.connect(self._ring.address())

        def send(image: Image) -> None:
            buffers: list[pickle.PickleBuffer] = []
            head = pickle.dumps(image, protocol=5, buffer_callback=buffers.append)
            producer.send(head, *(one.raw() for one in buffers))

        return send

    async def open_receiver(self) -> Callable[[], Awaitable[Image]]:
        while not self._ring.stats.producers:
            self._ring.poll()
            await asyncio.sleep(0.001)
        return self._receive

    async def _receive(self) -> Image:
        with await self._ring.arecv() as message:
            image: Image = pickle.loads(message.header, buffers=[bytes(message.payload)])
            return image

    def close(self) -> None:
        self._ring.close()


class FileWay(PipeWay):
    """The pixels in a new file in shared memory, which the engine maps and removes; its name through the pipe."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._folder = tempfile.mkdtemp(prefix="reports-", dir="/dev/shm")

    def open_sender(self) -> Callable[[Image], None]:
        numbers = iter(range(1 << 30))

        def send(image: Image) -> None:
            path = f"{self._folder}/{next(numbers)}"
            with open(f"{path}.part", "wb", buffering=0) as file:
                rest = memoryview(image.pixels)
                while rest:
                    rest = rest[file.write(rest) :]
            os.rename(f"{path}.part", path)
            send_message(self._theirs, Image(image.height, image.width, path.encode()))

        return send

    async def open_receiver(self) -> Callable[[], Awaitable[Image]]:
        receive = await super().open_receiver()

        async def mapped() -> Image:
            named = await receive()
            path = bytes(named.pixels).decode()
            with open(path, "rb") as file:
                os.unlink(path)
                pixels: Any = memoryview(mmap(file.fileno(), 0, prot=PROT_READ))
            return Image(named.height, named.width, pixels)

        return mapped

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder)


WAYS: dict[str, Callable[[int], Way]] = {
    "pipe": PipeWay,
    "pipe, one piece": OnePieceWay,
    "ring": lambda size: RingWay(size, is_checked=False),
    "ring, checked": lambda size: RingWay(size, is_checked=True),
    "file": FileWay,
}
"""By name; made for pictures of so many bytes."""
