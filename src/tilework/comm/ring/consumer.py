"""The consumer's end of a ring."""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from tilework.comm.ring.backend import Admission, Site
from tilework.comm.ring.errors import RingClosed, RingCorrupted, RingError
from tilework.comm.ring.layout import UNIT, RingLayout, SlotState
from tilework.comm.ring.members import Members
from tilework.comm.ring.network import Network
from tilework.comm.ring.node.place import RingPlace
from tilework.comm.ring.node.site import NodeSite
from tilework.comm.ring.transport import Found, has_extension, spans

Got = TypeVar("Got")
_PREFETCH = 16
_TEND_NS = 1_000_000
_VERB_NS = 1_000_000_000
_ADOPTED_NS = 10_000_000
"""Interval for checking for messages of producers that still ring the bell of a former consumer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingStats:
    """Counts of a ring. `delivered`: messages. `damaged`: committed entries whose bytes differ from those sent. `lost`:
    entries that producers had reserved when they ended, were abandoned or fenced. `abandoned`, `fenced`: by this
    consumer. `quarantined_bytes`: of abandoned entries whose owners may still write. `used_bytes`: of all entries.
    """

    producers: int
    delivered: int
    damaged: int
    lost: int
    abandoned: int
    fenced: int
    quarantined_bytes: int
    used_bytes: int
    capacity_bytes: int


class Message:
    """A message that lies in the ring until it is released. `producer` is the id of its sender and the id's epoch."""

    __slots__ = ("_release", "_slot", "header", "payload", "producer")

    def __init__(
        self, header: bytes, payload: memoryview, producer: tuple[int, int], slot: int, release: Callable[[int], None]
    ) -> None:
        self.header = header
        self.payload = payload
        self.producer = producer
        self._slot = slot
        self._release = release

    def release(self) -> None:
        """Free the bytes of the payload; call once. `payload` cannot be read any more.

        Arrays and memoryviews that were made from it without a copy must not be used either: the bytes then belong to
        another message, or to none.
        """
        self.payload.release()
        self._release(self._slot)

    def __enter__(self) -> Message:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Ring:
    """Memory that producers write messages to, and its one consumer.

    Belongs to one thread. Receiving also takes producers in and gives up entries of dead ones. A producer that does not
    commit an entry within `abandon_after_s` loses it; the producer learns that, and sends again. If it has not
    confirmed `fence_after_s` later that it writes no more, it is fenced, so that its bytes can be used again: on this
    node its process is killed (SIGKILL, which also ends stopped processes), over a network its connection is ended.
    `fence_after_s=None` turns fencing off; the ring then fills up behind the entry.
    """

    def __init__(self, site: Site, abandon_after_s: float, fence_after_s: float | None) -> None:
        self._site = site
        self._layout = site.layout
        self._abandon_after_ns = round(abandon_after_s * 1e9)
        self._fence_after_ns = None if fence_after_s is None else round(fence_after_s * 1e9)
        self.is_one_sided = site.is_one_sided
        """False if the C extension is missing: then a stopped producer can stop all others."""
        self._memory = site.memory
        self._transport = site.transport
        self._view = memoryview(self._memory).toreadonly()
        self._window = self._transport.recover(_soon())
        self._members = Members(self._transport.epochs)
        ended = set(self._members.adopt(site.holders()))
        if ended:
            self._members.note_ended(ended & self._transport.find_owners(self._window, _soon()))
        self._admissions: dict[socket.socket, Admission] = {}
        self._selector = selectors.EpollSelector()
        self._selector.register(site.listener, selectors.EVENT_READ, self._accept)
        if site.bell is not None:
            self._selector.register(site.bell, selectors.EVENT_READ, lambda: self._hear_bell(site.bell))
        self._since_ns: dict[tuple[int, int], int] = {}  # By slot and state: the time when it was first seen.
        self._ready: deque[Found] = deque()
        self._tend_at_ns = 0
        self._is_open = True
        self._delivered = self._damaged = self._lost = self._abandoned = self._fenced = 0

    @classmethod
    def create(
        cls,
        num_bytes: int,
        slots: int = 1024,
        *,
        directory: Path | None = None,
        network: Network | None = None,
        is_checked: bool = True,
        abandon_after_s: float = 1.0,
        fence_after_s: float | None = 10.0,
    ) -> Ring:
        """Create a ring of `num_bytes` for at most `slots` messages at once; both are rounded up to powers of two.

        A message takes at most half of the bytes. With `is_checked` each message has a checksum of all its bytes. With
        a `directory`, a new or empty one in shared memory, the ring outlives this process if that is killed: see
        `resume`. Until then its bytes stay there. With a `network`, producers of all nodes that reach it can connect,
        over UCX; without one, those of this node.

        Raises:
            ValueError: `num_bytes` is more than 4 GiB, or `slots` more than a million; or both a directory and a
                network are given.
            RingError: the directory is not empty, or has no room; UCX or the C extension is missing, or `network`
                cannot be listened at.
        """
        units = max(2, 1 << (-(-num_bytes // UNIT) - 1).bit_length())
        layout = RingLayout(max(2, 1 << (slots - 1).bit_length()), units)
        if network is None:
            site: Site = NodeSite(RingPlace.make(layout, has_extension(), is_checked, directory))
        elif directory is None:
            site = _open(network, layout, is_checked)
        else:
            raise ValueError("directory: a ring that is reached by a network ends with its process; leave one out")
        return cls(site, abandon_after_s, fence_after_s)

    @classmethod
    def resume(cls, directory: Path, *, abandon_after_s: float = 1.0, fence_after_s: float | None = 10.0) -> Ring:
        """Take over the ring in a directory, whose consumer has ended without closing it.

        Messages that it had received and not released come again. Producers go on: without a consumer they write as
        long as there is room, and at their next send they connect to this one, each with a new id.

        Raises:
            RingError: there is no ring, its consumer lives, or it needs the C extension, which is missing here.
            RingCorrupted: the memory holds words that no producer writes.
        """
        place = RingPlace.find(directory)
        try:
            if place.is_atomic and not has_extension():
                raise RingError("the ring needs the C extension, which is missing here; install with a C compiler")
            return cls(NodeSite(place), abandon_after_s, fence_after_s)
        except RingError:
            place.close()
            raise

    def address(self) -> str:
        """Return the address for producers: the path of a socket that only this user can open, or for a network
        `ucx://HOST:PORT/SECRET`.
        """
        return self._site.address

    @property
    def stats(self) -> RingStats:
        quarantined = sum(e.units for e in self._window.undecided.values() if e.state == SlotState.ABANDONED)
        return RingStats(
            producers=len(self._members.present),
            delivered=self._delivered,
            damaged=self._damaged,
            lost=self._lost,
            abandoned=self._abandoned,
            fenced=self._fenced,
            quarantined_bytes=quarantined * UNIT,
            used_bytes=self._window.scan.units_from(self._window.head) * UNIT,
            capacity_bytes=self._layout.units * UNIT,
        )

    def poll(self) -> Message | None:
        """Return the next message if there is one, without waiting.

        Raises:
            RingCorrupted: a producer has written to the words of the ring without following the protocol.
            RingClosed: the ring is closed.
        """
        soon_ns = self._tend() + _VERB_NS
        while True:
            if not self._ready:
                self._ready.extend(self._transport.look(self._window, _PREFETCH, soon_ns))
                if not self._ready:
                    return None
            found = self._ready.popleft()
            if found.header_bytes >= 0:
                break
            self._damaged += 1
            self._release(found.slot)
        self._delivered += 1
        header, payload = spans(self._layout, found)
        producer = (found.owner, found.epoch)
        return Message(self._memory[header], self._view[payload], producer, found.slot, self._release)

    def take(self, limit: int = 256, timeout_s: float | None = 0.0) -> list[tuple[bytes, bytes]]:
        """Return copies of header and payload of the next messages, at most `limit`: for many small ones.

        Sleeps until there is one, at most `timeout_s` (None: without limit). Raises what `poll` raises.
        """
        return self._wait(lambda: self._take(limit) or None, timeout_s) or []

    def _take(self, limit: int) -> list[tuple[bytes, bytes]]:
        self._tend()
        copies: list[tuple[bytes, bytes]] = []
        while self._ready and len(copies) < limit and (message := self.poll()):
            copies.append((message.header, bytes(message.payload)))
            message.release()
        more, num_damaged = self._transport.take(self._window, limit - len(copies), _soon())
        self._delivered += len(more)
        self._damaged += num_damaged
        return copies + more

    def recv(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message; None if there is none within `timeout_s`. Sleeps until a producer rings the bell.

        Raises what `poll` raises.
        """
        return self._wait(self.poll, timeout_s)

    def _wait(self, poll: Callable[[], Got | None], timeout_s: float | None) -> Got | None:
        """Return the first result of `poll` that is not None."""
        start_ns = time.monotonic_ns()
        end_ns = None if timeout_s is None else start_ns + round(timeout_s * 1e9)
        while (got := poll()) is None and (end_ns is None or time.monotonic_ns() < end_ns):
            if (got := self._poll_before_sleep(poll)) is not None:
                break
            self._serve(self._sleep_s(time.monotonic_ns(), end_ns))
        return got

    async def arecv(self) -> Message:
        """Return the next message; the event loop runs meanwhile."""
        loop = asyncio.get_running_loop()
        while (message := self.poll() or self._poll_before_sleep(self.poll)) is None:
            woken = asyncio.Event()
            loop.add_reader(self._selector.fileno(), woken.set)
            try:
                with suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), self._sleep_s(time.monotonic_ns(), None))
            finally:
                loop.remove_reader(self._selector.fileno())
            self._serve(0)
        return message

    def _poll_before_sleep(self, poll: Callable[[], Got | None]) -> Got | None:
        """Ask to be woken, then look once more: a producer that has not seen the bell has committed before this."""
        self._transport.set_bell(True, _soon())
        got = poll()
        if got is not None:
            self._transport.set_bell(False, _soon())
        return got

    def _sleep_s(self, now_ns: int, end_ns: int | None) -> float | None:
        """Return the time until something must be checked without a bell; None if there is nothing to check."""
        due = [] if end_ns is None else [end_ns]
        due += [since_ns + patience_ns for since_ns, patience_ns in self._patience(now_ns)]
        if self._members.adopted:
            due.append(now_ns + _ADOPTED_NS)
        return max(0.0, (min(due) - now_ns) / 1e9) if due else None

    def _patience(self, now_ns: int) -> Iterator[tuple[int, int]]:
        """Yield for each entry the time since which it is reserved or abandoned, and the time that it may stay so."""
        for slot, entry in self._window.undecided.items():
            since_ns = self._since_ns.get((slot, entry.state), now_ns)
            member = self._members.present.get(entry.owner)
            if member is None:
                yield now_ns, 0  # The producer has ended: this was seen after its other entries were taken back.
            elif entry.state == SlotState.RESERVED:
                yield since_ns, self._abandon_after_ns
            elif self._fence_after_ns is not None and not member.is_revoked:
                yield since_ns, self._fence_after_ns

    def _release(self, slot: int) -> None:
        if self._is_open:
            self._transport.release(self._window, slot, _soon())

    def _tend(self) -> int:
        """Do the upkeep beside messages, at most once per interval. Return the time."""
        if not self._is_open:
            raise RingClosed("the ring is closed")
        now_ns = time.monotonic_ns()
        if now_ns >= self._tend_at_ns:
            self._tend_at_ns = now_ns + _TEND_NS
            self._serve(0)
        return now_ns

    def _serve(self, timeout_s: float | None) -> None:
        """Take producers in, notice which have ended, and handle entries that are not committed."""
        for key, _ in self._selector.select(timeout_s):
            key.data()
        for owner in tuple(self._members.adopted):
            self._hear_end(owner)
        self._see_to_undecided(time.monotonic_ns())
        self._free_ids()

    def _accept(self) -> None:
        connection, _ = self._site.listener.accept()
        connection.setblocking(False)
        self._admissions[connection] = self._site.admit(connection, self._members, self._abandon_after_ns)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._go_on(connection))
        self._go_on(connection)

    def _go_on(self, connection: socket.socket) -> None:
        """Continue taking a producer in, now that its connection can be read."""
        try:
            next(self._admissions[connection])
        except StopIteration as end:
            self._selector.unregister(connection)
            del self._admissions[connection]
            if (member := end.value) is not None:
                self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear_end(member.owner))

    def _hear_bell(self, bell: int) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(bell)

    def _hear_end(self, owner: int) -> None:
        connection = self._members.present[owner].access.connection
        if self._members.drop_if_ended(owner) and connection is not None:
            self._selector.unregister(connection)

    def _see_to_undecided(self, now_ns: int) -> None:
        undecided = self._window.undecided
        if not undecided:
            self._since_ns.clear()
            return
        for gone in self._since_ns.keys() - {(slot, entry.state) for slot, entry in undecided.items()}:
            del self._since_ns[gone]
        for slot, entry in list(undecided.items()):
            since_ns = self._since_ns.setdefault((slot, entry.state), now_ns)
            if entry.owner in self._members.ended:
                self._lost += len(self._transport.drop_fenced(self._window, entry.owner, _soon()))
                continue
            member = self._members.present.get(entry.owner)
            if member is None:
                raise RingCorrupted(f"an entry belongs to producer {entry.owner}, which does not exist")
            if entry.state == SlotState.RESERVED:
                if now_ns - since_ns >= self._abandon_after_ns:
                    self._abandoned += self._transport.abandon(slot, entry.word, _soon())
            elif self._fence_after_ns is not None and now_ns - since_ns >= self._fence_after_ns:
                self._fenced += member.revoke()

    def _free_ids(self) -> None:
        """Free the ids of ended producers that have nothing in the ring any more."""
        ended = self._members.ended
        if ended and self._transport.is_all_seen(self._window, _soon()):
            in_use = {entry.owner for entry in self._window.open.values()}
            for owner in ended - in_use:
                self._members.free(owner)

    def close(self) -> None:
        """End the ring. Messages that were not received are lost; payloads that are not released stay readable."""
        if not self._is_open:
            return
        self._is_open = False
        for admission in self._admissions.values():
            admission.close()
        self._members.close()
        self._selector.close()
        self._site.close()
        self._view.release()
        with suppress(BufferError):  # Payloads that are in use keep the memory.
            self._memory.close()

    def __enter__(self) -> Ring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open(network: Network, layout: RingLayout, is_checked: bool) -> Site:
    if not has_extension():
        raise RingError("network: needs the C extension, which is missing here; install with a C compiler")
    from tilework.comm.ring.ucx.site import UcxSite

    return UcxSite(network, layout, is_checked)


def _soon() -> int:
    """Return a deadline for the consumer's own verbs: they wait only where a lock stands in for atomic instructions."""
    return time.monotonic_ns() + _VERB_NS
