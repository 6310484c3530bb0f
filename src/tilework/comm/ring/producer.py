"""The producer's end of a ring."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from types import TracebackType

from tilework.comm.ring.backend import Attachment, is_ended
from tilework.comm.ring.errors import RingClosed, RingError, RingFull, VerbFailed
from tilework.comm.ring.network import SCHEME
from tilework.comm.ring.node.handshake import answer, connect, join
from tilework.comm.ring.node.site import attach
from tilework.comm.ring.transport import Message, SendOutcome, has_extension
from tilework.comm.ring.verbs import Buffer

_LEAST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_LOOK_AT_CONSUMER_NS = 5_000_000
_ANSWER_NS = 20_000_000
_ASK_AGAIN_NS = 200_000_000
_VERB_NS = 1_000_000_000
"""Least time that a verb may take: the deadline of a message limits only the wait for room."""


@dataclass(slots=True)
class ProducerStats:
    """Counts of a producer: messages `sent`; `waits` for room, and their total time; messages that others abandoned
    (`lost`), all of which were sent again.
    """

    sent: int = 0
    waits: int = 0
    waited_ns: int = 0
    lost: int = 0


class Producer:
    """Sends messages through the ring of another process. Belongs to one thread.

    A child that is forked after `connect` must not use it, but connects itself; over a network a child cannot connect.
    """

    def __init__(self, address: str, attachment: Attachment) -> None:
        self._address = address
        self._look_at_ns = 0
        self._is_open = True
        self.stats = ProducerStats()
        self._begin(attachment)

    @classmethod
    def connect(cls, address: str, timeout_s: float = 10.0) -> Producer:
        """Return the producer for the ring at `address`, once its consumer has admitted it.

        Raises:
            RingClosed: no consumer answers there within `timeout_s`.
            RingError: the ring has no room for another producer, is another user's, or needs the C extension, which
                this installation does not have; for one over a network: UCX is missing or of another version, the
                secret in the address is not the ring's, or its memory cannot be reached.
        """
        if address.startswith(SCHEME):
            return cls(address, _attach_by_network(address, timeout_s))
        return cls(address, attach(*join(address, timeout_s)))

    def _begin(self, attachment: Attachment) -> None:
        """Write to the ring as the owner that was granted."""
        self._attachment = attachment
        self._transport = attachment.transport

    def _end(self) -> None:
        """Stop writing as this owner."""
        del self._transport
        self._attachment.close()

    @property
    def owner(self) -> tuple[int, int]:
        """Id and its epoch by which the consumer knows this producer; others once another consumer took over."""
        return self._attachment.owner, self._attachment.epoch

    def send(self, header: Buffer, *buffers: Buffer, timeout_s: float = 10.0) -> None:
        """Send one message. It is copied into the ring: its buffers may be used again at once.

        `header` and `buffers` are contiguous; the payload is the concatenation of the buffers.

        Raises:
            RingFull: there was no room until the end of `timeout_s`.
            RingClosed: the consumer has closed the ring, ended and cannot be replaced, or has fenced this producer. It
                is not known whether the message was sent.
            VerbFailed: the memory could not be reached. It is not known whether the message was sent.
            ValueError: the message is longer than half of the ring.
        """
        self.send_all([(header, *buffers)], timeout_s)

    def send_all(self, messages: list[Message], timeout_s: float = 10.0) -> None:
        """Send messages in order, each a tuple of a header and buffers. Raises what `send` raises, with some sent."""
        for pause_s in self._attempts(messages, timeout_s):
            time.sleep(pause_s)

    async def asend(self, header: Buffer, *buffers: Buffer, timeout_s: float = 10.0) -> None:
        """Do the same as `send`, and let the event loop run while there is no room."""
        for pause_s in self._attempts([(header, *buffers)], timeout_s):
            await asyncio.sleep(pause_s)

    def _attempts(self, messages: list[Message], timeout_s: float) -> Generator[float, None, None]:
        """Try until all are sent; yield how long to wait before the next attempt."""
        if not self._is_open:
            raise RingClosed("the producer is closed")
        try:
            yield from self._attempts_while_reached(messages, timeout_s)
        except VerbFailed as error:
            is_cut_off = is_ended(self._attachment.connection)
            self.close()  # A verb may still be under way. The end of the connection tells the consumer.
            if is_cut_off:
                raise RingClosed("the consumer has ended, or has fenced this producer; connect again") from error
            raise

    def _attempts_while_reached(self, messages: list[Message], timeout_s: float) -> Generator[float, None, None]:
        """Do the work of `_attempts` while the memory can be reached. Raises VerbFailed; no verb may follow."""
        now_ns = time.monotonic_ns()
        deadline_ns = now_ns + round(timeout_s * 1e9)
        yield from self._see_to_consumer(now_ns)
        next_index = 0
        pause_s = _LEAST_PAUSE_S
        peers = None
        while True:
            count, outcome = self._try(messages, next_index, deadline_ns)
            next_index += count
            self.stats.sent += count
            if outcome == SendOutcome.SENT:
                return
            now_ns = time.monotonic_ns()
            if now_ns >= deadline_ns:
                raise RingFull(f"timeout_s: no room for a message in {timeout_s:g} s; the consumer is behind, or away")
            if outcome == SendOutcome.LOST:
                self.stats.lost += 1
                continue
            if count or peers is None:
                self.stats.waits += 1
                pause_s = _LEAST_PAUSE_S
                peers = _Peers(now_ns)
            yield from self._see_to_consumer(now_ns)
            self._look_at_peers(peers, now_ns, max(deadline_ns, now_ns + _VERB_NS))
            yield pause_s
            self.stats.waited_ns += time.monotonic_ns() - now_ns
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _look_at_peers(self, peers: _Peers, now_ns: int, deadline_ns: int) -> None:
        """Note what is reserved after a while without room; after as long again, abandon what still is."""
        if now_ns - peers.since_ns >= self._attachment.abandon_after_ns:
            for slot, word in peers.reserved:
                self._transport.abandon(slot, word, deadline_ns)
            peers.since_ns = now_ns
            peers.reserved = self._transport.find_reserved(deadline_ns)

    def _try(self, messages: list[Message], first: int, deadline_ns: int) -> tuple[int, int]:
        ring = self._attachment
        deadline_ns = max(deadline_ns, time.monotonic_ns() + _VERB_NS)
        return self._transport.send(ring.owner, ring.epoch, messages, first, ring.bell, deadline_ns)

    def _see_to_consumer(self, now_ns: int) -> Generator[float, None, None]:
        """Notice that the consumer has ended, and connect to the one that has taken over, if there is one."""
        if now_ns < self._look_at_ns:
            return
        self._look_at_ns = now_ns + _LOOK_AT_CONSUMER_NS
        if not is_ended(self._attachment.connection):
            return
        if not self._attachment.is_lasting:
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
        """Wait for the consumer's answer, and write as a new owner from then on; as the old one if the answer is slow.

        Nothing is sent between the question and the answer. The consumer answers between two looks, so before it sees a
        message of the new owner, it has seen all earlier messages as decided: their order holds.
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
                self._begin(attach(connection, grant, fds))
                self._is_open = True
                return
        connection.close()
        self._look_at_ns = now_ns + _ASK_AGAIN_NS

    def close(self) -> None:
        """Leave the ring. Messages that were sent still arrive."""
        if self._is_open:
            self._is_open = False
            self._end()

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _attach_by_network(address: str, timeout_s: float) -> Attachment:
    if not has_extension():
        raise RingError("the ring needs the C extension, which is missing here; install with a C compiler")
    from tilework.comm.ring.ucx.site import attach as attach_by_ucx

    return attach_by_ucx(address, timeout_s)


@dataclass(slots=True)
class _Peers:
    """Entries that were reserved at `since_ns`."""

    since_ns: int
    reserved: Sequence[tuple[int, int]] = ()
