"""The back end over UCX: both ends of a ring whose producers may be on other nodes.

Closing its lane ends a writer. A TCP connection beside the lane shows that a producer has ended.
"""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_POPULATE, MAP_PRIVATE, mmap
from typing import Any

from tilework.comm.ring.atomic import AtomicMemory, AtomicTransport
from tilework.comm.ring.backend import Admission, Attachment, is_ended
from tilework.comm.ring.errors import RingClosed, RingError
from tilework.comm.ring.layout import MAX_OWNERS, RingLayout
from tilework.comm.ring.members import Access, Members
from tilework.comm.ring.network import SCHEME, Network
from tilework.comm.ring.transport import Transport
from tilework.comm.ring.ucx import joining
from tilework.comm.ring.ucx.lanes import Lane, Lanes
from tilework.comm.ring.ucx.library import Context, Region, Remote, Worker, version
from tilework.comm.ring.ucx.memory import UcxMemory


class UcxSite:
    """A ring in memory of this process, which producers reach by `network`. Raises RingError."""

    bell = None
    is_one_sided = True

    def __init__(self, network: Network, layout: RingLayout, is_checked: bool) -> None:
        self.layout = layout
        self._is_checked = is_checked
        self._transports = network.transports
        self.listener = _listen(network)
        self._context = Context(network.transports)
        self._secret = joining.new_secret()
        host = f"[{network.host}]" if ":" in network.host else network.host
        self.address = f"{SCHEME}{host}:{self.listener.getsockname()[1]}/{self._secret}"
        self.memory = mmap(-1, layout.size, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE)
        self._lanes = Lanes(self._context, self.memory)
        self._own = _OwnMemory(self._context, self.memory)
        self.transport = AtomicTransport(layout, self._own, self.memory, is_checked)

    def holders(self) -> Mapping[int, tuple[int, Access]]:
        return {}

    def admit(self, connection: socket.socket, members: Members, abandon_after_ns: int) -> Admission:
        lane = None
        try:
            joining.watch(connection)
            hello = yield from joining.receive(connection)
            if reason := self._refusal(hello, members):
                raise RingError(reason)
            lane = self._lanes.open()
            joining.send(connection, self._offer(lane) | {"abandon_after_ns": abandon_after_ns})
            yield from joining.receive(connection)
            access = _LaneAccess(connection, lane)

            def give(owner: int, epoch: int) -> Access:
                joining.send(connection, {"owner": owner, "epoch": epoch})
                return access

            if members.is_full or (member := members.take_in(give)) is None:
                raise ConnectionResetError
        except BaseException as error:
            if lane is not None:
                lane.close()
            with connection:
                if isinstance(error, RingError):
                    _refuse(connection, str(error))
                elif not isinstance(error, OSError):
                    raise
            return None
        return member

    def _offer(self, lane: Lane) -> dict[str, Any]:
        """Return where the memory is and how to reach it."""
        ring = {"slots": self.layout.slots, "units": self.layout.units, "is_checked": self._is_checked}
        way = {"lane": lane.address.hex(), "base": lane.base, "key": lane.key.hex(), "transports": self._transports}
        return {**ring, **way}

    def _refusal(self, hello: dict[str, Any], members: Members) -> str:
        """Return why a producer cannot be admitted; empty if it can."""
        if hello.get("format") != joining.FORMAT:
            return f"the ring speaks {joining.FORMAT}, not {hello.get('format')}; run one version on both ends"
        if not hmac.compare_digest(str(hello.get("secret")).encode(errors="replace"), self._secret.encode()):
            return "address: its secret is not the ring's; give the address as ring.address() has it"
        if hello.get("ucx") != version():
            return f"the ring has UCX {version()}, not {hello.get('ucx')}; install one version on both ends"
        return f"the ring has {MAX_OWNERS} producers already; use a second ring" if members.is_full else ""

    def close(self) -> None:
        self.listener.close()
        self._own.close()
        self._lanes.close()
        self._context.close()


def _refuse(connection: socket.socket, reason: str) -> None:
    with suppress(OSError):
        joining.send(connection, {"refused": reason})


