"""Ways that also pass between nodes: the ring over UCX, NIXL, Redis Streams. All by TCP, on loopback."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from mmap import mmap
from multiprocessing.connection import Connection
from typing import Any

from suite.message_transports import RING_BYTES, SLOTS, RingReceiver, RingSender, Way
from tilework.comm.ring.consumer import Ring
from tilework.comm.ring.network import Network
from tilework.comm.ring.producer import Producer

_HOST = "127.0.0.1"


class UcxReceiver(RingReceiver):
    """The ring is made when the senders are forked: a process that has used UCX hands it on to no child."""

    def __init__(self, num_senders: int, size: int) -> None:
        pairs = [multiprocessing.Pipe(duplex=False) for _ in range(num_senders)]
        self.addresses: Sequence[Any] = [theirs for theirs, _ in pairs]
        self._told = [ours for _, ours in pairs]
        self._size = size

    def hand_over(self) -> None:
        self.ring = Ring.create(RING_BYTES, SLOTS, network=Network(host=_HOST), abandon_after_s=0.2)
        for ours in self._told:
            ours.send(self.ring.address())


class UcxSender(RingSender):
    def __init__(self, address: Connection) -> None:
        self.producer = self._producer = Producer.connect(address.recv())


class RedisReceiver:
    """A stream of a Redis server without persistence. What was received is deleted."""

    def __init__(self, num_senders: int, size: int) -> None:
        with socket.create_server((_HOST, 0)) as free:
            port = free.getsockname()[1]
        self._folder = tempfile.mkdtemp(prefix="redis-")
        options = ("--port", str(port), "--bind", _HOST, "--save", "", "--appendonly", "no", "--dir", self._folder)
        self._server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
        self.addresses = [port] * num_senders
        self._last = b"0"

    def hand_over(self) -> None:
        self._client = _redis(self.addresses[0])

    def receive(self, timeout_s: float) -> Sequence[Any]:
        found = self._client.xread({"messages": self._last}, count=8, block=max(1, round(timeout_s * 1000)))
        if not found:
            return ()
        ((_, entries),) = found
        self._last = entries[-1][0]
        self._client.xdel("messages", *[name for name, _ in entries])
        return [fields[b"m"][:16] for _, fields in entries]

    def close(self) -> None:
        self._client.close()
        self._server.kill()
        self._server.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class RedisSender:
    def __init__(self, port: int) -> None:
        self._client = _redis(port)

    def send(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            self._client.xadd("messages", {"m": message})

    def close(self) -> None:
        self._client.close()


def _redis(port: int) -> Any:
    """A client, once the server answers."""
    redis = import_module("redis")
    client = redis.Redis(_HOST, port)
    while True:
        with suppress(redis.exceptions.ConnectionError):
            client.ping()
            return client
        time.sleep(0.01)


_PLACES = 16
_NOTE = struct.Struct("<QQ")
"""Where a message lies, in its sender's memory, and its length; as an answer, where one lay."""


class NixlReceiver:
    """Senders say by a notification where a message lies, and get one when it has been read. Looks for notifications
    every 50 us, since it cannot be woken."""

    def __init__(self, num_senders: int, size: int) -> None:
        pairs = [multiprocessing.Pipe() for _ in range(num_senders)]
        self._ours, self.addresses = [ours for ours, _ in pairs], [theirs for _, theirs in pairs]

    def hand_over(self) -> None:
        self._agent, self._memory, self._at, self._size = *_nixl("receiver"), 1 << 20
        for ours in self._ours:
            ours.send_bytes(self._agent.get_agent_metadata())
            self._agent.add_remote_agent(ours.recv_bytes())
        self._free = deque(range(_PLACES))
        self._reading: list[tuple[Any, str, bytes, int]] = []
        self._waiting: deque[tuple[str, bytes]] = deque()

    def receive(self, timeout_s: float) -> Sequence[Any]:
        end_s = time.monotonic() + timeout_s
        while not (got := self._look()) and time.monotonic() < end_s:
            time.sleep(50e-6)
        return got

    def _look(self) -> list[bytes]:
        for name, notes in self._agent.get_new_notifs().items():
            self._waiting += [(name, note) for note in notes]
        while self._waiting and self._free:
            self._read(*self._waiting.popleft(), self._free.popleft())
        got, self._reading, reading = [], [], self._reading
        for handle, name, note, place in reading:
            try:
                if self._agent.check_xfer_state(handle) != "DONE":
                    self._reading.append((handle, name, note, place))
                    continue
                start = place * self._size
                got.append(self._memory[start : start + 16])
                self._agent.release_xfer_handle(handle)
                self._agent.send_notif(name, note)
            except Exception as error:
                _accept_end(error)
            self._free.append(place)
        return got

    def _read(self, name: str, note: bytes, place: int) -> None:
        try:
            self._begin_read(name, note, place)
        except Exception as error:
            _accept_end(error)
            self._free.append(place)

    def _begin_read(self, name: str, note: bytes, place: int) -> None:
        address, size = _NOTE.unpack(note)
        descs = self._agent.get_xfer_descs
        here = descs([(self._at + place * self._size, size, 0)], "DRAM")
        handle = self._agent.initialize_xfer("READ", here, descs([(address, size, 0)], "DRAM"), name)
        self._agent.transfer(handle)
        self._reading.append((handle, name, note, place))

    def close(self) -> None:
        pass


def _accept_end(error: Exception) -> None:
    """The end of a sender; NIXL's errors have no common base."""
    if "DISCONNECT" not in str(error):
        raise error


class NixlSender:
    def __init__(self, address: Connection) -> None:
        self._agent, self._memory, self._at = _nixl(f"sender {os.getpid()}")
        self._agent.add_remote_agent(address.recv_bytes())
        address.send_bytes(self._agent.get_agent_metadata())
        self._free = deque(range(_PLACES))

    def send(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            while not self._free:
                self._take_back()
            start = self._free.popleft() << 20
            self._memory[start : start + len(message)] = message
            self._agent.send_notif("receiver", _NOTE.pack(self._at + start, len(message)))

    def _take_back(self) -> None:
        for notes in self._agent.get_new_notifs().values():
            self._free += [(_NOTE.unpack(note)[0] - self._at) >> 20 for note in notes]

    def close(self) -> None:
        while len(self._free) < _PLACES:
            self._take_back()


def _nixl(name: str) -> tuple[Any, mmap, int]:
    """An agent, and memory of places of a MiB that it may use, with its address."""
    os.environ |= {"UCX_TLS": "tcp,self", "NIXL_LOG_LEVEL": "WARN"}
    memory = mmap(-1, _PLACES << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    agent = import_module("nixl_cu12._api").nixl_agent(name)
    agent.register_memory([(address, len(memory), 0, "")], "DRAM")
    return agent, memory, address


NETWORK_WAYS = {"ring over UCX": Way(UcxReceiver, UcxSender)}
"""Those whose programs are here."""
if find_spec("redis") and shutil.which("redis-server"):
    NETWORK_WAYS["Redis Streams"] = Way(RedisReceiver, RedisSender)
if find_spec("nixl_cu12"):
    NETWORK_WAYS["NIXL"] = Way(NixlReceiver, NixlSender)
