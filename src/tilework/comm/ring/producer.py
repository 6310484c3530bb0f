"""The producer's end of a ring."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from types import TracebackType

from tilework.comm.ring.errors import RingClosed, RingError, RingFull, VerbTimeout
from tilework.comm.ring.handshake import Grant, answer, connect, is_ended, join
from tilework.comm.ring.transport import Message, Outcome, has_extension, map_memory, transport
from tilework.comm.ring.verbs import Buffer

_LEAST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_LOOK_AT_CONSUMER_NS = 5_000_000
_ANSWER_NS = 20_000_000
_ASK_AGAIN_NS = 200_000_000


@dataclass(slots=True)
class ProducerStats:
    """Messages that were `sent`; how often one waited for room (`waits`) and for how long; messages that others
    abandoned (`lost`), all of which were sent again."""

    sent: int = 0
    waits: int = 0
    waited_ns: int = 0
    lost: int = 0


class Producer:
    """Sends messages through the ring of another process on this node. Belongs to one thread.

    A child that is forked after `connect` must not use it, and connects itself.
    """

    def __init__(self, address: str, connection: socket.socket, grant: Grant, fds: list[int]) -> None:
        self._address = address
        self._look_at_ns = 0
        self._is_open = True
        self.stats = ProducerStats()
        self._begin(connection, grant, fds)

    @classmethod
    def connect(cls, address: str, timeout_s: float = 10.0) -> Producer:
        """The producer for the ring at `address`, once its consumer has seen to it.

        Raises:
            RingClosed: no consumer answers there within `timeout_s`.
            RingError: the ring has no room for another producer, is another user's, or needs the C extension, which
                this installation does not have.
        """
        return cls(address, *join(address, timeout_s))

    def _begin(self, connection: socket.socket, grant: Grant, fds: list[int]) -> None:
        """Write to the ring as the owner that is granted. Takes all that is given over, also when it raises."""
        memory_fd, bell, file = fds
        if grant.is_atomic and not has_extension():
            connection.close()
            for fd in fds:
                os.close(fd)
            raise RingError("the ring needs the C extension, which is missing here; install with a C compiler")
        self._connection, self._bell, self._file = connection, bell, file
        self._owner, self._epoch = grant.owner, grant.epoch
        self._abandon_after_ns, self._is_lasting = grant.abandon_after_ns, grant.is_lasting
        self._memory = map_memory(memory_fd, grant.layout.size)
        self._transport = transport(grant.layout, self._memory, memory_fd, grant.is_atomic, grant.is_checked)
        os.close(memory_fd)

    def _end(self) -> None:
        """Write as this owner no more. The memory first: the end of the others says that this process cannot."""
        del self._transport
        self._memory.close()
        self._connection.close()
        os.close(self._file)
        os.close(self._bell)

    @property
    def owner(self) -> tuple[int, int]:
        """The id and its epoch by which the consumer knows this producer; others once another consumer took over."""
        return self._owner, self._epoch

    def send(self, header: Buffer, *buffers: Buffer, timeout_s: float = 10.0) -> None:
        """Send one message. It is copied into the ring: its buffers may be used again at once.

        `header` and `buffers` are contiguous; the payload is the buffers one behind the other.

        Raises:
            RingFull: there was no room until the end of `timeout_s`.
            RingClosed: the consumer has closed the ring, or ended and cannot be replaced.
            ValueError: the message is longer than half of the ring.
        """
        self.send_all([(header, *buffers)], timeout_s)

    def send_all(self, messages: list[Message], timeout_s: float = 10.0) -> None:
        """Send messages in order, each a tuple of a header and buffers. Raises what `send` raises, with some sent."""
        for pause_s in self._attempts(messages, timeout_s):
            time.sleep(pause_s)

    async def asend(self, header: Buffer, *buffers: Buffer, timeout_s: float = 10.0) -> None:
        """`send`, which lets the event loop run while there is no room."""
        for pause_s in self._attempts([(header, *buffers)], timeout_s):
            await asyncio.sleep(pause_s)

    def _attempts(self, messages: list[Message], timeout_s: float) -> Generator[float, None, None]:
        """Try until all are sent; yields how long to wait before the next attempt."""
        if not self._is_open:
            raise RingClosed("the producer is closed")
        now_ns = time.monotonic_ns()
        deadline_ns = now_ns + round(timeout_s * 1e9)
        yield from self._see_to_consumer(now_ns)
        next_index, pause_s, peers = 0, _LEAST_PAUSE_S, None
        while True:
            count, outcome = self._try(messages, next_index, deadline_ns)
            next_index += count
            self.stats.sent += count
            if outcome == Outcome.SENT:
                return
            now_ns = time.monotonic_ns()
            if now_ns >= deadline_ns:
                raise RingFull(f"timeout_s: no room for a message in {timeout_s:g} s; the consumer is behind, or away")
            if outcome == Outcome.LOST:
                self.stats.lost += 1
                continue
            if count or peers is None:
                self.stats.waits += 1
                pause_s, peers = _LEAST_PAUSE_S, _Peers(now_ns)
            yield from self._see_to_consumer(now_ns)
            self._look_at_peers(peers, now_ns, deadline_ns)
            yield pause_s
            self.stats.waited_ns += time.monotonic_ns() - now_ns
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _look_at_peers(self, peers: _Peers, now_ns: int, deadline_ns: int) -> None:
        """After a while without room, note what is reserved; after as long again, abandon what still is."""
        if now_ns - peers.since_ns >= self._abandon_after_ns:
            for slot, word in peers.reserved:
                self._transport.abandon(slot, word, deadline_ns)
            peers.since_ns, peers.reserved = now_ns, self._transport.find_reserved(deadline_ns)

    def _try(self, messages: list[Message], first: int, deadline_ns: int) -> tuple[int, int]:
        try:
            return self._transport.send(self._owner, self._epoch, messages, first, self._bell, deadline_ns)
        except VerbTimeout:
            self.close()  # A verb may still be under way. The end of the connection tells the consumer.
            raise

    def _see_to_consumer(self, now_ns: int) -> Generator[float, None, None]:
        """Notice that the consumer has ended, and connect to the one that has taken over, if one has."""
        if now_ns < self._look_at_ns:
            return
        self._look_at_ns = now_ns + _LOOK_AT_CONSUMER_NS
        if not is_ended(self._connection):
            return
        if not self._is_lasting:
            self.close()
            raise RingClosed("the consumer has closed the ring or ended")
        try:
            connection = connect(self._address, timeout_s=0)
        except FileNotFoundError:
            self.close()
            raise RingClosed("the consumer has closed the ring") from None
        except OSError:
            return  # None listens yet.
        yield from self._rejoin(connection, now_ns)

    def _rejoin(self, connection: socket.socket, now_ns: int) -> Generator[float, None, None]:
        """Wait for the consumer's answer, and write as a new owner from then on; as the old one if it is slow.

        Nothing is sent between the question and the answer. The consumer answers between two looks, so it has seen all
        that was sent before as decided when it first sees something of the new owner: its order holds.
        """
        pause_s = _LEAST_PAUSE_S
        while time.monotonic_ns() < now_ns + _ANSWER_NS:
            try:
                grant, fds = answer(connection)
            except BlockingIOError:
                yield pause_s
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except OSError:  # It has ended, too.
                break
            except RingError:
                connection.close()
                self.close()
                raise
            else:
                self._end()
                self._is_open = False
                self._begin(connection, grant, fds)
                self._is_open = True
                return
        connection.close()
        self._look_at_ns = now_ns + _ASK_AGAIN_NS

    def close(self) -> None:
        """Leave the ring. What was sent arrives."""
        if self._is_open:
            self._is_open = False
            self._end()

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(slots=True)
class _Peers:
    """Entries that were reserved at `since_ns`."""

    since_ns: int
    reserved: Sequence[tuple[int, int]] = ()