def _listen(network: Network) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in network.host else socket.AF_INET
        listener = socket.create_server((network.host, network.port), family=family, backlog=64)
    except OSError as error:
        raise RingError(f"network: {network.host} port {network.port} cannot be listened at ({error})") from error
    listener.setblocking(False)
    return listener


class _OwnMemory(AtomicMemory):
    """The consumer's own access to its memory.

    Its compare-and-swaps go the same way as those of producers: those of network cards are not atomic with the
    processor's. Its puts are plain: only the consumer writes these words, and no compare-and-swap expects their old
    values.
    """

    def __init__(self, context: Context, memory: mmap) -> None:
        super().__init__(memory)
        self._worker = Worker(context)
        self._region = Region(context, memory)
        self._remote = Remote(self._worker, self._worker.address, self._region.address, self._region.key)
        self._verbs = UcxMemory(self._remote)

    def cas64(self, offset: int, expected: int, desired: int, *, deadline_ns: int) -> int:
        return self._verbs.cas64(offset, expected, desired, deadline_ns=deadline_ns)

    def close(self) -> None:
        self._remote.close()
        self._worker.close()
        self._region.close()


@dataclass(slots=True)
class _LaneAccess:
    """A producer with its own lane. After the lane is closed, nothing it does there reaches the memory."""

    connection: socket.socket
    lane: Lane

    def is_ended(self) -> bool:
        return is_ended(self.connection)

    def revoke(self) -> bool:
        self.lane.close()
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        return True

    def close(self) -> None:
        self.lane.close()
        self.connection.close()


def attach(address: str, timeout_s: float) -> Attachment:
    """Connect to the ring at `address`. Raises what Producer.connect raises."""
    host, port, secret = joining.parse(address)
    deadline_ns = time.monotonic_ns() + round(timeout_s * 1e9)
    hello = {"format": joining.FORMAT, "secret": secret, "ucx": version()}
    try:
        connection = socket.create_connection((host, port), timeout_s)
    except OSError as error:
        raise _no_answer(address, timeout_s, error) from error
    reach = None
    try:
        joining.watch(connection)
        joining.send(connection, hello)
        offer = _answer(connection)
        layout = RingLayout(offer["slots"], offer["units"])
        reach = _Reach(offer, connection)
        reach.memory.get(layout.head, 8, deadline_ns=deadline_ns)
        joining.send(connection, {"ready": True})
        given = _answer(connection)
    except BaseException as error:
        if reach is not None:
            reach.close()
        connection.close()
        if isinstance(error, OSError):
            raise _no_answer(address, timeout_s, error) from error
        raise
    connection.setblocking(False)

    def close() -> None:
        """Close the lane first: the end of the connection says that nothing is written any more."""
        reach.close()
        connection.close()

    transport = Transport(layout, reach.memory, b"", offer["is_checked"])
    whose = (given["owner"], given["epoch"], offer["abandon_after_ns"])
    return Attachment(*whose, False, transport, connection, connection.fileno(), close)


def _answer(connection: socket.socket) -> dict[str, Any]:
    """Return the answer that comes over a blocking connection."""
    steps = joining.receive(connection)
    try:
        next(steps)
    except StopIteration as end:
        answer: dict[str, Any] = end.value
        return answer
    raise AssertionError("a connection with a time limit does not say that it would block")


def _no_answer(address: str, timeout_s: float, error: OSError) -> RingClosed:
    where = address.rpartition("/")[0]  # The secret is left out.
    return RingClosed(f"address: no consumer answers at {where} within {timeout_s:g} s ({error})")


class _Reach:
    """A producer's way to the memory that was offered. Raises RingError."""

    def __init__(self, offer: dict[str, Any], connection: socket.socket) -> None:
        lane, key = bytes.fromhex(offer["lane"]), bytes.fromhex(offer["key"])
        with ExitStack() as made:
            context = Context(offer["transports"])
            made.callback(context.close)
            worker = Worker(context)
            made.callback(worker.close)
            remote = Remote(worker, lane, offer["base"], key)
            made.callback(remote.close)
            self.close = made.pop_all().close
        self.memory = UcxMemory(remote, connection)
